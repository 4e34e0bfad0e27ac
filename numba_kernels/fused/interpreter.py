"""Walks a table of instructions: on the calling thread, or on several that meet at barriers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.fused import barrier
from onnx_inplace.numba_kernels.memory import load_int64, on_demand, store_int64

BARRIER = 1
"""Flag: no thread goes on before all have done this instruction."""
FIRST = 2
"""Flag: the first thread does the whole instruction, the others nothing."""

_INT = ir.IntType(64)
_ROW = 24  # bytes of an instruction
_CLOCK = 16  # bytes of its two times


def table(instructions: Iterable[tuple[int, int, int]]) -> np.ndarray[Any, Any]:
    """Rows of (address of the kernel, address of the argument block, flags)."""
    return np.array(list(instructions), np.int64).reshape(-1, 3)


def control() -> np.ndarray[Any, Any]:
    """State for the barriers of one run at a time, on cache lines of its own."""
    raw = np.zeros(barrier.SIZE + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + barrier.SIZE].view(np.int64)


def clocks(count: int, threads: int) -> np.ndarray[Any, Any]:
    """Where runs add up times: (threads, count, 2) nanoseconds in an instruction, and behind it."""
    return np.zeros((threads, count, 2), np.int64)


def team(state: np.ndarray[Any, Any]) -> int:
    """Threads that took part in the last :data:`run_parallel` with this state."""
    return int(state[barrier.TEAM // 8])


@intrinsic
def _call(typing_context, function, arguments, thread, threads):
    def generate(context, builder, signature, values):
        kernel = ir.FunctionType(ir.VoidType(), [_INT] * 3).as_pointer()
        builder.call(builder.inttoptr(values[0], kernel), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@njit
def _add(place, number):
    store_int64(place, load_int64(place) + number)


@njit
def _walk(instructions, count, state, thread, threads, clocks):
    clock, now = clocks + thread * count * _CLOCK, barrier.nanoseconds() if clocks else 0
    for row in range(instructions, instructions + count * _ROW, _ROW):
        function, arguments = load_int64(row), load_int64(row + 8)
        flags = load_int64(row + 16)
        if flags & FIRST:
            if thread == 0:
                _call(function, arguments, 0, 1)
        else:
            _call(function, arguments, thread, threads)
        if clocks:
            before, now = now, barrier.nanoseconds()
            _add(clock, now - before)
        if flags & BARRIER:
            barrier.meet(state, threads)
        if clocks:
            before, now = now, barrier.nanoseconds()
            _add(clock + 8, now - before)
            clock += _CLOCK


@on_demand("void(int64,int64)")
def run(instructions, count):
    """Run ``count`` instructions at an address, without the GIL, on the calling thread."""
    _walk(instructions, count, 0, 0, 1, 0)


@njit
def _join(instructions, count, state, threads, clocks):
    thread, members = barrier.join(state, threads)
    if thread >= 0:
        _walk(instructions, count, state, thread, members, clocks)


@on_demand("int64(int64,int64,int64,int64)", parallel=True)
def run_parallel(instructions, count, state, threads):
    """Run ``count`` instructions at an address on up to ``threads`` threads, in one region.

    ``threads`` is at most ``numba.get_num_threads()``. Where some of them do not begin at once,
    the others do all the work (:func:`team`). No two calls may share ``state`` at a time.

    Returns:
        Nanoseconds that threads have waited beyond the time in which they keep their core, in all.
        Much of it says that something else uses the cores, and that one thread would be faster.
    """
    barrier.clear(state)
    for worker in prange(threads):
        if worker >= 0:  # of no worker in particular, and not for numba to move out of the loop
            _join(instructions, count, state, threads, 0)
    return load_int64(state + barrier.WAITED)


@on_demand("int64(int64,int64,int64,int64,int64)", parallel=True)
def run_clocked(instructions, count, state, threads, clocks):
    """Like :data:`run_parallel`, and adds up times at the address of :func:`clocks`."""
    barrier.clear(state)
    for worker in prange(threads):
        if worker >= 0:
            _join(instructions, count, state, threads, clocks)
    return load_int64(state + barrier.WAITED)
