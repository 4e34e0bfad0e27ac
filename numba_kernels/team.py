"""Threads that help with a kernel if they come in time: nobody waits for one that is late.

A parallel region of OpenMP ends when all of its threads have come, and to wake one takes as long as
half of the tokens of a decoder's layer do. Here the caller opens a job, posts a semaphore and
begins. A helper that wakes up while the job is open enters it; when the caller finds nothing more
to do, it closes the job, does the parts of those who have not come, and waits only for those who
are in. Kernels share their work out by a counter: such a part is empty where others have been
faster.

A team is words of int64 that ``Words`` describes. One caller at a time may use it.
"""

from __future__ import annotations

import enum

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.fused.barrier import SPINS, give_way, load_shared, pause
from onnx_inplace.numba_kernels.memory import (
    fetch_add,
    kernel,
    load_int64,
    store_int64,
    swap_if,
)

_INT = ir.IntType(64)


class Words(enum.IntEnum):
    """Places of a team, in int64. What many threads write has a cache line of its own."""

    STATE = 0
    """Helpers in the job, helpers that have entered it, workers; no workers: it is closed."""
    FUNCTION = 8
    """Of the job: address of a C function (argument, worker)."""
    ARGUMENT = 9
    """What it takes."""
    CORE = 10
    """The core that the caller was on when it opened the job."""
    CROWDED = 11
    """1 since a helper has entered on that core, and took turns with the caller, until cleared."""
    WAIT = 16
    """Address of the C function that waits for a semaphore: 0, or else it was interrupted."""
    POST = 17
    """Address of the C function that posts one."""
    CLOCK = 18
    """Address of the C function ``clock_gettime``."""
    HELPERS = 19
    """How many there are."""
    OWNER = 24
    """1 while a caller has the team."""
    SEMAPHORE = 32
    """Posted once for each helper that is asked for."""
    END = 40


_ENTERED, _WORKERS = 16, 32  # bits of the state below them
_COUNT = (1 << 16) - 1


@intrinsic
def _call_c(typing_context, function, argument):
    """Call the C function ``int(void *)`` at an address."""

    def generate(context, builder, signature, arguments):
        pointer = ir.FunctionType(ir.IntType(32), [_INT]).as_pointer()
        found = builder.call(builder.inttoptr(arguments[0], pointer), [arguments[1]])
        return builder.sext(found, _INT)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _core(typing_context):
    """The number of the core that this thread is on."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(32), [])
        function = cgutils.get_or_insert_function(builder.module, kind, "sched_getcpu")
        return builder.sext(builder.call(function, []), _INT)

    return types.int64(), generate


@njit
def _enter(state):
    """The number of the calling helper in the job; 0: it is late, or others are enough."""
    while True:
        found = load_shared(state)
        entered, workers = found >> _ENTERED & _COUNT, found >> _WORKERS
        if entered + 1 >= workers:
            return 0
        if swap_if(state, found, found + (1 << _ENTERED) + 1):
            return entered + 1


@intrinsic
def _call_part(typing_context, function, argument, worker):
    """Call the C function ``void(int64, int64)`` at an address."""

    def generate(context, builder, signature, arguments):
        pointer = ir.FunctionType(ir.VoidType(), [_INT, _INT]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], pointer), arguments[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@kernel("void(int64)")
def assist(team):
    """What a helper does. Never returns."""
    state = team + 8 * Words.STATE
    wait, semaphore = load_int64(team + 8 * Words.WAIT), team + 8 * Words.SEMAPHORE
    while True:
        if _call_c(wait, semaphore) != 0:
            continue
        worker = _enter(state)
        if worker > 0:
            if _core() == load_int64(team + 8 * Words.CORE):
                store_int64(team + 8 * Words.CROWDED, 1)
            function = load_int64(team + 8 * Words.FUNCTION)
            _call_part(function, load_int64(team + 8 * Words.ARGUMENT), worker)
            fetch_add(state, -1)


@njit
def _wait_for_helpers(state):
    """Until nobody is in the job: shortly awake, then the core is for whoever wants it."""
    for _ in range(SPINS):
        if load_shared(state) & _COUNT == 0:
            return
        pause()
    while load_shared(state) & _COUNT != 0:
        give_way()


@kernel("int64(int64,int64,int64,int64,int64)")
def loop(team, function, workers, batches, argument):
    """Call ``function(argument, 0 .. workers - 1)``, on this thread and on helpers that come.

    Returns:
        0; or 1: another caller has the team, nothing has been called.
    """
    state = team + 8 * Words.STATE
    if not swap_if(team + 8 * Words.OWNER, 0, 1):
        return 1
    store_int64(team + 8 * Words.FUNCTION, function)
    store_int64(team + 8 * Words.ARGUMENT, argument)
    store_int64(team + 8 * Words.CORE, _core())
    fetch_add(state, workers << _WORKERS)
    for _ in range(workers - 1):
        _call_c(load_int64(team + 8 * Words.POST), team + 8 * Words.SEMAPHORE)
    _call_part(function, argument, 0)
    entered = fetch_add(state, -(workers << _WORKERS)) >> _ENTERED & _COUNT
    for worker in range(entered + 1, workers):
        _call_part(function, argument, worker)
    _wait_for_helpers(state)
    fetch_add(state, -(entered << _ENTERED))
    swap_if(team + 8 * Words.OWNER, 1, 0)
    return 0
