"""Rows of float32 become scales and codes of an integer format, and come back.

Works on K (``which`` 0) or V (1) of one head, whose region begins at an address. Rows are cleaned
and rotated before they come here; see ``pages_numbers``. All arithmetic is that of
``docs/formats.md``, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels.floats import (
    FLOAT16,
    float32_at,
    floats,
    uint8_at,
    uint16_at,
    widen,
)
from onnx_inplace.numba_kernels.memory import copy
from onnx_inplace.numba_kernels.pages_codes import pack, unpack
from onnx_inplace.numba_kernels.pages_coding import (
    code,
    code_bytes_of_key,
    code_bytes_of_value,
    code_each,
    code_value,
)
from onnx_inplace.numba_kernels.pages_lanes import SMALL, rotate_tile
from onnx_inplace.numba_kernels.pages_layout import BY_TOKEN
from onnx_inplace.numba_kernels.pages_numbers import half_at, limited, set_half
from onnx_inplace.numba_kernels.pages_scales import (
    RANGES,
    SETTLED,
    outside,
    range_of_token,
    ranges_of_channels,
    ranges_of_tokens,
    read_channels,
    settle,
    settle_magnitudes,
    steps_of_ranges,
)
from onnx_inplace.numba_kernels.pages_search import SPACE as SEARCH
from onnx_inplace.numba_kernels.pages_search import search, search_one

_TOGETHER = 16
"""Tokens that are encoded at once where a token has scales of its own."""
MAGNITUDES = 17 * 64  # bytes: 16 vectors of a tile's magnitudes, and one of scales
_FEW = 10
"""So many groups are searched one after the other: 16 at once take as long as 11."""
_PAIR = 128  # bytes: 2 x 16 float32
WIDENING = np.float32(0.1)  # of a new range, on a side that a later token has widened
_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)


class Codes(NamedTuple):
    """Codes of a format, as float32."""

    center: np.float32
    lowest: np.float32
    highest: np.float32


def space_size(tokens: int, head_size: int) -> int:
    """Bytes of workspace of :func:`encode` and :func:`decode`: a plane of codes, scales."""
    rest = max(RANGES, MAGNITUDES, SEARCH + 4 * _TOGETHER * head_size, 12 * head_size)
    return tokens * head_size + _PAIR + SETTLED + rest


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
def _search_tokens(codes, x, size, length, count, steps, space):
    """Steps and lows, (2, 16) float32, of a group of each of ``count`` tokens, at most 16."""
    step, low = floats(steps, 16), floats(steps + 64, 16)
    if count <= _FEW:
        for j in range(count):
            step[j], low[j] = search_one(x + j * size * 4, length, codes.highest, space)
        return
    block = space + SEARCH
    columns = carray(float32_at(block), (length, 16))
    for lane in range(16):
        row = floats(x + min(lane, count - 1) * size * 4, length)
        for i in range(length):
            columns[i, lane] = row[i]
    search(block, 64, length, codes.highest, space)
    copy(steps, space, _PAIR)


@njit
def _store_settled(settled, at, half, count):
    """Scales, and midpoints where there are any, of ``count`` neighbours of a group at ``at``."""
    halves = settled + _PAIR
    if count == 1:
        carray(uint16_at(at), (1,))[0] = carray(uint16_at(halves), (1,))[0]
        if half.midpoint:
            at += half.midpoint
            carray(uint16_at(at), (1,))[0] = carray(uint16_at(halves + 32), (1,))[0]
        return
    copy(at, halves, 2 * count)
    if half.midpoint:
        copy(at + half.midpoint, halves + 32, 2 * count)


@njit
def _by_token(which, half, region, size, rows, first, count, plane, space):
    """At most 16 tokens of one tile: a group of a token depends on nothing else."""
    codes = _codes(half)
    center, lowest, highest = codes.center, codes.lowest, codes.highest
    settled, rest = space + _PAIR, space + _PAIR + SETTLED
    inverse, middle = floats(settled, 16), floats(settled + 64, 16)
    whole = which == 1 and count == _TOGETHER
    for begin in range(0, size, half.group):
        length = min(half.group, size - begin)
        x = rows + begin * 4
        if half.searched:
            _search_tokens(codes, x, size, length, count, space, rest)
        else:
            if count == 1:
                range_of_token(x, length // 16, space)
            else:
                ranges_of_tokens(x, size, length // 16, count, space, rest)
            steps_of_ranges(space, half.midpoint, center, highest)
        settle(space, half.midpoint, center, settled)
        at = region + begin // half.group * half.step + 2 * first
        _store_settled(settled, at, half, count)
        if whole:
            to = region + half.codes + begin // 16 * half.tile + first * 2 * half.bits
            code_value(
                x, size, length // 16, settled, center, lowest, highest, to, half.tile, half.bits
            )
            continue
        for j in range(count):
            row, to = x + j * size * 4, plane + j * size + begin
            code(row, length // 16, inverse[j], middle[j], center, lowest, highest, to)
    if not whole:
        pack(which, region + half.codes, half.tile, half.bits, size, first, count, plane)


@njit
def _fit_channels(half, codes, scales, size, rows, count, space):
    """Choose and store the scales of channels afresh."""
    settled, rest = space + _PAIR, space + _PAIR + SETTLED
    for c in range(0, size, 16):
        if half.searched:
            search(rows + 4 * c, 4 * size, count, codes.highest, rest)
            copy(space, rest, _PAIR)
        else:
            ranges_of_channels(rows + 4 * c, 4 * size, count, space)
            steps_of_ranges(space, half.midpoint, codes.center, codes.highest)
        settle(space, half.midpoint, codes.center, settled)
        _store_settled(settled, scales + 2 * c, half, 16)


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
def _code_channels(codes, channels, size, rows, count, plane):
    """Codes of tokens whose channels are as ``read_channels`` says."""
    center, lowest, highest = codes.center, codes.lowest, codes.highest
    inverses, middles = channels + 4 * size, channels + 8 * size
    for j in range(count):
        x, to = rows + j * size * 4, plane + j * size
        code_each(x, size // 16, inverses, middles, center, lowest, highest, to)


@njit
def _by_channel(which, half, region, size, rows, first, count, valid, plane, space):
    """Tokens ``first .. first + count`` of one group; ``valid``: one past its last valid token.

    Valid tokens that are not written keep their codes where the range of their channel has room
    for the new values. Where it has to grow, they are decoded and coded again.
    """
    codes, at = _codes(half), region + half.codes
    begin = first // half.group * half.group
    tokens = max(first + count, valid) - begin
    scales = region + first // half.group * half.step
    if tokens == count:
        _fit_channels(half, codes, scales, size, rows, count, space)
    read_channels(scales, half.midpoint, size, space)
    reach = codes.highest - codes.center + np.float32(0.5)
    if tokens != count and outside(rows, count, size, space, reach):
        unpack(which, at, half.tile, half.bits, size, begin, tokens, plane)
        _widen_channels(half, codes, scales, size, rows, first - begin, count, tokens, plane)
        pack(which, at, half.tile, half.bits, size, begin, tokens, plane)
        read_channels(scales, half.midpoint, size, space)
    _code_channels(codes, space, size, rows, count, plane)
    pack(which, at, half.tile, half.bits, size, first, count, plane)


@njit
def encode(which, half, region, page_size, size, rows, first, count, valid, space):
    """Write tokens ``first .. first + count`` of a head; the page has ``valid`` tokens before.

    They share a group, where groups are of tokens, or else a tile: see :func:`piece_end`.

    Shapes:
        rows:  (count, size) float32, cleaned and rotated
        space: ``space_size`` bytes
    """
    plane = space
    rest = plane + page_size * size
    if half.grouping == BY_TOKEN:
        _by_token(which, half, region, size, rows, first, count, plane, rest)
        return
    limit = min(valid, (first // half.group + 1) * half.group)
    _by_channel(which, half, region, size, rows, first, count, limit, plane, rest)


@njit
def takes_tiles(which, half, size):
    """Whether :func:`encode_tile` serves a half: bytes around 0, one scale for all of a token."""
    plain = half.bits == 8 and half.midpoint == 0 and half.searched == 0 and half.offsets == 0
    rows = half.grouping == BY_TOKEN and half.group >= size and half.rotation
    return plain and rows and (which == 1 or size % 64 == 0)


@njit
def encode_tile(which, half, region, size, source, step, first, ahead, rows, space):
    """16 tokens of float32 that fill a tile, in one go; whether that could be done.

    It cannot where a number is too large or no number, or a scale so small that codes have to be
    clipped. Then nothing that lasts is written but scales, which :func:`encode` writes again.

    Shapes:
        source: (16, size) float32, rows ``step`` bytes apart, neither cleaned nor rotated
        ahead:  bytes from what is read to what is asked for
        rows:   (16, size) float32, workspace
        space:  (17, 16) float32, workspace
    """
    rotate_tile(source, step, rows, 16, size, half.rotation, ahead, space)
    codes = _codes(half)
    inverses, scales = space + 16 * 64, region + 2 * first
    steps = codes.highest - codes.center
    if not settle_magnitudes(space, steps, SMALL, inverses, scales):
        return False
    at, asked = region + half.codes, source + ahead
    if which:
        to = at + first * 2 * half.bits
        code_bytes_of_value(rows, size, inverses, codes.center, to, half.tile, asked, step)
    else:
        to = at + first // 16 * half.tile
        code_bytes_of_key(rows, size, inverses, codes.center, to, asked, step)
    return True


@njit
def piece_end(half, token):
    """Where the tokens end that are encoded together with one."""
    tokens = _TOGETHER if half.grouping == BY_TOKEN else half.group
    return (token // tokens + 1) * tokens


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
