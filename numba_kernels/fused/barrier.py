"""How the threads of one region wait for one another: by atomic counters, without a lock.

A barrier counts who has arrived; the last one opens the next generation. Who waits looks at the
generation alone, some microseconds in a busy loop, then it lets other processes have the core: in
such a loop, it would wait for a thread that cannot run because of it.

State is ``SIZE`` bytes that belong to one run at a time, on cache lines of their own.
"""

from __future__ import annotations

import platform
import time
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.memory import fetch_add

ARRIVED, GENERATION, WAITED, JOINED, TEAM = 0, 64, 128, 136, 144
SIZE = 192  # bytes of state
SPINS = 2000  # looks at the generation before the core is let go: 20 to 80 us
_CLOSED = 1 << 32  # added to the count of those who joined: whoever comes now is late
_JOIN_TIME = 200_000  # ns, time to begin for the other threads: much more than to wake one up

_I8, _I32, _I64 = (ir.IntType(n) for n in (8, 32, 64))
_PAUSES = {  # an instruction that leaves the core's resources to its other thread
    "x86_64": ("llvm.x86.sse2.pause", []),
    "AMD64": ("llvm.x86.sse2.pause", []),
    "aarch64": ("llvm.aarch64.hint", [1]),
    "arm64": ("llvm.aarch64.hint", [1]),
}


def _external(builder: Any, name: str, result: Any, values: list[Any]) -> Any:
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


@intrinsic
def pause(typing_context):
    """Say that this is a busy loop."""

    def generate(context, builder, signature, arguments):
        name, numbers = _PAUSES.get(platform.machine(), (None, []))
        if name is not None:
            _external(builder, name, ir.VoidType(), [_I32(n) for n in numbers])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def give_way(typing_context):
    """Let another thread have the core, if one waits for it."""

    def generate(context, builder, signature, arguments):
        _external(builder, "sched_yield", _I32, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def nanoseconds(typing_context):
    """A clock that only goes forward."""

    def generate(context, builder, signature, arguments):
        place = cgutils.alloca_once(builder, _I64, 2)
        pointer = builder.bitcast(place, _I8.as_pointer())
        _external(builder, "clock_gettime", _I32, [_I32(time.CLOCK_MONOTONIC), pointer])
        seconds = builder.load(place)
        rest = builder.load(builder.gep(place, [_I32(1)]))
        return builder.add(builder.mul(seconds, _I64(10**9)), rest)

    return types.int64(), generate


@intrinsic
def load_shared(typing_context, place):
    """An int64 that another thread may write; what it wrote before can be seen afterwards."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_shared(typing_context, place, number):
    """Write an int64 for others; whoever sees it sees all that was written before."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@njit
def clear(state):
    """Before a region: nobody has arrived."""
    store_shared(state + ARRIVED, 0)
    store_shared(state + GENERATION, 0)
    store_shared(state + WAITED, 0)
    store_shared(state + JOINED, 0)
    store_shared(state + TEAM, 0)


@njit
def wait_until_not(place, old, state):
    """Until the int64 at ``place`` is another one than ``old``."""
    for _ in range(SPINS):
        if load_shared(place) != old:
            return
        pause()
    began = nanoseconds()
    while load_shared(place) == old:
        give_way()
    fetch_add(state + WAITED, nanoseconds() - began)


@njit
def meet(state, threads):
    """Go on when all of ``threads`` have come here, and see what they wrote."""
    if threads == 1:
        return
    generation = load_shared(state + GENERATION)  # before arriving: afterwards it may be the next
    if fetch_add(state + ARRIVED, 1) == threads - 1:
        store_shared(state + ARRIVED, 0)  # nobody arrives again before the generation changes
        store_shared(state + GENERATION, generation + 1)
        return
    wait_until_not(state + GENERATION, generation, state)


@njit
def join(state, threads):
    """(number of this thread, how many take part); number -1: the others began without it.

    The first one waits a little for the rest. A region whose threads share a core, or get none,
    then goes on with fewer instead of waiting for ever: no scheduler is trusted to run all.
    """
    ticket = fetch_add(state + JOINED, 1)
    if ticket >= _CLOSED:
        return -1, 0
    if ticket > 0:
        wait_until_not(state + TEAM, 0, state)
        return ticket, load_shared(state + TEAM)
    began = nanoseconds()
    while load_shared(state + JOINED) < threads and nanoseconds() - began < _JOIN_TIME:
        pause()
    team = fetch_add(state + JOINED, _CLOSED)
    store_shared(state + TEAM, team)
    return 0, team
