"""Rows of numbers of pages in vectors of 16 lanes: cleaning and rotation.

Every lane does what the specification says for one number, in its order: vectors change no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels import cpu
from onnx_inplace.numba_kernels.floats import bits_of_float
from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Emitter, Value

_I = types.int64
_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)
_BLOCKS = (16, 32, 64, 128, 256)  # elements that are rotated together


def by_known(
    e: Emitter, number: Value, known: tuple[int, ...], emit: Callable[[int], None]
) -> None:
    """Code for each of the ``known`` values of a number, of which one is executed."""
    for value in known:
        with e.builder.if_then(e.builder.icmp_signed("==", number, e.whole(value))):
            emit(value)


def _butterflies(e: Emitter, x: list[Value]) -> list[Value]:
    """Sums and differences at distances 1, 2, 4, ... of the numbers of some vectors."""
    b, x = e.builder, list(x)
    for distance in (1, 2, 4, 8):
        order = [lane ^ distance for lane in range(LANES)]
        signs = ir.Constant(VECTOR, [-1.0 if lane & distance else 1.0 for lane in range(LANES)])
        for i, vector in enumerate(x):
            other = e.shuffle(vector, vector, order)
            # the product is exact: fused or not, this is one rounding
            if cpu.has("fma"):
                x[i] = e.fma(vector, signs, other)
            else:
                x[i] = b.fadd(other, b.fmul(vector, signs))
    step = 1
    while step < len(x):
        for i in range(len(x)):
            if not i & step:
                x[i], x[i | step] = b.fadd(x[i], x[i | step]), b.fsub(x[i], x[i | step])
        step *= 2
    return x


def _make_rotate(each: bool) -> Any:
    """``rotate_rows``, or with ``each`` ``rotate_tile``."""

    @intrinsic
    def rotate_rows(typing_context, source, step, to, rows, size, block, ahead, magnitudes):
        def generate(context, builder, signature, arguments):
            e = Emitter(builder)
            source, step, to, rows, size, block, ahead, magnitudes = arguments
            none = ir.Constant(_INTS, [0] * LANES)
            seen = cgutils.alloca_once_value(builder, none)
            builder.store(none, seen)

            def emit(known: int) -> None:
                factor = e.constant(float(np.float32(1 / np.sqrt(np.float64(known)))))
                with e.loop(rows) as row:
                    if each:
                        builder.store(none, seen)
                    with e.loop(builder.sdiv(size, block)) as i:
                        begin = e.add(e.add(source, e.times(row, step)), e.times(i, 4 * known))
                        target = e.add(to, e.times(e.add(e.times(row, size), e.times(i, known)), 4))
                        offsets = [4 * k for k in range(0, known, LANES)]
                        place = e.add(begin, ahead)
                        if each:  # the first half of the row
                            place = e.add(place, e.times(i, -2 * known))
                        for offset in offsets:
                            part = offset // 2 if each else offset
                            e.prefetch(e.add(place, part), near=True)
                        x = _butterflies(e, [e.load(e.add(begin, offset)) for offset in offsets])
                        largest = builder.load(seen)
                        for vector, offset in zip(x, offsets, strict=True):
                            number = builder.fmul(vector, factor)
                            e.store(number, e.add(target, offset))
                            bits = builder.bitcast(number, _INTS)
                            size_ = builder.and_(bits, e.lanes([0x7FFFFFFF] * LANES))
                            largest = _larger(e, size_, largest)
                        builder.store(largest, seen)
                    if each:
                        place = e.add(magnitudes, e.times(row, 4 * LANES))
                        e.store(builder.bitcast(builder.load(seen), VECTOR), place)

            by_known(e, block, _BLOCKS, emit)
            if each:
                return context.get_dummy_value()
            total = e.across(lambda a, b: _larger(e, a, b), builder.load(seen), LANES)
            first = builder.extract_element(total, ir.Constant(_INT, 0))
            return builder.zext(first, ir.IntType(64))

        result = types.void if each else types.int64
        return result(_I, _I, _I, _I, _I, _I, _I, _I), generate

    return rotate_rows


_rotate_rows, _rotate_tile = _make_rotate(False), _make_rotate(True)


@njit
def rotate_rows(source, step, to, rows, size, block, ahead):
    """Multiply blocks of rows by the orthonormal Hadamard matrix, its own inverse.

    The largest magnitude in the result, NaN above all, as the bits of a float32.

    Shapes:
        source: (rows, size) float32, rows ``step`` bytes apart; may be ``to``
        to:     (rows, size) float32
        block:  a power of two, 16 to 256, that divides ``size``
        ahead:  bytes from what is read to what is asked for
    """
    return _rotate_rows(source, step, to, rows, size, block, ahead, 0)


@njit
def rotate_tile(source, step, to, rows, size, block, ahead, magnitudes):
    """Like :func:`rotate_rows`, with magnitudes of each row; the first half of a row is asked for.

    ``magnitudes``: (rows, 16) int32: the largest of a row's are in the 16 lanes.
    """
    _rotate_tile(source, step, to, rows, size, block, ahead, magnitudes)


def _larger(e: Emitter, a: Value, b: Value) -> Value:
    return e.builder.select(e.builder.icmp_signed(">", a, b), a, b)


@njit
def rotate(rows, count, block):
    """Multiply blocks of ``count`` float32 by the orthonormal Hadamard matrix, in place.

    ``block``: a power of two, 16 to 256.
    """
    rotate_rows(rows, 0, rows, 1, count, block, 0)


SMALL = np.float32(65504 / 32)
"""Where no number is larger behind a rotation, none was beyond float16 before it, nor NaN: rotated,
a block of 256 is as long as it was, and its largest number at most 16 times smaller."""


@njit
def within(largest, limit):
    """Whether the magnitude that :func:`rotate_rows` gave is a number, and at most ``limit``."""
    return largest <= bits_of_float(limit)


@intrinsic
def clean(typing_context, at, vectors, largest):
    """NaN becomes 0, numbers come into ``-largest .. largest``; how many were changed."""

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        at, vectors, largest = arguments
        zero, none = e.constant(0.0), ir.Constant(_INTS, [0] * LANES)
        most = e.splat(largest, VECTOR)
        least = builder.fsub(zero, most)
        changed = cgutils.alloca_once_value(builder, none)
        builder.store(none, changed)
        with e.loop(vectors) as i:
            place = e.add(at, e.times(i, 4 * LANES))
            x = e.load(place)
            low, high = builder.fcmp_ordered("<", x, least), builder.fcmp_ordered(">", x, most)
            nan = builder.fcmp_unordered("uno", x, x)
            y = builder.select(low, least, builder.select(high, most, x))
            e.store(builder.select(nan, zero, y), place)
            wrong = builder.sext(builder.or_(nan, builder.or_(low, high)), _INTS)  # -1 or 0
            builder.store(builder.sub(builder.load(changed), wrong), changed)
        total = e.across(builder.add, builder.load(changed), LANES)
        first = builder.extract_element(total, ir.Constant(_INT, 0))
        return builder.sext(first, ir.IntType(64))

    return types.int64(_I, _I, types.float32), generate
