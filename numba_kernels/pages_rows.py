"""The page kernel of float formats for one query a head: the loops of decode attention on rows.

``specialise`` makes copies of this file with other values in the line that says so.
"""

import numpy as np
from numba import njit

from onnx_inplace.numba_kernels import pages_state
from onnx_inplace.numba_kernels.decode_parts import (
    TILE,
    head_lanes,
    make_gather,
    make_scores,
    make_soften,
    streams,
)
from onnx_inplace.numba_kernels.floats import SIZES, float_of_bits, floats
from onnx_inplace.numba_kernels.memory import kernel
from onnx_inplace.numba_kernels.pages_layout import E4M3
from onnx_inplace.numba_kernels.pages_task import KERNEL, read_task

KIND, SIZE, GROUP = 1, 64, 3  # specialised

LOG2_E = np.float32(1.4426950408889634)
TOKENS = 16 // head_lanes(GROUP)
WEIGHTS = (TILE + TOKENS - 1) // TOKENS * 16  # float32
SCRATCH = (WEIGHTS + 48 + GROUP * SIZE) * 4
PREPARED = 0
ROW = SIZE * SIZES[KIND]  # bytes
STREAMS = streams(KIND, SIZE)
STEPS = TILE // STREAMS  # rows of a stream in a tile
UNIT = np.float32(256 if KIND == E4M3 else 1)  # what the vectors of a kind have to be multiplied by

scores = make_scores(KIND, SIZE, GROUP)
soften = make_soften(GROUP)
gather = make_gather(KIND, SIZE, GROUP)


@njit
def _scale(at, count, factor):
    x = floats(at, count)
    for i in range(count):
        x[i] *= factor


@njit
def _tile(x, t, down, across, count, last, queries, weights, state):
    """``count`` tokens from ``t`` on: rows of a tile (see ``decode_parts``).

    Those of the next tile are asked for, or, if this is the ``last`` one, those of the next page.
    """
    ahead = ahead_value = STEPS * ROW
    if last and x.next:
        ahead, ahead_value = x.next - x.key - t * ROW, x.next_value - x.value - t * ROW
    softcap = float_of_bits(x.softcap) * LOG2_E
    scores(x.key + t * ROW, down, across, count, queries, weights, ahead)
    if softcap > 0:
        pages_state.cap(weights, (count + TOKENS - 1) // TOKENS * 16, softcap)
    soften(weights, count, state)
    if UNIT != 1:
        _scale(weights, (count + TOKENS - 1) // TOKENS * 16, UNIT)
    gather(x.value + t * ROW, down, across, count, weights, state, x.sums, ahead_value)


@kernel(KERNEL)
def attend(task):
    """See ``pages_task``. All rows see the same tokens; their number is GROUP."""
    x = read_task(task)
    weights = x.scratch
    state = weights + WEIGHTS * 4
    queries = x.queries
    if UNIT != 1:
        queries = state + pages_state.SIZE
        source, target = floats(x.queries, GROUP * SIZE), floats(queries, GROUP * SIZE)
        for i in range(GROUP * SIZE):
            target[i] = source[i] * UNIT
    pages_state.spread(state, x.states, GROUP, TOKENS)
    # whole tiles in streams, a part of the tokens each; what is left as it lies
    tiles = (x.last - x.first) // TILE
    across = tiles * STEPS
    rest = x.first + tiles * TILE
    for tile in range(tiles):
        t, last = x.first + tile * STEPS, tile + 1 == tiles and rest == x.last
        _tile(x, t, ROW, across * ROW, TILE, last, queries, weights, state)
    if rest < x.last:
        _tile(x, rest, STREAMS * ROW, ROW, x.last - rest, True, queries, weights, state)
    pages_state.collect(state, x.states, GROUP, TOKENS)
