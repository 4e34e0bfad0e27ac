"""What branches and loop bodies have in common: results, conditions, shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnx_inplace.compiler.diagnosis import VARIABLE
from onnx_inplace.compiler.errors import Location
from onnx_inplace.dsl import literals, recorder
from onnx_inplace.dsl.operations import standard
from onnx_inplace.dsl.tensor import Operand

SYNTHETIC = "onnx_inplace.synthetic"  # key in ir.Node.meta: recorded by us, and removed when unused


def as_value(r: recorder.Recorder, x: Any, dtype: ir.DataType | None, name: str) -> ir.Value:
    """A tensor or a number as a value of the open block."""
    if isinstance(x, Operand):
        value = x.value
        if dtype is None or value.dtype == dtype or not r.is_weak(value):
            return value
        return r.emit("", "Cast", [value], [ir.AttrInt64("to", int(dtype))])[0]
    try:
        return r.constant(literals.literal(x, dtype))
    except (literals.Lost, TypeError) as error:
        r.fault(f"`{name}`: {error}.", "E102")
        return r.unknown(name)


def condition(test: Operand, what: str) -> ir.Value:
    """The test of an if or while, which is one BOOL."""
    r, value = recorder.current(), test.value
    if r.is_unknown(value):
        return value
    name = recorder.called(value)
    if value.dtype not in (None, ir.DataType.BOOL):
        r.fault(
            f"`{what}` decides on a BOOL, and {name} is {value.dtype.name}.",
            "E102",
            repair="Compare it with something.",
        )
        return r.unknown()
    if value.shape is not None and value.shape.rank() > 0:
        if any(d != 1 for d in value.shape) or value.shape.rank() > 1:
            r.fault(
                f"`{what}` decides on one BOOL, and {name} has shape {value.shape}.",
                "E102",
                repair="Reduce what it compares to a scalar, for example with "
                "`op.ReduceMax(x, keepdims=0)`.",
            )
            return r.unknown()
        return standard("Reshape", value, r.constant(literals.literal([], ir.DataType.INT64)))
    return value


def close(
    block: recorder.Block,
    results: Sequence[ir.Value],
    location: Location,
    *,
    parameters: bool = True,
) -> None:
    """Make ``results`` the outputs of ``block``, each a value that the block itself made, once.

    ``parameters``: its own parameters may be results as well.
    """
    r = recorder.current()
    outputs: list[ir.Value] = []
    with r.reopened(block):
        for value in results:
            own = r.owner(value) is block and not value.is_initializer()
            own = own and (parameters or not value.is_graph_input())
            if not r.is_unknown(value) and (not own or any(value is v for v in outputs)):
                value = identity(r, value, location)
            outputs.append(value)
    block.graph.outputs.extend(v for v in outputs if not r.is_unknown(v))


def identity(r: recorder.Recorder, value: ir.Value, location: Location) -> ir.Value:
    """Another name of ``value``, of this block."""
    name = str(value.meta.get(VARIABLE) or value.name)
    [again] = r.emit("", "Identity", [value], outputs=[name], location=location)
    producer = again.producer()
    if producer is not None:
        producer.meta[SYNTHETIC] = True
    return again


def common_shape(a: ir.Shape | None, b: ir.Shape | None) -> ir.Shape | None:
    """What is known of a value that has one of two shapes."""
    if a is None or b is None or a.rank() != b.rank():
        return None
    return ir.Shape([x if x == y else None for x, y in zip(a, b, strict=True)])
