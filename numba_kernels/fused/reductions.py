"""Rows that become one number, and softmax. Threads share the rows."""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import floats
from onnx_inplace.numba_kernels.fused.kernel import KERNEL, reader, share
from onnx_inplace.numba_kernels.fused.lanes import Lanes, make_reduction
from onnx_inplace.numba_kernels.memory import kernel, store_int64
from onnx_inplace.numba_kernels.vector import VECTOR


class Of(enum.IntEnum):
    """What becomes of a row."""

    SUM = 0
    MEAN = 1
    MAXIMUM = 2
    MINIMUM = 3


class Reduce(NamedTuple):
    """``output[r] = operation(input[r, :])``.

    Shapes:
        input:  (rows, columns) float32; at least one column
        output: (rows) float32
    """

    operation: int  # of Of
    input: int
    output: int
    rows: int
    columns: int
    input_row: int  # bytes from row to row


class Largest(NamedTuple):
    """``output[r]`` is the first index of the largest number of ``input[r, :]``.

    Shapes:
        input:  (rows, columns) float32, without NaN; at least one column
        output: (rows) int64
    """

    input: int
    output: int
    rows: int
    columns: int
    input_row: int  # bytes from row to row


class Softmax(NamedTuple):
    """``output[r] = exp(input[r]) / sum(exp(input[r]))``; ``output`` may be ``input``.

    Shapes:
        input, output: (rows, columns) float32
    """

    input: int
    output: int
    rows: int
    columns: int
    input_row: int  # bytes from row to row
    output_row: int


def _plus(e):
    return e.builder.fadd


def _or_nan(e, choose, a, b):
    """``choose(a, b)``, which gives ``b`` where ``a`` is NaN; here NaN of both stays."""
    return e.builder.select(e.builder.fcmp_unordered("uno", a, a), a, choose(a, b))


_I = types.int64
_sum = make_reduction(0.0, lambda e, total, values, _: e.builder.fadd(total, values), _plus)
_maximum = make_reduction(
    float("-inf"), lambda e, total, values, _: e.maximum(values, total), lambda e: e.maximum
)
_highest_or_nan = make_reduction(
    float("-inf"),
    lambda e, total, values, _: _or_nan(e, e.maximum, values, total),
    lambda e: lambda a, b: _or_nan(e, e.maximum, a, b),
)
_lowest_or_nan = make_reduction(
    float("inf"),
    lambda e, total, values, _: _or_nan(e, e.minimum, values, total),
    lambda e: lambda a, b: _or_nan(e, e.minimum, a, b),
)
_LOWEST, _HIGHEST = np.float32(-np.inf), np.float32(np.inf)
_CHUNK = 256  # numbers whose largest one is found together

_read_reduce, _read_largest, _read_softmax = reader(Reduce), reader(Largest), reader(Softmax)


@intrinsic
def _exponentials(typing_context, target, source, count, top):
    """``target = exp(source - top)``."""

    def generate(context, builder, signature, arguments):
        e = Lanes(builder)
        target, source, count, top = arguments
        top = e.splat(top, VECTOR)

        def body(offset, lanes):
            numbers = builder.fsub(e.read(e.add(source, offset), lanes), top)
            e.write(e.decay(numbers), e.add(target, offset), lanes)

        e.rows(count, body)
        return context.get_dummy_value()

    return types.void(_I, _I, _I, types.float32), generate


@intrinsic
def _divide(typing_context, target, count, number):
    """``target /= number``."""

    def generate(context, builder, signature, arguments):
        e = Lanes(builder)
        target, count, number = arguments
        number = e.splat(number, VECTOR)

        def body(offset, lanes):
            place = e.add(target, offset)
            e.write(e.over(e.read(place, lanes), number), place, lanes)

        e.rows(count, body)
        return context.get_dummy_value()

    return types.void(_I, _I, types.float32), generate


@kernel(KERNEL)
def reduce(arguments, thread, threads):
    """A :class:`Reduce`."""
    x = _read_reduce(arguments)
    first, last = share(x.rows, thread, threads)
    for r in range(first, last):
        row, n = x.input + r * x.input_row, x.columns
        if x.operation == 2:
            result = _highest_or_nan(row, n, _LOWEST)
        elif x.operation == 3:
            result = _lowest_or_nan(row, n, _HIGHEST)
        else:
            result = _sum(row, n, np.float32(0))
            if x.operation == 1:
                result /= np.float32(n)
        floats(x.output + 4 * r, 1)[0] = result


@njit
def _largest_of(row, columns):
    """Chunk by chunk: only one of them is searched for the place."""
    best, begin = _LOWEST, 0
    for chunk in range(0, columns, _CHUNK):
        top = _maximum(row + 4 * chunk, min(_CHUNK, columns - chunk), _LOWEST)
        if top > best:
            best, begin = top, chunk
    numbers = floats(row, columns)
    for i in range(begin, min(begin + _CHUNK, columns)):
        if numbers[i] == best:
            return i
    return 0


@kernel(KERNEL)
def largest(arguments, thread, threads):
    """A :class:`Largest`."""
    x = _read_largest(arguments)
    first, last = share(x.rows, thread, threads)
    for r in range(first, last):
        store_int64(x.output + 8 * r, _largest_of(x.input + r * x.input_row, x.columns))


@kernel(KERNEL)
def softmax(arguments, thread, threads):
    """A :class:`Softmax`."""
    x = _read_softmax(arguments)
    first, last = share(x.rows, thread, threads)
    for r in range(first, last):
        source, target = x.input + r * x.input_row, x.output + r * x.output_row
        _exponentials(target, source, x.columns, _maximum(source, x.columns, _LOWEST))
        _divide(target, x.columns, _sum(target, x.columns, np.float32(0)))
