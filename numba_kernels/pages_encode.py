"""Rows of float32 become scales and codes of an integer format, and come back.

Works on K (``which`` 0) or V (1) of one head, whose region begins at an address. Rows are cleaned
and rotated before they come here; see ``pages_numbers``. All arithmetic is that of
``docs/formats.md``, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels.floats import FLOAT16, float32_at, floats, uint8_at, widen
from onnx_inplace.numba_kernels.pages_codes import pack, unpack
from onnx_inplace.numba_kernels.pages_lanes import SPACE as SEARCH
from onnx_inplace.numba_kernels.pages_lanes import code, code_each, extremes, search
from onnx_inplace.numba_kernels.pages_layout import BY_TOKEN
from onnx_inplace.numba_kernels.pages_numbers import half_at, limited, set_half

_TOGETHER = 16  # tokens
WIDENING = np.float32(0.1)  # of a new range, on a side that a later token has widened
_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)


class Codes(NamedTuple):
    """Codes of a format, as float32."""

    center: np.float32
    lowest: np.float32
    highest: np.float32


def space_size(tokens: int, head_size: int) -> int:
    """Bytes of workspace of :func:`encode` and :func:`decode`: a plane of codes, scales."""
    return tokens * head_size + max(8 * head_size, SEARCH + 64 * head_size)


@njit
def _codes(half):
    highest = np.float32((1 << half.bits) - 1)
    if half.midpoint:
        return Codes(highest / _TWO, _ZERO, highest)
    return Codes(np.float32(1 << (half.bits - 1)), _ONE, highest)


@njit
def _inverse(d):
    return _ONE / d if d != 0 else _ZERO


@njit
def _code(x, inverse, middle, codes):
    return min(max(np.rint((x - middle) * inverse + codes.center), codes.lowest), codes.highest)


@njit
def _store(at, half, codes, d, low):
    """Store the scale of a group whose range begins at ``low``, and its midpoint; both, rounded.

    The midpoint fits the rounded scale.
    """
    d = set_half(at, d)
    if half.midpoint == 0:
        return d, _ZERO
    return d, set_half(at + half.midpoint, low + d * codes.center)


@njit
def _middle(at, half):
    """The midpoint beside the scale at ``at``."""
    return half_at(at + half.midpoint) if half.midpoint else _ZERO


@njit
def _store_range(at, half, codes, least, most):
    """Choose and store the scale of numbers from ``least`` to ``most``; scale and midpoint."""
    if half.midpoint == 0:
        largest = max(abs(least), abs(most))
        return _store(at, half, codes, largest / (codes.highest - codes.center), least)
    return _store(at, half, codes, (most - least) / codes.highest, least)


@njit
def _widen(at, half, codes, least, most):
    """Give a group a range that has new values in it as well; its scale and midpoint."""
    d, middle = half_at(at), _middle(at, half)
    low = middle - d * (codes.center - codes.lowest)
    high = middle + d * (codes.highest - codes.center)
    new_low, new_high = min(low, least), max(high, most)
    margin = WIDENING * (new_high - new_low)
    if least < low:
        new_low -= margin
    if most > high:
        new_high += margin
    new_low, new_high = limited(new_low), limited(new_high)
    return _store_range(at, half, codes, new_low, new_high)


@njit
def _search_tokens(half, codes, region, size, rows, first, count, space):
    """Choose and store the scales of tokens, 16 at once."""
    lanes, block = space, space + SEARCH
    steps, lows = floats(lanes, 16), floats(lanes + 64, 16)
    for begin in range(0, size, half.group):
        length = min(half.group, size - begin)
        for t in range(0, count, 16):
            columns = carray(float32_at(block), (length, 16))
            for lane in range(16):
                x = floats(rows + (min(t + lane, count - 1) * size + begin) * 4, length)
                for i in range(length):
                    columns[i, lane] = x[i]
            search(block, 64, length, codes.highest, lanes)
            for lane in range(min(16, count - t)):
                at = region + begin // half.group * half.step + 2 * (first + t + lane)
                _store(at, half, codes, steps[lane], lows[lane])


@njit
def _by_token(half, region, size, rows, first, count, plane, space):
    """A group of a token depends on nothing else.

    Ranges, scales and codes of 16 tokens follow one another, so that a core has several scales,
    which are long chains of scalar arithmetic, under way.
    """
    codes, ranges = _codes(half), floats(space, 2 * _TOGETHER)
    center, lowest, highest = codes.center, codes.lowest, codes.highest
    if half.searched:
        _search_tokens(half, codes, region, size, rows, first, count, space)
    for t in range(0, count, _TOGETHER):
        now = min(_TOGETHER, count - t)
        for begin in range(0, size, half.group):
            vectors = min(half.group, size - begin) // 16
            x, to = rows + (t * size + begin) * 4, plane + t * size + begin
            at = region + begin // half.group * half.step + 2 * (first + t)
            if not half.searched:
                for j in range(now):
                    extremes(x + j * size * 4, vectors, space + 8 * j)
                for j in range(now):
                    _store_range(at + 2 * j, half, codes, ranges[2 * j], ranges[2 * j + 1])
            for j in range(now):
                inverse, middle = _inverse(half_at(at + 2 * j)), _middle(at + 2 * j, half)
                row, target = x + j * size * 4, to + j * size
                code(row, vectors, inverse, middle, center, lowest, highest, target)


@njit
def _fit_channels(half, codes, scales, size, rows, count, space):
    """Choose and store the scales of channels afresh."""
    if half.searched:
        steps, lows = floats(space, 16), floats(space + 64, 16)
        for c in range(0, size, 16):
            search(rows + 4 * c, 4 * size, count, codes.highest, space)
            for i in range(16):
                _store(scales + 2 * (c + i), half, codes, steps[i], lows[i])
        return
    least, most, first = floats(space, size), floats(space + 4 * size, size), floats(rows, size)
    for c in range(size):
        least[c] = most[c] = first[c]
    for j in range(1, count):
        x = floats(rows + j * size * 4, size)
        for c in range(size):
            least[c], most[c] = min(least[c], x[c]), max(most[c], x[c])
    for c in range(size):
        _store_range(scales + 2 * c, half, codes, least[c], most[c])


@njit
def _widen_channels(half, codes, scales, size, rows, first, count, tokens, plane):
    """Widen the range of channels that new values leave, and code their old values again.

    ``plane``: codes of ``tokens``, of which ``first .. first + count`` are to be written.
    """
    values = carray(float32_at(rows), (count, size))
    table = carray(uint8_at(plane), (tokens, size))
    for c in range(size):
        at = scales + 2 * c
        old_d, old_middle = half_at(at), _middle(at, half)
        reach = old_d * (codes.highest - codes.center + np.float32(0.5))
        least = most = values[0, c]
        fits = True
        for j in range(count):
            least, most = min(least, values[j, c]), max(most, values[j, c])
            fits &= abs(values[j, c] - old_middle) <= reach
        if fits:
            continue
        d, middle = _widen(at, half, codes, least, most)
        inverse = _inverse(d)
        for t in range(tokens):
            if t < first or t >= first + count:
                value = (np.float32(table[t, c]) - codes.center) * old_d + old_middle
                table[t, c] = np.uint8(_code(value, inverse, middle, codes))


@njit
def _by_channel(which, half, region, size, rows, first, count, valid, plane, space):
    """Tokens ``first .. first + count`` of one group; ``valid``: one past its last valid token.

    Valid tokens that are not written keep their codes where the range of their channel has room
    for the new values. Where it has to grow, they are decoded and coded again.
    """
    codes = _codes(half)
    begin = first // half.group * half.group
    tokens = max(first + count, valid) - begin
    scales = region + first // half.group * half.step
    if tokens > count:
        unpack(which, region + half.codes, half.tile, half.bits, size, begin, tokens, plane)
        _widen_channels(half, codes, scales, size, rows, first - begin, count, tokens, plane)
    else:
        _fit_channels(half, codes, scales, size, rows, count, space)
    inverses, middles = floats(space, size), floats(space + 4 * size, size)
    widen(space, size, scales, FLOAT16)
    widen(space + 4 * size, size, scales + half.midpoint, FLOAT16)
    for c in range(size):
        inverses[c] = _inverse(inverses[c])
        if half.midpoint == 0:
            middles[c] = 0
    for j in range(count):
        x, to = rows + j * size * 4, plane + (first - begin + j) * size
        code_each(
            x, size // 16, space, space + 4 * size, codes.center, codes.lowest, codes.highest, to
        )
    pack(which, region + half.codes, half.tile, half.bits, size, begin, tokens, plane)


@njit
def encode(which, half, region, page_size, size, rows, first, count, valid, space):
    """Write tokens ``first .. first + count`` of a head; the page has ``valid`` tokens before.

    Shapes:
        rows:  (count, size) float32, cleaned and rotated
        space: ``space_size`` bytes
    """
    plane = space
    rest = plane + page_size * size
    if half.grouping == BY_TOKEN:
        _by_token(half, region, size, rows, first, count, plane, rest)
        pack(which, region + half.codes, half.tile, half.bits, size, first, count, plane)
        return
    last = first + count
    while first < last:
        end = min((first // half.group + 1) * half.group, last)
        limit = min(valid, (first // half.group + 1) * half.group)
        now = end - first
        _by_channel(which, half, region, size, rows, first, now, limit, plane, rest)
        rows += now * size * 4
        first = end


@njit
def decode(which, half, region, size, first, count, rows, space):
    """Tokens ``first .. first + count`` of a head: rows (count, size) of float32, still rotated."""
    codes = _codes(half)
    unpack(which, region + half.codes, half.tile, half.bits, size, first, count, space)
    if half.grouping == BY_TOKEN:
        for j in range(count):
            for begin in range(0, size, half.group):
                length = min(half.group, size - begin)
                at = region + begin // half.group * half.step + 2 * (first + j)
                d = half_at(at)
                middle = _middle(at, half)
                x = floats(rows + (j * size + begin) * 4, length)
                row = carray(uint8_at(space + j * size + begin), (length,))
                for i in range(length):
                    x[i] = (np.float32(row[i]) - codes.center) * d + middle
        return
    scales = space + count * size
    d, middles = floats(scales, size), floats(scales + 4 * size, size)
    group = -1
    for j in range(count):
        if (first + j) // half.group != group:
            group = (first + j) // half.group
            at = region + group * half.step
            widen(scales, size, at, FLOAT16)
            widen(scales + 4 * size, size, at + half.midpoint, FLOAT16)
            if half.midpoint == 0:
                for i in range(size):
                    middles[i] = 0
        x, row = floats(rows + j * size * 4, size), carray(uint8_at(space + j * size), (size,))
        for i in range(size):
            x[i] = (np.float32(row[i]) - codes.center) * d[i] + middles[i]
