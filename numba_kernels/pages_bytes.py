"""The page kernel of 8-bit floats for one query a head, where the CPU computes in float16.

``specialise`` makes copies of this file with other values in the line that says so.
"""

import numpy as np

from onnx_inplace.numba_kernels import pages_state
from onnx_inplace.numba_kernels.decode_parts import head_lanes, make_soften
from onnx_inplace.numba_kernels.floats import float_of_bits
from onnx_inplace.numba_kernels.memory import kernel
from onnx_inplace.numba_kernels.pages_bytes_parts import (
    TILE,
    make_gather,
    make_prepare,
    make_scores,
)
from onnx_inplace.numba_kernels.pages_task import KERNEL, read_task

KIND, SIZE, GROUP = 3, 64, 3  # specialised

LOG2_E = np.float32(1.4426950408889634)
TOKENS = 16 // head_lanes(GROUP)
LINES = (TILE + TOKENS - 1) // TOKENS * 64  # bytes of the weights of a tile
SCRATCH = 2 * LINES + pages_state.SIZE
PREPARED = GROUP * SIZE * 2 + 64
AHEAD = 2 * TILE  # tokens that are asked for beforehand: best of 1 to 4 tiles

prepare = make_prepare(KIND, SIZE, GROUP)
scores = make_scores(KIND, SIZE, GROUP)
soften = make_soften(GROUP)
gather = make_gather(KIND, SIZE, GROUP)


@kernel(KERNEL)
def attend(task):
    """See ``pages_task``. All rows see the same tokens; their number is GROUP."""
    x = read_task(task)
    weights, pairs = x.scratch, x.scratch + LINES
    state = pairs + LINES
    units, queries = x.prepared, x.prepared + 64
    if x.fresh:
        prepare(x.queries, queries, units)
    pages_state.spread(state, x.states, GROUP, TOKENS)
    softcap = float_of_bits(x.softcap) * LOG2_E
    end = x.first + (x.last - x.first + TILE - 1) // TILE * TILE
    for t in range(x.first, x.last, TILE):
        count = min(TILE, x.last - t)
        ahead = ahead_value = AHEAD * SIZE
        if t + AHEAD >= end and x.next:
            back = (end - AHEAD) * SIZE  # tokens of the next page follow on this one's
            ahead, ahead_value = x.next - x.key - back, x.next_value - x.value - back
        scores(x.key + t * SIZE, count, queries, units, weights, ahead)
        if softcap > 0:
            pages_state.cap(weights, (count + TOKENS - 1) // TOKENS * 16, softcap)
        soften(weights, count, state)
        gather(x.value + t * SIZE, count, weights, pairs, state, x.sums, ahead_value)
    pages_state.collect(state, x.states, GROUP, TOKENS)
