"""The page kernel that any CPU executes: every format, head size and number of rows.

Tiles of 16 tokens pass through float32.
"""

import math

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels import attention, pages_encode
from onnx_inplace.numba_kernels.floats import float_of_bits, floats, int64_at
from onnx_inplace.numba_kernels.memory import kernel
from onnx_inplace.numba_kernels.pages_layout import INTEGER, ITEM, read_half, read_page
from onnx_inplace.numba_kernels.pages_numbers import half_at, widen_row
from onnx_inplace.numba_kernels.pages_task import KERNEL, read_task

TILE = 16  # tokens
ROWS = 32  # query rows of an item: they share the conversion of every tile
LOG2_E = np.float32(1.4426950408889634)


def scratch_size(head_size: int) -> int:
    """Bytes of ``Task.scratch``: a tile of K, one of V, scores, offsets; then for decoding."""
    numbers = TILE * (2 * head_size + 1) + head_size
    return numbers * 4 + pages_encode.space_size(TILE, head_size)


@njit
def tile_of(page, half, which, region, first, count, rows, space):
    """Tokens of a head as float32, as they are stored: not rotated back, offsets not added."""
    if page.kind == INTEGER:
        pages_encode.decode(which, half, region, page.head_size, first, count, rows, space)
        return
    size = page.head_size
    widen_row(rows, count * size, region + first * size * ITEM[page.kind], page.kind)


@njit
def _cap(scores, count, softcap):
    """Softcap of scores in base 2."""
    s, cap = floats(scores, count), softcap * LOG2_E
    for j in range(count):
        s[j] = cap * np.float32(math.tanh(s[j] / cap))


@kernel(KERNEL)
def attend(task):
    """See ``pages_task``."""
    x = read_task(task)
    page = read_page(x.description)
    key, value = read_half(x.description, 0), read_half(x.description, 1)
    size = page.head_size
    keys = x.scratch
    values = keys + TILE * size * 4
    scores = values + TILE * size * 4
    offsets = scores + TILE * 4
    space = offsets + size * 4
    softcap = float_of_bits(x.softcap)
    queries = x.rotated if key.rotation else x.queries
    limit = carray(int64_at(x.limits), (x.rows, 2))
    if key.offsets:
        c = floats(offsets, size)
        for i in range(size):
            c[i] = half_at(x.key + key.offsets + 2 * i)
    for tile in range(x.first, x.last, TILE):
        count = min(TILE, x.last - tile)
        tile_of(page, key, 0, x.key, tile, count, keys, space)
        tile_of(page, value, 1, x.value, tile, count, values, space)
        for r in range(x.rows):
            first, last = max(limit[r, 0] - tile, 0), min(limit[r, 1] - tile, count)
            if first >= last:
                continue
            s = floats(scores, last - first)
            base = np.float32(0)
            if key.offsets:
                base = attention.dot(x.queries + r * size * 4, offsets, size)
            for j in range(last - first):
                row = keys + (first + j) * size * 4
                s[j] = base + attention.dot(queries + r * size * 4, row, size)
            if softcap > 0:
                _cap(scores, last - first, softcap)
            sums, state = x.sums + r * size * 4, x.states + r * 8
            attention.accumulate(scores, last - first, state, sums, values + first * size * 4, size)
