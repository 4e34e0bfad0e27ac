"""Operators on numbers one by one: threads take whole cache lines of the result."""

from __future__ import annotations

import enum
from typing import NamedTuple

from onnx_inplace.numba_kernels.fused.kernel import KERNEL, reader, share_elements
from onnx_inplace.numba_kernels.fused.lanes import Lanes, make_binary, make_unary
from onnx_inplace.numba_kernels.memory import kernel


class Two(enum.IntEnum):
    """Operations of two numbers ``a``, ``b``. The last three are ``f(a) * b``."""

    ADD = 0
    SUBTRACT = 1
    MULTIPLY = 2
    DIVIDE = 3
    MAXIMUM = 4
    MINIMUM = 5
    SILU_MULTIPLY = 6
    GELU_MULTIPLY = 7
    GELU_TANH_MULTIPLY = 8


class One(enum.IntEnum):
    """Operations of one number."""

    IDENTITY = 0
    NEGATE = 1
    ABSOLUTE = 2
    RECIPROCAL = 3
    SQUARE_ROOT = 4
    RELU = 5
    EXP = 6
    SIGMOID = 7
    SILU = 8
    TANH = 9
    ERF = 10
    GELU = 11
    GELU_TANH = 12
    SOFTPLUS = 13


class Binary(NamedTuple):
    """``output[r, i] = operation(a[r, i], b[r, i])`` for float32.

    Shapes:
        output: (rows, columns), may be ``a`` or ``b``
        a, b:   (rows, columns), a stride of 0 repeats a row; (rows, 1) where ``a_single`` or
                ``b_single`` is 1
    """

    operation: int  # of Two
    a: int
    b: int
    output: int
    rows: int
    columns: int
    a_row: int  # bytes from row to row
    b_row: int
    output_row: int
    a_single: int
    b_single: int


class Unary(NamedTuple):
    """``output[i] = operation(input[i])`` for ``size`` float32; ``output`` may be ``input``."""

    operation: int  # of One
    input: int
    output: int
    size: int


def _times(function):
    return lambda e, a, b: e.builder.fmul(function(e, a), b)


_add = make_binary(lambda e, a, b: e.builder.fadd(a, b))
_subtract = make_binary(lambda e, a, b: e.builder.fsub(a, b))
_multiply = make_binary(lambda e, a, b: e.builder.fmul(a, b))
_divide = make_binary(lambda e, a, b: e.builder.fdiv(a, b))
_maximum = make_binary(Lanes.maximum)
_minimum = make_binary(Lanes.minimum)
_silu_multiply = make_binary(_times(Lanes.silu))
_gelu_multiply = make_binary(_times(Lanes.gelu))
_gelu_tanh_multiply = make_binary(_times(Lanes.gelu_tanh))

_identity = make_unary(lambda e, x: x)
_negate = make_unary(lambda e, x: e.builder.fneg(x))
_absolute = make_unary(Lanes.absolute)
_reciprocal = make_unary(lambda e, x: e.over(e.constant(1.0), x))
_square_root = make_unary(Lanes.root)
_relu = make_unary(Lanes.relu)
_exp = make_unary(Lanes.exp)
_sigmoid = make_unary(Lanes.sigmoid)
_silu = make_unary(Lanes.silu)
_tanh = make_unary(Lanes.tanh)
_erf = make_unary(Lanes.erf)
_gelu = make_unary(Lanes.gelu)
_gelu_tanh = make_unary(Lanes.gelu_tanh)
_softplus = make_unary(Lanes.softplus)

_read_binary, _read_unary = reader(Binary), reader(Unary)


@kernel(KERNEL)
def binary(arguments, thread, threads):
    """A :class:`Binary`; threads share the columns."""
    x = _read_binary(arguments)
    begin, end = share_elements(x.columns, thread, threads)
    n, which = end - begin, x.operation
    for r in range(x.rows):
        a = x.a + r * x.a_row + (0 if x.a_single else 4 * begin)
        b = x.b + r * x.b_row + (0 if x.b_single else 4 * begin)
        o = x.output + r * x.output_row + 4 * begin
        if which == 0:
            _add(o, a, b, n, x.a_single, x.b_single)
        elif which == 1:
            _subtract(o, a, b, n, x.a_single, x.b_single)
        elif which == 2:
            _multiply(o, a, b, n, x.a_single, x.b_single)
        elif which == 3:
            _divide(o, a, b, n, x.a_single, x.b_single)
        elif which == 4:
            _maximum(o, a, b, n, x.a_single, x.b_single)
        elif which == 5:
            _minimum(o, a, b, n, x.a_single, x.b_single)
        elif which == 6:
            _silu_multiply(o, a, b, n, x.a_single, x.b_single)
        elif which == 7:
            _gelu_multiply(o, a, b, n, x.a_single, x.b_single)
        elif which == 8:
            _gelu_tanh_multiply(o, a, b, n, x.a_single, x.b_single)


@kernel(KERNEL)
def unary(arguments, thread, threads):
    """A :class:`Unary`; threads share the numbers."""
    x = _read_unary(arguments)
    begin, end = share_elements(x.size, thread, threads)
    o, i, n, which = x.output + 4 * begin, x.input + 4 * begin, end - begin, x.operation
    if which == 0:
        _identity(o, i, n)
    elif which == 1:
        _negate(o, i, n)
    elif which == 2:
        _absolute(o, i, n)
    elif which == 3:
        _reciprocal(o, i, n)
    elif which == 4:
        _square_root(o, i, n)
    elif which == 5:
        _relu(o, i, n)
    elif which == 6:
        _exp(o, i, n)
    elif which == 7:
        _sigmoid(o, i, n)
    elif which == 8:
        _silu(o, i, n)
    elif which == 9:
        _tanh(o, i, n)
    elif which == 10:
        _erf(o, i, n)
    elif which == 11:
        _gelu(o, i, n)
    elif which == 12:
        _gelu_tanh(o, i, n)
    elif which == 13:
        _softplus(o, i, n)
