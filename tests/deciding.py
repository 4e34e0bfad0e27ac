"""Decides in place of the clock whether calls of kernels run on several threads."""

import collections

import pytest

from onnx_inplace.numba_kernels import pace
from onnx_inplace.numba_kernels.pace import Pace
from onnx_inplace.runner import attend, operators_paged_attention, threads


class Decider:
    """Decides for sessions that are made while ``patch`` is in force."""

    def __init__(self, patch: pytest.MonkeyPatch, several: bool = False) -> None:
        """All kernels of such sessions have the same words."""
        words = self._words = pace.words(0)
        patch.setattr(pace, "words", lambda longest: words)
        for module in (attend, operators_paged_attention):
            patch.setattr(module, "_policies", collections.defaultdict(threads.Policy))
        self.next(several)

    def next(self, several: bool) -> None:
        """Calls that follow, at most a hundred, run on several threads, or on one."""
        self._words[Pace.SECONDS] = 1e300  # several threads are always faster
        self._words[Pace.RUN], self._words[Pace.PAUSE] = 0, 0 if several else 1e15

    @property
    def tried(self) -> int:
        """How many of them have run on several threads."""
        return int(self._words[Pace.RUN])
