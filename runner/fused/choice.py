"""Whether the runs of a frame take fused steps, and why not."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numba

from onnx_inplace.compiler import sizes
from onnx_inplace.compiler.fused import NOTHING, ROWS, Fusion
from onnx_inplace.runner.actions import Fuse, Settings
from onnx_inplace.runner.fused import ready, region, weights
from onnx_inplace.runner.fused.region import Region
from onnx_inplace.runner.fused.table import NotFused

_MOST = 16  # tables of a binding; the least recently used is given up

_log = logging.getLogger("onnx_inplace")


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Runs with few rows that took the ordinary steps nevertheless.

    Attributes:
        reason: what a template cannot do.
        dims: of the first such run, by name; None: no run of the session can be fused.
    """

    reason: str
    dims: Mapping[str, int] | None = None

    def __str__(self) -> str:
        if self.dims is None:
            return self.reason
        sizes_ = ", ".join(f"{name}={size}" for name, size in self.dims.items())
        return f"with {sizes_}: {self.reason}" if sizes_ else self.reason


class Alternative:
    """The fused steps of one session. Safe in several threads.

    Attributes:
        fusion: the facts of the plan.
        block: the steps of fused runs; None where there are none.
        weights: repacked.
    """

    def __init__(self, fusion: Fusion, settings: Settings, model: Path | None = None):
        """Compile their kernels and repack their weights, or map them from beside ``model``."""
        self.fusion = fusion
        self.threads = min(settings.threads, numba.config.NUMBA_NUM_THREADS)
        self._portable = settings.portable
        self._lock = threading.Lock()
        self._refusals: dict[str, Refusal] = {}
        wanted = fusion if settings.fuse is not Fuse.OFF else NOTHING
        self.weights = weights.load(wanted, model)
        self.block = wanted.block if wanted.block is not None and self._prepare() else None
        self._dims = fusion.dims

    def _prepare(self) -> bool:
        many = [n for n in self.fusion.rows if isinstance(n, int) and n > ROWS]
        if many:
            self._refuse(Refusal(f"a product has {many[0]} rows in every run, at most {ROWS} can"))
            return False
        try:
            ready.prepare(self.fusion, self.weights, self.threads, self._portable)
        except NotFused as error:
            self._refuse(Refusal(str(error)))
            return False
        return True

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """What could not be fused although its rows are few: one for each reason."""
        with self._lock:
            return tuple(self._refusals.values())

    def on(self, roots: Mapping[str, Any]) -> OnStorage:
        """The fused steps of one binding, whose storage is given by name."""
        return OnStorage(self, roots)

    def key(self, dims: Mapping[str, int]) -> frozenset[tuple[str, int]]:
        """Of the sizes of a frame, those on which its fused steps depend."""
        return frozenset((name, size) for name, size in dims.items() if name in self._dims)

    def regions(self, dims: Mapping[str, int], roots: Mapping[str, Any]) -> dict[int, Region]:
        """The fused steps of a frame, ready to run, by ``id`` of the step; empty: there are none.

        Args:
            dims: sizes by name of the dimension.
            roots: the caller's storage by name.
        """
        if self.block is None:
            return {}
        try:
            if not _few(self.fusion, dims):
                return {}
            return {
                id(step): region.build(
                    step, dims, roots, self.weights, self.threads, self._portable
                )
                for step in self.fusion.regions
            }
        except NotFused as error:
            self._refuse(Refusal(str(error), dict(dims)))
            return {}

    def _refuse(self, refusal: Refusal) -> None:
        with self._lock:
            known = self._refusals.setdefault(refusal.reason, refusal) is not refusal
        if not known:
            _log.warning("not fused, the ordinary steps run: %s", refusal)


class OnStorage:
    """The fused steps of one binding, kept for several frames.

    Frames that differ only in sizes on which no instruction depends share them: a mask that is
    longer with every token makes a frame of every token. Not for several threads.
    """

    def __init__(self, alternative: Alternative, roots: Mapping[str, Any]):
        self._alternative, self._roots = alternative, roots
        self._kept: OrderedDict[frozenset[tuple[str, int]], dict[int, Region]] = OrderedDict()

    def regions(self, dims: Mapping[str, int]) -> dict[int, Region]:
        """As ``Alternative.regions``."""
        key = self._alternative.key(dims)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        found = self._alternative.regions(dims, self._roots)
        while len(self._kept) >= _MOST:
            self._kept.popitem(last=False)
        self._kept[key] = found
        return found


def _few(fusion: Fusion, dims: Mapping[str, int]) -> bool:
    """Whether all products have few enough rows, and some."""
    try:
        return all(0 < rows <= ROWS for rows in sizes.numbers(fusion.rows, dims))
    except KeyError as error:
        raise NotFused(f"the rows of a product: {error} is known only in a run") from None
