"""What reading memory costs, and how caches are made cold: the same sums over an array."""

from __future__ import annotations

import numba
import numpy as np
from timing import Call

from onnx_inplace.runner import threads as policy

COLD = 320 << 20
"""Bytes that are read before each turn: more than the caches of the CPUs that this ran on."""
BETWEEN = 1 << 30
"""Bytes that are read at least between two calls over one cache. ``COLD`` alone would leave part of
it in a last cache of 260 MB, which does not evict the oldest lines first."""

_LANES = 1024  # int64 elements of a block: one thread reads whole blocks, neighbours in turn


@numba.njit(parallel=True, cache=True, nogil=True)
def _total(data):
    """Sum of (4, blocks, lanes) int64; each thread reads a stretch of each of the four.

    Prefetchers stop at the end of each 4 KiB: one stream a thread would wait there, and read less
    than the machine can.
    """
    total = 0
    for block in numba.prange(data.shape[1]):
        a, b, c, d = data[0, block], data[1, block], data[2, block], data[3, block]
        part = 0
        for lane in range(a.shape[0]):
            part += a[lane] + b[lane] + c[lane] + d[lane]
        total += part
    return total


def reading(nbytes: int, threads: int) -> tuple[Call, int]:
    """A call that reads memory once on ``threads`` threads, and the bytes that it reads."""
    data = np.ones((4, max(1, nbytes // 32 // _LANES), _LANES), np.int64)

    def read() -> None:
        with policy.region(threads):
            _total(data)

    read()
    return read, data.nbytes


def cooling(variants: int, threads: int) -> Call:
    """What has to run before each turn so that ``variants`` in turns find their caches cold."""
    read, _ = reading(COLD, threads)
    times = -(-BETWEEN // (COLD * variants))

    def cool() -> None:
        for _ in range(times):
            read()

    return cool
