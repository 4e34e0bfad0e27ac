"""Rows of heads on their way into a cache: rotated by their position, converted, put in place."""

from __future__ import annotations

from typing import NamedTuple

from numba import carray, njit

from onnx_inplace.numba_kernels.floats import floats, int64_at, narrow, widen
from onnx_inplace.numba_kernels.memory import copy, on_demand


class RowsLayout(NamedTuple):
    """What a call of :func:`place_rows` is, but for the addresses. Strides are in bytes.

    ``rotated`` leading elements of a row are rotated, in pairs of neighbours (``interleaved``) or
    of the two halves; 0 rotates nothing. A kind is one of ``floats.FLOAT32`` and so on.
    """

    batch: int
    heads: int
    tokens: int
    size: int
    source_kind: int
    target_kind: int
    angle_kind: int
    rotated: int
    interleaved: int
    row_bytes: int
    source_batch: int
    source_head: int
    source_token: int
    target_batch: int
    target_head: int
    target_token: int
    angle_row: int


@njit
def _layout(address):
    n = carray(int64_at(address), (17,))
    return RowsLayout(
        n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10],
        n[11], n[12], n[13], n[14], n[15], n[16],
    )  # fmt: skip


@njit
def _rotate(at, size, half, interleaved, cosine, sine):
    """Rotate the pairs of a row, in place."""
    row, cosines, sines = floats(at, size), floats(cosine, half), floats(sine, half)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
        x, y, c, s = row[first], row[second], cosines[i], sines[i]
        row[first], row[second] = x * c - y * s, x * s + y * c


@njit
def place_rows(layout, source, target, starts, positions, cosines, sines, space):
    """Put rows (batch, heads, tokens) of ``source`` into ``target``, from token ``starts[b]`` on.

    Shapes:
        starts:         (batch) int64, or 0: from token 0 on
        positions:      (batch, tokens) int64: the row of ``cosines`` and ``sines`` for a token
        cosines, sines: (positions, rotated / 2) elements of ``angle_kind``
        space:          (size + rotated) float32, workspace

    Danger: the caller has checked starts and positions, and that the places do not overlap.

    Source: com.microsoft GroupQueryAttention, RotaryEmbedding.
    """
    x = _layout(layout)
    half = x.rotated // 2
    cosine, sine = space + x.size * 4, space + (x.size + half) * 4
    for b in range(x.batch):
        start = carray(int64_at(starts), (x.batch,))[b] if starts else 0
        for t in range(x.tokens):
            if half:
                p = carray(int64_at(positions), (x.batch * x.tokens,))[b * x.tokens + t]
                widen(cosine, half, cosines + p * x.angle_row, x.angle_kind)
                widen(sine, half, sines + p * x.angle_row, x.angle_kind)
            for h in range(x.heads):
                taken = source + b * x.source_batch + h * x.source_head + t * x.source_token
                to = target + b * x.target_batch + h * x.target_head
                to += (start + t) * x.target_token
                if half == 0 and x.source_kind == x.target_kind:
                    copy(to, taken, x.row_bytes)
                    continue
                widen(space, x.size, taken, x.source_kind)
                _rotate(space, x.size, half, x.interleaved, cosine, sine)
                narrow(to, x.size, space, x.target_kind)


@on_demand("void(int64,int64,int64,int64,int64,int64,int64,int64)")
def place(layout, source, target, starts, positions, cosines, sines, space):
    """:func:`place_rows`, called from outside of kernels."""
    place_rows(layout, source, target, starts, positions, cosines, sines, space)
