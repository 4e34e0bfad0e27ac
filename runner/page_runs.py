"""Which runs use a paged cache now: one that writes, or any number that read."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

import numpy as np

from onnx_inplace.compiler import errors
from onnx_inplace.compiler.contract import Access
from onnx_inplace.numba_kernels.whole_run import Claim
from onnx_inplace.runner.page import Use
from onnx_inplace.runner.page_store import PageStore


class Runs:
    """The runs on one cache, and the lock under which its owner changes it.

    Attributes:
        claim: ``whole_run.Claim``, for compiled runs, which do not wait for the lock. Who wants the
            cache says so there first, and then looks whether such a run has it.
        compiled: the name under which a compiled run has it.
    """

    def __init__(self, store: PageStore):
        self._store = store
        self._lock = threading.RLock()
        self._uses: list[weakref.ref[Use]] = []
        self._access = Access.READ_ONLY
        self.claim, self.compiled = np.zeros(Claim.END, np.int64), ""

    def begin(self, use: Use, access: Access) -> None:
        """A run begins.

        Raises:
            errors.BindingInUse: another run writes, or this one wants to and another reads.
        """
        with self._lock:
            try:
                self.claim[Claim.RUNS] = 1 + len(self._uses)
                if self._any() and (
                    self._compiled() or Access.READ_WRITE in (access, self._access)
                ):
                    raise self._refused("used by two runs")
                self._uses = [run for run in self._uses if run() is not None]
                self._uses.append(weakref.ref(use))
                self._access = access
            finally:
                self.claim[Claim.RUNS] = len(self._uses)

    @property
    def write(self) -> bool:
        """Whether a run may write now: no other run goes on then."""
        return self._access is Access.READ_WRITE and self._any()

    def end(self, use: Use) -> None:
        """A run has ended; nothing happens if it has not begun."""
        with self._lock:
            for index, run in enumerate(self._uses):
                if run() is use:
                    if self._access is Access.READ_WRITE:
                        self._store.release()
                    del self._uses[index]
                    self.claim[Claim.RUNS] = len(self._uses)
                    return

    @contextlib.contextmanager
    def none(self, what: str) -> Iterator[None]:
        """No run is going on, and no other thread changes the cache.

        Raises:
            errors.BindingInUse: the cache cannot be ``what`` (a participle) now.
        """
        with self._lock:
            self.claim[Claim.OWNER] += 1
            try:
                if self._any():
                    raise self._refused(what)
                yield
            finally:
                self.claim[Claim.OWNER] -= 1

    def _any(self) -> bool:
        """Whether a run is going on. Those that nobody holds any more are over."""
        return self._compiled() or any(run() is not None for run in self._uses)

    def _compiled(self) -> bool:
        return bool(self.claim[Claim.RUN])

    def _refused(self, what: str) -> errors.BindingInUse:
        uses = (run() for run in self._uses)
        holder = next((use.name for use in uses if use is not None), self.compiled)
        name = self._store.name
        return errors.BindingInUse(
            f"`{name}` cannot be {what} while `{holder}` runs on it.", name, holder
        )
