"""Looks at array objects of a caller and takes those that are as expected, all in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels.floats import int64_at
from onnx_inplace.numba_kernels.memory import FIELD, copy, load_int64, on_demand
from onnx_inplace.numba_kernels.objects import is_array


class Expected(NamedTuple):
    """One array, int64."""

    dtype: int  # address of the numpy object
    ndim: int
    dims: int  # address of (ndim) int64
    nbytes: int
    copy: int  # address of so many bytes that get its elements; 0: they are not copied
    bounded: int  # 1: the copies are int64, and each is within the bounds
    low: int
    high: int


_WORDS = len(Expected._fields)


def table(rows: Sequence[Expected]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """``expected`` of :data:`take`, (arrays, words) int64."""
    return np.array(rows, np.int64).reshape(-1, _WORDS)


def lent(
    starts: Sequence[int], stops: Sequence[int], views: Sequence[int]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """``lent`` of :data:`take`.

    Args:
        starts: of intervals of memory that are disjoint, ascending.
        stops: of the same.
        views: addresses of int64, each how many pieces of memory are lent beside these intervals.
    """
    return np.array([len(starts), len(views), *starts, *stops, *views], np.int64)


@njit
def _seen(lent):
    """Whether memory is lent beside the intervals."""
    count, views, total = load_int64(lent), load_int64(lent + 8), 0
    for k in range(views):
        total += load_int64(load_int64(lent + 8 * (2 + 2 * count + k)))
    return total != 0


@njit
def _overlaps(intervals, count, start, stop):
    """Whether bytes ``start .. stop`` meet one of ``count`` disjoint intervals, sorted."""
    low, high = 0, count
    while low < high:  # afterwards: the first interval that does not start before the end
        middle = (low + high) // 2
        if load_int64(intervals + 8 * middle) < stop:
            low = middle + 1
        else:
            high = middle
    return low > 0 and load_int64(intervals + 8 * (count + low - 1)) > start


@njit
def _read(at):
    n = carray(int64_at(at), (_WORDS,))
    return Expected(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7])


# With the GIL: nobody changes or frees an array meanwhile.
@njit
def taken(objects, expected, count, kind, lent):
    """See :func:`take`."""
    lent = load_int64(lent)
    if _seen(lent):
        return False
    for k in range(count):
        array, x = load_int64(objects + 8 * k), _read(expected + 8 * _WORDS * k)
        if not is_array(array, kind, x.dtype, x.ndim, x.dims):
            return False
        data = load_int64(array + FIELD)
        if x.nbytes and _overlaps(lent + 16, load_int64(lent), data, data + x.nbytes):
            return False
        if x.copy:
            copy(x.copy, data, x.nbytes)
            numbers = carray(int64_at(x.copy), (x.nbytes // 8 if x.bounded else 0,))
            for i in range(len(numbers)):
                if numbers[i] < x.low or numbers[i] > x.high:
                    return False
    return True


@on_demand("int64(int64,int64,int64,int64,int64)", nogil=False)
def take(objects, expected, count, kind, lent):
    """Whether ``count`` objects are arrays as expected, apart from memory that is lent.

    Elements that are wanted are copied on the way, and compared with their bounds as they were
    copied: nobody can change them afterwards. After a 0 copies may have been written.

    Shapes:
        objects:   (count) int64, addresses of objects
        expected:  (count, words), see :func:`table`
        kind:      address of the type ``numpy.ndarray``
        lent:      ``id(...) + FIELD`` of an array, see :func:`lent`

    Returns:
        1 or 0.
    """
    return int(taken(objects, expected, count, kind, lent))
