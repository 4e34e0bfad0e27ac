"""What reading memory costs, and how caches are made cold: the same sums over an array."""

from __future__ import annotations

import numba
import numpy as np
from timing import Call

from onnx_inplace.runner import threads as policy

COLD = 320 << 20
"""Bytes that are read between two calls: more than the caches of the CPUs that this ran on."""

_LANES = 4096  # int64 elements of a block: one thread reads whole blocks, neighbours in turn


@numba.njit(parallel=True, cache=True, nogil=True)
def _total(data):
    """Sum of (blocks, lanes) int64; each thread reads a stretch of it."""
    total = 0
    for block in numba.prange(data.shape[0]):
        row = data[block]
        part = 0
        for lane in range(row.shape[0]):
            part += row[lane]
        total += part
    return total


def reading(nbytes: int, threads: int) -> tuple[Call, int]:
    """A call that reads memory once on ``threads`` threads, and the bytes that it reads."""
    data = np.ones((max(1, nbytes // 8 // _LANES), _LANES), np.int64)

    def read() -> None:
        with policy.region(threads):
            _total(data)

    read()
    return read, data.nbytes
