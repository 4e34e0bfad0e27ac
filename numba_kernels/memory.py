"""Addresses of arrays and raw memory inside kernels.

Kernels take addresses as int64: one compiled function then serves every element type and rank,
bfloat16 and float16 included, which numba does not accept as array elements. What an address points
to, and that it is in range, is the caller's business.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels import cache

_BYTE = ir.IntType(8).as_pointer()


class OnDemand:
    """A function that takes seconds to compile: compiled, or read from disk, when first wanted."""

    def __init__(
        self, compile_: Callable[[Callable[..., Any]], tuple[Any, bool]], function: Any
    ) -> None:
        """``compile_`` gives what is called, and whether it was read from disk."""
        self._compile, self._function = compile_, function
        self._result: Any = None
        self._lock = threading.Lock()
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        self.__doc__ = function.__doc__

    def ready(self) -> Any:
        """The compiled function. Asked for at load, so that nothing compiles during a run."""
        with self._lock:
            if self._result is None:
                start = time.perf_counter()
                self._result, read = self._compile(self._function)
                _made.append(Made(self.name, time.perf_counter() - start, read))
            return self._result


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A kernel that this process has made ready.

    Attributes:
        name: module and function; copies of ``specialise`` carry their constants.
        seconds: that it took.
        read: it was read from disk, not compiled.
    """

    name: str
    seconds: float
    read: bool


_made: list[Made] = []


def made() -> tuple[Made, ...]:
    """All kernels that this process has made ready, in order."""
    return tuple(_made)


def on_demand(signature: str, **options: Any) -> Callable[[Callable[..., Any]], OnDemand]:
    """A function for one signature: ``ready()(...)``. Without the GIL, but for ``nogil=False``."""
    options = {"nogil": True, **options}

    def compile_(function: Callable[..., Any]) -> tuple[Any, bool]:
        with cache.kept() as kept:
            dispatcher: Any = numba.njit(cache=kept, **options)(function)
        dispatcher.compile(signature)
        # The code of the only signature, which converts its arguments: numba's dispatcher would
        # look for it in every call, which takes a third of the time of a small one.
        (compiled,) = dispatcher.overloads.values()
        return compiled.entry_point, sum(dispatcher.stats.cache_hits.values()) > 0

    return lambda function: OnDemand(compile_, function)


def kernel(signature: str) -> Callable[[Callable[..., Any]], OnDemand]:
    """A C function, for calls by address: ``ready().address``."""

    def compile_(function: Callable[..., Any]) -> tuple[Any, bool]:
        with cache.kept() as kept:
            result: Any = numba.cfunc(signature, cache=kept)(function)
        return result, result.cache_hits > 0

    return lambda function: OnDemand(compile_, function)


FIELD = object.__basicsize__
"""An array object has the address of its elements so many bytes behind its own (``id``).

numpy's C structure begins with the header of every object and that pointer; this is part of its
ABI. The documented ways to the address take 0.8 us, and a decoder needs some hundred of them for
each token: kernels that are called so often take ``id(array) + FIELD`` and look themselves.
"""

_read_pointer = ctypes.c_void_p.from_address


def pointer(place: int) -> int:
    """The address that memory at ``place`` holds."""
    return _read_pointer(place).value or 0


def address(array: np.ndarray[Any, Any]) -> int:
    """Address of the first element of an array."""
    return _read_pointer(id(array) + FIELD).value or 0


_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def mapped(size: int) -> mmap.mmap:
    """So many bytes of addresses from the begin of a frame on; memory comes with the first write.

    Raises:
        MemoryError: the system has no more addresses.
    """
    try:
        return mmap.mmap(-1, size, **_PRIVATE)
    except OSError as error:
        raise MemoryError(f"no {size} bytes of address space: {error}") from error


def _check_field() -> None:
    probes: list[np.ndarray[Any, Any]] = [
        np.zeros(3),
        np.zeros((4, 4), np.uint8)[1:, 2:],
        np.asarray(3),
    ]
    if any(address(p) != p.__array_interface__["data"][0] for p in probes):
        raise ImportError("the arrays of this interpreter have another layout than numpy documents")


_check_field()


@intrinsic
def copy(typing_context, target, source, size):
    """Copy ``size`` bytes between places that do not overlap."""

    def generate(context, builder, signature, arguments):
        to, source, size = arguments
        to, source = builder.inttoptr(to, _BYTE), builder.inttoptr(source, _BYTE)
        cgutils.raw_memcpy(builder, to, source, size, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _loader(element, result):
    """An intrinsic ``load(address)``; integers are sign-extended."""

    @intrinsic
    def load(typing_context, place):
        def generate(context, builder, signature, arguments):
            value = builder.load(builder.inttoptr(arguments[0], element.as_pointer()))
            value.align = 1
            if isinstance(element, ir.IntType) and element.width < 64:
                value = builder.sext(value, ir.IntType(64))
            return value

        return result(types.int64), generate

    return load


load_int64 = _loader(ir.IntType(64), types.int64)
load_int32 = _loader(ir.IntType(32), types.int64)


@intrinsic
def call(typing_context, function, argument):
    """Call the kernel ``void(int64)`` at an address."""

    def generate(context, builder, signature, arguments):
        kernel = ir.FunctionType(ir.VoidType(), [ir.IntType(64)]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], kernel), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def store_int64(typing_context, place, value):
    """Write one int64."""

    def generate(context, builder, signature, arguments):
        place, value = arguments
        builder.store(value, builder.inttoptr(place, ir.IntType(64).as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def fetch_add(typing_context, place, number):
    """Add to an int64 that threads share; its value before."""

    def generate(context, builder, signature, arguments):
        place, number = arguments
        pointer = builder.inttoptr(place, ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, number, "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def swap_if(typing_context, place, expected, value):
    """Write an int64 that threads share where it is as expected; whether it was."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        found = builder.cmpxchg(pointer, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.zext(builder.extract_value(found, 1), ir.IntType(64))

    return types.int64(types.int64, types.int64, types.int64), generate
