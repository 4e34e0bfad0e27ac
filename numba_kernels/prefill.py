"""Prefill attention: many queries of a kv head against tiles of its keys.

``specialise`` makes copies of this file with other values in the line that says so.
"""

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels import layout
from onnx_inplace.numba_kernels.floats import (
    SIZES,
    float_of_bits,
    floats,
    int64_at,
    narrow,
    widen,
)
from onnx_inplace.numba_kernels.memory import fetch_add, kernel
from onnx_inplace.numba_kernels.prefill_parts import (
    BLOCK,
    LINE,
    TILE,
    ask,
    item_rows,
    make_pack,
    make_product,
    soften,
)

KIND, SIZE = 0, 64  # specialised

LOG2_E = 1.4426950408889634
HEADER = 2 * LINE  # a counter of items, and up to a line that the workspace is moved by
ROW = (2 * SIZE + 2) * 4  # bytes of a query row: query, sum, largest score and sum of weights
# bytes: tile, scores, limits and factors of a block, filled up to whole lines
SHARED = (TILE * (2 * SIZE + BLOCK) + BLOCK * 6) * 4
WIDTH = SIZE * SIZES[KIND]  # bytes of a key

pack = make_pack(KIND, SIZE)
multiply_keys = make_product(SIZE, TILE, False)
add_values = make_product(TILE, SIZE, True)


def workspace_size(count: int, heads: int, workers: int) -> int:
    """Bytes for ``workers`` where each of ``heads`` kv heads has ``count`` query rows."""
    rows: int = item_rows(count, heads)
    return HEADER + workers * (rows * ROW + SHARED)


@njit
def _adjust(x, at, b, h, row, tile, scores, limit):
    """Softcap and mask for what a block of rows sees of a tile."""
    for r in range(BLOCK):
        t, head = (row + r) // x.group, h * x.group + (row + r) % x.group
        mask = at.mask + b * x.mask_batch + head * x.mask_head + t * x.mask_token
        s = floats(scores + r * TILE * 4, TILE)
        for j in range(limit[r, 0], limit[r, 1]):
            s[j] = layout.adjusted(x, s[j], np.float32(LOG2_E), mask, tile + j)


@njit
def _item(x, at, b, h, row, rows, length, start, space):
    """Rows ``row .. row + rows`` of kv head ``h``: row ``t * group + g`` is token t in head g."""
    blocks = (rows + BLOCK - 1) // BLOCK
    keys = space
    values = keys + TILE * SIZE * 4
    scores = values + TILE * SIZE * 4
    queries = scores + BLOCK * TILE * 4
    sums = queries + blocks * BLOCK * SIZE * 4
    tops = sums + blocks * BLOCK * SIZE * 4
    totals = tops + blocks * BLOCK * 4
    limits = totals + blocks * BLOCK * 4
    factors = limits + BLOCK * 16
    top, total = floats(tops, blocks * BLOCK), floats(totals, blocks * BLOCK)
    limit = carray(int64_at(limits), (BLOCK, 2))

    factor = float_of_bits(x.scale) * LOG2_E
    first_key, last_key = length, 0
    for r in range(blocks * BLOCK):
        q, o = floats(queries + r * SIZE * 4, SIZE), floats(sums + r * SIZE * 4, SIZE)
        for d in range(SIZE):
            q[d] = o[d] = 0
        top[r], total[r] = layout.LOWEST, 0
        if r >= rows:  # fills up the last block
            continue
        t, head = (row + r) // x.group, h * x.group + (row + r) % x.group
        source = at.query + b * x.query_batch + head * x.query_head + t * x.query_token
        widen(queries + r * SIZE * 4, SIZE, source, x.query_kind)
        for d in range(SIZE):
            q[d] *= factor
        if at.sinks:
            top[r], total[r] = floats(at.sinks, head + 1)[head] * LOG2_E, 1
        low, high = layout.visible(x, length, start + t)
        if low < high:
            first_key, last_key = min(first_key, low), max(last_key, high)

    for tile in range(first_key, last_key, TILE):
        count = min(TILE, last_key - tile)
        key = at.key + b * x.key_batch + h * x.key_head + tile * x.key_token
        value = at.value + b * x.value_batch + h * x.value_head + tile * x.value_token
        pack(key, x.key_token, value, x.value_token, count, keys, values)
        following = min(TILE, last_key - tile - TILE)
        for block in range(blocks):
            first, last = block * TILE // blocks, (block + 1) * TILE // blocks
            for j in range(first, min(last, following)):
                ask(key + (TILE + j) * x.key_token, WIDTH)
                ask(value + (TILE + j) * x.value_token, WIDTH)
            seen = False
            for r in range(BLOCK):
                limit[r, 0] = limit[r, 1] = 0
                if block * BLOCK + r < rows:
                    t = (row + block * BLOCK + r) // x.group
                    low, high = layout.visible(x, length, start + t)
                    low, high = max(low - tile, 0), min(high - tile, count)
                    if low < high:
                        limit[r, 0], limit[r, 1] = low, high
                        seen = True
            if not seen:
                continue
            offset = block * BLOCK * SIZE * 4
            multiply_keys(queries + offset, keys, scores, 0)
            if x.softcap or x.mask_size:
                _adjust(x, at, b, h, row + block * BLOCK, tile, scores, limit)
            soften(scores, limits, tops + block * BLOCK * 4, totals + block * BLOCK * 4, factors)
            add_values(scores, values, sums + offset, factors)

    for r in range(rows):
        t, head = (row + r) // x.group, h * x.group + (row + r) % x.group
        # a row that sees nothing is a row of zeros
        inverse = 1 / total[r] if total[r] != 0 and top[r] > layout.LOWEST else 0.0
        o = floats(sums + r * SIZE * 4, SIZE)
        for d in range(SIZE):
            o[d] *= inverse
        target = at.output + b * x.output_batch + head * x.output_head + t * x.output_token
        narrow(target, SIZE, sums + r * SIZE * 4, x.output_kind)


@kernel(layout.KERNEL)
def attend(layout_at, query, key, value, output, lengths, mask, sinks, space, worker, workers):
    """Part of a worker: it takes blocks of rows until none is left, those with most keys first."""
    x = layout.read(layout_at)
    at = layout.Places(query, key, value, output, lengths, mask, sinks)
    count, heads = x.group * x.tokens, x.batch * x.kv_heads
    most = item_rows(count, heads)
    parts = (count + most - 1) // most
    scratch = (space + HEADER) // LINE * LINE + worker * (most * ROW + SHARED)
    while True:
        item = fetch_add(space, 1)
        if item >= heads * parts:
            break
        row = (parts - 1 - item // heads) * most
        b, h = item % heads // x.kv_heads, item % heads % x.kv_heads
        length, start = layout.extent(x, lengths, b)
        _item(x, at, b, h, row, min(most, count - row), length, start, scratch)
