"""Memory that onnxruntime has filled with packed weights, in huge pages, where Linux has them.

onnxruntime allocates it in pieces of frames of 4 KiB. A core that streams through weights stops at
the end of each: for the translation of the address, and because prefetchers go no further. Nothing
tells us where these pieces are, but the mappings of the process do: what is private memory after
sessions have been loaded, was not mapped before and is resident as a whole. Content and addresses
stay, and so does the size of what is resident.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

_HUGE = 2 << 20  # bytes of a huge page where a page has 4 KiB
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1: at once, without asking for more memory to be used
_PRESENT = 1 << 63  # of an entry of pagemap, an int64 for each page
_MAPS, _PAGES = Path("/proc/self/maps"), Path("/proc/self/pagemap")
_WANTED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@contextlib.contextmanager
def of_what_is_loaded(nbytes: int) -> Iterator[None]:
    """Put private memory that is mapped and filled inside into huge pages, where that may be.

    ``nbytes``: of the weights that are loaded inside. Where they fill no huge page, nothing is
    looked for: most models are small, and to read the mappings takes a millisecond.
    """
    before = _private() if nbytes >= _HUGE and _possible() else None
    yield
    if before is None:
        return
    with contextlib.suppress(OSError):  # a system that shows less of itself
        advise = ctypes.CDLL(None).madvise
        for start, end in _runs(_filled(_blocks(before, _private()))):
            advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(_COLLAPSE))


def _possible() -> bool:
    """Whether this is Linux with pages of 4 KiB, and huge ones have not been switched off."""
    if sys.platform != "linux" or mmap.PAGESIZE != 4096:
        return False
    try:
        return "[never]" not in _WANTED.read_text() and _PAGES.exists() and _MAPS.exists()
    except OSError:
        return False


def _private() -> list[tuple[int, int]]:
    """Begin and end of the mappings of private memory without a file, by address."""
    found = []
    for line in _MAPS.read_text().splitlines():
        places, access, _, _, file, *name = line.split(maxsplit=5)
        if access == "rw-p" and file == "0" and (not name or name[0] == "[heap]"):
            start, _, end = places.partition("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def _blocks(before: list[tuple[int, int]], now: list[tuple[int, int]]) -> Iterator[int]:
    """Where a huge page fits into a mapping and meets nothing that was mapped ``before``."""
    ends = [end for _, end in before]
    for start, end in now:
        for block in range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
            near = bisect.bisect_right(ends, block)  # the first that ends behind its begin
            if near == len(before) or before[near][0] >= block + _HUGE:
                yield block


def _filled(blocks: Iterable[int]) -> Iterator[int]:
    """Those of which every page is resident: a huge page takes no more memory."""
    count = _HUGE // mmap.PAGESIZE
    with _PAGES.open("rb", buffering=0) as pages:
        for block in blocks:
            pages.seek(block // mmap.PAGESIZE * 8)
            entries = np.frombuffer(pages.read(8 * count), np.uint64)
            if entries.size == count and (entries & np.uint64(_PRESENT)).all():
                yield block


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Begin and end of blocks that follow one another: every call to the system has its price."""
    start = end = 0
    for block in blocks:
        if block != end:
            if end:
                yield start, end
            start = block
        end = block + _HUGE
    if end:
        yield start, end
