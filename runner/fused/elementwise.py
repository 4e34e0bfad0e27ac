"""Templates of arithmetic on numbers one by one, in float32."""

from __future__ import annotations

import numpy as np

from onnx_inplace.compiler.fused import Operation
from onnx_inplace.numba_kernels.fused import elementwise as kernels
from onnx_inplace.numba_kernels.fused.elementwise import One, Two
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.fused.table import Builder
from onnx_inplace.runner.fused.template import template

BINARY = {"Add": Two.ADD, "Sub": Two.SUBTRACT, "Mul": Two.MULTIPLY, "Div": Two.DIVIDE}
STANDARD = {
    "Neg": One.NEGATE,
    "Exp": One.EXP,
    "Sqrt": One.SQUARE_ROOT,
    "Abs": One.ABSOLUTE,
    "Erf": One.ERF,
    "Reciprocal": One.RECIPROCAL,
    "Softplus": One.SOFTPLUS,
}
"""Operators of one number, by name."""

ACTIVATIONS = {
    "Sigmoid": One.SIGMOID,
    "Tanh": One.TANH,
    "Relu": One.RELU,
    "Silu": One.SILU,
    "Gelu": One.GELU,
    "GeluTanh": One.GELU_TANH,
}
"""What may follow a product, as ``compiler.patterns`` calls it."""

GATES = {
    "Silu": Two.SILU_MULTIPLY,
    "Gelu": Two.GELU_MULTIPLY,
    "GeluTanh": Two.GELU_TANH_MULTIPLY,
}

SHARED = 16384  # numbers from which a second thread pays


@template(kernels.binary)
def binary(b: Builder, o: Operation) -> None:
    """Add, Sub, Mul, Div of arrays that numpy's rules broadcast."""
    first, second = (b.array(k) for k in o.inputs)
    target, written = b.writing(o.outputs[0])
    binary_of(b, BINARY[o.op_type], first, second, target)
    written()


@template(kernels.binary)
def gated(b: Builder, o: Operation) -> None:
    """``activation(gate) * up``."""
    gate, up = (b.array(k) for k in o.inputs)
    target, written = b.writing(o.outputs[0])
    binary_of(b, GATES[o.attributes["activation"]], gate, up, target)
    written()


def binary_of(b: Builder, operation: Two, first: Array, second: Array, target: Array) -> None:
    """One operation of two arrays that broadcast to ``target``, which is float32."""
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


@template(kernels.unary)
def unary(b: Builder, o: Operation) -> None:
    """One number to one number."""
    source = b.array(o.inputs[0])
    target, written = b.writing(o.outputs[0])
    _unary(b, (STANDARD | ACTIVATIONS)[o.op_type], source, target)
    written()


def _unary(b: Builder, operation: One, source: Array, target: Array) -> None:
    source = b.contiguous(source)
    block = kernels.Unary(operation, address(source), address(target), target.size)
    b.emit(kernels.unary, block, [source], [target], first=target.size < SHARED)


@template(kernels.binary, kernels.unary)
def swish(b: Builder, o: Operation) -> None:
    """``x * sigmoid(alpha * x)``: Swish, and QuickGelu, whose factor is another one by default."""
    factor = o.attributes.get("alpha", 1.702 if o.op_type == "QuickGelu" else 1.0)
    source = b.contiguous(b.array(o.inputs[0]))
    target, written = b.writing(o.outputs[0])
    gate = b.temporary(source.shape)
    binary_of(b, Two.MULTIPLY, source, b.lasting(np.full(1, factor, np.float32)), gate)
    _unary(b, One.SIGMOID, gate, gate)
    binary_of(b, Two.MULTIPLY, source, gate, target)
    written()


@template(kernels.binary, kernels.unary)
def biased_gelu(b: Builder, o: Operation) -> None:
    """BiasGelu, and FastGelu with a bias."""
    source, bias = (b.array(k) for k in o.inputs)
    target, written = b.writing(o.outputs[0])
    binary_of(b, Two.ADD, source, bias, target)
    _unary(b, One.GELU if o.op_type == "BiasGelu" else One.GELU_TANH, target, target)
    written()


@template(kernels.binary, kernels.unary)
def power(b: Builder, o: Operation) -> None:
    """Pow with one of the exponents of ``fusable_rules.POWERS``."""
    source, exponent = b.contiguous(b.array(o.inputs[0])), b.array(o.inputs[1])
    target, written = b.writing(o.outputs[0])
    match exponent.item():
        case 0.5:
            _unary(b, One.SQUARE_ROOT, source, target)
        case 1.0:
            _unary(b, One.IDENTITY, source, target)
        case 2.0:
            binary_of(b, Two.MULTIPLY, source, source, target)
        case _:
            square = b.temporary(source.shape)
            binary_of(b, Two.MULTIPLY, source, source, square)
            binary_of(b, Two.MULTIPLY, square, source, target)
    written()
