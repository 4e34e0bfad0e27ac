"""The page kernel of float formats for one query a head: the loops of decode attention on rows.

``specialise`` makes copies of this file with other values in the line that says so.
"""

import math

import numpy as np
from numba import njit

from onnx_inplace.numba_kernels import layout
from onnx_inplace.numba_kernels.decode_parts import (
    STREAMS,
    TILE,
    head_lanes,
    make_gather,
    make_scores,
    make_soften,
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
def _cap(at, count, softcap):
    """Softcap of scores in base 2; those of no token stay what they are."""
    s = floats(at, count)
    for i in range(count):
        if s[i] > layout.LOWEST:
            s[i] = softcap * np.float32(math.tanh(s[i] / softcap))


@kernel(KERNEL)
def attend(task):
    """See ``pages_task``. All rows see the same tokens; their number is GROUP."""
    x = read_task(task)
    weights = x.scratch
    state = weights + WEIGHTS * 4
    queries = x.queries
    if UNIT != 1:
        queries = state + 48 * 4
        source, target = floats(x.queries, GROUP * SIZE), floats(queries, GROUP * SIZE)
        for i in range(GROUP * SIZE):
            target[i] = source[i] * UNIT
    s, rows = floats(state, 48), floats(x.states, 2 * GROUP)
    for i in range(16):
        s[i], s[16 + i] = layout.LOWEST, 0
    for g in range(GROUP):
        for j in range(TOKENS):
            s[g * TOKENS + j] = rows[2 * g]
        s[16 + g * TOKENS] = rows[2 * g + 1]
    softcap = float_of_bits(x.softcap) * LOG2_E
    for t in range(x.first, x.last, TILE):
        count = min(TILE, x.last - t)
        ahead = ahead_value = TILE * ROW
        if t + TILE >= x.last and x.next:
            ahead, ahead_value = x.next - x.key - t * ROW, x.next_value - x.value - t * ROW
        scores(x.key + t * ROW, STREAMS * ROW, ROW, count, queries, weights, ahead)
        if softcap > 0:
            _cap(weights, (count + TOKENS - 1) // TOKENS * 16, softcap)
        soften(weights, count, state)
        if UNIT != 1:
            _scale(weights, (count + TOKENS - 1) // TOKENS * 16, UNIT)
        gather(x.value + t * ROW, STREAMS * ROW, ROW, count, weights, state, x.sums, ahead_value)
    for g in range(GROUP):
        total = np.float32(0)
        for j in range(TOKENS):
            total += s[16 + g * TOKENS + j]
        rows[2 * g], rows[2 * g + 1] = s[g * TOKENS], total
