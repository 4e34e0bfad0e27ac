"""Looks through block tables: are all pages there that a kernel is about to read?"""

from __future__ import annotations

from numba import carray

from onnx_inplace.numba_kernels.floats import int32_at, int64_at
from onnx_inplace.numba_kernels.memory import on_demand


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
