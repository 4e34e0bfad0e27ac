"""Whether a kernel runs on several threads, and how: measured, not assumed.

A parallel call waits for its last thread. Where that thread gets no core, because something else
works on the machine, it waits for a quantum of the scheduler: milliseconds instead of a tenth. So
what a parallel call took is compared with what one thread would have taken. One loss is forgiven,
for a core is away for a moment on any machine; losses that come again are followed by a pause.

The decisions themselves are those of ``numba_kernels.pace``, for compiled calls decide, too.

A forked process has one thread: those of its parent are not in it, and GNU OpenMP ends a process
that asks for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator

import numba

from onnx_inplace.compiler import errors
from onnx_inplace.numba_kernels import pace
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.numba_kernels.pace import Pace

# the same in Python: to compile them takes longer than a process that runs no long call wants
_decide, _one_took = pace.decide.py_func, pace.one_took.py_func
_several_took = pace.several_took.py_func

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


def alone() -> bool:
    """Whether no other thread can work in this process; says so once."""
    global _said
    if _forked and not _said:
        _said = True
        _log.warning(
            "this process was forked from one in which kernels had run on several threads: here "
            'they run on one. Processes that are started by "spawn" have all.'
        )
    return _forked


class Policy:
    """Decides for one kernel. Threads may share it: a lost update costs one decision.

    Attributes:
        words: what it knows, a ``pace.Pace``.
        at: their address, for compiled calls.
    """

    def __init__(self, longest: int = 4096) -> None:
        """``longest``: calls of a pause, at most."""
        self._longest, self.words = longest, pace.words(longest)
        self._view = self.words.data  # numpy's own numbers take three times as long
        self.at = address(self.words)
        _policies.add(self)
        self.allow_pauses(not _without_pauses)

    def parallel(self) -> bool:
        """Whether to try several threads for the next call."""
        return not alone() and bool(_decide(self._view))

    def serial_took(self, work: float, seconds: float) -> None:
        """One thread took so long."""
        _one_took(self._view, work, seconds)

    def parallel_took(self, work: float, seconds: float) -> None:
        """Several threads took so long."""
        _several_took(self._view, work, seconds)

    @property
    def pause(self) -> int:
        """Calls that are left to one thread before several are tried again."""
        return int(self._view[Pace.PAUSE])

    @pause.setter
    def pause(self, calls: int) -> None:
        self._view[Pace.PAUSE] = calls

    def allow_pauses(self, wanted: bool) -> None:
        """Whether losses are followed by pauses; without, one that has begun ends."""
        self._view[Pace.LONGEST] = self._longest if wanted else 0
        if not wanted:
            self.pause = 0


_policies: weakref.WeakSet[Policy] = weakref.WeakSet()
_without_pauses = False


@contextlib.contextmanager
def without_pauses() -> Iterator[None]:
    """Every call of this process may try several threads: a loss costs nothing but its own call.

    For benchmarks: a pause is a small part of what a decoder does, and all that a variant has.
    """
    before = _without_pauses
    _set_without_pauses(True)
    try:
        yield
    finally:
        _set_without_pauses(before)


def _set_without_pauses(wanted: bool) -> None:
    global _without_pauses
    _without_pauses = wanted
    for policy in list(_policies):
        policy.allow_pauses(not wanted)


@contextlib.contextmanager
def region(threads: int) -> Iterator[None]:
    """Threads of numba, at most ``threads``; one region at a time where the layer needs it.

    The layer "workqueue" aborts the process when two threads enter it.

    Raises:
        errors.BindingError: there is only one thread, in a forked process.
    """
    global _layer_is_safe
    if alone():
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
