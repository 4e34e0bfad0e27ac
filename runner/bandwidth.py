"""How fast this machine reads memory: what a step of a decoder can be compared with."""

from __future__ import annotations

import statistics
import time

import numpy as np

from onnx_inplace.numba_kernels.fused import interpreter, reductions
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import storage, threads

_ROWS = 64  # that threads share
_SMALLEST = 1 << 22  # bytes: below, a pass is over before it can be timed


def read(size: int, workers: int, passes: int = 9) -> float:
    """Bytes/s of reading the same ``size`` bytes again and again: median over ``passes``.

    What the caches of the CPU keep of them from pass to pass counts, as it does for the weights of
    a model that runs again and again.
    """
    columns = max(size, _SMALLEST) // (4 * _ROWS)
    data = storage.empty((_ROWS, columns), np.dtype(np.float32))
    data[:] = 1
    sums = np.zeros(_ROWS, np.float32)
    block = reductions.Reduce(
        reductions.Of.SUM, address(data), address(sums), _ROWS, columns, data.strides[0]
    )
    words = np.array(block, np.int64)
    row = reductions.reduce.ready().address, address(words), interpreter.BARRIER
    table, control = interpreter.table([row]), interpreter.control()
    run = interpreter.run_parallel.ready()
    spent: list[float] = []
    with threads.region(workers):
        for number in range(passes + 2):
            start = time.perf_counter()
            run(address(table), 1, address(control), workers)
            if number > 1:
                spent.append(time.perf_counter() - start)
    return data.nbytes / statistics.median(spent)
