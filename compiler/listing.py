"""What a plan lists for its reader: what copies, what reads too much, what is left to run time.

Texts and places only; what a run checks is decided in ``positions``.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnx_inplace.compiler import contract, integrity, partition
from onnx_inplace.compiler.steps import Condition, Copied, Fallback

_UPDATES = {(contract.DOMAIN, "CacheUpdate"), ("", "TensorScatter")}
_INDEXED = {(contract.DOMAIN, "CacheReorder"): 1, ("", "ScatterND"): 1, ("", "ScatterElements"): 1}
_NO_CONTENT = {"Shape", "Size"}  # read what is known of a tensor, not its bytes
_CONTAINERS = {
    "SequenceConstruct": "a sequence holds values of its own",
    "SequenceInsert": "a sequence holds values of its own",
    "Optional": "an optional value holds a value of its own",
}


def copies(nodes: list[ir.Node], facts: partition.Facts) -> tuple[Copied, ...]:
    """What ``kv.Copy`` asks for, and what cannot hold a root without copying it."""
    return tuple(_copies(nodes, facts))


def _copies(nodes: list[ir.Node], facts: partition.Facts) -> Iterator[Copied]:
    for node in nodes:
        source = node.inputs[0] if node.inputs else None
        root = facts.roots.get(source) if source is not None else None
        name = root.name if root is not None else None
        value = node.outputs[0].name or ""
        if (node.domain, node.op_type) == (contract.DOMAIN, "Copy"):
            yield Copied(value, name, "kv.Copy asks for it", integrity.source(node))
        elif node.domain == "" and node.op_type in _CONTAINERS:
            for held in dict.fromkeys(node.inputs):
                if held is not None and held in facts.roots:
                    reason = _CONTAINERS[node.op_type]
                    yield Copied(value, facts.roots[held].name, reason, integrity.source(node))
        elif node.domain == "" and node.op_type == "Scan":
            yield from _sliced(node, facts)


def _sliced(node: ir.Node, facts: partition.Facts) -> Iterator[Copied]:
    """Elements along an inner axis are not contiguous in the root: each is copied for its round."""
    body = node.attributes["body"].as_graph()
    scanned = node.attributes["num_scan_inputs"].as_int()
    axes = (
        node.attributes["scan_input_axes"].as_ints() if "scan_input_axes" in node.attributes else ()
    )
    for whole, element, axis in zip(
        node.inputs[-scanned:], body.inputs[-scanned:], axes, strict=False
    ):
        if whole is not None and whole in facts.roots and axis != 0:
            yield Copied(
                element.name or "",
                facts.roots[whole].name,
                "a Scan takes it apart along an inner axis",
                integrity.source(node),
            )


def fallbacks(nodes: list[ir.Node], facts: partition.Facts) -> tuple[Fallback, ...]:
    """Ordinary nodes that read the bytes of a root: all of them, not only its valid part."""
    return tuple(
        Fallback(node.op_type, str(root.name), integrity.source(node))
        for node in nodes
        if not facts.is_special(node)
        and not (node.domain == "" and node.op_type in {*_NO_CONTENT, *_CONTAINERS})
        for root in dict.fromkeys(
            facts.roots[v] for v in node.inputs if v is not None and v in facts.roots
        )
    )


def conditions(nodes: list[ir.Node], facts: partition.Facts) -> tuple[Condition, ...]:
    """Bounds of positions and indices of all writes."""
    return tuple(_conditions(nodes, facts))


def _conditions(nodes: list[ir.Node], facts: partition.Facts) -> Iterator[Condition]:
    for node in nodes:
        key = (node.domain, node.op_type)
        if not node.outputs or node.outputs[0] not in facts.roots:
            continue
        root = str(facts.roots[node.outputs[0]].name)
        if key in _UPDATES:
            text = _update(node, root)
        elif key in _INDEXED:
            indices = node.inputs[_INDEXED[key]]
            text = f"`{indices.name if indices else ''}` holds indices of `{root}`"
        else:
            continue
        yield Condition(text, root, integrity.source(node))


def _update(node: ir.Node, root: str) -> str:
    cache, values = node.inputs[:2]
    assert cache is not None and values is not None
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -2
    capacity, length = _dim(cache, axis), _dim(values, axis)
    position = node.inputs[2].name if len(node.inputs) > 2 and node.inputs[2] else "0"
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "linear"
    if mode == "circular":
        return f"0 <= {position} and {length} <= {capacity} (`{root}`)"
    return f"0 <= {position} and {position} + {length} <= {capacity} (`{root}`)"


def _dim(value: ir.Value, axis: int) -> str:
    if value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return f"{value.name}.shape[{axis}]"
    dim = value.shape[axis]
    text = dim if isinstance(dim, int) else dim.value
    return f"{value.name}.shape[{axis}]" if text is None else str(text)
