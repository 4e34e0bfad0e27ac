"""Python's objects as kernels see them: arrays of numpy, items of tuples and lists; the GIL.

To ask numpy for shape, type and order of an array takes a microsecond, and tens of them where the
code for that has left the CPU's caches. Here the C structures are read, whose fields are part of
the ABI; where they are not what they are documented to be, importing this module fails.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import int32_at, int64_at
from onnx_inplace.numba_kernels.memory import FIELD, address, load_int64

ARRAY = id(np.ndarray)
"""The type of arrays, as objects name it."""
ITEMS = tuple.__basicsize__
"""A tuple has the addresses of its items so many bytes behind its own (``id``)."""
LIST = ITEMS
"""A list has so many bytes behind its own the address where those of its items are."""

_KIND = FIELD - 8  # of an object: its type
# of an array object, behind the address of its elements
_NDIM, _DIMS, _DTYPE, _FLAGS = (FIELD + offset for offset in (8, 16, 40, 48))
_C_CONTIGUOUS = 1  # of the flags
_INT, _STATE = ir.IntType(64), ir.IntType(8).as_pointer()


# With the GIL: nobody changes or frees an array meanwhile.
@njit
def is_array(object_, kind, dtype, ndim, wanted):
    """Whether an object is a C-contiguous array of this type and shape.

    ``kind``: ``ARRAY``. ``dtype``: ``id`` of numpy's object. ``wanted``: address of (ndim) int64.
    """
    if load_int64(object_ + _KIND) != kind or load_int64(object_ + _DTYPE) != dtype:
        return False
    if carray(int32_at(object_ + _NDIM), (1,))[0] != ndim:
        return False
    if not carray(int32_at(object_ + _FLAGS), (1,))[0] & _C_CONTIGUOUS:
        return False
    dims, same = load_int64(object_ + _DIMS), True
    for axis in range(ndim):
        same &= load_int64(dims + 8 * axis) == load_int64(wanted + 8 * axis)
    return same


class Expected(NamedTuple):
    """One array of a list, int64."""

    place: int  # in the list
    data: int  # address of its elements; 0: any
    dtype: int  # ``id`` of numpy's object
    ndim: int
    dims: int  # address of (ndim) int64


EXPECTED = len(Expected._fields)
NOTHING = -1
"""The place of an array that is not there: nothing is expected of it."""


@njit
def _expected(at):
    n = carray(int64_at(at), (EXPECTED,))
    return Expected(n[0], n[1], n[2], n[3], n[4])


@njit
def as_expected(items, table, count, kind):
    """Whether objects of a list are the arrays that a table expects: ``count`` of ``Expected``."""
    for k in range(count):
        x = _expected(table + 8 * EXPECTED * k)
        if x.place == NOTHING:
            continue
        array = load_int64(items + 8 * x.place)
        if not is_array(array, kind, x.dtype, x.ndim, x.dims):
            return False
        if x.data and load_int64(array + FIELD) != x.data:
            return False
    return True


@njit
def data_of(items, table, k):
    """Where the elements of the k-th array that a table expects are."""
    return load_int64(load_int64(items + 8 * _expected(table + 8 * EXPECTED * k).place) + FIELD)


@intrinsic
def let_go(typing_context):
    """Let go of the GIL; what :func:`take_back` wants."""

    def generate(context, builder, signature, arguments):
        function = ir.FunctionType(_STATE, [])
        save = cgutils.get_or_insert_function(builder.module, function, "PyEval_SaveThread")
        return builder.ptrtoint(builder.call(save, []), _INT)

    return types.int64(), generate


@intrinsic
def take_back(typing_context, state):
    """Wait for the GIL."""

    def generate(context, builder, signature, arguments):
        function = ir.FunctionType(ir.VoidType(), [_STATE])
        restore = cgutils.get_or_insert_function(builder.module, function, "PyEval_RestoreThread")
        builder.call(restore, [builder.inttoptr(arguments[0], _STATE)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _check_fields() -> None:
    def read(place: int, kind: Any) -> int:
        value: int = kind.from_address(place).value or 0
        return value

    base = np.zeros((4, 6), np.float32)
    for probe in (base, base[1:, ::2], base.T, np.asarray(3), np.zeros((2, 0, 5), np.uint8)):
        at, items, listed = id(probe), (probe,), [base, probe]
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
            read(read(id(listed) + LIST, ctypes.c_void_p) + 8, ctypes.c_void_p),
        )
        contiguous = bool(probe.flags.c_contiguous)
        expected = ARRAY, address(probe), probe.ndim, probe.shape, id(probe.dtype)
        if found != (*expected, contiguous, at, at):
            raise ImportError("objects of this interpreter have another layout than documented")


_check_fields()
