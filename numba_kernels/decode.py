"""Decode attention: one new token, all query heads of a kv head together, the keys in splits.

``specialise`` makes copies of this file with other values in the line that says so.
"""

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels import layout
from onnx_inplace.numba_kernels.decode_parts import (
    TILE,
    head_lanes,
    make_ask,
    make_gather,
    make_scores,
    make_soften,
    streams,
)
from onnx_inplace.numba_kernels.floats import (
    exp2,
    float32_at,
    float_of_bits,
    floats,
    int64_at,
    narrow,
    widen,
)
from onnx_inplace.numba_kernels.memory import fetch_add, kernel

KIND, SIZE, GROUP = 0, 64, 3  # specialised

LOG2_E = 1.4426950408889634
HEADER = 64  # bytes: a counter of items, the number of splits
TOKENS = 16 // head_lanes(GROUP)
PARTIAL = 128 + GROUP * SIZE * 4  # bytes: largest scores, sums of weights, sums of values
SCRATCH = (GROUP * SIZE + 48 + TILE // TOKENS * 16) * 4  # bytes: queries, state, scores
STREAMS = streams(KIND, SIZE)
STEPS = TILE // STREAMS  # rows of a stream in a tile
AHEAD = 1024  # bytes of a stream that are asked for beforehand

ask = make_ask(KIND, SIZE)
scores = make_scores(KIND, SIZE, GROUP)
soften = make_soften(GROUP)
gather = make_gather(KIND, SIZE, GROUP)


def workspace_size(items: int, workers: int) -> int:
    """Bytes for ``items`` pairs of kv head and split."""
    return HEADER + workers * SCRATCH + items * PARTIAL


@njit
def _adjust(x, at, b, h, first, down, across, count, weights):
    """Softcap and mask for the scores of ``count`` keys from ``first`` on, in streams."""
    s = floats(weights, TILE // TOKENS * 16)
    for g in range(GROUP):
        mask = at.mask + b * x.mask_batch + (h * GROUP + g) * x.mask_head
        for j in range(count):
            place = j // TOKENS * 16 + g * TOKENS + j % TOKENS
            key = first + j // STREAMS * down + j % STREAMS * across
            s[place] = layout.adjusted(x, s[place], np.float32(LOG2_E), mask, key)


@njit
def _tile(x, at, b, h, first, down, across, count, queries, weights, state, sums):
    """``count`` keys and their values: rows of a tile from ``first`` on (see ``decode_parts``)."""
    key = at.key + b * x.key_batch + h * x.key_head + first * x.key_token
    value = at.value + b * x.value_batch + h * x.value_head + first * x.value_token
    scores(key, down * x.key_token, across * x.key_token, count, queries, weights, AHEAD)
    if x.softcap or x.mask_size:
        _adjust(x, at, b, h, first, down, across, count, weights)
    soften(weights, count, state)
    gather(value, down * x.value_token, across * x.value_token, count, weights, state, sums, AHEAD)


@njit
def split(x, at, b, h, low, high, scratch, partial):
    """Keys ``low .. high`` of a kv head, into a partial result."""
    queries, state = scratch, scratch + GROUP * SIZE * 4
    weights = state + 192
    q = floats(queries, GROUP * SIZE)
    factor = float_of_bits(x.scale) * LOG2_E
    for g in range(GROUP):
        source = at.query + b * x.query_batch + (h * GROUP + g) * x.query_head
        widen(queries + g * SIZE * 4, SIZE, source, x.query_kind)
    for i in range(GROUP * SIZE):
        q[i] *= factor
    s = floats(state, 48)
    for i in range(16):
        s[i], s[16 + i] = layout.LOWEST, 0
    result = floats(partial, PARTIAL // 4)
    for i in range(32, PARTIAL // 4):
        result[i] = 0
    # whole tiles in streams, a part of the tokens each; what is left as it lies
    across = max(0, high - low) // TILE * STEPS
    if across:
        key = at.key + b * x.key_batch + h * x.key_head + low * x.key_token
        value = at.value + b * x.value_batch + h * x.value_head + low * x.value_token
        ask(key, x.key_token, across * x.key_token)
        ask(value, x.value_token, across * x.value_token)
    for t in range(low, low + across, STEPS):
        _tile(x, at, b, h, t, 1, across, TILE, queries, weights, state, partial + 128)
    for t in range(low + STREAMS * across, high, TILE):
        _tile(x, at, b, h, t, STREAMS, 1, high - t, queries, weights, state, partial + 128)
    for i in range(32):
        result[i] = s[i]


@njit
def join(x, at, splits, results, space, begin, end):
    """Join the splits of the pairs (batch, kv head) from ``begin`` on, and write the output."""
    row = floats(space, SIZE)
    for item in range(begin, end):
        b, h = item // x.kv_heads, item % x.kv_heads
        part = carray(float32_at(results + item * splits * PARTIAL), (splits, PARTIAL // 4))
        for g in range(GROUP):
            head, lane = h * GROUP + g, g * TOKENS
            top = part[0, lane]
            for p in range(1, splits):
                top = max(top, part[p, lane])
            total = float_of_bits(0)
            if at.sinks:
                sink = floats(at.sinks, head + 1)[head] * LOG2_E
                top = max(top, sink)
                total = exp2(sink - top)
            for d in range(SIZE):
                row[d] = 0
            for p in range(splits):
                weight = exp2(part[p, lane] - top)
                for j in range(TOKENS):
                    total += weight * part[p, 16 + lane + j]
                for d in range(SIZE):
                    row[d] += weight * part[p, 32 + g * SIZE + d]
            # a row that sees nothing is a row of zeros
            inverse = 1 / total if total != 0 and top > layout.LOWEST else 0.0
            for d in range(SIZE):
                row[d] *= inverse
            target = at.output + b * x.output_batch + head * x.output_head
            narrow(target, SIZE, space, x.output_kind)


@njit
def keys(x, lengths, b, part, splits):
    """First, and one past the last key of a split."""
    length, start = layout.extent(x, lengths, b)
    low, high = layout.visible(x, length, start)
    chunk = ((high - low + splits - 1) // splits + 15) // 16 * 16
    first = low + part * chunk
    return first, min(high, first + chunk)


@kernel(layout.KERNEL)
def attend(layout_at, query, key, value, output, lengths, mask, sinks, space, worker, workers):
    """Part of a worker: it takes pairs of kv head and split until none is left.

    A single worker joins the splits as well.
    """
    x = layout.read(layout_at)
    at = layout.Places(query, key, value, output, lengths, mask, sinks)
    splits = carray(int64_at(space), (2,))[1]
    scratch = space + HEADER + worker * SCRATCH
    results = space + HEADER + workers * SCRATCH
    items = x.batch * x.kv_heads * splits
    while True:
        item = fetch_add(space, 1)
        if item >= items:
            break
        b, h = item // splits // x.kv_heads, item // splits % x.kv_heads
        first, last = keys(x, lengths, b, item % splits, splits)
        split(x, at, b, h, first, last, scratch, results + item * PARTIAL)
    if workers == 1:
        join(x, at, splits, results, scratch, 0, x.batch * x.kv_heads)


@kernel(layout.KERNEL)
def merge(layout_at, query, key, value, output, lengths, mask, sinks, space, worker, workers):
    """What is left to do when several ``workers`` have taken part."""
    x = layout.read(layout_at)
    at = layout.Places(query, key, value, output, lengths, mask, sinks)
    splits = carray(int64_at(space), (2,))[1]
    results = space + HEADER + workers * SCRATCH
    join(x, at, splits, results, space + HEADER, 0, x.batch * x.kv_heads)
