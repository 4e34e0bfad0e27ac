"""Looks through block tables: are all pages there that a kernel is about to read?"""

from __future__ import annotations

import enum

from numba import carray

from onnx_inplace.numba_kernels.floats import int32_at, int64_at
from onnx_inplace.numba_kernels.memory import load_int64, on_demand


class Table(enum.IntEnum):
    """Where the descriptors of pages are, in int64: arrays come and go, these words stay."""

    ADDRESSES = 0
    """Address of (rows) int64: the first byte of each page; 0: there is none."""
    FORMATS = 1
    """Address of (rows) int32."""
    FILLS = 2
    """Address of (rows) int32 [tokens]."""
    OWNERS = 3
    """Address of (rows) int32."""
    ROWS = 4
    """Of these four arrays."""
    VIEWS = 5
    """How many pages somebody may have an array of."""
    END = 6


@on_demand("int64(" + ",".join(["int64"] * 10) + ")")
def find_unreadable(places, batch, blocks, starts, ends, page_size, addresses, fills, pages, begin):
    """First entry, from ``begin`` on, whose page has not all tokens that are wanted; -1: none.

    Shapes:
        places:    (batch, blocks) int64, places in the two arrays below; any number
        starts:    (batch) int64, first token of each sequence that is wanted, at least 0
        ends:      (batch) int64, one more than the last, at most blocks * page_size
        addresses: (pages) int64, 0: there is no page
        fills:     (pages) int32, tokens of each page

    Returns:
        ``row * blocks + block``.
    """
    place = carray(int64_at(places), (batch * blocks,))
    address = carray(int64_at(addresses), (pages,))
    fill = carray(int32_at(fills), (pages,))
    first, last = carray(int64_at(starts), (batch,)), carray(int64_at(ends), (batch,))
    for b in range(begin // blocks if blocks else batch, batch):
        if first[b] >= last[b]:
            continue
        low = first[b] // page_size
        if b == begin // blocks:
            low = max(low, begin % blocks)
        for block in range(low, (last[b] + page_size - 1) // page_size):
            at = place[b * blocks + block]
            wanted = min(last[b] - block * page_size, page_size)
            if at < 0 or at >= pages or address[at] == 0 or fill[at] < wanted:
                return b * blocks + block
    return -1


@on_demand("int64(" + ",".join(["int64"] * 8) + ")")
def find_unready(tables, count, ids, blocks, page_size, low, start, end):
    """The first of ``count`` page tables in which a sequence cannot grow and be read; -1: none.

    Tokens ``start .. end`` are written, then tokens from ``low`` on are read. The pages of the
    latter exist, those that are only read have all of their tokens, those that are written are
    different ones, and have one owner.

    Shapes:
        tables: (count) int64: addresses of ``Table``, of tables whose rows are page ids
        ids:    (blocks) int64, any numbers; 0 <= low <= start < end <= blocks * page_size
    """
    pages = carray(int64_at(ids), (blocks,))
    first, last = start // page_size, (end - 1) // page_size
    for block in range(first + 1, last + 1):
        for other in range(first, block):
            if pages[block] == pages[other]:
                return 0
    for k in range(count):
        table = carray(int64_at(load_int64(tables + 8 * k)), (Table.END,))
        rows = table[Table.ROWS]
        address = carray(int64_at(table[Table.ADDRESSES]), (rows,))
        fill = carray(int32_at(table[Table.FILLS]), (rows,))
        owners = carray(int32_at(table[Table.OWNERS]), (rows,))
        for block in range(low // page_size, last + 1):
            page = pages[block]
            if page < 0 or page >= rows or address[page] == 0:
                return k
            if block < first and fill[page] < page_size:
                return k
            if block >= first and owners[page] > 1:
                return k
    return -1
