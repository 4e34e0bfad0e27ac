"""Memory of single pages: taken from the system one by one, kept for a while when given back.

A cache grows and shrinks by pages, and no page ever moves. Which page holds what is decided in
``page_table``. Pages of one size lie side by side in huge frames (``slabs``): attention reads them
once a token, and in frames of 4 KiB a cold read waits for a translation at the end of each.

Policy: a page that is given back is kept for the next page of the same number of bytes as long as
all that is kept stays under ``keep`` bytes; what is beyond goes back to the system at once, the
longest kept first. A page that somebody outside has seen (``Page.raw``) is never kept: its memory
lives as long as that view and is never used again.
"""

from __future__ import annotations

import collections
import ctypes
import threading
from collections.abc import Callable, Sequence

import numpy as np

from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import slabs, storage
from onnx_inplace.runner.storage import Array

KEEP = 16 << 20
"""Bytes that a memory keeps by default, over all sizes of pages."""

_BYTE = np.dtype(np.uint8)
_SMALLEST = 4 << 10  # bytes of a page that lies in a slab: smaller ones share a frame anyway
_RELEASE = 32 << 20  # bytes given back before the C library is asked to return them, too


class PageMemory:
    """Free lists by number of bytes. All methods may be called from any thread.

    Attributes:
        keep: most bytes that are kept for later pages.
    """

    def __init__(self, keep: int = KEEP):
        """Nothing is kept yet."""
        self.keep = keep
        self._lock = threading.Lock()
        # Kept pages in the order in which they came back, and the same pages by size.
        self._order: collections.OrderedDict[int, Array] = collections.OrderedDict()
        self._by_size: dict[int, list[int]] = {}
        self._kept = 0
        self._released = 0  # since the C library was last asked

    @property
    def kept(self) -> int:
        """Bytes that wait for the next page of their size."""
        return self._kept

    def take(self, sizes: Sequence[int], *, zeroed: bool = True) -> list[Array]:
        """Pages of these numbers of bytes: all of them or, with MemoryError, none.

        Args:
            sizes: bytes of each page.
            zeroed: whether all bytes are 0; else the caller writes every byte.

        Returns:
            uint8 arrays, one for each size, aligned to a cache line, that share nothing.
        """
        taken: list[Array] = []
        try:
            for size in sizes:
                taken.append(self._one(size, zeroed))
        except BaseException:
            for page in taken:
                self.give(page)
            raise
        return taken

    def _one(self, size: int, zeroed: bool) -> Array:
        with self._lock:
            held = self._by_size.get(size)
            page = self._order.pop(held.pop()) if held else None
            if page is not None:
                self._kept -= size
        if page is None:
            if _SMALLEST <= size <= slabs.LARGEST:
                return slabs.shared.take(size, zeroed=zeroed)
            # Zeroed memory of the system is committed when it is first written.
            return (storage.zeros if zeroed else storage.empty)((size,), _BYTE)
        if zeroed:
            page[:] = 0
        return page

    def give(self, page: Array) -> None:
        """Give back a page that nobody else can see. A part of a mapped file is let go."""
        if isinstance(page.base, np.ndarray) and not page.base.flags.owndata:
            return  # of a mapped file
        size = page.nbytes
        with self._lock:
            if size <= self.keep:
                place = address(page)
                self._order[place] = page
                self._by_size.setdefault(size, []).append(place)
                self._kept += size
            else:
                self._released += size
            released = self._forget(self.keep)
        del page
        if released:
            _return_to_system()

    def trim(self, keep: int = 0) -> int:
        """Give kept pages back to the system until at most ``keep`` bytes are left.

        Returns:
            How many bytes of pages that were.
        """
        with self._lock:
            before = self._kept
            self._forget(keep)
            freed = before - self._kept
            self._released = 0
        _return_to_system()
        return freed

    def _forget(self, keep: int) -> bool:
        """Drop the oldest pages beyond ``keep``; whether it is time to ask the C library."""
        while self._kept > keep:
            place, page = self._order.popitem(last=False)
            self._by_size[page.nbytes].remove(place)
            self._kept -= page.nbytes
            self._released += page.nbytes
        if self._released < _RELEASE:
            return False
        self._released = 0
        return True


def _find_trim() -> Callable[[], object]:
    """What is freed stays with the C library unless it ends the heap; glibc can be asked for it."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda: None
    return lambda: trim(0)


_return_to_system = _find_trim()

shared = PageMemory()
"""The memory of all caches of this process: a page that one layer frees serves the next layer."""
