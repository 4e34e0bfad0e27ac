"""A layer of a decoder in one call: looks at its arrays, writes keys and values, attends over them.

Arrays are found in a list of objects. Before the first byte is written all of them are compared
with what is expected, and positions and lengths with the capacity: whatever is not so is left to
the caller, who knows how to say why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels import sharing
from onnx_inplace.numba_kernels.floats import int64_at
from onnx_inplace.numba_kernels.memory import copy, kernel, load_int64, on_demand, store_int64
from onnx_inplace.numba_kernels.objects import (
    EXPECTED,
    LIST,
    Expected,
    as_expected,
    data_of,
    let_go,
    take_back,
)
from onnx_inplace.numba_kernels.sharing import Sharing, attend, sharing_of, splits_at

REFUSED, WRITTEN, DONE, NEWS = 0, sharing.LEFT, sharing.DONE, sharing.NEWS
"""What a call has done: nothing; keys and values are written; attention is done, too. And there is
news of the helpers."""

CACHE, VALUES, POSITIONS = 0, 1, 2  # arrays of a write; the second write has the three that follow
QUERY, OUTPUT, LENGTHS = 6, 7, 8  # of attention
_ARRAYS = 9


class Write(NamedTuple):
    """Sizes of one write, int64: see ``dense.update``; rows are those of a batch one by one."""

    batch: int  # positions
    rows: int  # of each
    capacity: int  # [tokens]
    length: int  # [tokens]
    token: int  # bytes


class Attention(NamedTuple):
    """The call that follows, int64."""

    kind: int  # ``objects.ARRAY``
    kernel: int  # address, of one that ``invoke.invoke`` calls
    layout: int  # address of its Layout
    key: int  # which write is that of keys, 0 or 1
    batch: int  # lengths
    capacity: int  # [tokens]: no length is longer


_WRITE = len(Write._fields)
_WRITES = _ARRAYS * EXPECTED
_ATTENTION = _WRITES + 2 * _WRITE
_SHARING = _ATTENTION + len(Attention._fields)


def table(
    arrays: Sequence[Expected], writes: Sequence[Write], attention: Attention, sharing: Sharing
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """``table`` of :data:`append_and_attend`: nine arrays and two writes."""
    rows: list[tuple[int, ...]] = [*arrays, *writes, attention, sharing]
    return np.array([number for row in rows for number in row], np.int64)


@njit
def _write(at):
    n = carray(int64_at(at), (_WRITE,))
    return Write(n[0], n[1], n[2], n[3], n[4])


@njit
def _attention(at):
    n = carray(int64_at(at), (6,))
    return Attention(n[0], n[1], n[2], n[3], n[4], n[5])


@njit
def _longest(numbers, count, most):
    """The largest of ``count`` int64; -1: one is negative, or larger than ``most``."""
    longest = 0
    for k in range(count):
        number = load_int64(numbers + 8 * k)
        if number < 0 or number > most:
            return -1
        longest = max(longest, number)
    return longest


@njit
def _update(x, cache, values, positions):
    block = x.length * x.token
    for row in range(x.batch * x.rows):
        position = load_int64(positions + row // x.rows * 8)
        copy(cache + (row * x.capacity + position) * x.token, values + row * block, block)


# With the GIL, but for copies and the kernel: nobody changes or frees an array while it is judged.
@njit
def _call(slots, table, space, team):
    items, x = load_int64(slots + LIST), _attention(table + 8 * _ATTENTION)
    space = load_int64(space)
    if not as_expected(items, table, _ARRAYS, x.kind):
        return REFUSED
    first, second = _write(table + 8 * _WRITES), _write(table + 8 * (_WRITES + _WRITE))
    positions, others = data_of(items, table, POSITIONS), data_of(items, table, 3 + POSITIONS)
    if _longest(positions, first.batch, first.capacity - first.length) < 0:
        return REFUSED
    if _longest(others, second.batch, second.capacity - second.length) < 0:
        return REFUSED
    lengths = data_of(items, table, LENGTHS)
    longest = _longest(lengths, x.batch, x.capacity)
    if longest < 0:
        return REFUSED
    cache, other = data_of(items, table, CACHE), data_of(items, table, 3 + CACHE)
    new, newer = data_of(items, table, VALUES), data_of(items, table, 3 + VALUES)
    query, output = data_of(items, table, QUERY), data_of(items, table, OUTPUT)
    key, value = (cache, other) if x.key == 0 else (other, cache)
    state = let_go()
    _update(first, cache, new, positions)
    _update(second, other, newer, others)
    s = sharing_of(table + 8 * _SHARING)
    store_int64(space, 0)  # items that are done
    store_int64(space + 8, splits_at(s, lengths, x.batch, longest))
    places = x.layout, query, key, value, output, lengths, 0, 0, space
    done = attend(s, team, x.kernel, places, longest, s.merge)
    take_back(state)
    return done


@on_demand("int64(int64,int64,int64,int64)", nogil=False)
def append_and_attend(slots, table, space, team):
    """Write keys and values into their caches, then attend; only if all is as expected.

    Args:
        slots: ``id`` of a list, whose items nobody changes meanwhile.
        table: address of what is expected, see :func:`table`.
        space: ``id(...) + FIELD`` of workspace for the kernel; its first int64 become 0 and the
            number of splits.
        team: address of a ``sharing.Team``; 0: attention over long sequences is left to the caller.

    Danger: places are in the list, sizes of writes and the Layout belong to the shapes that are
        expected, and new keys and values do not overlap caches.

    Returns:
        ``REFUSED``, ``WRITTEN`` or ``DONE``; and ``NEWS``.
    """
    return _call(slots, table, space, team)


@kernel("int64(int64,int64,int64,int64)")
def called(slots, table, space, team):
    """The same for a library that calls it."""
    return _call(slots, table, space, team)
