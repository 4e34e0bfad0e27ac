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
    float_of_bits,
    floats,
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
def dot(a_at, b_at, count):
    """Product of two rows of float32."""
    a, b, total = floats(a_at, count), floats(b_at, count), np.float32(0)
    for d in range(count):
        total += a[d] * b[d]
    return total


@njit(fastmath={"reassoc"})
def _sum(at, count):
    numbers, total = floats(at, count), np.float32(0)
    for j in range(count):
        total += numbers[j]
    return total


@njit
def _score(scores, count, query, keys, size, scale, softcap):
    """Scaled and capped products of a query with ``count`` keys."""
    s = floats(scores, count)
    for j in range(count):
        s[j] = scale * dot(query, keys + j * size * 4, size)
    if softcap > 0:
        for j in range(count):
            s[j] = softcap * np.float32(math.tanh(s[j] / softcap))


@njit
def _mask(scores, count, mask, size):
    """Apply a row of the mask."""
    s = floats(scores, count)
    if size == 1:
        allowed = carray(uint8_at(mask), (count,))
        for j in range(count):
            if not allowed[j]:
                s[j] = NOTHING
    else:
        bias = floats(mask, count)
        for j in range(count):
            s[j] += bias[j]


@njit
def _to_base_2(scores, count):
    s = floats(scores, count)
    for j in range(count):
        s[j] *= LOG2_E


@njit(fastmath={"contract"})
def accumulate(scores, count, row, sums, values, size):
    """One step of the online softmax: ``count`` scores in base 2 and their values join a row.

    ``row``: (2) float32, the largest score and the sum of weights until now.
    """
    s, state, o = floats(scores, count), floats(row, 2), floats(sums, size)
    before = state[0]
    top = before
    for j in range(count):
        top = max(top, s[j])
    if top == NOTHING:
        return
    if top > before:
        shrink = exp2(before - top)
        state[1] *= shrink
        for d in range(size):
            o[d] *= shrink
        state[0] = top
    for j in range(count):
        s[j] = exp2(s[j] - top)
    state[1] += _sum(scores, count)
    step = size * 4
    whole = count // 4 * 4
    for j in range(0, whole, 4):
        p0, p1, p2, p3 = s[j], s[j + 1], s[j + 2], s[j + 3]
        at = values + j * step
        v0, v1 = floats(at, size), floats(at + step, size)
        v2, v3 = floats(at + 2 * step, size), floats(at + 3 * step, size)
        for d in range(size):
            o[d] += (p0 * v0[d] + p1 * v1[d]) + (p2 * v2[d] + p3 * v3[d])
    for j in range(whole, count):
        p, v = s[j], floats(values + j * step, size)
        for d in range(size):
            o[d] += p * v[d]


@njit
def _block(x, at, b, h, row, rows, length, start, space):
    """Rows ``row .. row + rows`` of kv head ``h``: row ``t * group + g`` is token t in head g."""
    size, value_size = x.head_size, x.value_size
    scale, softcap = float_of_bits(x.scale), float_of_bits(x.softcap)
    queries = space
    sums = queries + ROWS * size * 4
    states = sums + ROWS * value_size * 4  # largest score, sum of weights
    scores = states + ROWS * 2 * 4
    keys = scores + TILE * 4
    values = keys + TILE * size * 4

    first_key, last_key = length, 0
    for r in range(rows):
        t, head = (row + r) // x.group, h * x.group + (row + r) % x.group
        source = at.query + b * x.query_batch + head * x.query_head + t * x.query_token
        widen(queries + r * size * 4, size, source, x.query_kind)
        low, high = layout.visible(x, length, start + t)
        if low < high:
            first_key, last_key = min(first_key, low), max(last_key, high)
        state, o = floats(states + r * 8, 2), floats(sums + r * value_size * 4, value_size)
        state[0], state[1] = NOTHING, 0
        if at.sinks:
            state[0], state[1] = floats(at.sinks, head + 1)[head] * LOG2_E, 1
        for d in range(value_size):
            o[d] = 0

    for tile in range(first_key, last_key, TILE):
        count = min(TILE, last_key - tile)
        key = at.key + b * x.key_batch + h * x.key_head + tile * x.key_token
        value = at.value + b * x.value_batch + h * x.value_head + tile * x.value_token
        for j in range(count):
            widen(keys + j * size * 4, size, key + j * x.key_token, x.key_kind)
            to = values + j * value_size * 4
            widen(to, value_size, value + j * x.value_token, x.value_kind)
        for r in range(rows):
            t, head = (row + r) // x.group, h * x.group + (row + r) % x.group
            low, high = layout.visible(x, length, start + t)
            first, last = max(low - tile, 0), min(high - tile, count)
            if first >= last:
                continue
            query, key = queries + r * size * 4, keys + first * size * 4
            _score(scores, last - first, query, key, size, scale, softcap)
            if x.mask_size:
                mask = at.mask + b * x.mask_batch + head * x.mask_head + t * x.mask_token
                mask += (tile + first) * x.mask_size
                _mask(scores, last - first, mask, x.mask_size)
            to, value = sums + r * value_size * 4, values + first * value_size * 4
            _to_base_2(scores, last - first)
            accumulate(scores, last - first, states + r * 8, to, value, value_size)

    for r in range(rows):
        t, head = (row + r) // x.group, h * x.group + (row + r) % x.group
        total, o = floats(states + r * 8, 2)[1], floats(sums + r * value_size * 4, value_size)
        inverse = np.float32(1) / total if total != 0 else np.float32(0)
        for d in range(value_size):  # a row that sees nothing is a row of zeros (Attention-24)
            o[d] *= inverse
        target = at.output + b * x.output_batch + head * x.output_head + t * x.output_token
        narrow(target, value_size, sums + r * value_size * 4, x.output_kind)


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
