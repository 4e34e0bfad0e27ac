"""States of the online softmax for page kernels of rows: by lane within a page, by row between.

Lanes are those of ``decode_parts``: lane ``head * tokens + token`` of 16.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from onnx_inplace.numba_kernels import layout
from onnx_inplace.numba_kernels.floats import floats

SIZE = 48 * 4  # bytes of a state by lane


@njit
def spread(state, rows, group, tokens):
    """The state of each row, (group, 2) float32, to its lanes: (3, 16) float32."""
    s, r = floats(state, 48), floats(rows, 2 * group)
    for i in range(16):
        s[i], s[16 + i] = layout.LOWEST, 0
    for g in range(group):
        for j in range(tokens):
            s[g * tokens + j] = r[2 * g]
        s[16 + g * tokens] = r[2 * g + 1]


@njit
def collect(state, rows, group, tokens):
    """And back: the sums of the lanes of a row are joined."""
    s, r = floats(state, 48), floats(rows, 2 * group)
    for g in range(group):
        total = np.float32(0)
        for j in range(tokens):
            total += s[16 + g * tokens + j]
        r[2 * g], r[2 * g + 1] = s[g * tokens], total


@njit
def cap(scores, count, softcap):
    """Softcap of scores in base 2; those of no token stay what they are."""
    s = floats(scores, count)
    for i in range(count):
        if s[i] > layout.LOWEST:
            s[i] = softcap * np.float32(math.tanh(s[i] / softcap))
