"""Templates of arithmetic on numbers one by one, in float32."""

from __future__ import annotations

import numpy as np

from onnx_inplace.compiler.fused import Operation
from onnx_inplace.numba_kernels.fused import elementwise as kernels
from onnx_inplace.numba_kernels.fused.elementwise import One, Two
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.fused.table import Builder, NotFused

BINARY = {"Add": Two.ADD, "Sub": Two.SUBTRACT, "Mul": Two.MULTIPLY, "Div": Two.DIVIDE}
UNARY = {
    "Sigmoid": One.SIGMOID,
    "Tanh": One.TANH,
    "Relu": One.RELU,
    "Neg": One.NEGATE,
    "Exp": One.EXP,
    "Sqrt": One.SQUARE_ROOT,
    "Abs": One.ABSOLUTE,
    "Erf": One.ERF,
    "Silu": One.SILU,
    "Gelu": One.GELU,
    "GeluTanh": One.GELU_TANH,
}
GATES = {
    "Silu": Two.SILU_MULTIPLY,
    "Gelu": Two.GELU_MULTIPLY,
    "GeluTanh": Two.GELU_TANH_MULTIPLY,
}

SHARED = 16384  # numbers from which a second thread pays


def binary(b: Builder, o: Operation) -> None:
    """Add, Sub, Mul, Div of arrays that numpy's rules broadcast."""
    first, second = (b.array(k) for k in o.inputs)
    target, written = b.writing(o.outputs[0])
    _binary(b, BINARY[o.op_type], first, second, target)
    written()


def gated(b: Builder, o: Operation) -> None:
    """``activation(gate) * up``."""
    gate, up = (b.array(k) for k in o.inputs)
    target, written = b.writing(o.outputs[0])
    _binary(b, GATES[o.attributes["activation"]], gate, up, target)
    written()


def _binary(b: Builder, operation: Two, first: Array, second: Array, target: Array) -> None:
    columns = target.shape[-1] if target.ndim else 1
    rows = target.size // columns if columns else 0
    a, a_row, a_single = _operand(b, first, target.shape)
    c, c_row, c_single = _operand(b, second, target.shape)
    block = kernels.Binary(
        operation,
        address(a),
        address(c),
        address(target),
        rows,
        columns,
        a_row,
        c_row,
        4 * columns,
        a_single,
        c_single,
    )
    b.emit(kernels.binary, block, [a, c], [target], first=target.size < SHARED)


def _operand(b: Builder, array: Array, shape: tuple[int, ...]) -> tuple[Array, int, int]:
    """An array, bytes from row to row, and whether a row is one number."""
    if array.dtype != np.float32:
        array = b.contiguous(array)
    full = np.broadcast_to(array, shape)
    if not shape:
        return array, 0, 0
    single = int(full.strides[-1] == 0 and shape[-1] > 1)
    if single or full.strides[-1] == 4 or shape[-1] == 1:
        lead = [(d, s) for d, s in zip(shape[:-1], full.strides[:-1], strict=True) if d > 1]
        step = lead[-1][1] if lead else 0
        if all(s == step * n for (_, s), n in zip(lead, _after(lead), strict=True)):
            return array, step, single
    copy = b.temporary(shape)
    b.move(full, copy)
    return copy, 4 * shape[-1], 0


def _after(lead: list[tuple[int, int]]) -> list[int]:
    """For each axis, the product of the sizes behind it."""
    found, total = [], 1
    for size, _ in reversed(lead):
        found.append(total)
        total *= size
    return found[::-1]


def unary(b: Builder, o: Operation) -> None:
    """One number to one number."""
    operation = UNARY.get(o.op_type)
    if operation is None:
        raise NotFused(f"{o.op_type} has no kernel")
    apply(b, operation, o)


def apply(b: Builder, operation: One, o: Operation) -> None:
    """An operation of the first input to the first output."""
    source = b.contiguous(b.array(o.inputs[0]))
    target, written = b.writing(o.outputs[0])
    block = kernels.Unary(operation, address(source), address(target), target.size)
    b.emit(kernels.unary, block, [source], [target], first=target.size < SHARED)
    written()
