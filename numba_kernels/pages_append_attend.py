"""Like ``append_attend``, for pages: judges arrays and pages, quantizes tokens, attends over them.

A page id is the place of its page in the tables. Every page that is touched is looked at: that it
is there, that nobody else counts on it where it is written, and that it has the tokens that are
read. Whatever is not so is left to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels import pages_call, pages_join
from onnx_inplace.numba_kernels.append_attend import REFUSED, WRITTEN
from onnx_inplace.numba_kernels.floats import int32_at, int64_at
from onnx_inplace.numba_kernels.memory import kernel, load_int64, on_demand
from onnx_inplace.numba_kernels.objects import (
    EXPECTED,
    LIST,
    Expected,
    as_expected,
    data_of,
    let_go,
    take_back,
)
from onnx_inplace.numba_kernels.pages import call_writer
from onnx_inplace.numba_kernels.pages_attention import TOKENS
from onnx_inplace.numba_kernels.pages_layout import Formats
from onnx_inplace.numba_kernels.pages_table import Table
from onnx_inplace.numba_kernels.sharing import Sharing, attend, sharing_of, splits_at

IDS, VALUES, POSITIONS, QUERY, OUTPUT, LENGTHS = range(6)
_ARRAYS = 6
CLIPPED = 8
"""A result is as ``append_attend`` says, and this times the numbers that were clipped."""
_FEW = 64  # pages that one call writes: more would be compared with each other for too long


class Cache(NamedTuple):
    """What says where the pages of a cache are, int64."""

    place: int  # of the cache, in the list
    object: int  # its ``id``
    table: int  # address of ``pages_table.Table``
    formats: int  # address of ``pages_layout.Formats``
    key: int  # that they have to have


class _Where(NamedTuple):
    """Where pages are, int64: see ``pages.write_tokens``."""

    addresses: int
    formats: int
    fills: int
    owners: int  # (pages) int32
    pages: int  # of these four arrays
    descriptions: int


class Layer(NamedTuple):
    """What a call does, int64."""

    kind: int  # ``objects.ARRAY``
    batch: int  # sequences: positions, lengths
    blocks: int  # [pages] of each
    page_size: int  # [tokens]
    tokens: int  # that are written
    reach: int  # tokens before a length that attention reads; -1: all
    writer: int  # address of ``pages.writer``
    joiner: int  # address of ``pages_join.joiner``; 0: there is more than one token
    values: int  # address of ``pages_heads.Values``
    kernel: int  # address of ``pages_attention.attend``
    layout: int  # address of its PagesLayout
    kernels: int  # see ``pages_attention.Tables``


_CACHE = _ARRAYS * EXPECTED
_LAYER = _CACHE + len(Cache._fields)
_SHARING = _LAYER + len(Layer._fields)


def table(
    arrays: Sequence[Expected], cache: Cache, layer: Layer, sharing: Sharing
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """``table`` of :data:`append_and_attend`: six arrays."""
    rows: list[tuple[int, ...]] = [*arrays, cache, layer, sharing]
    return np.array([number for row in rows for number in row], np.int64)


@njit
def _cache(at):
    n = carray(int64_at(at), (5,))
    return Cache(n[0], n[1], n[2], n[3], n[4])


@njit
def _where(cache):
    n = carray(int64_at(cache.table), (Table.ROWS + 1,))
    descriptions = load_int64(cache.formats + 8 * Formats.DESCRIPTIONS)
    return _Where(n[0], n[1], n[2], n[3], n[4], descriptions)


@njit
def _layer(at):
    n = carray(int64_at(at), (12,))
    return Layer(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11])


@njit
def _there(at, page):
    """Whether there is such a page."""
    return 0 <= page < at.pages and load_int64(at.addresses + 8 * page) != 0


@njit
def _written(x, at, ids, positions):
    """Whether all tokens can be written: their pages are there, are different ones, and unshared.

    The page before an empty one may give it offsets: it is one of the table, or negative.
    """
    capacity, count = x.blocks * x.page_size, 0
    if x.tokens < 1:
        return False
    for b in range(x.batch):
        position = load_int64(positions + 8 * b)
        if position < 0 or position > capacity - x.tokens:
            return False
        row = ids + 8 * b * x.blocks
        first, last = position // x.page_size, (position + x.tokens - 1) // x.page_size
        if first > 0 and load_int64(row + 8 * (first - 1)) >= at.pages:
            return False
        count += last - first + 1
        if count > _FEW:
            return False
        for block in range(first, last + 1):
            page = load_int64(row + 8 * block)
            if not _there(at, page) or carray(int32_at(at.owners + 4 * page), (1,))[0] > 1:
                return False
            if not _first(x, ids, positions, b, block, page):
                return False
    return True


@njit
def _first(x, ids, positions, b, block, page):
    """Whether no block that is written before one holds the same page."""
    for other in range(b + 1):
        position = load_int64(positions + 8 * other)
        last = (position + x.tokens - 1) // x.page_size
        end = block if other == b else last + 1
        for k in range(position // x.page_size, end):
            if load_int64(ids + 8 * (other * x.blocks + k)) == page:
                return False
    return True


@njit
def _longest(x, at, ids, positions, lengths):
    """The longest of the sequences; -1: one has pages that lack tokens which are read."""
    longest = 0
    for b in range(x.batch):
        length, position = load_int64(lengths + 8 * b), load_int64(positions + 8 * b)
        if length < 0 or length > x.blocks * x.page_size:
            return -1
        low = 0 if x.reach < 0 else max(0, length - x.reach)
        for block in range(low // x.page_size, (length + x.page_size - 1) // x.page_size):
            page, begin = load_int64(ids + 8 * (b * x.blocks + block)), block * x.page_size
            if not _there(at, page):
                return -1
            fill = carray(int32_at(at.fills + 4 * page), (1,))[0]
            end = min(position + x.tokens - begin, x.page_size)
            if position < begin + x.page_size:
                fill = max(fill, end)
            if fill < min(length - begin, x.page_size):
                return -1
        longest = max(longest, length)
    return longest


# With the GIL, but for pages and the kernel: nobody changes or frees an array while it is judged.
@njit
def _call(slots, table, space, team):
    items, x = load_int64(slots + LIST), _layer(table + 8 * _LAYER)
    cache, space = _cache(table + 8 * _CACHE), load_int64(space)
    if load_int64(items + 8 * cache.place) != cache.object:
        return REFUSED
    if load_int64(cache.formats + 8 * Formats.KEY) != cache.key:
        return REFUSED
    if not as_expected(items, table, _ARRAYS, x.kind):
        return REFUSED
    at = _where(cache)
    ids, positions = data_of(items, table, IDS), data_of(items, table, POSITIONS)
    lengths = data_of(items, table, LENGTHS)
    if not _written(x, at, ids, positions):
        return REFUSED
    longest = _longest(x, at, ids, positions, lengths)
    if longest < 0:
        return REFUSED
    values = data_of(items, table, VALUES)
    query, output = data_of(items, table, QUERY), data_of(items, table, OUTPUT)
    s = sharing_of(table + 8 * _SHARING)
    attends = longest <= s.most or team != 0
    joins = attends and x.joiner != 0
    joins = joins and pages_join.apart(ids, positions, lengths, x.batch, x.blocks, x.page_size)
    state = let_go()
    tables = at.descriptions, x.values, values, at.addresses, at.formats, at.fills, ids, positions
    clipped, done, tokens = np.int64(0), WRITTEN, np.int64(0)
    if not joins:
        clipped = call_writer(x.writer, (*tables, space))
    if attends:
        splits = splits_at(s, lengths, x.batch, longest)
        begun = pages_call.prepare(
            at.addresses, at.formats, at.descriptions, x.kernels, ids, space, splits
        )
        if joins:
            tokens = space + TOKENS
            pages_join.begin(tokens, x.joiner, tables)
        places = x.layout, query, begun, tokens, output, lengths, 0, 0, space
        done = attend(s, team, x.kernel, places, longest, s.merge if splits > 1 else 0)
    if joins:
        clipped = pages_join.end(tokens, x.batch, x.page_size)
    take_back(state)
    return clipped * CLIPPED + done


@on_demand("int64(int64,int64,int64,int64)", nogil=False)
def append_and_attend(slots, table, space, team):
    """Write tokens into their pages, then attend; only if all is as expected.

    Args:
        slots: ``id`` of a list, whose items nobody changes meanwhile.
        table: address of what is expected, see :func:`table`.
        space: ``id(...) + FIELD`` of workspace of writing and of attention.
        team: address of a ``sharing.Team``; 0: attention over long sequences is left to the caller.

    Danger: places are in the list, Values and PagesLayout belong to the shapes that are expected,
        and nobody changes the cache meanwhile.

    Returns:
        ``REFUSED``, ``WRITTEN`` or ``DONE``; ``NEWS``; and ``CLIPPED`` times the numbers that were
        clipped.
    """
    return _call(slots, table, space, team)


@kernel("int64(int64,int64,int64,int64)")
def called(slots, table, space, team):
    """The same for a library that calls it."""
    return _call(slots, table, space, team)
