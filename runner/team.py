"""The helpers of kernels: threads of this process that sleep until a kernel can use them.

They are not those of numba, all of which have to come before a region ends, late or not; see
``numba_kernels.team``. Where the system lacks what they need, numba's take their place. While a
library calls us back, its own threads do: they are awake, and others would want their cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading

import numpy as np

from onnx_inplace.numba_kernels import foreign, invoke, team
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.numba_kernels.team import Words
from onnx_inplace.runner import threads

_LINE = 64  # bytes that one core at a time may write
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_int64)

_lock = threading.Lock()
_local = threading.local()  # ``borrowed``: of a run on this thread
_helpers: list[threading.Thread] = []


@functools.cache
def _possible() -> bool:
    """Whether this system has unnamed semaphores: others declare them, and refuse."""
    return sys.platform == "linux"


@functools.cache
def _team() -> int:
    """Address of the words of the one team. They are never freed: helpers sleep in them."""
    library = ctypes.CDLL(None)
    library.aligned_alloc.restype = ctypes.c_void_p
    size = -(-8 * Words.END // _LINE) * _LINE
    place: int = library.aligned_alloc(ctypes.c_size_t(_LINE), ctypes.c_size_t(size))
    ctypes.memset(place, 0, size)
    words = (ctypes.c_int64 * Words.END).from_address(place)
    for word, function in ((Words.WAIT, library.sem_wait), (Words.POST, library.sem_post)):
        words[word] = ctypes.cast(function, ctypes.c_void_p).value or 0
    library.sem_init(ctypes.c_void_p(place + 8 * Words.SEMAPHORE), 0, 0)
    return place


def _forget() -> None:
    """In a forked process: helpers are not in it, and somebody may have been using the team."""
    global _lock
    _lock = threading.Lock()
    _helpers.clear()
    _team.cache_clear()


if hasattr(os, "register_at_fork"):  # where there is fork
    os.register_at_fork(after_in_child=_forget)


def ready(workers: int) -> None:
    """Compile and start what calls of so many workers need. For a model that is being loaded."""
    invoke.invoke.ready()
    if workers < 2:
        return
    if not _possible():
        invoke.invoke_parallel.ready()
        return
    team.lead.ready()
    with _lock:
        while len(_helpers) < workers - 1:
            assist, places = _FUNCTION(team.assist.ready().address), (_team(),)
            helper = threading.Thread(target=assist, args=places, name="onnx-inplace", daemon=True)
            helper.start()
            _helpers.append(helper)


class Borrowed:
    """Threads of a library that calls us back, for the time of ``with``, on the calling thread.

    Attributes:
        context: of the call that is in progress.
    """

    def __init__(self, functions: int) -> None:
        """Compile what the threads run. ``functions``: address of a ``foreign.Functions``."""
        self.context, self._functions = 0, functions
        self._loop, self._part = foreign.loop.ready(), foreign.part.ready().address

    def __enter__(self) -> None:
        """Use them."""
        _local.borrowed = self

    def __exit__(self, *_: object) -> None:
        """Use our own again."""
        _local.borrowed = None

    def run(self, kernel: int, places: tuple[int, ...], workers: int, then: int) -> None:
        """See :func:`run`."""
        job = np.array((kernel, *places, workers), np.int64)
        if self._loop(self._functions, self.context, self._part, address(job)):
            raise RuntimeError("the library did not run a kernel on its threads")
        if then:
            invoke.invoke.ready()(then, *places, workers)


def borrows() -> bool:
    """Whether this thread is one of a library that calls us back, and whose threads are awake."""
    return getattr(_local, "borrowed", None) is not None


def run(kernel: int, places: tuple[int, ...], workers: int, then: int = 0) -> None:
    """Run a kernel as each of several workers, on this thread and on helpers that come.

    On this thread alone where another one has the helpers: kernels then do by themselves what
    ``then`` is for.

    Args:
        kernel: its address; see ``invoke.invoke``.
        places: its arguments up to the workspace, which has room for all workers.
        workers: more than one.
        then: address of the kernel that joins what workers have left; 0: there is none.
    """
    borrowed: Borrowed | None = getattr(_local, "borrowed", None)
    if borrowed is not None:
        borrowed.run(kernel, places, workers, then)
        return
    if not _possible():
        with threads.region(workers):
            invoke.invoke_parallel.ready()(kernel, *places, workers)
        if then:
            invoke.invoke.ready()(then, *places, workers)
        return
    if len(_helpers) < workers - 1:  # in a forked process
        ready(workers)
    done = team.lead.ready()(_team(), kernel, *places, workers, then)
    if done == 0:
        invoke.invoke.ready()(kernel, *places, 1)
    elif done == 2:
        _make_room()


def _make_room() -> None:
    """Keep helpers off the core of the calling thread.

    Where no core is idle, Linux wakes a thread on the one of the thread that wakes it, and it takes
    turns with it. On another one it shares with whoever is there.
    """
    core = (ctypes.c_int64 * Words.END).from_address(_team())[Words.CORE]
    others = os.sched_getaffinity(0) - {core}
    if others:
        for helper in _helpers:
            with contextlib.suppress(OSError):  # no right to
                os.sched_setaffinity(helper.native_id or 0, others)
