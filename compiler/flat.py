"""One flat graph without calls, with unique names and known types: what the plan is made from.

Facts about aliases are not carried through: they are derived again on the flat graph. What is kept
in place of a call are the operators whose function is only their functional meaning: a kernel of
ours executes them.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from onnx_inplace.compiler import calls, contract, control, errors, inference


def flatten(model: ir.Model) -> None:
    """Inline, lift constants, make names unique, infer types and shapes. Changes ``model``.

    Requires:
        no cycle of calls; one version of every domain in all functions.

    Ensures:
        inputs and outputs of the main graph keep their order, inputs their names; every node keeps
        its ``metadata_props``, and the ``calls`` that it stood in; constants are initializers of
        the main graph, except where a Constant is itself a result of its graph.
    """
    for function in model.functions.values():
        _return_new_values(function)
        _forget_symbols(function)
    noted = calls.note(model, _is_inlined)
    try:
        common.InlinePass(_is_inlined)(model)
    except (ValueError, ir.passes.PassError) as error:
        raise errors.ModelFileError("model", f"a call cannot be inlined: {error}") from None
    calls.collect(model.graph, noted)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _lift_initializers(model.graph)
    _unique_names(model.graph)
    inference.infer(model)


def is_operator(function: ir.Function) -> bool:
    """Whether a function is only the functional meaning of an operator that has an alias rule."""
    key = (function.domain, function.name)
    return function.domain == contract.DOMAIN or key in contract.RULES


def _is_inlined(function: ir.Function) -> bool:
    return not is_operator(function)


def captures(node: ir.Node) -> list[ir.Value]:
    """Values that a node needs: its inputs, and what its bodies take from outside of the node."""
    needed = [v for v in node.inputs if v is not None]
    for graph in control.bodies(node):
        inside = {*graph.inputs, *graph.initializers.values()}
        inside.update(v for inner in graph for v in inner.outputs)
        needed += [v for inner in graph for v in captures(inner) if v not in inside]
        needed += [v for v in graph.outputs if v not in inside]
    return list(dict.fromkeys(needed))


def _return_new_values(function: ir.Function) -> None:
    """Give a result that is a parameter, or that is returned twice, a name of its own.

    The inliner gives the caller's value the name and the type of the call's result, which would
    rename an input of the model here.
    """
    seen = set(function.inputs)
    for index, value in enumerate(function.outputs):
        if value in seen:
            node = ir.Node("", "Identity", [value], name=f"{function.name}_result_{index}")
            node.outputs[0].name = f"{value.name}_result_{index}"
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            function.append(node)
            function.outputs[index] = node.outputs[0]
        seen.add(value)


def _forget_symbols(function: ir.Function) -> None:
    """A dimension's name means nothing in the caller, which may use the same for another."""
    for node in function.all_nodes():
        inner = [v for graph in control.bodies(node) for v in (*graph.inputs, *graph.outputs)]
        for value in (*node.outputs, *inner):
            if value.shape is not None:
                dims = [d if isinstance(d, int) else None for d in value.shape]
                value.shape = ir.Shape(dims)


def _lift_initializers(graph: ir.Graph) -> None:
    """Move initializers of bodies to the main graph, under a name that is free there."""
    for node in graph.all_nodes():
        for inner in control.bodies(node):
            for name in list(inner.initializers):
                value = inner.initializers[name]
                if value.is_graph_input() or value.is_graph_output():
                    continue
                inner.initializers.pop(name)
                index = 0
                while value.name in graph.initializers:
                    index += 1
                    value.name = f"{name}.{index}"
                graph.register_initializer(value)


def _unique_names(graph: ir.Graph) -> None:
    """Sibling bodies may use one name twice; sub-sessions and slots must not."""
    taken: set[str] = set()
    # the main graph first: its names are the ones that an author looks for
    _name([*graph.inputs, *graph.outputs, *graph.initializers.values()], taken)
    _name([v for node in graph for v in node.outputs if not v.is_graph_output()], taken)
    for node in graph:
        for inner in control.bodies(node):
            _unique_body_names(inner, taken)


def _unique_body_names(graph: ir.Graph, taken: set[str]) -> None:
    inside = {*graph.inputs, *graph.initializers.values()}
    _name([*graph.inputs, *graph.initializers.values()], taken)
    _name([v for node in graph for v in node.outputs if v not in inside], taken)
    for node in graph:
        for inner in control.bodies(node):
            _unique_body_names(inner, taken)


def _name(values: list[ir.Value], taken: set[str]) -> None:
    for value in dict.fromkeys(values):
        base = value.name or "value"
        name, index = base, 0
        while name in taken:
            index += 1
            name = f"{base}.{index}"
        if name != value.name:
            value.name = name
        taken.add(name)
