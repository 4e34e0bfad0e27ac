"""Where the threads of the pool sleep while nothing runs.

onnxruntime lets the threads of a shared pool wait awake for the next piece of work, 34 ms long
where that was measured, and no setting changes it: that is a core less for whoever works after a
run. So they get a piece of work that sleeps, from a thread that does nothing else.
"""

from __future__ import annotations

import ctypes
import sys
import threading

import numpy as np

from onnx_inplace.numba_kernels import shared
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.native.functions import Functions
from onnx_inplace.runner.native.operators import Desk

_SEMAPHORE = 64  # bytes, more than sem_t has
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Parking:
    """Puts the threads of one pool to sleep and wakes them. Lives as long as the process."""

    def __init__(self, functions: Functions, desk: Desk, threads: int) -> None:
        """Let them sleep.

        Args:
            functions: of onnxruntime.
            desk: for the job to sleep.
            threads: of the pool.
        """
        library = ctypes.CDLL(None)
        self._semaphores = np.zeros(2 * _SEMAPHORE, np.uint8)
        wanted = address(self._semaphores)
        over = wanted + _SEMAPHORE
        for semaphore in (wanted, over):
            library.sem_init(ctypes.c_void_p(semaphore), 0, 0)
        wait, post = (
            ctypes.cast(function, ctypes.c_void_p).value or 0
            for function in (library.sem_wait, library.sem_post)
        )
        session, options, binding = desk.binding.places
        run = functions.address("RunWithBinding")
        facts = shared.Parking(
            shared.AWAKE, wait, post, run, session, options, binding, wanted, over, threads - 1
        )
        self._facts, self._desk = np.array(facts, np.int64), desk
        place = address(self._facts)
        desk.job[:] = shared.sleep.ready().address, place, *[0] * 8, threads, 0
        attend, self._wake, self._rest = (
            _FUNCTION(kernel.ready().address)
            for kernel in (shared.attendant, shared.wake, shared.rest)
        )
        self._place, self._lock, self._runs = place, threading.Lock(), 0
        threading.Thread(target=attend, args=(place,), name="onnx-inplace", daemon=True).start()
        # Before onnxruntime ends its threads, which it waits for: later handlers come first.
        library["__cxa_atexit"](
            ctypes.c_void_p(shared.end.ready().address), ctypes.c_void_p(place), None
        )
        self._rest(place)

    def wake(self) -> None:
        """Begin a run: threads are awake until as many have ended."""
        with self._lock:
            self._runs += 1
            if self._runs == 1:
                self._wake(self._place)

    def rest(self) -> None:
        """End a run."""
        with self._lock:
            self._runs -= 1
            if not self._runs:
                self._rest(self._place)


def possible() -> bool:
    """Whether this machine has what ``Parking`` needs."""
    library = ctypes.CDLL(None)
    names = ("sem_init", "sem_wait", "sem_post", "__cxa_atexit")
    return sys.platform == "linux" and all(hasattr(library, name) for name in names)
