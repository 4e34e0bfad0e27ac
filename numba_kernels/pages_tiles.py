"""The page kernel of integer formats for one query a head: codes are multiplied as they are.

``specialise`` makes copies of this file with other values in the line that says so.
"""

import math

import numpy as np
from numba import njit

from onnx_inplace.numba_kernels import attention
from onnx_inplace.numba_kernels.floats import float_of_bits, floats
from onnx_inplace.numba_kernels.memory import kernel
from onnx_inplace.numba_kernels.pages_layout import read_half
from onnx_inplace.numba_kernels.pages_numbers import half_at
from onnx_inplace.numba_kernels.pages_task import KERNEL, read_task
from onnx_inplace.numba_kernels.pages_tile_lanes import LINE, packs
from onnx_inplace.numba_kernels.pages_tile_parts import make_fold, make_scores, make_sums
from onnx_inplace.numba_kernels.pages_tile_weights import make_weights

# RUN: tokens that share the scales of channels of K; 0: K has scales of tokens.
# K, V: elements of a token that share a scale. CENTER: twice the code of the midpoint.
# PLANES: of 8 bits, of weights; queries have two.
BITS, RUN, K, V, CENTER, SIZE, PAGE, GROUP, PLANES = 4, 64, 64, 64, 15, 64, 64, 3, 2  # specialised

