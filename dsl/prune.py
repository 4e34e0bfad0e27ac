"""Removing what recording left over: outputs of control nodes that nobody reads.

Operators of the author are never removed: a write that nobody reads is lost, which the analysis
reports.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnx_inplace.dsl import blocks

Writes = Callable[[ir.Node], bool]
_BODIES = {"If": ("then_branch", "else_branch"), "Loop": ("body",), "Scan": ("body",)}


def prune(graph: ir.Graph, writes: Writes) -> None:
    """Remove the left-overs of ``graph`` and of all blocks inside, last node first.

    ``writes(node)`` says whether a node may write storage: a control node around it stays,
    whatever it gives.
    """
    for node in reversed(list(graph)):
        if node.domain == "" and node.op_type in _BODIES:
            _control(graph, node, writes)
        elif blocks.SYNTHETIC in node.meta and _unused(node):
            graph.remove(node, safe=True)


def _unused(node: ir.Node) -> bool:
    return not any(v.uses() or v.is_graph_output() for v in node.outputs)


def _control(graph: ir.Graph, node: ir.Node, writes: Writes) -> None:
    bodies = [node.attributes[name].as_graph() for name in _BODIES[node.op_type]]
    unused = [
        k
        for k, v in enumerate(node.outputs)
        if not v.uses() and not v.is_graph_output() and _can_go(node, bodies[0], k)
    ]
    if len(unused) == len(node.outputs) and not any(_has_writes(b, writes) for b in bodies):
        graph.remove(node, safe=True)
        return
    if unused:
        _drop(graph, node, bodies, unused)
    for body in bodies:
        prune(body, writes)


def _has_writes(graph: ir.Graph, writes: Writes) -> bool:
    return any(map(writes, ir.traversal.RecursiveGraphIterator(graph)))


def _carried(node: ir.Node) -> tuple[int, int]:
    """Number of carried values, and how many inputs stand before them."""
    if node.op_type == "Loop":
        return len(node.inputs) - 2, 2
    return len(node.inputs) - node.attributes["num_scan_inputs"].as_int(), 0


def _can_go(node: ir.Node, body: ir.Graph, k: int) -> bool:
    """A carried value that the body reads is needed by the next step."""
    if node.op_type == "If" or k >= _carried(node)[0]:
        return True
    formal = body.inputs[k + (2 if node.op_type == "Loop" else 0)]
    return not formal.uses() and not formal.is_graph_output()


def _drop(graph: ir.Graph, node: ir.Node, bodies: list[ir.Graph], unused: list[int]) -> None:
    """A node like ``node`` without some outputs takes its place."""
    carried, before = (0, 0) if node.op_type == "If" else _carried(node)
    shift = 1 if node.op_type == "Loop" else 0
    inputs = list(node.inputs)
    attributes = dict(node.attributes)
    for k in reversed(unused):
        for body in bodies:
            body.outputs.pop(k + shift)
        if k < carried:
            bodies[0].inputs.pop(k + before)
            del inputs[k + before]
        elif node.op_type == "Scan":
            for name in ("scan_output_axes", "scan_output_directions"):
                if name in attributes:
                    numbers = list(attributes[name].as_ints())
                    del numbers[k - carried]
                    attributes[name] = ir.AttrInt64s(name, numbers)
    kept = [v for k, v in enumerate(node.outputs) if k not in unused]
    outputs = [ir.Value(name=v.name, type=v.type, shape=v.shape) for v in kept]
    new = ir.Node(
        node.domain,
        node.op_type,
        inputs,
        attributes=attributes,
        outputs=outputs,
        version=node.version,
        name=node.name,
        metadata_props=dict(node.metadata_props),
    )
    new.meta.update(node.meta)
    for old, value in zip(kept, outputs, strict=True):
        value.meta.update(old.meta)
        old.replace_all_uses_with(value, replace_graph_outputs=True)
    graph.insert_before(node, new)
    graph.remove(node, safe=True)
