"""RMS and layer normalization of rows, with the sum before it and the quantization behind it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import float_of_bits
from onnx_inplace.numba_kernels.fused import quantize
from onnx_inplace.numba_kernels.fused.kernel import KERNEL, reader, share
from onnx_inplace.numba_kernels.fused.lanes import Lanes, make_binary, make_reduction, make_unary
from onnx_inplace.numba_kernels.memory import kernel
from onnx_inplace.numba_kernels.vector import VECTOR


class Norm(NamedTuple):
    """``output = (x - mean) / sqrt(variance + epsilon) * scale + bias`` for x = input + skip.

    Without ``centered`` the mean counts as 0: RMS normalization. Threads share the rows. With
    ``each`` every thread does all of them, for itself: its output and codes lie ``each`` * (number
    of the thread) bytes behind those that are given; it is still one thread that writes ``total``.

    Shapes:
        input, output: (rows, columns) float32; one may be the other
        skip:          (rows, columns) float32, or address 0
        total:         (rows, columns) float32, receives input + skip; or address 0. With ``each``
                       it is neither input nor skip.
        scale, bias:   (columns) float32; bias may be address 0
        codes:         (rows) quantized rows (``quantize``), or address 0
    """

    input: int
    skip: int
    total: int
    scale: int
    bias: int
    output: int
    codes: int
    rows: int
    columns: int
    input_row: int  # bytes from row to row
    skip_row: int
    total_row: int
    output_row: int
    codes_row: int
    centered: int
    epsilon: int  # bits of a float32
    planes: int  # of the codes
    each: int  # bytes, or 0


def _deviation(e, total, values, mean):
    difference = e.builder.fsub(values, mean)
    return e.fma(difference, difference, total)


def _plus(e):
    return e.builder.fadd


_sum = make_reduction(0.0, lambda e, total, values, _: e.builder.fadd(total, values), _plus)
_deviations = make_reduction(0.0, _deviation, _plus)
_add = make_binary(lambda e, a, b: e.builder.fadd(a, b))
_copy = make_unary(lambda e, x: x)


@intrinsic
def _normalize(typing_context, target, source, scale, count, mean, factor):
    """``target = (source - mean) * factor * scale``."""

    def generate(context, builder, signature, arguments):
        e = Lanes(builder)
        target, source, scale, count, mean, factor = arguments
        mean, factor = e.splat(mean, VECTOR), e.splat(factor, VECTOR)

        def body(offset, lanes):
            numbers = builder.fsub(e.read(e.add(source, offset), lanes), mean)
            scales = e.read(e.add(scale, offset), lanes)
            result = builder.fmul(builder.fmul(numbers, factor), scales)
            e.write(result, e.add(target, offset), lanes)

        e.rows(count, body)
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I, types.float32, types.float32), generate


_I = types.int64
_read = reader(Norm)


@njit
def _row(x, source, target, codes):
    """One row, from ``source`` to ``target``."""
    n = x.columns
    mean = np.float32(0)
    if x.centered:
        mean = _sum(source, n, np.float32(0)) / np.float32(n)
    variance = _deviations(source, n, mean) / np.float32(n)
    factor = np.float32(1) / np.sqrt(variance + float_of_bits(x.epsilon))
    _normalize(target, source, x.scale, n, mean, factor)
    if x.bias:
        _add(target, target, x.bias, n, 0, 0)
    if x.codes:
        blocks = (n + quantize.BLOCK - 1) // quantize.BLOCK
        if x.planes == 3:
            quantize.quantize_three(target, codes, blocks, 0, blocks, n)
        else:
            quantize.quantize_one(target, codes, blocks, 0, blocks, n)


@kernel(KERNEL)
def norm(arguments, thread, threads):
    """A :class:`Norm`."""
    x = _read(arguments)
    first, last = (0, x.rows) if x.each else share(x.rows, thread, threads)
    for r in range(first, last):
        source = x.input + r * x.input_row
        target = x.output + thread * x.each + r * x.output_row
        codes = x.codes + thread * x.each + r * x.codes_row
        if x.skip:
            _add(target, source, x.skip + r * x.skip_row, x.columns, 0, 0)
            source = target
            if x.total and (thread == 0 or not x.each):
                _copy(x.total + r * x.total_row, source, x.columns)
        _row(x, source, target, codes)
