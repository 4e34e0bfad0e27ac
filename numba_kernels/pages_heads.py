"""K or V of one head in a page: written, read, and continued from the page before; every format.

``region`` is the address where the head begins, ``which`` is 0 for K and 1 for V.

Danger: nothing is checked here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels import pages_encode
from onnx_inplace.numba_kernels.floats import FLOAT32, floats, int32_at, int64_at, uint8_at
from onnx_inplace.numba_kernels.memory import copy, load_int64
from onnx_inplace.numba_kernels.pages_lanes import SMALL, clean, rotate, rotate_rows, within
from onnx_inplace.numba_kernels.pages_layout import INTEGER, ITEM, WORDS, read_half, read_page
from onnx_inplace.numba_kernels.pages_numbers import (
    LARGEST,
    half_at,
    narrow_row,
    set_half,
    widen_row,
)

_AHEAD = 16  # tokens


class Values(NamedTuple):
    """New tokens, (2, batch, heads, tokens, head_size), and the block table. Strides in bytes.

    The elements of a row are neighbours. ``kind`` is one of ``floats.FLOAT32``, FLOAT16, BFLOAT16.
    """

    batch: int
    tokens: int
    kind: int
    half_step: int
    batch_step: int
    head_step: int
    token_step: int
    blocks: int  # [pages] of a row of the block table


def workspace_size(page_size: int, head_size: int) -> int:
    """Bytes of workspace of every kernel here."""
    return page_size * head_size * 4 + pages_encode.space_size(page_size, head_size)


@njit
def read_values(address):
    """The ``Values`` at an address."""
    n = carray(int64_at(address), (8,))
    return Values(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7])


@njit
def clear(address, size):
    """Make ``size`` bytes zero."""
    data = carray(uint8_at(address), (size,))
    for i in range(size):
        data[i] = 0


@njit
def prepare(half, region, rows, count, size):
    """Clean rows, take the offsets of channels away, and rotate; how many numbers were clipped."""
    clipped = clean(rows, count * size // 16, LARGEST)
    if half.offsets:
        for j in range(count):
            x = floats(rows + j * size * 4, size)
            for i in range(size):
                x[i] -= half_at(region + half.offsets + 2 * i)
    if half.rotation:
        rotate(rows, count * size, half.rotation)
    clean(rows, count * size // 16, LARGEST)
    return clipped


@njit
def _take(half, region, source, step, kind, rows, count, size):
    """Rows of new values ``step`` bytes apart, prepared; how many numbers were clipped."""
    if half.offsets == 0 and half.rotation and kind == FLOAT32:
        ahead = _AHEAD * step
        largest = rotate_rows(source, step, rows, count, size, half.rotation, ahead)
        if within(largest, SMALL):
            return 0
    for j in range(count):
        widen_row(rows + j * size * 4, size, source + j * step, kind)
    return prepare(half, region, rows, count, size)


@njit
def save(page, half, which, region, rows, first, count, valid, space):
    """Rows of float32 become tokens ``first .. first + count`` of a head; how many were clipped.

    The rows are overwritten.
    """
    size, clipped = page.head_size, 0
    if page.kind != INTEGER:
        row_bytes = size * ITEM[page.kind]
        for j in range(count):
            to = region + (first + j) * row_bytes
            clipped += narrow_row(to, size, rows + j * size * 4, page.kind)
        return clipped
    clipped = prepare(half, region, rows, count, size)
    pages_encode.encode(which, half, region, page.page_size, size, rows, first, count, valid, space)
    return clipped


@njit
def load(page, half, which, region, rows, first, count, space):
    """Tokens ``first .. first + count`` of a head become rows of float32."""
    size = page.head_size
    if page.kind != INTEGER:
        row_bytes = size * ITEM[page.kind]
        widen_row(rows, count * size, region + first * row_bytes, page.kind)
        return
    pages_encode.decode(which, half, region, size, first, count, rows, space)
    if half.rotation:
        rotate(rows, count * size, half.rotation)
    if half.offsets:
        for j in range(count):
            x = floats(rows + j * size * 4, size)
            for i in range(size):
                x[i] += half_at(region + half.offsets + 2 * i)


@njit
def _write_floats(page, region, source, x, first, gap, count, space):
    """Tokens of a head into a page of floats, behind ``gap`` tokens of zeros; how many clipped.

    ``space``: a row of float32.
    """
    size, clipped = page.head_size, 0
    row_bytes = size * ITEM[page.kind]
    clear(region + (first - gap) * row_bytes, gap * row_bytes)
    for j in range(count):
        to, row = region + (first + j) * row_bytes, source + j * x.token_step
        if page.kind == x.kind:  # the same bits, NaN included
            copy(to, row, row_bytes)
            continue
        if x.kind != FLOAT32:
            widen_row(space, size, row, x.kind)
            row = space
        clipped += narrow_row(to, size, row, page.kind, _AHEAD * x.token_step)
    return clipped


@njit
def write_half(page, half, which, region, source, following, x, first, count, fill, space):
    """``count`` tokens of K or V of a head; how many numbers were clipped.

    ``source``: address of the first token's first element; ``following``: of that of the head that
    is written next. From ``fill`` to ``first`` come zeros.
    """
    size, clipped = page.head_size, 0
    rows, rest = space, space + page.page_size * page.head_size * 4
    gap = max(0, first - fill)
    if page.kind != INTEGER:
        return _write_floats(page, region, source, x, first, gap, count, rows)
    tiles = x.kind == FLOAT32 and pages_encode.takes_tiles(which, half, size)
    begin = first - gap
    while begin < first + count:
        end = min(pages_encode.piece_end(half, begin), first + count)
        zeros = max(0, min(first, end) - begin)
        clear(rows, zeros * size * 4)
        token, to = source + (begin + zeros - first) * x.token_step, rows + zeros * size * 4
        now = end - begin
        if tiles and now == 16 and zeros == 0:
            over = begin + _AHEAD - first - count
            ahead = _AHEAD * x.token_step
            if over >= 0:
                ahead = following + over * x.token_step - token
            if pages_encode.encode_tile(
                which, half, region, size, token, x.token_step, begin, ahead, rows, rest
            ):
                begin = end
                continue
        if half.offsets:
            prepare(half, region, rows, zeros, size)
        clipped += _take(half, region, token, x.token_step, x.kind, to, now - zeros, size)
        pages_encode.encode(which, half, region, page.page_size, size, rows, begin, now, fill, rest)
        begin = end
    return clipped


@njit
def set_offsets(region, half, rows, count, size):
    """The mean of each channel, limited and rounded to float16."""
    for i in range(size):
        total = np.float32(0)
        for j in range(count):
            total += floats(rows, count * size)[j * size + i]
        set_half(region + half.offsets + 2 * i, total / np.float32(max(count, 1)))


class Target(NamedTuple):
    """A page that tokens come into."""

    description: int  # address
    address: int
    fill_at: int  # address of its fill, int32
    fill: int  # [tokens] that are valid
    before_description: int  # of the page that gives this one, which is empty, its offsets
    before: int  # address of that page
    valid: int  # [tokens] of that page; 0: there is none


@njit
def target_of(descriptions, addresses, formats, fills, row, block):
    """The ``Target`` that block ``block`` of a sequence is; ``row``: of the block table."""
    at = load_int64(row + 8 * block)
    fill = carray(int32_at(fills + 4 * at), (1,))[0]
    before, valid = at, 0
    if fill == 0 and block > 0:
        other = load_int64(row + 8 * (block - 1))
        if other >= 0:
            before, valid = other, carray(int32_at(fills + 4 * other), (1,))[0]
    return Target(
        descriptions + 8 * WORDS * carray(int32_at(formats + 4 * at), (1,))[0],
        load_int64(addresses + 8 * at),
        fills + 4 * at,
        fill,
        descriptions + 8 * WORDS * carray(int32_at(formats + 4 * before), (1,))[0],
        load_int64(addresses + 8 * before),
        valid,
    )


@njit
def continue_head(to, h, space):
    """Give a head of a ``Target``, where it has channel offsets, the means of the tokens before."""
    page = read_page(to.before_description)
    size = page.head_size
    rest = space + page.page_size * size * 4
    for which in range(2):
        half = read_half(to.description, which)
        if half.offsets == 0:
            continue
        source = read_half(to.before_description, which)
        region = to.before + source.at + h * source.head
        load(page, source, which, region, space, 0, to.valid, rest)
        clean(space, to.valid * size // 16, LARGEST)
        set_offsets(to.address + half.at + h * half.head, half, space, to.valid, size)
