"""Operators that graphs write in several nodes, as one operation: by onnxscript's rewriter.

The operations of a fused step become a graph, the rules of ``rewrite_rules`` are applied to it, and
what they leave becomes operations again. Values keep their numbers: a rule makes one node whose
inputs and outputs were there before.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_inplace.compiler.fused import FusedValue, Operation

STARTS = {"Erf", "Tanh", "ReduceMean", "Neg", "Sigmoid"}
"""Every pattern has one of them: without any, the rewriter is not even imported (0.2 s)."""


def rewrite(
    operations: Sequence[Operation],
    values: Sequence[FusedValue],
    leaving: Collection[int],
    opset: int,
) -> list[Operation]:
    """The operations, those of a pattern as one. ``leaving``: values that are used elsewhere."""
    if not any(o.op_type in STARTS for o in operations):
        return list(operations)
    found = importlib.import_module("onnx_inplace.compiler.rewrite_rules")
    graph = _Graph(operations, values, leaving, opset)
    for rules in found.ROUNDS:
        rules.apply_to_model(graph.model)
    return graph.operations()


class _Graph:
    """Operations as a graph, and the way back."""

    def __init__(
        self,
        operations: Sequence[Operation],
        values: Sequence[FusedValue],
        leaving: Collection[int],
        opset: int,
    ):
        self._values = [_value(k, value) for k, value in enumerate(values)]
        self._of = {self._node(o): o for o in operations}
        made = {k for o in operations for k in o.outputs if k is not None}
        used = {k for o in operations for k in o.inputs if k is not None}
        graph = ir.Graph(
            [v for k, v in enumerate(self._values) if k in used - made and v.const_value is None],
            [self._values[k] for k in sorted(made & set(leaving))],
            nodes=list(self._of),
            initializers=[v for k, v in enumerate(self._values) if v.const_value is not None],
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
