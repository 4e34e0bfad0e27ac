"""Runs instructions of the fused step in tests, on any number of threads."""

import numba
import numpy as np

from onnx_inplace.numba_kernels.fused import interpreter, kernel
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import threads as policy


def run(instructions, threads=1):
    """Run (kernel, argument block[, flags]) one after the other; nanoseconds waited."""
    blocks = [kernel.block(arguments) for _, arguments, *_ in instructions]
    rows = [
        (function.ready().address, address(memory), *(flags or [interpreter.BARRIER]))
        for (function, _, *flags), memory in zip(instructions, blocks, strict=True)
    ]
    table = interpreter.table(rows)
    if threads == 1:
        interpreter.run.ready()(address(table), len(rows))
        return 0
    state = interpreter.control()
    with policy.region(threads):
        members = min(threads, numba.get_num_threads())
        return interpreter.run_parallel.ready()(address(table), len(rows), address(state), members)


def together(instructions, threads):
    """Run instructions as ``threads`` threads would, one thread after the other: no barriers."""
    for function, arguments, *_ in instructions:
        memory = kernel.block(arguments)
        for thread in range(threads):
            function.ready().ctypes(address(memory), thread, threads)


def row(array):
    """Bytes from row to row."""
    return array.strides[0] if array.ndim > 1 else 0


def floats(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)