LOG2_E = np.float32(1.4426950408889634)
AFFINE = CENTER % 2 == 1
FIELDS = 8 // BITS
VALUE_BLOCKS = -(-SIZE // V)
KEY_BLOCK = SIZE if RUN else K
KEY_PLANES = 2 * GROUP * SIZE
KEY_AUX = -(-SIZE // KEY_BLOCK) * 3 * LINE
TOKENS = LINE if packs(PAGE) else 16  # that weights are made for at once
SCORES = PAGE * GROUP * 4
VALUE_PLANES = VALUE_BLOCKS * PLANES * GROUP * PAGE
VALUE_AUX = (1 + 3 * VALUE_BLOCKS) * LINE
READY = 2 * VALUE_BLOCKS * PAGE * 4
SCRATCH = KEY_PLANES + KEY_AUX + SCORES + VALUE_PLANES + VALUE_AUX + READY + SIZE * 4 + LINE
PREPARED = KEY_PLANES + KEY_AUX + LINE

# With 8 bits V of this page is read soon and K of the next later, and V is asked for first. Else K
# and V of the next page are asked for in turn, as arithmetic leaves them time to arrive. Each
# part asks for about as much as arrives while it lasts: *_ASKS are lines of both, of a fold, of a
# tile of scores, of a tile of weights, and of all sums.
KEY_SCALES = -(-PAGE // RUN) * SIZE if RUN else PAGE * -(-SIZE // K)
HALVES = 2 * (1 + AFFINE)  # bytes of a scale and its midpoint
LINES = -(-(PAGE * SIZE * BITS // 8 + HALVES * max(KEY_SCALES, PAGE * VALUE_BLOCKS)) // LINE)
TILES = PAGE // 16
FOLDS = -(-PAGE // RUN) if RUN else 0
if BITS == 8:
    KEY_LINES = math.ceil(7 / 8 * LINES / TILES)
    LEFT = max(0, -(-(LINES - KEY_LINES * TILES) // TILES))
    FOLD_ASKS, KEY_ASKS, WEIGHT_ASKS = (0, 0), (KEY_LINES, 0), (LEFT, LEFT)
    VALUE_ASKS = 0, LINES - LEFT * TILES
else:
    FOLD_LINES, KEY_LINES, LEFT = LINES // 18, LINES // (3 * TILES), LINES // (9 * TILES)
    FOLD_ASKS, KEY_ASKS, WEIGHT_ASKS = (FOLD_LINES,) * 2, (KEY_LINES,) * 2, (LEFT,) * 2
    VALUE_ASKS = (LINES - FOLD_LINES * FOLDS - (KEY_LINES + LEFT) * TILES,) * 2
NEAR = (HALVES * KEY_SCALES + 4 * SIZE * BITS) // LINE  # lines: scales of K, and two tiles

fold = make_fold(SIZE, GROUP, KEY_BLOCK, CENTER, RUN > 0, FOLD_ASKS)
scores = make_scores(BITS, SIZE, GROUP, KEY_BLOCK, CENTER, RUN > 0, AFFINE, KEY_ASKS)
weights = make_weights(SIZE, GROUP, V, CENTER, AFFINE, PAGE, PLANES, WEIGHT_ASKS)
sums = make_sums(BITS, SIZE, GROUP, V, CENTER, PAGE, PLANES, VALUE_ASKS, NEAR)


@njit
def _adjust(x, key, to, tiles, offsets):
    """Offsets of channels, and softcap."""
    softcap = float_of_bits(x.softcap) * LOG2_E
    s = floats(to, tiles * GROUP * 16)
    if key.offsets:
        c = floats(offsets, SIZE)
        for i in range(SIZE):
            c[i] = half_at(x.key + key.offsets + 2 * i)
        for g in range(GROUP):
            base = attention.dot(x.queries + g * SIZE * 4, offsets, SIZE)
            for i in range(tiles):
                for j in range(16):
                    s[(i * GROUP + g) * 16 + j] += base
    if softcap > 0:
        for i in range(tiles * GROUP * 16):
            s[i] = softcap * np.float32(math.tanh(s[i] / softcap))


@njit
def _behind(soon, later, count, asks):
    """What follows on the lines that so many parts ask for."""
    return soon + count * asks[0] * LINE, later + count * asks[1] * LINE


@kernel(KERNEL)
def attend(task):
    """See ``pages_task``. All rows see the same tokens; their number is GROUP."""
    x = read_task(task)
    key, value = read_half(x.description, 0), read_half(x.description, 1)
    space = (x.scratch + 63) // 64 * 64
    prepared = (x.prepared + 63) // 64 * 64
    planes = space if RUN else prepared
    aux = planes + KEY_PLANES
    results = space + KEY_PLANES + KEY_AUX
    value_planes = results + SCORES
    value_aux = value_planes + VALUE_PLANES
    ready = value_aux + VALUE_AUX
    offsets = ready + READY
    queries = x.rotated if key.rotation else x.queries
    next_key, next_value = (x.next, x.next_value) if x.next else (x.key, x.value)
    soon, later = (x.value, next_key) if BITS == 8 else (next_key, next_value)
    begin = x.first // TOKENS * TOKENS // 16  # tiles
    end = (x.last + TOKENS - 1) // TOKENS * TOKENS // 16
    tile = 16 * SIZE * BITS // 8
    if RUN:
        step = RUN // 16
        for g in range(begin // step, (end + step - 1) // step):
            scales = x.key + g * key.step
            low, high = max(begin, g * step), min(end, (g + 1) * step)
            first, second = _behind(soon, later, g, FOLD_ASKS)
            first, second = _behind(first, second, low, KEY_ASKS)
            fold(queries, scales, scales + key.midpoint, planes, aux, first, second)
            first, second = _behind(first, second, 1, FOLD_ASKS)
            codes, to = x.key + key.codes + low * tile, results + (low - begin) * GROUP * LINE
            scores(codes, high - low, 0, 0, 0, planes, aux, to, first, second)
    else:
        if x.fresh:
            fold(queries, 0, 0, planes, aux, 0, 0)
        codes, scales = x.key + key.codes + begin * tile, x.key + 32 * begin
        scores(
            codes, end - begin, scales, key.step, key.midpoint, planes, aux, results, soon, later
        )
    if key.offsets or x.softcap:
        _adjust(x, key, results, end - begin, offsets)
    soon, later = _behind(soon, later, FOLDS, FOLD_ASKS)
    soon, later = _behind(soon, later, TILES, KEY_ASKS)
    first, last = x.first - 16 * begin, x.last - 16 * begin
    scales = x.value + 32 * begin
    weights(
        results, end - begin, first, last, x.states, scales, value.step, value.midpoint,
        ready, value_planes + 16 * begin, value_aux, soon, later,
    )  # fmt: skip
    soon, later = _behind(soon, later, TILES, WEIGHT_ASKS)
    low, high = begin * 4 // FIELDS, end * 4 // FIELDS  # a vector has 4 * FIELDS tokens
    codes = x.value + value.codes
    sums(codes, low, high, value_planes, value_aux, x.sums, soon, later, next_key)
