"""Looks at array objects of a caller and takes those that are as expected, all in one call.

To ask numpy for shape, type and order of an array takes a microsecond, and tens of them where the
code for that has left the CPU's caches. Here numpy's C structure is read, whose fields are part of
its ABI; where they are not what they are documented to be, importing this module fails.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels.floats import int32_at, int64_at
from onnx_inplace.numba_kernels.memory import FIELD, address, copy, load_int64, on_demand

_KIND = FIELD - 8  # of an object: its type
# of an array object, behind the address of its elements
_NDIM, _DIMS, _DTYPE, _FLAGS = (FIELD + offset for offset in (8, 16, 40, 48))
_C_CONTIGUOUS = 1  # of the flags
ITEMS = tuple.__basicsize__
"""A tuple has the addresses of its items so many bytes behind its own (``id``)."""


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


@njit
def _is(array, kind, x):
    """Whether an object is an array of this type, shape and order."""
    if load_int64(array + _KIND) != kind or load_int64(array + _DTYPE) != x.dtype:
        return False
    if carray(int32_at(array + _NDIM), (1,))[0] != x.ndim:
        return False
    if not carray(int32_at(array + _FLAGS), (1,))[0] & _C_CONTIGUOUS:
        return False
    dims, wanted = load_int64(array + _DIMS), x.dims
    for axis in range(x.ndim):
        if load_int64(dims + 8 * axis) != load_int64(wanted + 8 * axis):
            return False
    return True


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
@on_demand("int64(int64,int64,int64,int64,int64,int64)", nogil=False)
def take(objects, expected, count, kind, intervals, lent):
    """Whether ``count`` objects are arrays as expected, apart from memory that is lent.

    Elements that are wanted are copied on the way, and compared with their bounds as they were
    copied: nobody can change them afterwards. After a 0 copies may have been written.

    Shapes:
        objects:   (count) int64, addresses of objects
        expected:  (count, words), see :func:`table`
        kind:      address of the type ``numpy.ndarray``
        intervals: ``id(...) + FIELD`` of an array (2, lent) int64: begins and ends of memory that
                   is lent, disjoint and ascending

    Returns:
        1 or 0.
    """
    intervals = load_int64(intervals)
    for k in range(count):
        array, x = load_int64(objects + 8 * k), _read(expected + 8 * _WORDS * k)
        if not _is(array, kind, x):
            return 0
        data = load_int64(array + FIELD)
        if x.nbytes and _overlaps(intervals, lent, data, data + x.nbytes):
            return 0
        if x.copy:
            copy(x.copy, data, x.nbytes)
            numbers = carray(int64_at(x.copy), (x.nbytes // 8 if x.bounded else 0,))
            for i in range(len(numbers)):
                if numbers[i] < x.low or numbers[i] > x.high:
                    return 0
    return 1


def _check_fields() -> None:
    def read(place: int, kind: Any) -> int:
        value: int = kind.from_address(place).value or 0
        return value

    base = np.zeros((4, 6), np.float32)
    for probe in (base, base[1:, ::2], base.T, np.asarray(3), np.zeros((2, 0, 5), np.uint8)):
        at, items = id(probe), (probe,)
        dims = read(at + _DIMS, ctypes.c_void_p)
        shape = tuple(read(dims + 8 * axis, ctypes.c_int64) for axis in range(probe.ndim))
        found = (
            read(at + _KIND, ctypes.c_void_p),
            read(at + FIELD, ctypes.c_void_p),
            read(at + _NDIM, ctypes.c_int),
            shape,
            read(at + _DTYPE, ctypes.c_void_p),
            bool(read(at + _FLAGS, ctypes.c_int) & _C_CONTIGUOUS),
            read(id(items) + ITEMS, ctypes.c_void_p),
        )
        contiguous = bool(probe.flags.c_contiguous)
        expected = id(np.ndarray), address(probe), probe.ndim, probe.shape, id(probe.dtype)
        if found != (*expected, contiguous, at):
            raise ImportError("arrays of this interpreter have another layout than documented")


_check_fields()
