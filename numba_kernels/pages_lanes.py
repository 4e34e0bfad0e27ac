"""Loops over numbers of pages in vectors of 16 lanes: rotation, and the search for scales.

Every lane does what the specification says for one number, in its order: vectors change no bit.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import floats
from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Emitter

_I = types.int64
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
            chosen = [lane + LANES if lane & distance else lane for lane in range(LANES)]
            x = e.shuffle(builder.fadd(x, other), builder.fsub(other, x), chosen)
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
    for at in range(rows, rows + 4 * count, 64):
        _rotate_16(at)
    step = 64  # bytes
    while step < 4 * block:
        for low in range(rows, rows + 4 * count, 2 * step):
            for at in range(low, low + step, 64):
                _butterfly(at, at + step)
        step *= 2
    x = floats(rows, count)
    for i in range(count):
        x[i] *= factor


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
            q = e._intrinsic(f"llvm.nearbyint.v{LANES}f32", VECTOR, [q])
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
