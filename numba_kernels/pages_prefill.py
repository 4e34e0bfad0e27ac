"""The page kernel for many queries: tiles of any format meet blocks of rows as matrix products.

``specialise`` makes copies of this file with other values in the line that says so.
"""

import math

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels import attention, pages_encode
from onnx_inplace.numba_kernels.floats import FLOAT32, SIZES, float_of_bits, floats, int64_at
from onnx_inplace.numba_kernels.memory import kernel
from onnx_inplace.numba_kernels.pages_layout import INTEGER, read_half, read_page
from onnx_inplace.numba_kernels.pages_numbers import half_at
from onnx_inplace.numba_kernels.pages_portable import tile_of
from onnx_inplace.numba_kernels.pages_task import KERNEL, read_task
from onnx_inplace.numba_kernels.prefill_parts import (
    BLOCK,
    LINE,
    TILE,
    ask,
    make_pack,
    make_product,
    soften,
)

# KIND: of the elements of a page; INTEGER: they are decoded first.
KIND, SIZE, ROWS = 5, 64, 128  # specialised

LOG2_E = np.float32(1.4426950408889634)
NUMBERS = TILE * (3 * SIZE + BLOCK) + 4 * BLOCK + SIZE + BLOCK
SCRATCH = LINE + NUMBERS * 4 + BLOCK * 16 + pages_encode.space_size(TILE, SIZE)

DECODED = KIND == INTEGER
ROW = SIZE * (SIZES[FLOAT32] if DECODED else SIZES[KIND])  # bytes

pack = make_pack(FLOAT32 if DECODED else KIND, SIZE, keys_only=DECODED)
multiply_keys = make_product(SIZE, TILE, False)
add_values = make_product(TILE, SIZE, True)


@njit
def _adjust(x, row, offsets, scores):
    """Offsets of channels, and softcap, for a block of rows."""
    softcap = float_of_bits(x.softcap) * LOG2_E
    for r in range(BLOCK):
        s = floats(scores + r * TILE * 4, TILE)
        if offsets:
            base = attention.dot(x.queries + (row + r) * SIZE * 4, offsets, SIZE)
            for j in range(TILE):
                s[j] += base
        if softcap > 0:
            for j in range(TILE):
                s[j] = softcap * np.float32(math.tanh(s[j] / softcap))


@kernel(KERNEL)
def attend(task):
    """See ``pages_task``. There is room for whole blocks of rows."""
    x = read_task(task)
    page = read_page(x.description)
    key, value = read_half(x.description, 0), read_half(x.description, 1)
    limits = (x.scratch + LINE - 1) // LINE * LINE
    rows_at = limits + BLOCK * 16
    keys, values = rows_at + TILE * SIZE * 4, rows_at + TILE * SIZE * 8
    scores = values + TILE * SIZE * 4
    factors = scores + TILE * BLOCK * 4
    tops = factors + BLOCK * 4
    totals = tops + BLOCK * 4
    offsets = totals + BLOCK * 4
    space = offsets + SIZE * 4
    top, total = floats(tops, BLOCK), floats(totals, BLOCK)
    limit = carray(int64_at(limits), (BLOCK, 2))
    seen_of = carray(int64_at(x.limits), (x.rows, 2))
    states = floats(x.states, 2 * x.rows)
    queries = x.rotated if key.rotation else x.queries
    if key.offsets:
        c = floats(offsets, SIZE)
        for i in range(SIZE):
            c[i] = half_at(x.key + key.offsets + 2 * i)
    for tile in range(x.first, x.last, TILE):
        count = min(TILE, x.last - tile)
        key_rows, value_rows = x.key + tile * ROW, x.value + tile * ROW
        if DECODED:
            key_rows, value_rows = rows_at, values
            tile_of(page, key, 0, x.key, tile, count, key_rows, space)
            tile_of(page, value, 1, x.value, tile, count, values, space)
            rest = floats(values + count * ROW, (TILE - count) * SIZE)
            for i in range((TILE - count) * SIZE):  # has no weight, but has to be a number
                rest[i] = 0
        pack(key_rows, ROW, value_rows, ROW, count, keys, values)
        if DECODED:
            following = 0
        elif tile + TILE < x.last:
            following, ahead, ahead_value = 1, key_rows + TILE * ROW, value_rows + TILE * ROW
        else:
            following, ahead, ahead_value = x.next, x.next, x.next_value
        blocks = (x.rows + BLOCK - 1) // BLOCK
        for row in range(0, x.rows, BLOCK):
            if following:
                part = TILE * ROW // blocks
                ask(ahead + row // BLOCK * part, part)
                ask(ahead_value + row // BLOCK * part, part)
            seen = False
            for r in range(BLOCK):
                limit[r, 0] = limit[r, 1] = 0
                if row + r < x.rows:
                    low = max(seen_of[row + r, 0] - tile, 0)
                    high = min(seen_of[row + r, 1] - tile, count)
                    if low < high:
                        limit[r, 0], limit[r, 1] = low, high
                        seen = True
            if not seen:
                continue
            known = min(BLOCK, x.rows - row)
            for r in range(known):
                top[r], total[r] = states[2 * (row + r)], states[2 * (row + r) + 1]
            at = row * SIZE * 4
            multiply_keys(queries + at, keys, scores, 0)
            if key.offsets or x.softcap:
                _adjust(x, row, offsets if key.offsets else 0, scores)
            soften(scores, limits, tops, totals, factors)
            add_values(scores, values, x.sums + at, factors)
            for r in range(known):
                states[2 * (row + r)], states[2 * (row + r) + 1] = top[r], total[r]
