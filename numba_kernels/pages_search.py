"""The search for the scale and midpoint of a group that give the least squared error.

Both ends of the range of a group are clipped in five steps, and each of the 25 ranges is fitted
once more to its own codes. Every lane does what the specification says for one group or for one of
its ranges, in its order: vectors change no bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import float32_at, floats
from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Emitter, Value

_I, _F = types.int64, types.float32
_CLIP = 0.05  # step of a search, in widths of the range
_STEPS = 5
_RANGES = _STEPS * _STEPS
_LINES = 2 * LANES  # lanes that hold all ranges of one group
_NARROW = np.float32(2.0**-24)  # a range below it is one value: its scale would be 0
_ROUNDING = 12582912.0  # 1.5 * 2**23: added and taken away, it rounds what is small to even
_ERROR, _PRODUCTS, _TOTAL, _SQUARES = range(4)
SPACE = 12 * LANES * 4
"""Bytes of workspace of a search."""


class _Sums:
    """Sums over the numbers of 16 groups, each coded with a step and a begin of its lane."""

    def __init__(self, e: Emitter, low: Value, step: Value, highest: Value) -> None:
        self._e, self._low, self._step = e, low, step
        self._inverse = e.builder.fdiv(e.constant(1.0), step)
        self._highest = e.splat(highest, VECTOR)

    def terms(self, x: Value) -> tuple[Value, Value, Value, Value]:
        """What a vector of numbers adds: squared errors, products with codes, codes, squares."""
        e, b = self._e, self._e.builder
        q = b.fmul(b.fsub(x, self._low), self._inverse)
        zero, rounding = e.constant(0.0), e.constant(_ROUNDING)
        # rounding keeps the order of numbers, and the limits are whole
        q = b.select(b.fcmp_ordered(">", q, zero), q, zero)
        q = b.select(b.fcmp_ordered("<", q, self._highest), q, self._highest)
        q = b.fsub(b.fadd(q, rounding), rounding)
        difference = b.fsub(x, b.fadd(b.fmul(q, self._step), self._low))
        return b.fmul(difference, difference), b.fmul(x, q), q, b.fmul(q, q)


def _sums(many: int, spread: bool, wanted: int) -> Any:
    """``sums(x, stride, count, low, step, highest, to)`` of ``many`` vectors of lanes.

    The first ``wanted`` sums of ``_Sums.terms`` go to ``to``, (wanted, many, 16) float32. ``low``
    and ``step``: addresses of (many, 16) float32. ``x``: (count) vectors ``stride`` bytes apart;
    with ``spread``, numbers that meet all lanes.
    """

    @intrinsic
    def sums(typing_context, x, stride, count, low, step, highest, to):
        def generate(context, builder, signature, arguments):
            e = Emitter(builder)
            x, stride, count, low, step, highest, to = arguments
            places = {
                (k, m): cgutils.alloca_once(builder, VECTOR)
                for k in range(wanted)
                for m in range(many)
            }
            for place in places.values():
                builder.store(e.constant(0.0), place)
            offsets = [64 * m for m in range(many)]
            lines = [
                _Sums(e, e.load(e.add(low, o)), e.load(e.add(step, o)), highest) for o in offsets
            ]
            with e.loop(count) as i:
                at = e.add(x, e.times(i, stride))
                number = e.load_all(at) if spread else e.load(at)
                for m, line in enumerate(lines):
                    for k, term in enumerate(line.terms(number)[:wanted]):
                        place = places[k, m]
                        builder.store(builder.fadd(builder.load(place), term), place)
            for (k, m), place in places.items():
                e.store(builder.load(place), e.add(to, 64 * (k * many + m)))
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I, _F, _I), generate

    return sums


_sums_of_groups, _errors_of_groups = _sums(1, False, 4), _sums(1, False, 1)
_sums_of_ranges, _errors_of_ranges = _sums(2, True, 4), _sums(2, True, 1)


@njit
def _clipped(least, most, highest, a, b):
    """Begin and step of a range that is clipped ``a`` and ``b`` times at its ends."""
    width = most - least
    low = least + width * np.float32(a * _CLIP)
    return low, ((most - width * np.float32(b * _CLIP)) - low) / highest


@njit
def _fitted(count, total, products, codes, squares, wide):
    """Begin and step of the least squares line through codes; where there is none, step 0."""
    spread = count * squares - codes * codes
    slope = np.float32(0)
    if wide and spread > 0:
        slope = (count * products - total * codes) / spread
    step = max(slope, np.float32(0))
    return (total - step * codes) / count, step


@njit
def search(x, stride, count, highest, space):
    """Scales of 16 groups at once: steps and begins of the ranges with the least squared error.

    Shapes:
        x:     (count) vectors of 16 float32, ``stride`` bytes apart: lane i is a number of group i
        space: SPACE bytes; its first two vectors become steps and begins
    """
    best_step, best_low = floats(space, 16), floats(space + 64, 16)
    best, least, most = floats(space + 128, 16), floats(space + 192, 16), floats(space + 256, 16)
    step, low, total = floats(space + 320, 16), floats(space + 384, 16), floats(space + 448, 16)
    steps, lows, to = space + 320, space + 384, space + 512
    sums = carray(float32_at(to), (4, 16))
    numbers, first = np.float32(count), floats(x, 16)
    for i in range(16):
        least[i] = most[i] = first[i]
        total[i] = np.float32(0) + first[i]
    for j in range(1, count):
        row = floats(x + j * stride, 16)
        for i in range(16):
            least[i], most[i] = min(least[i], row[i]), max(most[i], row[i])
            total[i] += row[i]
    for i in range(16):
        best[i], best_step[i], best_low[i] = np.inf, 0, least[i]
    for a in range(_STEPS):
        for b in range(_STEPS):
            for i in range(16):
                low[i], step[i] = _clipped(least[i], most[i], highest, a, b)
            _sums_of_groups(x, stride, count, lows, steps, highest, to)
            for i in range(16):
                wide = most[i] - least[i] >= _NARROW
                if wide and sums[_ERROR, i] < best[i]:
                    best[i], best_step[i], best_low[i] = sums[_ERROR, i], step[i], low[i]
                low[i], step[i] = _fitted(
                    numbers, total[i], sums[_PRODUCTS, i], sums[_TOTAL, i], sums[_SQUARES, i], wide
                )
            _errors_of_groups(x, stride, count, lows, steps, highest, to)
            for i in range(16):
                if step[i] > 0 and sums[_ERROR, i] < best[i]:
                    best[i], best_step[i], best_low[i] = sums[_ERROR, i], step[i], low[i]


@njit
def search_one(x, count, highest, space):
    """Scale of one group: step and begin. All its ranges are tried at once.

    Shapes:
        x:     (count) float32
        space: SPACE bytes
    """
    steps, lows, to = space, space + 128, space + 256
    step, low = floats(steps, _LINES), floats(lows, _LINES)
    sums = carray(float32_at(to), (4, _LINES))
    row, numbers = floats(x, count), np.float32(count)
    least = most = row[0]
    total = np.float32(0) + row[0]
    for j in range(1, count):
        least, most = min(least, row[j]), max(most, row[j])
        total += row[j]
    best, best_step, best_low = np.float32(np.inf), np.float32(0), least
    if most - least < _NARROW:
        return best_step, best_low
    for i in range(_LINES):  # lanes behind the last range repeat it
        k = min(i, _RANGES - 1)
        low[i], step[i] = _clipped(least, most, highest, k // _STEPS, k % _STEPS)
    _sums_of_ranges(x, 4, count, lows, steps, highest, to)
    # which is the first one of the least error is known when all are
    winner, fitted = -1, False
    for i in range(_RANGES):
        if sums[_ERROR, i] < best:
            best, best_step, best_low = sums[_ERROR, i], step[i], low[i]
            winner = i
    for i in range(_LINES):
        low[i], step[i] = _fitted(
            numbers, total, sums[_PRODUCTS, i], sums[_TOTAL, i], sums[_SQUARES, i], True
        )
    _errors_of_ranges(x, 4, count, lows, steps, highest, to)
    for i in range(_RANGES):
        error = sums[_ERROR, i]
        # a range stands before its own fit, and both before the next range
        if step[i] > 0 and (error < best or (error == best and not fitted and i < winner)):
            best, best_step, best_low = error, step[i], low[i]
            winner, fitted = i, True
    return best_step, best_low
