"""Attention over the valid part of a cache, on every CPU: any group, head size, mask and window.

One item of work is a block of query rows of one kv head. Keys and values pass through a tile of
float32, and softmax is accumulated tile by tile (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018; Dao et al., "FlashAttention", 2022). Only keys that a row of the
block may see are ever loaded: what lies beyond the valid length may be anything, NaN included.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels import layout
from onnx_inplace.numba_kernels.floats import (
    exp2,
    float32_at,
    float_of_bits,
    narrow,
    uint8_at,
    widen,
)
from onnx_inplace.numba_kernels.memory import kernel

ROWS = 32  # query rows of an item
TILE = 64  # keys that are converted at once
LOG2_E = np.float32(1.4426950408889634)
NOTHING = np.float32(-np.inf)


def workspace_size(head_size: int, value_size: int) -> int:
    """Bytes of workspace of one worker."""
    return (ROWS * (head_size + value_size + 2) + TILE * (head_size + value_size + 1)) * 4


@njit(fastmath={"reassoc", "contract", "nsz"})
def _dot(a, i, b, j, count):
    total = np.float32(0)
    for d in range(count):
        total += a[i + d] * b[j + d]
    return total


@njit
def _score(s, first, last, q, row, keys, size, scale, softcap):
    """``s[first:last]``: scaled and capped products of a query row with the keys of a tile."""
    for j in range(first, last):
        s[j] = scale * _dot(q, row * size, keys, j * size, size)
    if softcap > 0:
        for j in range(first, last):
            s[j] = softcap * np.float32(math.tanh(s[j] / softcap))


@njit
def _mask(s, first, last, mask, size):
    """Apply a row of the mask, which begins at the first key of the tile."""
    if size == 1:
        allowed = carray(uint8_at(mask), (last,))
        for j in range(first, last):
            if not allowed[j]:
                s[j] = NOTHING
    else:
        bias = carray(float32_at(mask), (last,))
        for j in range(first, last):
            s[j] += bias[j]


@njit(fastmath={"contract"})
def _accumulate(s, first, last, top_of, sum_of, row, o, values, size):
    """One step of the online softmax: scores ``s[first:last]`` and their values join a row."""
    top = top_of[row]
    for j in range(first, last):
        s[j] *= LOG2_E
        top = max(top, s[j])
    if top == NOTHING:
        return
    begin = row * size
    if top > top_of[row]:
        shrink = exp2(top_of[row] - top)
        sum_of[row] *= shrink
        for d in range(size):
            o[begin + d] *= shrink
        top_of[row] = top
    total = np.float32(0)
    for j in range(first, last):
        s[j] = exp2(s[j] - top)
        total += s[j]
    sum_of[row] += total
    whole = first + (last - first) // 4 * 4
    for j in range(first, whole, 4):
        p0, p1, p2, p3 = s[j], s[j + 1], s[j + 2], s[j + 3]
        v0 = j * size
        v1, v2, v3 = v0 + size, v0 + 2 * size, v0 + 3 * size
        for d in range(size):
            o[begin + d] += (p0 * values[v0 + d] + p1 * values[v1 + d]) + (
                p2 * values[v2 + d] + p3 * values[v3 + d]
            )
    for j in range(whole, last):
        p, v0 = s[j], j * size
        for d in range(size):
            o[begin + d] += p * values[v0 + d]


@njit
def _block(x, at, b, h, row, rows, length, start, space):
    """Rows ``row .. row + rows`` of kv head ``h``: row ``t * group + g`` is token t in head g."""
    size, value_size = x.head_size, x.value_size
    scale, softcap = float_of_bits(x.scale), float_of_bits(x.softcap)
    q = carray(float32_at(space), (ROWS * size,))
    space += ROWS * size * 4
    o = carray(float32_at(space), (ROWS * value_size,))
    space += ROWS * value_size * 4
    top_of = carray(float32_at(space), (ROWS,))
    sum_of = carray(float32_at(space + ROWS * 4), (ROWS,))
    space += 2 * ROWS * 4
    s = carray(float32_at(space), (TILE,))
    keys = carray(float32_at(space + TILE * 4), (TILE * size,))
    values = carray(float32_at(space + TILE * (size + 1) * 4), (TILE * value_size,))

    first_key, last_key = length, 0
    for r in range(rows):
        t, head = (row + r) // x.group, h * x.group + (row + r) % x.group
        source = at.query + b * x.query_batch + head * x.query_head + t * x.query_token
        widen(q, r * size, size, source, x.query_kind)
        low, high = layout.visible(x, length, start + t)
        if low < high:
            first_key, last_key = min(first_key, low), max(last_key, high)
        top_of[r], sum_of[r] = NOTHING, 0
        if at.sinks:
            top_of[r] = carray(float32_at(at.sinks), (head + 1,))[head] * LOG2_E
            sum_of[r] = 1
        for d in range(r * value_size, (r + 1) * value_size):
            o[d] = 0

    for tile in range(first_key, last_key, TILE):
        count = min(TILE, last_key - tile)
        key = at.key + b * x.key_batch + h * x.key_head + tile * x.key_token
        value = at.value + b * x.value_batch + h * x.value_head + tile * x.value_token
        for j in range(count):
            widen(keys, j * size, size, key + j * x.key_token, x.key_kind)
            widen(values, j * value_size, value_size, value + j * x.value_token, x.value_kind)
        for r in range(rows):
            t, head = (row + r) // x.group, h * x.group + (row + r) % x.group
            low, high = layout.visible(x, length, start + t)
            first, last = max(low - tile, 0), min(high - tile, count)
            if first >= last:
                continue
            _score(s, first, last, q, r, keys, size, scale, softcap)
            if x.mask_size:
                mask = at.mask + b * x.mask_batch + head * x.mask_head + t * x.mask_token
                _mask(s, first, last, mask + tile * x.mask_size, x.mask_size)
            _accumulate(s, first, last, top_of, sum_of, r, o, values, value_size)

    for r in range(rows):
        t, head = (row + r) // x.group, h * x.group + (row + r) % x.group
        # a row that sees nothing is a row of zeros (ONNX Attention-24)
        inverse = np.float32(1) / sum_of[r] if sum_of[r] != 0 else np.float32(0)
        for d in range(r * value_size, (r + 1) * value_size):
            o[d] *= inverse
        target = at.output + b * x.output_batch + head * x.output_head + t * x.output_token
        narrow(target, value_size, o, r * value_size, x.output_kind)


@kernel(layout.KERNEL)
def attend(layout_at, query, key, value, output, lengths, mask, sinks, space, worker, workers):
    """Attention as ``layout_at`` (address of a Layout as int64 array) says, the part of a worker.

    ``space``: for each worker ``workspace_size`` bytes. For the other arguments see Places.

    Danger: addresses and lengths are not checked here.

    Source: ONNX Attention-25; with sinks, com.microsoft GroupQueryAttention.
    """
    x = layout.read(layout_at)
    at = layout.Places(query, key, value, output, lengths, mask, sinks)
    space += worker * (
        (ROWS * (x.head_size + x.value_size + 2) + TILE * (x.head_size + x.value_size + 1)) * 4
    )
    rows = x.group * x.tokens
    blocks = (rows + ROWS - 1) // ROWS
    # every workers-th block: the later blocks of a causal prompt see more keys
    for item in range(worker, x.batch * x.kv_heads * blocks, workers):
        row = item % blocks * ROWS
        b, h = item // blocks // x.kv_heads, item // blocks % x.kv_heads
        length, start = layout.extent(x, lengths, b)
        _block(x, at, b, h, row, min(ROWS, rows - row), length, start, space)
