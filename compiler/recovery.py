"""Typed fields again, from the JSON contract, after a tool has dropped them.

The JSON holds what the author declared; the model holds the operators. What follows from both is
written, and nothing else: a model whose declarations no longer hold is refused, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from onnx_inplace.compiler import (
    comparison,
    contradictions,
    declarations,
    derivation,
    emitter,
    facts,
    integrity,
    loader,
    page_contract,
    schema,
)
from onnx_inplace.compiler.contract import Access
from onnx_inplace.compiler.errors import ContractError, Finding
from onnx_inplace.compiler.program import Program


def restore(
    source: str | os.PathLike[str] | bytes | Program, target: str | os.PathLike[str] | None = None
) -> Program:
    """Rebuild the typed fields of a model from its JSON contract, and prove them.

    Args:
        source: a file, its bytes, or a program.
        target: where to save the result; None: nowhere.

    Raises:
        errors.ContractError: E113 if there is no JSON contract, E124 if it speaks of values that
            are gone; any code if the model does not keep it.
        errors.ModelFileError: this is no model.
    """
    program = loader.open_program(source)
    proto = type(program.proto)()
    proto.CopyFrom(program.proto)
    promised = _contract(proto)
    _refuse(integrity.unknown_fields(proto))
    clear_facts(proto)
    _refuse(_declare(proto, promised))
    restored = annotated(Program(program.name, proto, program.weights))
    if target is not None:
        restored.save(target)
    return restored


def clear_facts(proto: Any) -> None:
    """Drop all typed facts but the ports of operators that nobody here has a rule for."""
    functions = {(f.domain, f.name, f.overload) for f in proto.functions}
    _clear(proto, lambda node: derivation.is_foreign(_identifier(node), functions))


def annotated(program: Program) -> Program:
    """Write all facts that follow from the declarations of a program into it, and prove them.

    Raises:
        errors.ContractError: the model does not keep what it declares.
    """
    proto = program.proto
    _refuse(contradictions.misplaced(proto))
    derived = derivation.Derivation(proto, program.weights)
    _refuse(derived.findings)
    found, declared = derived.facts(), derivation.declared(proto)
    _clear(proto, lambda node: False)
    emitter.annotate(proto, found)
    page_contract.write(proto, derived.model)
    emitter.declare(proto, declared)
    loader.verify_file(program)
    return program


def _refuse(findings: list[Finding]) -> None:
    if findings:
        raise ContractError(findings)


def _contract(proto: Any) -> declarations.Declarations:
    promised = comparison.read_contract(proto)
    if promised is None:
        message = "There is no JSON contract in metadata_props: nothing says what was declared."
        raise ContractError([Finding("E113", message)])
    return promised


def _identifier(node: Any) -> derivation.Identifier:
    return node.domain, node.op_type, node.overload


def _clear(proto: Any, keep: Callable[[Any], bool]) -> None:
    """Drop all typed facts but the ports of nodes that ``keep`` names: those are contracts."""
    _clear_graph(proto.graph, keep)
    for function in proto.functions:
        function.ClearField("output_alias")
        _clear_values(function.value_info)
        _clear_nodes(function.node, keep)


def _clear_graph(graph: Any, keep: Callable[[Any], bool]) -> None:
    for values in (graph.input, graph.output, graph.value_info):
        _clear_values(values)
    _clear_nodes(graph.node, keep)


def _clear_values(values: Iterable[Any]) -> None:
    for value in values:
        value.ClearField("access")
        value.ClearField("alias_of")


def _clear_nodes(nodes: Iterable[Any], keep: Callable[[Any], bool]) -> None:
    for node in nodes:
        if not keep(node):
            node.ClearField("output_alias")
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _clear_graph(attribute.g, keep)


def _declare(proto: Any, promised: declarations.Declarations) -> list[Finding]:
    """Write what was declared; what is gone without being missed (an inlined function) is left."""
    findings = page_contract.restore(proto, promised)
    inputs = {v.name: v for v in proto.graph.input}
    for name, access in promised.inputs.items():
        if access != Access.READ_WRITE.name:
            continue
        if name in inputs:
            inputs[name].access = schema.READ_WRITE
        else:
            findings.append(Finding("E124", f"the mutable graph input `{name}` is gone."))
    outputs = {v.name: v for v in proto.graph.output}
    for name, root in promised.outputs.items():
        if name not in outputs:
            findings.append(Finding("E124", f"graph output `{name}`, alias of `{root}`, is gone."))
        elif name != root:
            outputs[name].alias_of = root
    for function in derivation.own_functions(proto):
        scope = facts.function_scope(function)
        declaration = promised.functions.get(scope)
        if declaration is None or len(declaration.access) != len(function.input):
            message = f"the JSON contract says nothing that fits function {scope}."
            findings.append(Finding("E123", message))
            continue
        infos = {info.name: info for info in function.value_info}
        for name, access in zip(function.input, declaration.access, strict=True):
            if access == Access.READ_WRITE.name:
                info = infos.get(name) or function.value_info.add(name=name)
                info.access = schema.READ_WRITE
        for output, source in sorted(declaration.alias.items()):
            function.output_alias.add(
                output_index=output, input_index=source, kind=schema.MUST_ALIAS
            )
    return findings
