"""Kernels on threads that belong to somebody else: a pool that offers a parallel loop.

The pool calls ``work`` with what it was given and ``job``; ``work`` asks it for a loop in which
``part`` runs the kernel of the job as each of its workers. A worker that comes late finds nothing
to do: kernels share out their work themselves, and others may have taken all of it.

Threads of such a pool may wait awake for the next loop, for longer than one would like. A kernel
that sleeps ends that: ``attendant`` runs on a thread of its own and asks for it.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import int64_at
from onnx_inplace.numba_kernels.memory import kernel, store_int64

_INT = ir.IntType(64)


class Job(NamedTuple):
    """A call of a kernel, int64: see ``invoke.invoke`` for its arguments."""

    function: int
    layout: int
    query: int
    key: int
    value: int
    output: int
    lengths: int
    mask: int
    sinks: int
    space: int
    workers: int
    done: int  # 1 when all workers have been called


WORDS = len(Job._fields)
_DONE = Job._fields.index("done")


class Table(NamedTuple):
    """What a pool offers, and what it is given, int64: addresses of C functions.

    They return 0, or something else that says why not.
    """

    input: int  # (context, index, place): puts an input of the call there
    data: int  # (input, place): puts the address of its elements there
    loop: int  # (context, function, total, batches, argument): function(argument, 0 .. total - 1)
    part: int  # our ``part``


TABLE_WORDS = len(Table._fields)


def _caller(count, result):
    """An intrinsic ``call(function, arguments)`` of a C function with ``count`` integers."""
    returned = _INT if result is types.int64 else ir.VoidType()

    @intrinsic
    def call(typing_context, function, arguments):
        def generate(context, builder, signature, values):
            pointer = ir.FunctionType(returned, [_INT] * count).as_pointer()
            inputs = [builder.extract_value(values[1], k) for k in range(count)]
            found = builder.call(builder.inttoptr(values[0], pointer), inputs)
            return found if result is types.int64 else context.get_dummy_value()

        return result(types.int64, arguments), generate

    return call


_call_kernel = _caller(11, types.void)
_call_1, _call_2, _call_3, _call_5 = (_caller(count, types.int64) for count in (1, 2, 3, 5))


@intrinsic
def _slot(typing_context):
    """The address of eight bytes on the stack."""

    def generate(context, builder, signature, arguments):
        with builder.goto_entry_block():
            place = builder.alloca(_INT)
        return builder.ptrtoint(place, _INT)

    return types.int64(), generate


@intrinsic
def _exchange(typing_context, place, value):
    """Write an int64 that threads share; its value before."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _INT.as_pointer())
        return builder.atomic_rmw("xchg", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _compare_exchange(typing_context, place, expected, value):
    """Write an int64 that threads share where it is as expected; its value before."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _INT.as_pointer())
        found = builder.cmpxchg(pointer, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 0)

    return types.int64(types.int64, types.int64, types.int64), generate


@kernel("void(int64,int64)")
def part(job, worker):
    """Run the kernel of a job as one of its workers."""
    j = carray(int64_at(job), (WORDS,))
    places = (j[1], j[2], j[3], j[4], j[5], j[6], j[7], j[8], j[9], worker, j[10])
    _call_kernel(j[0], places)


@kernel("void(int64,int64)")
def work(table, context):
    """Run the job that is the first input of a call on the threads of a pool."""
    t = carray(int64_at(table), (TABLE_WORDS,))
    place = _slot()
    found = carray(int64_at(place), (1,))
    if _call_3(t[0], (context, 0, place)) != 0:
        return
    if _call_2(t[1], (found[0], place)) != 0:
        return
    job = found[0]
    workers = carray(int64_at(job), (WORDS,))[10]
    if _call_5(t[2], (context, t[3], workers, workers, job)) == 0:
        store_int64(job + 8 * _DONE, 1)


class Parking(NamedTuple):
    """Where threads of a pool sleep, int64: addresses of C functions, and what they get."""

    state: int
    wait: int  # (semaphore): sleeps until somebody posts; 0, or else it was only interrupted
    post: int  # (semaphore)
    run: int  # (session, options, binding): runs ``sleep`` as the kernel of a job
    session: int
    options: int
    binding: int
    wanted: int  # semaphore: somebody wants the threads to sleep
    over: int  # semaphore: posted once for each thread that is to wake up
    sleepers: int  # threads that sleep: all of the pool's own


PARKING_WORDS = len(Parking._fields)
AWAKE, WANTED, ASLEEP, ENDED = 0, 1, 2, 3  # states


@njit
def _parking(place):
    p = carray(int64_at(place), (PARKING_WORDS,))
    return Parking(p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9])


@njit
def _wait(function, semaphore):
    while (_call_1(function, (semaphore,)) & 0xFFFFFFFF) != 0:
        pass


@kernel("void(" + ",".join(["int64"] * 11) + ")")
def sleep(parking, query, key, value, output, lengths, mask, sinks, space, worker, workers):
    """A kernel that does nothing: threads of the pool until a run begins, the first until one ends.

    So the first, which waits awake for the others when it has done its part, has nothing to wait
    for.
    """
    p = _parking(parking)
    _wait(p.wait, p.wanted if worker == 0 else p.over)


@kernel("void(int64)")
def attendant(parking):
    """Make the threads of a pool sleep each time that it is wanted. Never returns."""
    while True:
        p = _parking(parking)
        if _compare_exchange(parking, WANTED, ASLEEP) == WANTED:
            _call_3(p.run, (p.session, p.options, p.binding))
        else:  # a run has begun since
            _wait(p.wait, p.wanted)


@kernel("void(int64)")
def rest(parking):
    """Want the threads to sleep."""
    p = _parking(parking)
    _exchange(parking, WANTED)
    _call_1(p.post, (p.wanted,))


@njit
def _wake(p):
    for _ in range(p.sleepers):
        _call_1(p.post, (p.over,))


@kernel("void(int64)")
def wake(parking):
    """Wake the threads up, or let them be awake."""
    if _exchange(parking, AWAKE) == ASLEEP:
        _wake(_parking(parking))


@kernel("void(int64)")
def end(parking):
    """Wake the threads up for the last time."""
    if _exchange(parking, ENDED) == ASLEEP:
        _wake(_parking(parking))


@kernel("void(int64)")
def nothing(argument):
    """What a pool calls when it needs no more of a table."""
