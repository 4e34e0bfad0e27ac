"""Memory for arrays of up to some MiB: those of one size lie side by side in huge frames.

The caches of a decoder's layers are of one size, often less than two of the huge frames (2 MiB)
that CPUs translate addresses with, and are read from end to end in every step; so are the pages of
a cache. Allocated one by one they lie in frames of 4 KiB, and a cold read waits for a translation
every 4 KiB: with SmolLM2-135M a token at position 8,000 takes 8 % longer, attention over INT8 pages
a third.

The whole frames of an array that nobody holds any more return to the system at once.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import math
import mmap
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnx_inplace.numba_kernels.memory import address, mapped
from onnx_inplace.runner import storage
from onnx_inplace.runner.storage import Array

LARGEST = 4 << 20
"""Bytes of the largest piece; numpy itself asks for huge frames for what is larger."""

_SMALLEST = 64 << 10  # bytes of an array that may be a piece: less is read in no time
_SLAB = 32 << 20  # of address space: memory is committed frame by frame, when it is first written
_HUGE = 2 << 20
_LINE = 64


# tracemalloc sees numpy's arrays in a domain of their own; pieces are counted beside them
_NUMPY = np.lib.tracemalloc_domain
_track, _untrack = ctypes.pythonapi.PyTraceMalloc_Track, ctypes.pythonapi.PyTraceMalloc_Untrack
_track.argtypes = ctypes.c_uint, ctypes.c_size_t, ctypes.c_size_t
_untrack.argtypes = ctypes.c_uint, ctypes.c_size_t


class _Slab:
    """Pieces of one size. An instance lives as long as it has room or pieces."""

    def __init__(self, stride: int):
        self._region = mapped(_SLAB + _HUGE)
        place = address(np.frombuffer(self._region, np.uint8))
        self._start = -place % _HUGE
        self._address = place + self._start
        self._stride = stride
        self._returned: list[int] = []  # appended to by finalizers, in any thread at any time
        self._given = 0
        self._advise("MADV_HUGEPAGE", self._start, _SLAB)

    @property
    def empty(self) -> bool:
        """Whether nobody has a piece."""
        return len(self._returned) == self._given

    def take(self) -> tuple[int, bool] | None:
        """Number of a piece, and whether it was never used; None: there is no room."""
        try:
            return self._returned.pop(), False
        except IndexError:
            if (self._given + 1) * self._stride > _SLAB:
                return None
            self._given += 1
            return self._given - 1, True

    def address(self, number: int) -> int:
        """Of a piece."""
        return self._address + number * self._stride

    def give(self, number: int) -> None:
        """Nobody sees this piece any more: its whole frames go back to the system."""
        at = self._start + number * self._stride
        first = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (at + self._stride) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._advise("MADV_DONTNEED", first, last - first)
        self._returned.append(number)

    def _advise(self, name: str, start: int, length: int) -> None:
        advice = getattr(mmap, name, None)
        if advice is None:
            return
        with contextlib.suppress(OSError):  # a kernel without huge frames
            self._region.madvise(advice, start, length)


class _Piece:
    """What the arrays over a piece have as their base: it goes back when the last of them goes."""

    __slots__ = "_owner", "_slab", "_stride", "number", "size"

    def __init__(self, owner: Slabs, slab: _Slab, stride: int, number: int, size: int):
        self._owner, self._slab, self._stride = owner, slab, stride
        self.number, self.size = number, size
        _track(_NUMPY, slab.address(number), size)

    @property
    def __array_interface__(self) -> dict[str, object]:
        place = self._slab.address(self.number), False
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": place}

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # else the functions that it takes may be gone, and the memory soon is
            self._owner.give(self._stride, self._slab, self.number)


class Slabs:
    """Pieces by size. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._with_room: dict[int, dict[int, _Slab]] = {}  # by size, then by id
        # ``give`` runs wherever a reference is dropped, under any lock: it takes none.
        self._changed: collections.deque[tuple[int, _Slab]] = collections.deque()

    def take(self, size: int, *, zeroed: bool) -> Array:
        """uint8[size], aligned to a cache line, at most ``LARGEST`` bytes.

        The bytes are used again when no array over them is left.

        Raises:
            MemoryError: the system has no more.
        """
        stride = max(_LINE, -(-size // _LINE) * _LINE)
        with self._lock:
            self._look_again()
            slab, number, fresh = self._slot(stride)
        array = np.asarray(_Piece(self, slab, stride, number, size))
        if zeroed and not fresh:
            array[:] = 0
        return array

    def _slot(self, stride: int) -> tuple[_Slab, int, bool]:
        slabs = self._with_room.setdefault(stride, {})
        for slab in list(slabs.values()):
            slot = slab.take()
            if slot is not None:
                return slab, *slot
            del slabs[id(slab)]  # full: it is listed again when a piece comes back
        slab = _Slab(stride)
        slabs[id(slab)] = slab
        slot = slab.take()
        assert slot is not None  # LARGEST is less than a slab
        return slab, *slot

    def _look_again(self) -> None:
        """List slabs that have room again, let those go that nobody has a piece of."""
        while self._changed:
            stride, slab = self._changed.popleft()
            slabs = self._with_room.setdefault(stride, {})
            if slab.empty:
                slabs.pop(id(slab), None)
            else:
                slabs[id(slab)] = slab

    def give(self, stride: int, slab: _Slab, number: int) -> None:
        """Nobody has an array over this piece any more."""
        _untrack(_NUMPY, slab.address(number))
        slab.give(number)
        self._changed.append((stride, slab))


def zeros(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Zeroed, C-contiguous array, aligned to a cache line; a piece where huge frames pay."""
    size = math.prod(shape) * dtype.itemsize
    if not _SMALLEST <= size <= LARGEST:
        return storage.zeros(shape, dtype)
    return shared.take(size, zeroed=True).view(dtype).reshape(shape)


shared = Slabs()
"""Of all caches of this process."""
