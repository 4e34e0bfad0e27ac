"""A new token joins its page a head at a time: its worker writes it, and then attends over it.

A token has a part of many lines of a page. Where one thread writes those of several sequences
before attention begins, it waits for all of them, and other threads for it. Here an item of
attention writes its own token before it reads the last page, some lines of which have been
asked for, and the threads share the writing out as they share attention.

Danger: nothing is checked here but what :func:`apart` says.
"""

from __future__ import annotations

import enum

from numba import carray, njit

from onnx_inplace.numba_kernels.floats import int32_at
from onnx_inplace.numba_kernels.foreign import call_4
from onnx_inplace.numba_kernels.memory import fetch_add, kernel, load_int64, store_int64
from onnx_inplace.numba_kernels.pages_heads import (
    continue_head,
    read_values,
    target_of,
    write_half,
)
from onnx_inplace.numba_kernels.pages_layout import read_half, read_page


class Words(enum.IntEnum):
    """Places of what a token of each sequence needs to be written, in int64."""

    JOINER = 0
    """Address of :data:`joiner`."""
    CLIPPED = 1
    """Numbers that were clipped, of all tokens."""
    TABLES = 2
    """What ``pages.writer`` takes, up to the workspace; see ``pages.write_tokens``."""
    END = 10


_DESCRIPTIONS, _VALUES, _ELEMENTS, _ADDRESSES, _FORMATS, _FILLS, _BLOCKS, _POSITIONS = range(
    Words.TABLES, Words.END
)


@njit
def _word(words, place):
    return load_int64(words + 8 * place)


@njit
def apart(ids, positions, lengths, batch, blocks, page_size):
    """Whether tokens can be written while others attend: each page of one is read for it alone.

    Then each sequence has one new token, its last one, and no sequence has the page of one, or its
    own a second time.

    Shapes:
        ids: (batch, blocks) int64; pages that are written are different ones
        positions, lengths: (batch) int64, in range
    """
    marks = 0
    for b in range(batch):
        position = load_int64(positions + 8 * b)
        if load_int64(lengths + 8 * b) != position + 1:
            return False
        page = load_int64(ids + 8 * (b * blocks + position // page_size))
        marks |= 1 << (page & 63)
    for b in range(batch):
        for block in range(load_int64(positions + 8 * b) // page_size):
            page = load_int64(ids + 8 * (b * blocks + block))
            if marks >> (page & 63) & 1 == 0:
                continue
            for other in range(batch):
                written = load_int64(positions + 8 * other) // page_size
                if load_int64(ids + 8 * (other * blocks + written)) == page:
                    return False
    return True


@njit
def begin(words, function, tables):
    """Prepare :class:`Words` at an address; ``function``: address of :data:`joiner`."""
    store_int64(words + 8 * Words.JOINER, function)
    store_int64(words + 8 * Words.CLIPPED, 0)
    for k in range(Words.END - Words.TABLES):
        store_int64(words + 8 * (Words.TABLES + k), tables[k])


@njit
def join(words, b, h, space):
    """Write the token of a sequence, one head of it; ``space``: ``pages_heads.workspace_size``."""
    clipped = call_4(_word(words, Words.JOINER), (words, b, h, space))
    if clipped != 0:
        fetch_add(words + 8 * Words.CLIPPED, clipped)


@njit
def end(words, batch, page_size):
    """Count the tokens among those of their pages; how many numbers were clipped."""
    row_bytes = 8 * read_values(_word(words, _VALUES)).blocks
    for b in range(batch):
        position = load_int64(_word(words, _POSITIONS) + 8 * b)
        page = load_int64(_word(words, _BLOCKS) + b * row_bytes + 8 * (position // page_size))
        fill = carray(int32_at(_word(words, _FILLS) + 4 * page), (1,))
        fill[0] = max(fill[0], position % page_size + 1)
    return _word(words, Words.CLIPPED)


@kernel("int64(int64,int64,int64,int64)")
def joiner(words, b, h, space):
    """Head ``h`` of the token of sequence ``b``, K and V; how many numbers were clipped.

    For calls by address: it takes long to compile.
    """
    descriptions, x = _word(words, _DESCRIPTIONS), read_values(_word(words, _VALUES))
    page_size = read_page(descriptions).page_size
    position = load_int64(_word(words, _POSITIONS) + 8 * b)
    block, first = position // page_size, position % page_size
    row = _word(words, _BLOCKS) + 8 * b * x.blocks
    tables = _word(words, _ADDRESSES), _word(words, _FORMATS), _word(words, _FILLS)
    to = target_of(descriptions, *tables, row, block)
    if to.valid > 0:
        continue_head(to, h, space)
    page, clipped = read_page(to.description), 0
    for which in range(2):
        half = read_half(to.description, which)
        region = to.address + half.at + h * half.head
        source = _word(words, _ELEMENTS) + which * x.half_step + b * x.batch_step + h * x.head_step
        clipped += write_half(
            page, half, which, region, source, source, x, first, 1, to.fill, space
        )
    return clipped
