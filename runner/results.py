"""What a run gives back, from its slots: aliases are the caller's storage, all else is new."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_inplace.compiler import errors
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import storage
from onnx_inplace.runner.frames import Frame
from onnx_inplace.runner.outputs import Outputs, Result
from onnx_inplace.runner.pages import PagedCache
from onnx_inplace.runner.storage import Array, Interval

if TYPE_CHECKING:
    from onnx_inplace.runner.session import Session

Slots = list[Any]


class Results:
    """Results of the runs of one frame.

    A decoder returns two caches for each layer: what a frame has put into its place once, and no
    step writes, is not looked at in every run.

    Attributes:
        type: of what a run returns.
        settled: by position, results that are the same object in all runs; None: any other.
        made: those others: position, what it is, whether every run makes it for nobody else.
    """

    def __init__(self, session: Session, arrays: Mapping[str, Any], frame: Frame) -> None:
        """For storage that is lent as ``arrays``, by name."""
        self.type: Callable[[list[Any]], Outputs] = session.outputs_type
        self._arrays, self._keeps = arrays, session.keeps
        results, own = session.results, frame.own
        self.settled: list[Any] = [None] * len(results)
        made = []
        for index, result in enumerate(results):
            _, slot, root = result
            if root is not None and frame.template[slot] is arrays[root]:
                self.settled[index] = arrays[root]
            else:
                once = [s for _, s, r in results if r is None].count(slot) == 1
                made.append((index, result, slot in own and once))
        self.made: tuple[tuple[int, Result, bool], ...] = tuple(made)

    def collect(self, slots: Slots, given: list[Any]) -> Outputs:
        """Those of a run with such inputs."""
        results, arrays = self.settled.copy(), self._arrays
        seen: list[Array] = []
        for index, (name, slot, root), own in self.made:
            value = slots[slot]
            if root is not None:
                mine = value is arrays[root]
                results[index] = value if mine else self._storage_of(name, root, value)
            elif own or not isinstance(value, np.ndarray):
                results[index] = value  # made in this run; what is no array is a sequence
            else:
                shared = any(value is other for other in seen)
                if shared or self._belongs_to_others(value, given):
                    value = value.copy()
                seen.append(value)
                results[index] = value
        return self.type(results)

    def _storage_of(self, name: str, root: str, value: Any) -> Any:
        """The caller's storage, after comparing where the run left the value."""
        array = self._arrays[root]
        if value is array:
            return array
        if isinstance(array, PagedCache):
            raise errors.AliasViolation(f"output `{name}` is not its root `{root}`.", name)
        expected, actual = address(array), address(value)
        if actual != expected or value.nbytes != array.nbytes:
            raise errors.AliasViolation(
                f"output `{name}` is at {actual:#x}, its root `{root}` at {expected:#x}.",
                name,
                expected,
                actual,
            )
        return array

    def _belongs_to_others(self, value: Array, given: list[Any]) -> bool:
        """Whether an output that is no alias shares memory with an input, a constant or a lease."""
        given = [other for other in given if isinstance(other, np.ndarray)]
        if any(value is other for other in given):
            return True
        mine: Interval = storage.interval(value)
        if storage.leases.holder(mine) is not None or self._keeps(mine):
            return True
        arrays = (other for other in given if isinstance(other, np.ndarray))  # no paged caches
        return any(mine.overlaps(storage.interval(other)) for other in arrays)
