"""What a kernel needs of a library that calls it: the memory of its tensors, and its threads.

The library offers C functions; each returns 0, or the address of something that says why not.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import int64_at
from onnx_inplace.numba_kernels.memory import kernel, load_int64, on_demand, store_int64
from onnx_inplace.numba_kernels.team import work

_INT = ir.IntType(64)


class Functions(enum.IntEnum):
    """Places of a table of addresses of C functions, in int64."""

    INPUT = 0
    """(context, number, place): writes a tensor that goes in to ``place``."""
    OUTPUT = 1
    """(context, number, sizes, rank, place): makes a tensor that comes out, writes it likewise."""
    DATA = 2
    """(tensor, place): writes the address of its elements to ``place``."""
    LOOP = 3
    """(context, function, total, batches, argument): ``function(argument, 0 .. total - 1)``."""
    END = 4


class Job(enum.IntEnum):
    """Places of a kernel that several threads run, in int64; see ``invoke.invoke``."""

    FUNCTION = 0
    """Its address; the arguments up to the workspace follow."""
    WORKERS = 10
    END = 11


class Team(enum.IntEnum):
    """Places of what a compiled call needs to use the library's threads, in int64."""

    FUNCTIONS = 0
    """Address of a table, see ``Functions``."""
    CONTEXT = 1
    """Of the call that is in progress."""
    PART = 2
    """Address of :func:`part`."""
    JOB = 3
    """The job, see ``Job``."""
    END = JOB + Job.END


class Sharing(NamedTuple):
    """How a compiled call shares out long sequences, int64.

    Attributes:
        most: [tokens] of a sequence that one thread takes alone, without splits.
        shortest: [tokens] of a split.
        splits: at most.
        workers: threads.
        merge: address of the kernel that joins splits; 0: there is none.
    """

    most: int
    shortest: int
    splits: int
    workers: int
    merge: int


def _caller(count):
    """An intrinsic ``call(function, arguments)`` of a C function with ``count`` integers."""

    @intrinsic
    def call(typing_context, function, arguments):
        def generate(context, builder, signature, values):
            pointer = ir.FunctionType(_INT, [_INT] * count).as_pointer()
            inputs = [builder.extract_value(values[1], k) for k in range(count)]
            return builder.call(builder.inttoptr(values[0], pointer), inputs)

        return types.int64(types.int64, arguments), generate

    return call


call_2, call_3, call_4, call_5 = (_caller(count) for count in (2, 3, 4, 5))


@njit
def fetch(functions, context, number, place):
    """Write the address of the elements of a tensor that goes in to ``place``; 0, or why not."""
    status = call_3(load_int64(functions + 8 * Functions.INPUT), (context, number, place))
    if status != 0:
        return status
    return call_2(load_int64(functions + 8 * Functions.DATA), (load_int64(place), place))


@njit
def create(functions, context, number, shape, place):
    """Make a tensor that comes out, and write the address of its elements; 0, or why not.

    ``shape``: address of its rank and sizes.
    """
    sizes = shape + 8, load_int64(shape)
    status = call_5(load_int64(functions + 8 * Functions.OUTPUT), (context, number, *sizes, place))
    if status != 0:
        return status
    return call_2(load_int64(functions + 8 * Functions.DATA), (load_int64(place), place))


@on_demand("int64(int64,int64,int64,int64)")
def collect(functions, context, count, places):
    """Write the addresses of the elements of ``count`` tensors that go in, int64, to ``places``.

    Returns:
        What the library says if it has no such tensor, else 0.
    """
    for number in range(count):
        status = fetch(functions, context, number, places + 8 * number)
        if status != 0:
            return status
    return 0


@on_demand("int64(int64,int64,int64,int64,int64,int64)")
def provide(functions, context, count, shapes, places, token):
    """Make ``count`` tensors that come out, and write the addresses of their elements.

    Args:
        functions: address of a table, see ``Functions``.
        context: of the call.
        count: of tensors. The first one is int64[1], and gets ``token``.
        shapes: address of the rank and the sizes of each tensor, int64, one behind the other.
        places: where addresses are written, int64.
        token: what the library hands on to the next call.

    Returns:
        What the library says if it cannot make one, else 0.
    """
    for number in range(count):
        status = create(functions, context, number, shapes, places + 8 * number)
        if status != 0:
            return status
        shapes += 8 * (load_int64(shapes) + 1)
    store_int64(load_int64(places), token)
    return 0


@kernel("void(int64,int64)")
def part(job, worker):
    """Run the kernel of a ``Job`` as one of its workers."""
    work(job, worker, load_int64(job + 8 * Job.WORKERS))


@njit
def sharing_of(at):
    """The ``Sharing`` at an address."""
    n = carray(int64_at(at), (5,))
    return Sharing(n[0], n[1], n[2], n[3], n[4])


@njit
def _loop(functions, context, function, job):
    workers = load_int64(job + 8 * Job.WORKERS)
    run = load_int64(functions + 8 * Functions.LOOP)
    return call_5(run, (context, function, workers, workers, job))


@njit
def share(team, x, function, places):
    """Run a kernel on threads of the library as each of ``x.workers``; whether it has been run.

    ``places``: its arguments up to the workspace.
    """
    job = team + 8 * Team.JOB
    store_int64(job, function)
    for k in range(9):
        store_int64(job + 8 * (k + 1), places[k])
    store_int64(job + 8 * Job.WORKERS, x.workers)
    functions, context, part_ = (
        load_int64(team + 8 * Team.FUNCTIONS), load_int64(team + 8 * Team.CONTEXT),
        load_int64(team + 8 * Team.PART),
    )  # fmt: skip
    return _loop(functions, context, part_, job) == 0


@njit
def splits_of(x, longest):
    """Into how many parts the longest of the sequences is split; see ``Sharing``."""
    return max(1, min(longest // x.shortest, x.splits))


@on_demand("int64(int64,int64,int64,int64)")
def loop(functions, context, function, job):
    """Run a ``Job`` on threads of the library; ``function`` is the address of :func:`part`."""
    return _loop(functions, context, function, job)
