"""Whether calls of a kernel run on several threads, as what they have taken says.

``runner.threads`` says why. What is known of a kernel is a few words in memory, so that a compiled
call decides and learns by itself: in Python that takes longer, where code is cold, than the work of
a thread that helps is worth. Threads may share the words: a lost update costs one decision.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import float64_at

_FIRST_PAUSE = 32  # calls
_AGAIN = 128  # parallel calls, after which one thread shows again what it takes
_WEIGHT = 0.1  # of a measurement that is slower than those before it
_MOST_CREDIT, _FIRST_CREDIT, _AFTER_PAUSE = 6, 2, 1  # gains, of which a loss costs two


class Pace(enum.IntEnum):
    """Places of what is known of a kernel, in float64: all but the first hold whole numbers."""

    SECONDS = 0
    """For a unit of work on one thread; infinity before the first measurement."""
    PAUSE = 1
    """Calls that are left to one thread before several are tried again."""
    RUN = 2
    """Parallel calls in a row."""
    NEXT = 3
    """How long the next pause is; each one that follows soon is twice as long."""
    CREDIT = 4
    """Losses that are forgiven, times two; a gain adds one. After a pause it is less than a loss
    costs: a machine that is still busy costs one slow call."""
    LONGEST = 5
    """Calls of a pause, at most: one slow call among so many is to be no matter. 0: no pauses."""
    END = 6


# plain numbers, for this is run in Python as well
_SECONDS, _PAUSE, _RUN, _NEXT, _CREDIT, _LONGEST = map(int, list(Pace)[: Pace.END])


def words(longest: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What is known of a kernel that has not been called."""
    return np.array([np.inf, 0, 0, _FIRST_PAUSE, _FIRST_CREDIT, longest])


@njit
def at(place):
    """Words of a ``Pace`` at an address."""
    return carray(float64_at(place), (6,))


@njit
def decide(pace):
    """Whether to try several threads for the next call."""
    if pace[_SECONDS] == np.inf:
        return False  # one thread shows first what it takes
    if pace[_PAUSE] > 0:
        pace[_PAUSE] -= 1
        return False
    pace[_RUN] = (pace[_RUN] + 1) % _AGAIN
    return pace[_RUN] != 0


@njit(error_model="numpy")
def one_took(pace, work, seconds):
    """One thread took so many seconds for so much work, which is more than none."""
    found = seconds / work
    if found < pace[_SECONDS]:  # the first one may have met cold memory
        pace[_SECONDS] = found
    else:
        pace[_SECONDS] += _WEIGHT * (found - pace[_SECONDS])


@njit
def several_took(pace, work, seconds):
    """Several threads took so many seconds for so much work."""
    if seconds < work * pace[_SECONDS]:
        pace[_NEXT] = max(_FIRST_PAUSE, pace[_NEXT] - 1)
        pace[_CREDIT] = min(_MOST_CREDIT, pace[_CREDIT] + 1)
        return
    pace[_CREDIT] -= 2
    if pace[_CREDIT] >= 0:
        return
    pace[_CREDIT], pace[_PAUSE] = _AFTER_PAUSE, min(pace[_NEXT], pace[_LONGEST])
    pace[_NEXT] = max(_FIRST_PAUSE, min(2 * pace[_NEXT], pace[_LONGEST]))


_INT = ir.IntType(64)
_MONOTONIC = 1  # of Linux


@intrinsic
def now(typing_context, clock):
    """[ns] by the clock that never goes back; ``clock``: address of Linux's ``clock_gettime``."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32), _INT.as_pointer()]).as_pointer()
        place = cgutils.alloca_once(builder, ir.ArrayType(_INT, 2))
        first = builder.bitcast(place, _INT.as_pointer())
        function = builder.inttoptr(arguments[0], kind)
        builder.call(function, [ir.Constant(ir.IntType(32), _MONOTONIC), first])
        seconds = builder.load(first)
        rest = builder.load(builder.gep(first, [ir.Constant(_INT, 1)]))
        return builder.add(builder.mul(seconds, ir.Constant(_INT, 10**9)), rest)

    return types.int64(types.int64), generate
