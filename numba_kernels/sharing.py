"""Calls of attention that share their work out: among threads of a library, or our own helpers.

Both offer a loop, a C function of five int64 (context, function, count, batches, argument), which
calls ``function(argument, 0 .. count - 1)`` on threads that it chooses, and returns 0; or anything
else, if it has called nothing.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels import pace
from onnx_inplace.numba_kernels.floats import int64_at
from onnx_inplace.numba_kernels.foreign import call_5
from onnx_inplace.numba_kernels.invoke import call_kernel
from onnx_inplace.numba_kernels.memory import kernel, load_int64, on_demand, store_int64
from onnx_inplace.numba_kernels.team import Words


class Job(enum.IntEnum):
    """Places of a kernel that several threads run, in int64; see ``invoke.invoke``."""

    FUNCTION = 0
    """Its address; the arguments up to the workspace follow."""
    WORKERS = 10
    END = 11


class Team(enum.IntEnum):
    """Places of what a compiled call needs to use threads, in int64."""

    LOOP = 0
    """Address of a loop."""
    CONTEXT = 1
    """What it takes; with a pace: address of our helpers, see ``team.Words``."""
    PART = 2
    """Address of :func:`part`."""
    ALONE = 3
    """[tokens] up to which the longest of the sequences is left to one thread, though split."""
    PACE = 4
    """Address of a ``pace.Pace``, which decides about longer ones; 0: the loop has them all."""
    PRODUCTS = 5
    """Of elements, for one key that the queries of a row see: the unit of work is one."""
    BATCH = 6
    """Rows of a call, and what :func:`seen` takes of them, up to the next word."""
    JOB = 11
    """The job, see ``Job``."""
    END = JOB + Job.END


LEFT, DONE, NEWS = 1, 2, 4
"""What a call of :func:`attend` says: it has left all to the caller, or has done all; and there is
news of the helpers, which Python has to look after."""


class Sharing(NamedTuple):
    """How a compiled call shares out long sequences, int64.

    Attributes:
        most: [tokens] of a sequence that one thread takes alone, without splits.
        shortest: [tokens] of a split.
        items: kv heads of a sequence, or pieces of their rows; 0: they are not split.
        reach: [tokens] of a sequence that are read at most: a window leaves others out.
        workers: threads.
        merge: address of the kernel that joins splits; 0: there is none.
    """

    most: int
    shortest: int
    items: int
    reach: int
    workers: int
    merge: int


@njit
def _work(job, worker, workers):
    places = (
        load_int64(job + 8), load_int64(job + 16), load_int64(job + 24), load_int64(job + 32),
        load_int64(job + 40), load_int64(job + 48), load_int64(job + 56), load_int64(job + 64),
        load_int64(job + 72), worker, workers,
    )  # fmt: skip
    call_kernel(load_int64(job), places)


@kernel("void(int64,int64)")
def part(job, worker):
    """Run the kernel of a ``Job`` as one of its workers."""
    _work(job, worker, load_int64(job + 8 * Job.WORKERS))


@njit
def _seen(lengths, batch, tokens, left, right, at_end):
    middle, total = tokens // 2, np.int64(0)
    for row in range(batch):
        length = load_int64(lengths + 8 * row)
        position = length - tokens + middle if at_end else middle
        low = max(0, position - left) if left >= 0 else 0
        high = min(length, position + right + 1) if right >= 0 else length
        total += max(1, high - low)
    return total


@on_demand("int64(int64,int64,int64,int64,int64,int64)")
def seen(lengths, batch, tokens, left, right, at_end):
    """Keys that the middle one of the queries sees, all rows of the batch together.

    Args:
        lengths: address of (batch) int64.
        batch: rows.
        tokens: queries of each.
        left: keys that one sees before its own; -1: all.
        right: likewise behind its own.
        at_end: 1: queries are the last tokens of their row; 0: the first ones.
    """
    return _seen(lengths, batch, tokens, left, right, at_end)


@on_demand("int64(int64,int64,int64,int64)")
def run(loop, context, function, job):
    """Run a ``Job`` by a loop; ``function`` is the address of :func:`part`."""
    workers = load_int64(job + 8 * Job.WORKERS)
    return call_5(loop, (context, function, workers, workers, job))


@njit
def sharing_of(at):
    """The ``Sharing`` at an address."""
    n = carray(int64_at(at), (6,))
    return Sharing(n[0], n[1], n[2], n[3], n[4], n[5])


@njit
def splits_of(x, longest, total):
    """Into how many parts each of the sequences is split; see ``Sharing``.

    A part of the longest is at most a quarter of what a thread has to do in all, so that a late
    one is no loss. And there are as many of them for each thread: with 3 heads in 3 parts, one of
    two threads has a fifth part when the other one has nothing more to do. There are most parts if
    all sequences but one are empty: the number that suits threads there suits them with any total.

    Args:
        x: ``Sharing``.
        longest: [tokens] of the sequences.
        total: [tokens] that are read of all of them.
    """
    if longest <= x.most or x.items == 0:
        return 1
    part = min(longest, x.reach)
    parts = -(-4 * x.workers * part // (x.items * total))
    rows = x.items * ((2 * total + part) // (2 * part))  # as long as the longest, nearly
    while parts * rows % x.workers:
        parts += 1
    return max(1, min(longest // x.shortest, parts))


@njit
def splits_at(x, lengths, count, longest):
    """Likewise for ``count`` sequences; ``lengths``: address of int64."""
    total = np.int64(0)
    for k in range(count):
        total += min(load_int64(lengths + 8 * k), x.reach)
    return splits_of(x, longest, total)


@njit
def attend(x, team, function, places, longest, merge):
    """Run a kernel on as many threads as suits the longest of the sequences.

    Args:
        x: ``Sharing``.
        team: address of a ``Team``; 0: there is none, long sequences are left to the caller.
        function: address of the kernel.
        places: its arguments up to the workspace, which says how many splits there are.
        longest: [tokens] of the sequences.
        merge: address of the kernel that joins what several threads have left; 0: there is none.
            One thread alone does by itself what it is for.

    Returns:
        ``LEFT`` or ``DONE``; and ``NEWS``.
    """
    if longest > x.most:
        if team == 0:
            return LEFT
        if longest > load_int64(team + 8 * Team.ALONE):
            if load_int64(team + 8 * Team.PACE) != 0:
                return _at_a_pace(x, team, function, places, merge)
            _shared(x, team, function, places, merge)
            return DONE
    call_kernel(function, (*places, 0, 1))
    return DONE


@njit
def _shared(x, team, function, places, merge):
    """Run a kernel by a loop, or on this thread where that refuses; whether it was the loop."""
    job = team + 8 * Team.JOB
    store_int64(job, function)
    for k in range(9):
        store_int64(job + 8 * (k + 1), places[k])
    store_int64(job + 8 * Job.WORKERS, x.workers)
    context, part_ = load_int64(team + 8 * Team.CONTEXT), load_int64(team + 8 * Team.PART)
    loop = load_int64(team + 8 * Team.LOOP)
    if call_5(loop, (context, part_, x.workers, x.workers, job)) != 0:  # it has called nothing
        call_kernel(function, (*places, 0, 1))
        return False
    if merge != 0:
        call_kernel(merge, (*places, 0, x.workers))
    return True


@njit
def _at_a_pace(x, team, function, places, merge):
    """Run a kernel on our helpers, or on this thread: as calls before it have taken."""
    helpers = load_int64(team + 8 * Team.CONTEXT)
    if load_int64(helpers + 8 * Words.HELPERS) < x.workers - 1:  # in a forked process
        call_kernel(function, (*places, 0, 1))
        return DONE | NEWS
    known, clock = pace.at(load_int64(team + 8 * Team.PACE)), load_int64(helpers + 8 * Words.CLOCK)
    several, start = pace.decide(known), pace.now(clock)
    if several:
        several = _shared(x, team, function, places, merge)
    else:
        call_kernel(function, (*places, 0, 1))
    seconds = (pace.now(clock) - start) * 1e-9
    n = carray(int64_at(team + 8 * Team.BATCH), (5,))
    keys = _seen(places[5], n[0], n[1], n[2], n[3], n[4])
    work = max(1, load_int64(team + 8 * Team.PRODUCTS) * keys)
    if several:
        pace.several_took(known, work, seconds)
    else:
        pace.one_took(known, work, seconds)
    return DONE | NEWS if load_int64(helpers + 8 * Words.CROWDED) != 0 else DONE
