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

from onnx_inplace.numba_kernels import invoke, sharing, team
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.numba_kernels.sharing import Team
from onnx_inplace.numba_kernels.team import Words
from onnx_inplace.runner import threads
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.work import Clock

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
def _words() -> ctypes.Array[ctypes.c_int64]:
    """The words of the one team. They are never freed: helpers sleep in them."""
    library = ctypes.CDLL(None)
    library.aligned_alloc.restype = ctypes.c_void_p
    size = -(-8 * Words.END // _LINE) * _LINE
    place: int = library.aligned_alloc(ctypes.c_size_t(_LINE), ctypes.c_size_t(size))
    words = (ctypes.c_int64 * Words.END).from_address(place)
    _begin(words)
    return words


def _begin(words: ctypes.Array[ctypes.c_int64]) -> None:
    """Make them the words of a team without helpers."""
    library, place = ctypes.CDLL(None), ctypes.addressof(words)
    ctypes.memset(place, 0, ctypes.sizeof(words))
    library.sem_init(ctypes.c_void_p(place + 8 * Words.SEMAPHORE), 0, 0)
    for word, function in (
        (Words.WAIT, library.sem_wait),
        (Words.POST, library.sem_post),
        (Words.CLOCK, library.clock_gettime),
    ):
        words[word] = ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def _team() -> int:
    """Their address."""
    return ctypes.addressof(_words())


def _forget() -> None:
    """In a forked process: helpers are not in it, and somebody may have been using the team.

    Its words stay where they are, for compiled calls have their address.
    """
    global _lock
    _lock = threading.Lock()
    _helpers.clear()
    if _words.cache_info().currsize:
        _begin(_words())


if hasattr(os, "register_at_fork"):  # where there is fork
    os.register_at_fork(after_in_child=_forget)


def ready(workers: int) -> None:
    """Compile and start what calls of so many workers need. For a model that is being loaded."""
    invoke.invoke.ready()
    if workers < 2:
        return
    sharing.seen.ready()
    if not _possible():
        invoke.invoke_parallel.ready()
        return
    team.loop.ready()
    sharing.run.ready()
    sharing.part.ready()
    with _lock:
        while len(_helpers) < workers - 1:
            assist, places = _FUNCTION(team.assist.ready().address), (_team(),)
            helper = threading.Thread(target=assist, args=places, name="onnx-inplace", daemon=True)
            helper.start()
            _helpers.append(helper)
        _words()[Words.HELPERS] = len(_helpers)


def words(loop: int, context: int = 0) -> Array:
    """A ``sharing.Team`` of threads that a loop offers; long sequences are theirs."""
    places = np.zeros(Team.END, np.int64)
    places[[Team.LOOP, Team.CONTEXT]] = loop, context
    places[Team.PART] = sharing.part.ready().address
    return places


class Borrowed:
    """Threads of a library that calls us back, for the time of ``with``, on the calling thread.

    Attributes:
        loop: address of the library's, see ``numba_kernels.sharing``.
        context: of the call that is in progress.
    """

    def __init__(self, loop: int) -> None:
        """Compile what the threads run."""
        self.loop, self.context = loop, 0
        sharing.run.ready()
        sharing.part.ready()

    def __enter__(self) -> None:
        """Use them."""
        _local.borrowed = self

    def __exit__(self, *_: object) -> None:
        """Use our own again."""
        _local.borrowed = None


def borrows() -> bool:
    """Whether this thread is one of a library that calls us back, and whose threads are awake."""
    return getattr(_local, "borrowed", None) is not None


class Helpers:
    """Our helpers, for a compiled call that shares out long sequences when that has been faster.

    Attributes:
        at: what the call takes: the address of a ``sharing.Team``.
    """

    def __init__(self, clock: Clock, workers: int, rows: int) -> None:
        """``rows``: sequences of the call."""
        self._workers, self._clock = workers, clock
        self._words = words(team.loop.ready().address, _team())
        self._words[Team.ALONE : Team.JOB] = (
            clock.least, clock.policy.at, clock.products, *clock.batch(rows),
        )  # fmt: skip
        self.at = address(self._words)

    def look_after(self) -> None:
        """What a call asks for that has ``NEWS``."""
        if _words()[Words.CROWDED]:
            _make_room()
        if not threads.alone():
            _own(self._workers)


def helpers(clock: Clock, workers: int, rows: int) -> Helpers | None:
    """For calls of so many sequences; None: there are none."""
    return Helpers(clock, workers, rows) if workers > 1 and _possible() else None


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
        if _share(borrowed.loop, borrowed.context, kernel, places, workers):
            raise RuntimeError("the library did not run a kernel on its threads")
    elif not _possible():
        with threads.region(workers):
            invoke.invoke_parallel.ready()(kernel, *places, workers)
    else:
        if _share(team.loop.ready().address, _own(workers), kernel, places, workers):
            invoke.invoke.ready()(kernel, *places, 1)
            return
        if _words()[Words.CROWDED]:
            _make_room()
    if then:
        invoke.invoke.ready()(then, *places, workers)


def _share(loop: int, context: int, kernel: int, places: tuple[int, ...], workers: int) -> int:
    """Run a kernel by a loop; what that returns."""
    job = np.array((kernel, *places, workers), np.int64)
    part = sharing.part.ready().address
    refused: int = sharing.run.ready()(loop, context, part, address(job))
    return refused


def _own(workers: int) -> int:
    """The context of our own loop: the team, with a helper for each of the workers but one."""
    if len(_helpers) < workers - 1:  # in a forked process
        ready(workers)
    return _team()


def _make_room() -> None:
    """Keep helpers off the core of the calling thread: one has been there.

    Where no core is idle, Linux wakes a thread on the one of the thread that wakes it, and it takes
    turns with it. On another one it shares with whoever is there.
    """
    places = _words()
    places[Words.CROWDED] = 0
    others = os.sched_getaffinity(0) - {places[Words.CORE]}
    if others:
        for helper in _helpers:
            with contextlib.suppress(OSError):  # no right to
                os.sched_setaffinity(helper.native_id or 0, others)
