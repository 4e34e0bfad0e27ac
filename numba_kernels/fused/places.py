"""Integers that a fused step counts itself: positions, and where new tokens of sequences stand."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from onnx_inplace.numba_kernels import layout
from onnx_inplace.numba_kernels.fused.kernel import KERNEL, reader
from onnx_inplace.numba_kernels.memory import copy, kernel, load_int32, load_int64, store_int64

_FIELDS, _AT_END = len(layout.Layout._fields), layout.Layout._fields.index("at_end")


class Count(NamedTuple):
    """``output[r, i] = first[0] + i`` for all rows.

    Shapes:
        first:  (1) int64
        output: (rows, columns) int64
    """

    first: int
    output: int
    rows: int
    columns: int


class Span(NamedTuple):
    """Tokens that join sequences, as GroupQueryAttention counts them.

    All of ``total`` tokens are new: they stand at 0 and following, whatever the lengths. Else they
    are the last of each sequence.

    Shapes:
        last:      (batch) int32, or int64 where ``wide``: one less than the length of a sequence
        total:     () likewise
        lengths:   (batch) int64, written
        starts:    (batch) int64, written: where the first new token stands
        positions: (batch, tokens) int64, written
    """

    last: int
    total: int
    lengths: int
    starts: int
    positions: int
    batch: int
    tokens: int
    wide: int


class Ends(NamedTuple):
    """A ``layout.Layout`` for them: ``target = source``, but for ``at_end``.

    ``total``: () int32, or int64 where ``wide``, of which ``tokens`` are new.
    """

    source: int
    target: int
    total: int
    tokens: int
    wide: int


_read, _read_span, _read_ends = reader(Count), reader(Span), reader(Ends)


@kernel(KERNEL)
def count(arguments, thread, threads):
    """A :class:`Count`."""
    x = _read(arguments)
    start = load_int64(x.first)
    for r in range(x.rows):
        for i in range(x.columns):
            store_int64(x.output + 8 * (r * x.columns + i), start + i)


@njit
def _load(place, wide):
    return load_int64(place) if wide else np.int64(load_int32(place))


@kernel(KERNEL)
def span(arguments, thread, threads):
    """A :class:`Span`."""
    x = _read_span(arguments)
    all_new = _load(x.total, x.wide) == x.tokens
    for b in range(x.batch):
        length = _load(x.last + (8 if x.wide else 4) * b, x.wide) + 1
        start = 0 if all_new else length - x.tokens
        store_int64(x.lengths + 8 * b, length)
        store_int64(x.starts + 8 * b, start)
        for t in range(x.tokens):
            store_int64(x.positions + 8 * (b * x.tokens + t), start + t)


@kernel(KERNEL)
def ends(arguments, thread, threads):
    """An :class:`Ends`."""
    x = _read_ends(arguments)
    copy(x.target, x.source, 8 * _FIELDS)
    all_new = _load(x.total, x.wide) == x.tokens
    store_int64(x.target + 8 * _AT_END, 0 if all_new else 1)
