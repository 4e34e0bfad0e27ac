"""Like ``append_attend``, for rows that are rotated and converted on their way into the caches.

Query, key and value are arrays of their own, or stand one behind the other in each row of one. New
tokens stand behind those that are valid, or at the begin (a prompt).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels.append_attend import REFUSED
from onnx_inplace.numba_kernels.floats import int32_at, int64_at
from onnx_inplace.numba_kernels.memory import kernel, load_int64, on_demand, store_int64
from onnx_inplace.numba_kernels.objects import (
    EXPECTED,
    LIST,
    NOTHING,
    Expected,
    as_expected,
    data_of,
    let_go,
    take_back,
)
from onnx_inplace.numba_kernels.rows import place_rows
from onnx_inplace.numba_kernels.sharing import Sharing, attend, sharing_of, splits_at

QUERY, KEY, VALUE, KEYS, VALUES, LAST, TOTAL, COSINES, SINES, POSITIONS, OUTPUT = range(11)
"""Arrays; KEY, VALUE, COSINES, SINES and POSITIONS may be ``objects.NOTHING``."""
_ARRAYS = 11


class Layer(NamedTuple):
    """What a call does, int64. Bytes of workspace are behind that of the kernel."""

    kind: int  # ``objects.ARRAY``
    batch: int
    tokens: int  # of each row
    capacity: int  # [tokens] of the caches
    prompt: int  # 1: TOTAL is ``tokens``, which stand at the begin
    angles: int  # rows of COSINES; 0: nothing is rotated
    kernel: int  # address, of one that ``invoke.invoke`` calls
    layout: int  # address of its Layout
    queries: int  # address of ``rows.RowsLayout``; 0: the kernel takes queries as they are
    keys: int  # likewise
    values: int  # likewise
    key_offset: int  # bytes from QUERY, where there is no KEY
    value_offset: int  # likewise
    numbers: int  # bytes from the begin of workspace: (batch, 2 + tokens) int64
    row: int  # likewise: workspace of ``rows.place_rows``
    rotated: int  # likewise: rotated queries, float32


_WORDS = len(Layer._fields)
_LAYER = _ARRAYS * EXPECTED
_SHARING = _LAYER + _WORDS


def table(
    arrays: Sequence[Expected], layer: Layer, sharing: Sharing
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """``table`` of :data:`append_and_attend`: eleven arrays."""
    rows: list[tuple[int, ...]] = [*arrays, layer, sharing]
    return np.array([number for row in rows for number in row], np.int64)


@njit
def _layer(at):
    n = carray(int64_at(at), (16,))
    return Layer(
        n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13],
        n[14], n[15],
    )  # fmt: skip


@njit
def _judge(x, last, given, starts, lengths, positions):
    """The longest row, whose numbers are written; -1: a token, or its angle, is out of bounds.

    ``given``: address of (batch, tokens) int64, or 0: a token's angle is that of its place.
    """
    longest = np.int64(0)
    for b in range(x.batch):
        length = np.int64(carray(int32_at(last), (x.batch,))[b]) + 1
        start = 0 if x.prompt else length - x.tokens
        if start < 0 or start > x.capacity - x.tokens or length < 0 or length > x.capacity:
            return -1
        store_int64(starts + 8 * b, start)
        store_int64(lengths + 8 * b, length)
        for t in range(x.tokens if x.angles else 0):
            k = 8 * (b * x.tokens + t)
            position = load_int64(given + k) if given else start + t
            if position < 0 or position >= x.angles:
                return -1
            store_int64(positions + k, position)
        longest = max(longest, length)
    return longest


@njit
def _data(items, table, k):
    """Where the elements of an array are; 0: there is none."""
    if load_int64(table + 8 * EXPECTED * k) == NOTHING:
        return 0
    return data_of(items, table, k)


# With the GIL, but for rows and the kernel: nobody changes or frees an array while it is judged.
@njit
def _call(slots, table, space, team):
    items, x = load_int64(slots + LIST), _layer(table + 8 * _LAYER)
    s, space = sharing_of(table + 8 * _SHARING), load_int64(space)
    if not as_expected(items, table, _ARRAYS, x.kind):
        return REFUSED
    total = carray(int32_at(data_of(items, table, TOTAL)), (1,))[0]
    if (total == x.tokens) != (x.prompt == 1):
        return REFUSED
    starts = space + x.numbers
    lengths, positions = starts + 8 * x.batch, starts + 16 * x.batch
    given, last = _data(items, table, POSITIONS), data_of(items, table, LAST)
    longest = _judge(x, last, given, starts, lengths, positions)
    if longest < 0 or (longest > s.most and team == 0):
        return REFUSED
    query, output = data_of(items, table, QUERY), data_of(items, table, OUTPUT)
    key, value = _data(items, table, KEY), _data(items, table, VALUE)
    key, value = key or query + x.key_offset, value or query + x.value_offset
    keys, values = data_of(items, table, KEYS), data_of(items, table, VALUES)
    cosines, sines = _data(items, table, COSINES), _data(items, table, SINES)
    state = let_go()
    row = space + x.row
    place_rows(x.keys, key, keys, starts, positions, cosines, sines, row)
    place_rows(x.values, value, values, starts, positions, cosines, sines, row)
    if x.queries:
        place_rows(x.queries, query, space + x.rotated, 0, positions, cosines, sines, row)
        query = space + x.rotated
    store_int64(space, 0)  # items that are done
    store_int64(space + 8, splits_at(s, lengths, x.batch, longest))
    places = x.layout, query, keys, values, output, lengths, 0, 0, space
    done = attend(s, team, x.kernel, places, longest, s.merge)
    take_back(state)
    return done


@on_demand("int64(int64,int64,int64,int64)", nogil=False)
def append_and_attend(slots, table, space, team):
    """Put keys and values into their caches, then attend; only if all is as expected.

    Args:
        slots: ``id`` of a list, whose items nobody changes meanwhile.
        table: address of what is expected, see :func:`table`.
        space: ``id(...) + FIELD`` of workspace.
        team: address of a ``sharing.Team``; 0: long sequences are left to the caller.

    Danger: places are in the list, the layouts belong to the shapes that are expected, and new
        keys and values do not overlap caches.

    Returns:
        ``REFUSED``, ``WRITTEN`` or ``DONE``; and ``NEWS``.
    """
    return _call(slots, table, space, team)


@kernel("int64(int64,int64,int64,int64)")
def called(slots, table, space, team):
    """The same for a library that calls it."""
    return _call(slots, table, space, team)
