"""Loops over numbers of pages in vectors of 16 lanes: rotation, and the search for scales.

Every lane does what the specification says for one number, in its order: vectors change no bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import floats
from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Emitter, Value

_I = types.int64
_INT = ir.IntType(32)
_CLIP = 0.05  # step of a search, in widths of the range
_STEPS = 5
_NARROW = np.float32(2.0**-24)  # a range below it is one value: its scale would be 0
SPACE = 12 * LANES * 4  # bytes of workspace of a search


@intrinsic
def _rotate_16(typing_context, at):
    """Butterflies of distances 1, 2, 4 and 8 of the 16 float32 at an address."""

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        x = e.load(arguments[0])
        for distance in (1, 2, 4, 8):
            other = e.shuffle(x, x, [lane ^ distance for lane in range(LANES)])
            signs = [-1.0 if lane & distance else 1.0 for lane in range(LANES)]
            x = builder.fadd(other, builder.fmul(x, ir.Constant(VECTOR, signs)))
        e.store(x, arguments[0])
        return context.get_dummy_value()

    return types.void(_I), generate


@intrinsic
def _butterfly(typing_context, a, b):
    """Sum and difference of two vectors, in their places."""

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        x, y = (e.load(at) for at in arguments)
        e.store(builder.fadd(x, y), arguments[0])
        e.store(builder.fsub(x, y), arguments[1])
        return context.get_dummy_value()

    return types.void(_I, _I), generate


@njit
def rotate(rows, count, block):
    """Multiply blocks of ``count`` float32 by the orthonormal Hadamard matrix, its own inverse.

    ``block``: a power of two, at least 16.
    """
    factor = np.float32(1 / np.sqrt(np.float64(block)))
    for begin in range(rows, rows + 4 * count, 4 * block):
        for at in range(begin, begin + 4 * block, 64):
            _rotate_16(at)
        step = 64  # bytes
        while step < 4 * block:
            for low in range(begin, begin + 4 * block, 2 * step):
                for at in range(low, low + step, 64):
                    _butterfly(at, at + step)
            step *= 2
        x = floats(begin, block)
        for i in range(block):
            x[i] *= factor


@intrinsic
def clean(typing_context, at, vectors, largest):
    """NaN becomes 0, numbers come into ``-largest .. largest``; how many were changed."""

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        at, vectors, largest = arguments
        ints = ir.VectorType(_INT, LANES)
        zero, none = e.constant(0.0), ir.Constant(ints, [0] * LANES)
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
            wrong = builder.sext(builder.or_(nan, builder.or_(low, high)), ints)  # -1 or 0
            builder.store(builder.sub(builder.load(changed), wrong), changed)
        total = e.across(builder.add, builder.load(changed), LANES)
        first = builder.extract_element(total, ir.Constant(_INT, 0))
        return builder.sext(first, ir.IntType(64))

    return types.int64(_I, _I, types.float32), generate


@intrinsic
def extremes(typing_context, at, vectors, to):
    """The smallest and the largest of 16 * ``vectors`` float32, none of them NaN, to ``to``."""

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        at, vectors, to = arguments

        def smaller(a: Value, b: Value) -> Value:
            return builder.select(builder.fcmp_ordered("<", a, b), a, b)

        first = e.load(at)
        least, most = (cgutils.alloca_once_value(builder, first) for _ in range(2))
        builder.store(first, least)
        builder.store(first, most)
        with e.loop(vectors) as i:
            x = e.load(e.add(at, e.times(i, 4 * LANES)))
            builder.store(smaller(builder.load(least), x), least)
            builder.store(e.maximum(builder.load(most), x), most)
        both = e.across(smaller, builder.load(least), LANES)
        other = e.across(e.maximum, builder.load(most), LANES)
        pair = builder.shuffle_vector(both, other, e.lanes([0, LANES] * (LANES // 2)))
        for k in range(2):
            number = builder.extract_element(pair, ir.Constant(_INT, k))
            place = builder.inttoptr(e.add(to, 4 * k), ir.FloatType().as_pointer())
            builder.store(number, place).align = 4
        return context.get_dummy_value()

    return types.void(_I, _I, _I), generate


def _write_codes(
    e: Emitter, x: Value, vectors: Value, affine: Any, limits: list[Value], to: Value
) -> None:
    """Bytes of ``(x - middle) * inverse + center``, rounded to even, in the limits.

    ``affine(offset)``: inverse and middle for the numbers ``offset`` bytes behind the first one.
    """
    b, bytes_, ints = e.builder, ir.VectorType(ir.IntType(8), LANES), ir.VectorType(_INT, LANES)
    center, lowest, highest = (e.splat(n, VECTOR) for n in limits)
    with e.loop(vectors) as i:
        offset = e.times(i, 4 * LANES)
        inverse, middle = affine(offset)
        number = b.fmul(b.fsub(e.load(e.add(x, offset)), middle), inverse)
        number = e.nearest(b.fadd(number, center))
        number = b.select(b.fcmp_ordered(">", number, lowest), number, lowest)
        number = b.select(b.fcmp_ordered("<", number, highest), number, highest)
        place = b.inttoptr(e.add(to, e.times(i, LANES)), bytes_.as_pointer())
        b.store(b.trunc(b.fptosi(number, ints), bytes_), place).align = 1


@intrinsic
def code(typing_context, x, vectors, inverse, middle, center, lowest, highest, to):
    """Codes of 16 * ``vectors`` float32 that share a scale: one byte each."""

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        x, vectors, inverse, middle, *limits, to = arguments
        both = e.splat(inverse, VECTOR), e.splat(middle, VECTOR)
        _write_codes(e, x, vectors, lambda offset: both, limits, to)
        return context.get_dummy_value()

    return types.void(_I, _I, *[types.float32] * 5, _I), generate


@intrinsic
def code_each(typing_context, x, vectors, inverses, middles, center, lowest, highest, to):
    """Like :func:`code`, for numbers with scales of their own: addresses of float32."""

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        x, vectors, inverses, middles, *limits, to = arguments

        def affine(offset: Value) -> tuple[Value, Value]:
            return e.load(e.add(inverses, offset)), e.load(e.add(middles, offset))

        _write_codes(e, x, vectors, affine, limits, to)
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I, *[types.float32] * 3, _I), generate


@intrinsic
def _errors(typing_context, x, stride, count, low, step, highest, to):
    """Sums over ``count`` vectors ``stride`` bytes apart, coded with ``low`` and ``step``.

    ``low`` and ``step`` are addresses of a vector; ``to``: of four: the sums of squared errors, of
    numbers times codes, of codes, of squared codes. ``highest``: the largest code.
    """

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        x, stride, count, low, step, highest, to = arguments
        zero, low, step = e.constant(0.0), e.load(low), e.load(step)
        inverse, highest = builder.fdiv(e.constant(1.0), step), e.splat(highest, VECTOR)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(4)]
        for place in sums:
            builder.store(zero, place)
        with e.loop(count) as i:
            number = e.load(e.add(x, e.times(i, stride)))
            q = builder.fmul(builder.fsub(number, low), inverse)
            q = e.nearest(q)
            q = builder.select(builder.fcmp_ordered(">", q, zero), q, zero)
            q = builder.select(builder.fcmp_ordered("<", q, highest), q, highest)
            difference = builder.fsub(number, builder.fadd(builder.fmul(q, step), low))
            terms = (
                builder.fmul(difference, difference), builder.fmul(number, q), q, builder.fmul(q, q)
            )  # fmt: skip
            for place, term in zip(sums, terms, strict=True):
                builder.store(builder.fadd(builder.load(place), term), place)
        for i, place in enumerate(sums):
            e.store(builder.load(place), e.add(to, i * 64))
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I, _I, types.float32, _I), generate


@njit
def search(x, stride, count, highest, space):
    """Scales of 16 groups at once: steps and begins of the ranges with the least squared error.

    Both ends of a range are clipped in five steps, and each range is fitted once more to its own
    codes.

    Shapes:
        x:     (count) vectors of 16 float32, ``stride`` bytes apart: lane i is a number of group i
        space: SPACE bytes; its first two vectors become steps and begins
    """
    best_step, best_low = floats(space, 16), floats(space + 64, 16)
    best, least, most = floats(space + 128, 16), floats(space + 192, 16), floats(space + 256, 16)
    step, low = floats(space + 320, 16), floats(space + 384, 16)
    to = space + 448
    error, products, total, squares = (
        floats(to, 16), floats(to + 64, 16), floats(to + 128, 16), floats(to + 192, 16)
    )  # fmt: skip
    sums = floats(to + 256, 16)
    numbers, zero = np.float32(count), np.float32(0)
    first = floats(x, 16)
    for i in range(16):
        least[i] = most[i] = first[i]
        sums[i] = zero + first[i]
    for j in range(1, count):
        row = floats(x + j * stride, 16)
        for i in range(16):
            least[i], most[i] = min(least[i], row[i]), max(most[i], row[i])
            sums[i] += row[i]
    for i in range(16):
        best[i], best_step[i], best_low[i] = np.inf, zero, least[i]
    for a in range(_STEPS):
        for b in range(_STEPS):
            for i in range(16):
                width = most[i] - least[i]
                low[i] = least[i] + width * np.float32(a * _CLIP)
                step[i] = ((most[i] - width * np.float32(b * _CLIP)) - low[i]) / highest
            _errors(x, stride, count, space + 384, space + 320, highest, to)
            for i in range(16):
                wide = most[i] - least[i] >= _NARROW
                if wide and error[i] < best[i]:
                    best[i], best_step[i], best_low[i] = error[i], step[i], low[i]
                # the least squares line through the codes; where there is none, the step is 0
                spread = numbers * squares[i] - total[i] * total[i]
                slope = zero
                if wide and spread > 0:
                    slope = (numbers * products[i] - sums[i] * total[i]) / spread
                step[i] = max(slope, zero)
                low[i] = (sums[i] - step[i] * total[i]) / numbers
            _errors(x, stride, count, space + 384, space + 320, highest, to)
            for i in range(16):
                if step[i] > 0 and error[i] < best[i]:
                    best[i], best_step[i], best_low[i] = error[i], step[i], low[i]
