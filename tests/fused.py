"""Runs instructions of the fused step in tests, on any number of threads."""

import math

import numba
import numpy as np

from onnx_inplace.numba_kernels.fused import interpreter, kernel
from onnx_inplace.numba_kernels.fused.elementwise import One, Two
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


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ONE = {
    One.IDENTITY: lambda x: x,
    One.NEGATE: np.negative,
    One.ABSOLUTE: np.abs,
    One.RECIPROCAL: lambda x: 1 / x,
    One.SQUARE_ROOT: np.sqrt,
    One.RELU: lambda x: np.maximum(x, 0),
    One.EXP: np.exp,
    One.SIGMOID: sigmoid,
    One.SILU: lambda x: x * sigmoid(x),
    One.TANH: np.tanh,
    One.ERF: np.vectorize(math.erf),
    One.GELU: gelu,
    One.GELU_TANH: gelu_tanh,
    One.SOFTPLUS: lambda x: np.logaddexp(0, x),
}
TWO = {
    Two.ADD: np.add,
    Two.SUBTRACT: np.subtract,
    Two.MULTIPLY: np.multiply,
    Two.DIVIDE: np.divide,
    Two.MAXIMUM: np.maximum,
    Two.MINIMUM: np.minimum,
    Two.SILU_MULTIPLY: lambda a, b: a * sigmoid(a) * b,
    Two.GELU_MULTIPLY: lambda a, b: gelu(a) * b,
    Two.GELU_TANH_MULTIPLY: lambda a, b: gelu_tanh(a) * b,
}
