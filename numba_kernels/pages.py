"""Pages written, read and converted in place: every format, by its description.

A table of pages is three arrays: addresses (int64), formats (int32, rows of the table of
descriptions, see ``pages_layout``) and fills (int32, valid tokens from a page's begin on). A block
table names pages by their place in these arrays. No kernel writes to a byte outside the pages that
it is told, and what a write does not touch keeps its bits.

Danger: nothing is checked here. The caller has checked pages, formats, positions and sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from onnx_inplace.numba_kernels import pages_encode
from onnx_inplace.numba_kernels.floats import FLOAT32, floats, int32_at, int64_at, uint8_at
from onnx_inplace.numba_kernels.memory import copy, kernel, on_demand
from onnx_inplace.numba_kernels.pages_ahead import ask_for
from onnx_inplace.numba_kernels.pages_lanes import SMALL, clean, rotate, rotate_rows, within
from onnx_inplace.numba_kernels.pages_layout import (
    INTEGER,
    ITEM,
    WORDS,
    read_half,
    read_page,
)
from onnx_inplace.numba_kernels.pages_numbers import (
    LARGEST,
    half_at,
    narrow_row,
    set_half,
    widen_row,
)

_AHEAD = 16  # tokens
_FEW = 16  # tokens: less than a tile, so that lines are read before they are written


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
def _values(address):
    n = carray(int64_at(address), (8,))
    return Values(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7])


@njit
def _clear(address, size):
    data = carray(uint8_at(address), (size,))
    for i in range(size):
        data[i] = 0


@njit
def _prepare(half, region, rows, count, size):
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
    return _prepare(half, region, rows, count, size)


@njit
def _save(page, half, which, region, rows, first, count, valid, space):
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
    clipped = _prepare(half, region, rows, count, size)
    pages_encode.encode(which, half, region, page.page_size, size, rows, first, count, valid, space)
    return clipped


@njit
def _load(page, half, which, region, rows, first, count, space):
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
    _clear(region + (first - gap) * row_bytes, gap * row_bytes)
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
def _write_page(description, address, source, x, first, count, fill, space):
    """``count`` tokens of all heads, K and V, into a page; how many numbers were clipped.

    ``source``: address of the first token's first element. From ``fill`` to ``first`` come zeros.
    """
    page = read_page(description)
    size, clipped = page.head_size, 0
    rows, rest = space, space + page.page_size * page.head_size * 4
    gap = max(0, first - fill)
    for which in range(2):
        half = read_half(description, which)
        tiles = x.kind == FLOAT32 and pages_encode.takes_tiles(which, half, size)
        for h in range(page.heads):
            region = address + half.at + h * half.head
            taken = source + which * x.half_step + h * x.head_step
            following = taken + x.head_step
            if h + 1 == page.heads:  # then V; behind it, nothing is asked for
                following = source + (x.half_step if which == 0 else 0)
            if page.kind != INTEGER:
                clipped += _write_floats(page, region, taken, x, first, gap, count, rows)
                continue
            if count < _FEW and h + 1 < page.heads:
                ask_for(which, half, region + half.head, size, first)
            elif count < _FEW and which == 0:
                value = read_half(description, 1)
                ask_for(1, value, address + value.at, size, first)
            begin = first - gap
            while begin < first + count:
                end = min(pages_encode.piece_end(half, begin), first + count)
                zeros = max(0, min(first, end) - begin)
                _clear(rows, zeros * size * 4)
                token, to = taken + (begin + zeros - first) * x.token_step, rows + zeros * size * 4
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
                    _prepare(half, region, rows, zeros, size)
                clipped += _take(half, region, token, x.token_step, x.kind, to, now - zeros, size)
                pages_encode.encode(
                    which, half, region, page.page_size, size, rows, begin, now, fill, rest
                )
                begin = end
    return clipped


@njit
def _set_offsets(region, half, rows, count, size):
    """The mean of each channel, limited and rounded to float16."""
    for i in range(size):
        total = np.float32(0)
        for j in range(count):
            total += floats(rows, count * size)[j * size + i]
        set_half(region + half.offsets + 2 * i, total / np.float32(max(count, 1)))


@njit
def _continue(description, address, before_description, before, valid, space):
    """Give an empty page, where it has channel offsets, the means of the ``valid`` tokens before.

    ``before``: address of the page that stands before it in its sequence.
    """
    page = read_page(before_description)
    size = page.head_size
    rest = space + page.page_size * size * 4
    for which in range(2):
        half, source = read_half(description, which), read_half(before_description, which)
        if half.offsets == 0:
            continue
        for h in range(page.heads):
            region = before + source.at + h * source.head
            _load(page, source, which, region, space, 0, valid, rest)
            clean(space, valid * size // 16, LARGEST)
            _set_offsets(address + half.at + h * half.head, half, space, valid, size)


@njit
def write_tokens(descriptions, layout, values, addresses, formats, fills, blocks, positions, space):
    """Write new tokens into the pages of each row of the batch; how many numbers were clipped.

    A finite number is clipped when it becomes the largest one of its format, or an infinity; an
    infinity or NaN where the format has none. An empty page takes its channel offsets, where its
    format has them, from the page before it in its row, if there is one that is not empty.

    Shapes:
        descriptions: (formats, WORDS) int64
        layout:       Values as int64
        values:       address of the first element
        addresses:    (pages) int64
        formats:      (pages) int32
        fills:        (pages) int32, become the fills after the write
        blocks:       (batch, Values.blocks) int64, places in the three arrays before; negative:
                      no page, where none is written
        positions:    (batch) int64: the token of the sequence that ``values`` begins with
        space:        ``workspace_size`` bytes
    """
    x = _values(layout)
    page_size = read_page(descriptions).page_size
    clipped = 0
    for b in range(x.batch):
        position, done = carray(int64_at(positions), (x.batch,))[b], 0
        while done < x.tokens:
            place = position + done
            block, first = place // page_size, place % page_size
            count = min(page_size - first, x.tokens - done)
            at = carray(int64_at(blocks + 8 * (b * x.blocks + block)), (1,))[0]
            description = descriptions + 8 * WORDS * carray(int32_at(formats + 4 * at), (1,))[0]
            address = carray(int64_at(addresses + 8 * at), (1,))[0]
            fill = carray(int32_at(fills + 4 * at), (1,))
            before = np.int64(-1)
            if fill[0] == 0 and block > 0:
                before = carray(int64_at(blocks + 8 * (b * x.blocks + block - 1)), (1,))[0]
            valid = carray(int32_at(fills + 4 * before), (1,))[0] if before >= 0 else 0
            if valid > 0:
                _continue(
                    description,
                    address,
                    descriptions + 8 * WORDS * carray(int32_at(formats + 4 * before), (1,))[0],
                    carray(int64_at(addresses + 8 * before), (1,))[0],
                    valid,
                    space,
                )
            source = values + b * x.batch_step + done * x.token_step
            clipped += _write_page(description, address, source, x, first, count, fill[0], space)
            fill[0] = max(fill[0], first + count)
            done += count
    return clipped


@kernel("int64(" + ",".join(["int64"] * 9) + ")")
def writer(descriptions, layout, values, addresses, formats, fills, blocks, positions, space):
    """:func:`write_tokens`, for calls by address: it takes long to compile."""
    return write_tokens(
        descriptions, layout, values, addresses, formats, fills, blocks, positions, space
    )


@intrinsic
def call_writer(typing_context, function, arguments):
    """Call :data:`writer`, which is at an address."""

    def generate(context, builder, signature, values):
        types_ = [ir.IntType(64)] * 9
        kernel_ = ir.FunctionType(ir.IntType(64), types_).as_pointer()
        inputs = [builder.extract_value(values[1], k) for k in range(9)]
        return builder.call(builder.inttoptr(values[0], kernel_), inputs)

    return types.int64(types.int64, arguments), generate


@on_demand("int64(" + ",".join(["int64"] * 10) + ")")
def write(
    function, descriptions, layout, values, addresses, formats, fills, blocks, positions, space
):
    """:func:`write_tokens`, called from outside of kernels; ``function``: address of ``writer``."""
    return call_writer(
        function,
        (descriptions, layout, values, addresses, formats, fills, blocks, positions, space),
    )


@on_demand("void(" + ",".join(["int64"] * 10) + ")")
def read(description, page_at, first, count, target, kind, half_step, head_step, token_step, space):
    """Tokens ``first .. first + count`` of a page, as an array (2, heads, count, head_size).

    ``kind``: of the elements at ``target``: ``floats.FLOAT32``, FLOAT16, BFLOAT16. Steps: bytes.
    """
    page = read_page(description)
    size = page.head_size
    rest = space + page.page_size * size * 4
    for which in range(2):
        half = read_half(description, which)
        for h in range(page.heads):
            _load(page, half, which, page_at + half.at + h * half.head, space, first, count, rest)
            to = target + which * half_step + h * head_step
            for j in range(count):
                narrow_row(to + j * token_step, size, space + j * size * 4, kind)


@on_demand("int64(" + ",".join(["int64"] * 6) + ")")
def convert(source_description, source, target_description, target, count, space):
    """Write the first ``count`` tokens of a page into another one; how many numbers were clipped.

    The pages do not overlap. All other bytes of the target become zero.
    """
    page, to = read_page(source_description), read_page(target_description)
    size = page.head_size
    rest = space + page.page_size * size * 4
    _clear(target, to.size)
    clipped = 0
    for which in range(2):
        half, to_half = read_half(source_description, which), read_half(target_description, which)
        for h in range(page.heads):
            _load(page, half, which, source + half.at + h * half.head, space, 0, count, rest)
            region = target + to_half.at + h * to_half.head
            if to_half.offsets:
                clipped += clean(space, count * size // 16, LARGEST)
                _set_offsets(region, to_half, space, count, size)
            begin = 0
            while begin < count:
                end = min(pages_encode.piece_end(to_half, begin), count)
                rows = space + begin * size * 4
                clipped += _save(to, to_half, which, region, rows, begin, end - begin, 0, rest)
                begin = end
    return clipped
