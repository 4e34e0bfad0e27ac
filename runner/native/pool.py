"""One pool of threads for the sub-sessions of a process and for our kernels beside them.

Its threads stay awake during a run. A decoder's token is some sixty pieces of work in a row;
threads that sleep between two pieces are woken each time: a tenth of a millisecond later on a
virtual machine, when half of the piece is done. Behind a run they sleep: see ``parking``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from onnx_inplace.runner.native import operators, parking, session
from onnx_inplace.runner.native.functions import Functions, load

_SILENT = 4  # log severity: fatal
_ARENA, _DEFAULT = 1, 0  # kind of an allocator, kind of memory
# Addresses are free, memory is taken where it is touched: at the lowest place that fits.
REGION = {"initial_chunk_size_bytes": 1 << 28, "max_dead_bytes_per_chunk": 256}
_lock = threading.Lock()
_pools: list[Pool] = []


def get(threads: int) -> Pool | None:
    """The pool of the process, made with so many threads when it is first asked for.

    Returns:
        None where there is none: it has another size, or this onnxruntime has no C interface.
    """
    if threads < 2:
        return None
    with _lock:
        if not _pools:
            functions = load() if parking.possible() else None
            if functions is None:
                return None
            _pools.append(Pool(functions, threads))
        return _pools[0] if _pools[0].threads == threads else None


def made() -> Pool | None:
    """The pool of the process, if sub-sessions work with it: its threads may be awake."""
    return _pools[0] if _pools else None


class Pool:
    """An environment of onnxruntime with threads of its own. Lives as long as the process.

    Attributes:
        threads: that work on one call, the calling one included.
    """

    def __init__(self, functions: Functions, threads: int) -> None:
        """Start the threads, and load what ``run`` needs."""
        self.threads, self._functions = threads, functions
        settings = functions.make("CreateThreadingOptions")
        functions.call("SetGlobalIntraOpNumThreads", settings, threads)
        functions.call("SetGlobalInterOpNumThreads", settings, 1)
        self._environment = functions.make(
            "CreateEnvWithGlobalThreadPools", _SILENT, b"onnx_inplace", settings
        )
        functions.release("ThreadingOptions", settings)
        self._memory = functions.make("CreateCpuMemoryInfo", _ARENA, _DEFAULT)
        self._share_arena()
        self._operator = operators.Work(functions)
        options = self.options()
        self._operator.register(options.at)
        self._work = self.session(options, operators.model())
        self._local = threading.local()
        self._parking = parking.Parking(functions, operators.Desk(self._work), threads)

    def _share_arena(self) -> None:
        """Give all sessions one arena."""
        functions, count = self._functions, len(REGION)
        keys = (ctypes.c_char_p * count)(*[key.encode() for key in REGION])
        values = (ctypes.c_size_t * count)(*REGION.values())
        arena = functions.make("CreateArenaCfgV2", keys, values, count)
        functions.call("CreateAndRegisterAllocator", self._environment, self._memory, arena)
        functions.release("ArenaCfg", arena)

    def options(self) -> session.Options:
        """Options of a session on this pool."""
        return session.Options(self._functions, self._memory)

    def session(self, options: session.Options, model: bytes) -> session.Session:
        """Load a model.

        Raises:
            Exception: of the kind that the Python package raises.
        """
        return session.Session(self._functions, self._environment, self._memory, options, model)

    def run(self, kernel: int, places: tuple[int, ...], workers: int) -> None:
        """Run a kernel of ``numba_kernels.invoke`` as each of ``workers``, on these threads."""
        desk: operators.Desk | None = getattr(self._local, "desk", None)
        if desk is None:
            desk = self._local.desk = operators.Desk(self._work)
        desk.job[:] = kernel, *places, workers, 0
        desk.run()
        if not desk.job[-1]:
            raise RuntimeError("onnxruntime did not run a kernel of attention")

    def awake(self, action: Callable[[Any], None]) -> Callable[[Any], None]:
        """The same action; threads of the pool are awake while it is in progress."""
        wake, rest = self._parking.wake, self._parking.rest

        def act(argument: Any) -> None:
            wake()
            try:
                action(argument)
            finally:
                rest()

        return act
