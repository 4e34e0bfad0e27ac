"""Operators that graphs write in several nodes, as one operation: by onnxscript's rewriter.

Operations of a fused step that may be part of a pattern become a graph, the rules of
``rewrite_rules`` are applied to it, and what they leave becomes operations again. Values keep their
numbers: a rule makes one node whose inputs and outputs were there before.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_inplace.compiler.fused import FusedValue, Operation

FAMILIES = {
    "Erf": {"Erf", "Div", "Mul", "Add"},
    "Tanh": {"Tanh", "Pow", "Mul", "Add"},
    "Sigmoid": {"Sigmoid", "Mul"},
    "ReduceMean": {"ReduceMean", "Sub", "Pow", "Add", "Sqrt", "Reciprocal", "Div", "Mul"},
    "Neg": {"Neg", "Slice", "Concat", "Mul", "Add"},
}
"""Operators of patterns, by one that each of a family has.

What is no part of any does not enter the graph, and rules of a family that cannot match are not
tried: a decoder of 1,236 nodes with SiLU takes 0.01 s, all nodes and all rules 1.2 s. Without any
family the rewriter is not even imported (0.08 s).
"""


def rewrite(
    operations: Sequence[Operation],
    values: Sequence[FusedValue],
    leaving: Collection[int],
    opset: int,
) -> list[Operation]:
    """The operations, those of a pattern as one. ``leaving``: values that are used elsewhere."""
    families = {o.op_type for o in operations} & set(FAMILIES)
    if not families:
        return list(operations)
    words = {word for family in families for word in FAMILIES[family]}
    parts = [o for o in operations if o.op_type in words and not o.domain]
    others = {id(o) for o in operations} - {id(o) for o in parts}
    used = {k for o in operations if id(o) in others for k in o.inputs if k is not None}
    graph = _Graph(parts, values, {*leaving, *used}, opset)
    found = importlib.import_module("onnx_inplace.compiler.rewrite_rules")
    for rules in found.rounds(families):
        rules.apply_to_model(graph.model)
    place = {k: n for n, o in enumerate(operations) for k in o.outputs if k is not None}
    left = [*graph.operations(), *(o for o in operations if id(o) in others)]
    return sorted(left, key=lambda o: max(place[k] for k in o.outputs if k is not None))


class _Graph:
    """Operations as a graph, and the way back."""

    def __init__(
        self,
        operations: Sequence[Operation],
        values: Sequence[FusedValue],
        leaving: Collection[int],
        opset: int,
    ):
        made = {k for o in operations for k in o.outputs if k is not None}
        used = {k for o in operations for k in o.inputs if k is not None}
        self._values = {k: _value(k, values[k]) for k in sorted(made | used)}
        self._of = {self._node(o): o for o in operations}
        entering = [self._values[k] for k in sorted(used - made)]
        graph = ir.Graph(
            [v for v in entering if v.const_value is None],
            [self._values[k] for k in sorted(made & set(leaving))],
            nodes=list(self._of),
            initializers=[v for v in entering if v.const_value is not None],
            opset_imports={"": opset},
        )
        self.model = ir.Model(graph, ir_version=11)

    def _node(self, o: Operation) -> ir.Node:
        return ir.Node(
            o.domain,
            o.op_type,
            [None if k is None else self._values[k] for k in o.inputs],
            [
                ir.AttrInt64(n, v) if type(v) is int else ir.AttrInt64s(n, v)
                for n, v in _integers(o)
            ],
            outputs=[ir.Value() if k is None else self._values[k] for k in o.outputs],
        )

    def operations(self) -> list[Operation]:
        """What is in the graph now."""
        maker = {k: o for o in self._of.values() for k in o.outputs if k is not None}
        return [self._of.get(node) or _made(node, maker) for node in self.model.graph]


def _value(number: int, value: FusedValue) -> ir.Value:
    tensor = value.constant
    fixed = value.content is not None and all(isinstance(n, int) for n in value.content)
    if tensor is None and fixed:
        tensor = ir.tensor(np.array(value.content, np.int64))
    shape = None
    if value.shape is not None:
        shape = ir.Shape([n if isinstance(n, int) else None for n in value.shape])
    # storage of the caller takes no part: one operation reads it later than its nodes would
    known = value.dtype is not None and value.root is None
    type_ = ir.TensorType(value.dtype) if known and value.dtype is not None else None
    return ir.Value(name=f"{number}", shape=shape, type=type_, const_value=tensor)


def _integers(o: Operation) -> list[tuple[str, Any]]:
    """The attributes that patterns may ask for."""
    return [
        (name, value)
        for name, value in o.attributes.items()
        if type(value) is int
        or (isinstance(value, list | tuple) and all(type(v) is int for v in value))
    ]


def _made(node: ir.Node, maker: Mapping[int, Operation]) -> Operation:
    """What a rule has put in: it stands where the operation stood that made its result."""
    outputs = [int(str(v.name)) for v in node.outputs]
    return Operation(
        node.domain,
        node.op_type,
        1,
        tuple(None if v is None else int(str(v.name)) for v in node.inputs),
        tuple(outputs),
        MappingProxyType({name: a.value for name, a in node.attributes.items()}),
        location=maker[outputs[0]].location,
    )
