"""The page kernel of 8-bit floats for one query a head, where the CPU computes in float16.

``specialise`` makes copies of this file with other values in the line that says so.
"""

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels import pages_state
from onnx_inplace.numba_kernels.decode_parts import head_lanes, make_soften
from onnx_inplace.numba_kernels.floats import (
    float32_at,
    float_of_bits,
    floats,
    int64_at,
    uint8_at,
)
from onnx_inplace.numba_kernels.memory import kernel
from onnx_inplace.numba_kernels.pages_bytes_lanes import LINE
from onnx_inplace.numba_kernels.pages_bytes_parts import (
    PART,
    TILE,
    make_gather,
    make_prepare,
    make_scores,
)
from onnx_inplace.numba_kernels.pages_task import KERNEL, read_task

KIND, SIZE, GROUP = 3, 64, 3  # specialised

LOG2_E = np.float32(1.4426950408889634)
SUSPECTED = np.int64(0x4040404040404040)  # of 8 bytes
TOKENS = 16 // head_lanes(GROUP)
WEIGHTS = TILE // TOKENS * 64  # bytes of the weights of a tile
SCRATCH = 2 * WEIGHTS + LINE + TILE * 8 + pages_state.SIZE
PREPARED = GROUP * SIZE * 4 + 64

# Rows of a tile come from several places, a part of the tokens each: prefetchers stop at the end of
# 4 KiB, and with one place a core waits there. In pages of 128 tokens each place has as much; with
# twice or half as many places up to a tenth less is read. AHEAD: rows of a place that lie before
# what is asked for, the best of 4 to 12 KiB for all places together.
STREAMS = 4 if SIZE >= 128 else 2
STEPS = TILE // STREAMS  # rows of a place in a tile
AHEAD = max(1, 6144 // (STREAMS * SIZE))

prepare = make_prepare(KIND, SIZE, GROUP)
scores = make_scores(KIND, SIZE, GROUP)
soften = make_soften(GROUP)
gather = make_gather(KIND, SIZE, GROUP)


@njit
def _put_offsets(offsets, down, across, count):
    """Offsets of the rows of a tile: each step reads one row of each place."""
    o = carray(int64_at(offsets), (TILE,))
    for r in range(TILE):
        row = min(r, count - 1)
        o[r] = row // STREAMS * down + row % STREAMS * across


@njit
def _spoil(x):
    """NaN of E4M3, which were read as numbers: keys spoil all sums, values those of a column."""
    count, nan = x.last - x.first, np.uint8(0x7F)
    keys = carray(uint8_at(x.key + x.first * SIZE), (count * SIZE,))
    values = carray(uint8_at(x.value + x.first * SIZE), (count, SIZE))
    wrong = carray(uint8_at(x.scratch), (SIZE,))  # the place of weights
    every = np.uint8(0)
    for i in range(count * SIZE):
        every |= np.uint8(keys[i] & nan == nan)
    for c in range(SIZE):
        wrong[c] = every
    for t in range(count):
        for c in range(SIZE):
            wrong[c] |= np.uint8(values[t, c] & nan == nan)
    o = carray(float32_at(x.sums), (GROUP, SIZE))
    for g in range(GROUP):
        for c in range(SIZE):
            if wrong[c]:
                o[g, c] = np.nan


@njit
def _tile(x, t, count, near, ahead, beyond, space, softcap):
    """``count`` tokens, the first one ``t``; the other rows are where ``offsets`` says."""
    weights, pairs = space, space + WEIGHTS
    seen = pairs + WEIGHTS
    offsets = seen + LINE
    state = offsets + TILE * 8
    units, queries = x.prepared, x.prepared + 64
    scores(
        x.key + t * SIZE, offsets, count, queries, units, weights, seen, near, ahead,
        beyond + x.next - x.key,
    )  # fmt: skip
    if softcap > 0:
        pages_state.cap(weights, (count + TOKENS - 1) // TOKENS * 16, softcap)
    soften(weights, count, state)
    shrink = floats(state + 128, 16)
    for part in range(0, count, PART):
        gather(
            x.value + t * SIZE, offsets + part * 8, min(PART, count - part),
            weights + part // TOKENS * 64, pairs, state, x.sums, seen, near - part, ahead,
            beyond + x.next_value - x.value,
        )  # fmt: skip
        for lane in range(16):
            shrink[lane] = 1  # the sums have been made smaller


@kernel(KERNEL)
def attend(task):
    """See ``pages_task``. All rows see the same tokens; their number is GROUP."""
    x = read_task(task)
    seen = x.scratch + 2 * WEIGHTS
    offsets = seen + LINE
    state = offsets + TILE * 8
    if x.fresh:
        prepare(x.queries, x.prepared + 64, x.prepared)
    words = carray(int64_at(seen), (LINE // 8,))
    for i in range(LINE // 8):
        words[i] = 0
    pages_state.spread(state, x.states, GROUP, TOKENS)
    softcap = float_of_bits(x.softcap) * LOG2_E
    # whole tiles from several places, a part of the tokens each; what is left as it lies
    tiles = (x.last - x.first) // TILE
    across = tiles * STEPS
    ahead = min(AHEAD, across)
    _put_offsets(offsets, SIZE, across * SIZE, TILE)
    for tile in range(tiles):
        done = tile * STEPS
        near = (across - ahead - done) * STREAMS if x.next else TILE
        beyond = (ahead - across) * SIZE
        _tile(x, x.first + done, TILE, near, ahead * SIZE, beyond, x.scratch, softcap)
    rest = x.first + tiles * TILE
    if rest < x.last:
        _put_offsets(offsets, STREAMS * SIZE, SIZE, x.last - rest)
        near = 0 if x.next else TILE
        _tile(x, rest, x.last - rest, near, 0, 0, x.scratch, softcap)
    pages_state.collect(state, x.states, GROUP, TOKENS)
    found = np.int64(0)
    for i in range(LINE // 8):
        found |= words[i]
    if found & SUSPECTED:  # rare: each page that has 448 is read once more, a sixth of its time
        _spoil(x)
