"""Whether a kernel runs on several threads, and how: measured, not assumed.

A parallel call waits for its last thread. Where that thread gets no core, because something else
works on the machine, it waits for a quantum of the scheduler: milliseconds instead of a tenth. So
what a parallel call took is compared with what one thread would have taken. One loss is forgiven,
for a core is away for a moment on any machine; losses that come again are followed by a pause.

A forked process has one thread: those of its parent are not in it, and GNU OpenMP ends a process
that asks for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Iterator

import numba

from onnx_inplace.compiler import errors

_FIRST_PAUSE = 32  # calls
_AGAIN = 128  # parallel calls, after which one thread shows again what it takes
_WEIGHT = 0.1  # of a measurement that is slower than those before it
_MOST_CREDIT, _FIRST_CREDIT, _AFTER_PAUSE = 6, 2, 1  # gains, of which a loss costs two

_log = logging.getLogger("onnx_inplace")
_layer_lock = threading.Lock()
_layer_is_safe = False
_forked, _said = False, False


def _after_fork() -> None:
    """In a process that begins as a copy of one in which several threads may have worked."""
    global _forked
    with contextlib.suppress(ValueError):  # none had started: the copy may start its own
        numba.threading_layer()
        _forked = True


if hasattr(os, "register_at_fork"):  # where there is fork
    os.register_at_fork(after_in_child=_after_fork)


def _alone() -> bool:
    """Whether no other thread can work in this process; says so once."""
    global _said
    if _forked and not _said:
        _said = True
        _log.warning(
            "this process was forked from one in which kernels had run on several threads: here "
            'they run on one. Processes that are started by "spawn" have all.'
        )
    return _forked


@dataclasses.dataclass
class Policy:
    """Decides for one kernel. Threads may share it: a lost update costs one decision.

    Attributes:
        pace: seconds for a unit of work on one thread; None before the first measurement.
        pause: calls that are left to one thread before several are tried again.
        run: parallel calls in a row.
        next_pause: how long the next pause is; each one that follows soon is twice as long.
        credit: losses that are forgiven, times two; a gain adds one. After a pause it is less than
            a loss costs: a machine that is still busy costs one slow call.
        longest: calls of a pause, at most: one slow call among so many is to be no matter.
    """

    pace: float | None = None
    pause: int = 0
    run: int = 0
    next_pause: int = _FIRST_PAUSE
    credit: int = _FIRST_CREDIT
    longest: int = 4096

    def parallel(self) -> bool:
        """Whether to try several threads for the next call."""
        if self.pace is None or _alone():
            return False  # one thread shows first what it takes
        if self.pause > 0:
            self.pause -= 1
            return False
        self.run = (self.run + 1) % _AGAIN
        return self.run != 0

    def serial_took(self, work: float, seconds: float) -> None:
        """One thread took so long."""
        pace = seconds / work
        if self.pace is None or pace < self.pace:  # the first one may have met cold memory
            self.pace = pace
        else:
            self.pace += _WEIGHT * (pace - self.pace)

    def parallel_took(self, work: float, seconds: float) -> None:
        """Several threads took so long."""
        if self.pace is None or seconds < work * self.pace:
            self.next_pause = max(_FIRST_PAUSE, self.next_pause - 1)
            self.credit = min(_MOST_CREDIT, self.credit + 1)
            return
        self.credit -= 2
        if self.credit >= 0:
            return
        self.credit, self.pause = _AFTER_PAUSE, self.next_pause
        self.next_pause = min(2 * self.next_pause, self.longest)


@contextlib.contextmanager
def region(threads: int) -> Iterator[None]:
    """Threads of numba, at most ``threads``; one region at a time where the layer needs it.

    The layer "workqueue" aborts the process when two threads enter it.

    Raises:
        errors.BindingError: there is only one thread, in a forked process.
    """
    global _layer_is_safe
    if _alone():
        raise errors.BindingError("a forked process has no threads to measure.", "threads")
    before = numba.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    try:
        if _layer_is_safe:
            yield
            return
        with _layer_lock:
            yield
            _layer_is_safe = numba.threading_layer() in ("omp", "tbb")
    finally:
        numba.set_num_threads(before)
