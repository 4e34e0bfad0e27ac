"""Rows of float32 become scales and codes of an integer format, and come back.

Works on K (``which`` 0) or V (1) of one head, whose region begins at an address. Rows are cleaned
and rotated before they come here; see ``pages_numbers``. All arithmetic is that of
``docs/formats.md``, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels.floats import float32_at, floats, uint8_at
from onnx_inplace.numba_kernels.pages_codes import pack, unpack
from onnx_inplace.numba_kernels.pages_layout import BY_TOKEN
from onnx_inplace.numba_kernels.pages_numbers import half_at, limited, set_half

WIDENING = np.float32(0.1)  # of a new range, on a side that a later token has widened
_CLIP = 0.05  # step of a search, in widths of the range
_NARROW = np.float32(2.0**-24)  # a range below it is one value: its scale would be 0
_STEPS = 5
_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)


class Codes(NamedTuple):
    """Codes of a format, as float32."""

    center: np.float32
    lowest: np.float32
    highest: np.float32


def space_size(page_size: int, head_size: int) -> int:
    """Bytes of workspace of :func:`encode` and :func:`decode`: a plane of codes, a line."""
    return page_size * head_size + 4 * max(page_size, head_size)


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
def _error(x, count, low, step, highest):
    """Squared error of the codes of a range, and sums over x * code, code, code * code."""
    inverse = _ONE / step
    error = products = total = squares = _ZERO
    for i in range(count):
        q = min(max(np.rint((x[i] - low) * inverse), _ZERO), highest)
        difference = x[i] - (q * step + low)
        error += difference * difference
        products += x[i] * q
        total += q
        squares += q * q
    return error, products, total, squares


@njit
def _search(x, count, least, most, highest):
    """Step and begin of the range with the least squared error.

    Both ends are clipped in five steps, and each range is fitted once more to its own codes.
    """
    width = most - least
    best_step, best_low, best = _ZERO, least, np.float32(np.inf)
    if width < _NARROW:
        return best_step, best_low
    numbers, sums = np.float32(count), _ZERO
    for i in range(count):
        sums += x[i]
    for a in range(_STEPS):
        for b in range(_STEPS):
            low = least + width * np.float32(a * _CLIP)
            step = ((most - width * np.float32(b * _CLIP)) - low) / highest
            error, products, total, squares = _error(x, count, low, step, highest)
            if error < best:
                best, best_step, best_low = error, step, low
            spread = numbers * squares - total * total
            if spread <= 0:
                continue
            step = (numbers * products - sums * total) / spread
            if step <= 0:
                continue
            low = (sums - step * total) / numbers
            error, _, _, _ = _error(x, count, low, step, highest)
            if error < best:
                best, best_step, best_low = error, step, low
    return best_step, best_low


@njit
def _fit(at, half, codes, line, count):
    """Choose and store the scale of ``count`` numbers; scale and midpoint."""
    x = floats(line, count)
    least = most = x[0]
    for i in range(1, count):
        least, most = min(least, x[i]), max(most, x[i])
    if half.midpoint == 0:
        return _store(
            at, half, codes, max(abs(least), abs(most)) / (codes.highest - codes.center), least
        )
    if half.searched:
        d, low = _search(x, count, least, most, codes.highest)
        return _store(at, half, codes, d, low)
    return _store(at, half, codes, (most - least) / codes.highest, least)


@njit
def _middle(at, half):
    """The midpoint beside the scale at ``at``."""
    return half_at(at + half.midpoint) if half.midpoint else _ZERO


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
    if half.midpoint == 0:
        largest = max(abs(new_low), abs(new_high))
        return _store(at, half, codes, largest / (codes.highest - codes.center), new_low)
    return _store(at, half, codes, (new_high - new_low) / codes.highest, new_low)


@njit
def _by_token(half, region, size, rows, first, count, plane):
    """A group of a token depends on nothing else."""
    codes = _codes(half)
    for j in range(count):
        for begin in range(0, size, half.group):
            length = min(half.group, size - begin)
            line = rows + (j * size + begin) * 4
            at = region + begin // half.group * half.step + 2 * (first + j)
            d, middle = _fit(at, half, codes, line, length)
            inverse = _inverse(d)
            x, to = floats(line, length), carray(uint8_at(plane + j * size + begin), (length,))
            for i in range(length):
                to[i] = np.uint8(_code(x[i], inverse, middle, codes))


@njit
def _by_channel(which, half, region, size, rows, first, count, valid, plane, line):
    """Tokens ``first .. first + count`` of one group; ``valid``: one past its last valid token.

    Valid tokens that are not written keep their codes where the range of their channel has room
    for the new values. Where it has to grow, they are decoded and coded again.
    """
    codes = _codes(half)
    group = first // half.group
    begin = group * half.group
    end = max(first + count, valid)
    kept = end - begin > count
    tokens = end - begin
    if kept:
        unpack(which, region + half.codes, half.tile, half.bits, size, begin, tokens, plane)
    x, values = floats(line, count), carray(float32_at(rows), (count, size))
    table = carray(uint8_at(plane), (tokens, size))
    for c in range(size):
        at = region + group * half.step + 2 * c
        for j in range(count):
            x[j] = values[j, c]
        if not kept:
            d, middle = _fit(at, half, codes, line, count)
        else:
            d, middle = half_at(at), _middle(at, half)
            reach = d * (codes.highest - codes.center + np.float32(0.5))
            least = most = x[0]
            fits = True
            for j in range(count):
                least, most = min(least, x[j]), max(most, x[j])
                fits &= abs(x[j] - middle) <= reach
            if not fits:
                old_d, old_middle = d, middle
                d, middle = _widen(at, half, codes, least, most)
                inverse = _inverse(d)
                for t in range(tokens):
                    if t < first - begin or t >= first - begin + count:
                        value = (np.float32(table[t, c]) - codes.center) * old_d + old_middle
                        table[t, c] = np.uint8(_code(value, inverse, middle, codes))
        inverse = _inverse(d)
        for j in range(count):
            table[first - begin + j, c] = np.uint8(_code(x[j], inverse, middle, codes))
    pack(which, region + half.codes, half.tile, half.bits, size, begin, tokens, plane)


@njit
def encode(which, half, region, page_size, size, rows, first, count, valid, space):
    """Write tokens ``first .. first + count`` of a head; the page has ``valid`` tokens before.

    Shapes:
        rows:  (count, size) float32, cleaned and rotated
        space: ``space_size`` bytes
    """
    plane = space
    line = plane + page_size * size
    if half.grouping == BY_TOKEN:
        _by_token(half, region, size, rows, first, count, plane)
        pack(which, region + half.codes, half.tile, half.bits, size, first, count, plane)
        return
    last = first + count
    while first < last:
        end = min((first // half.group + 1) * half.group, last)
        limit = min(valid, (first // half.group + 1) * half.group)
        now = end - first
        _by_channel(which, half, region, size, rows, first, now, limit, plane, line)
        rows += now * size * 4
        first = end


@njit
def decode(which, half, region, size, first, count, rows, space):
    """Tokens ``first .. first + count`` of a head: rows (count, size) of float32, still rotated."""
    codes = _codes(half)
    unpack(which, region + half.codes, half.tile, half.bits, size, first, count, space)
    for j in range(count):
        x, row = floats(rows + j * size * 4, size), carray(uint8_at(space + j * size), (size,))
        t = first + j
        if half.grouping == BY_TOKEN:
            for begin in range(0, size, half.group):
                at = region + begin // half.group * half.step + 2 * t
                d = half_at(at)
                middle = _middle(at, half)
                for i in range(begin, min(begin + half.group, size)):
                    x[i] = (np.float32(row[i]) - codes.center) * d + middle
        else:
            at = region + t // half.group * half.step
            for i in range(size):
                d, middle = half_at(at + 2 * i), _middle(at + 2 * i, half)
                x[i] = (np.float32(row[i]) - codes.center) * d + middle
