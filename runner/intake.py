"""Ordinary inputs of a run that look like those of the run before: taken in one call.

Most runs of a decoder bring other numbers in arrays of the same shapes. What ``binding`` asks of
each input one by one is then a comparison with what it found the last time. Whatever is not so is
left to it, which also says why something is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onnx_inplace.numba_kernels import intake, objects
from onnx_inplace.numba_kernels.memory import FIELD, address
from onnx_inplace.runner import storage
from onnx_inplace.runner.checks import Check, Narrowest
from onnx_inplace.runner.inputs import Port
from onnx_inplace.runner.storage import Array

_INT64 = np.dtype(np.int64)
_MOST = 1 << 16  # bytes of a copy that is kept; longer prompts are copied anew
_LOWEST = -(2**63)


def ready() -> None:
    """Compile what takes inputs, so that no run has to."""
    intake.take.ready()


class Intake:
    """Takes the inputs of one tuple of shapes. Belongs to a binding: one run at a time.

    Attributes:
        judges: checks that need not be made of inputs which were taken here.
        copies: of each input what it is copied into; None: it is not copied. A run overwrites them.
        expected: what inputs have to be, address of ``intake.table``.
    """

    def __init__(self, pick: Callable[..., tuple[Any, ...]], rows: Sequence[_Row]):
        self._pick, self._count = pick, len(rows)
        self._rows = rows  # keeps what the table has addresses of
        self._table = intake.table([row.expected for row in rows])
        self.expected = address(self._table)
        self.copies = [row.copy for row in rows]
        self._take = intake.take.ready()
        self.judges = frozenset(row.check for row in rows if row.check is not None)

    def pick(self, values: Mapping[str, object]) -> tuple[Any, ...] | None:
        """The inputs in order, as they are; None: other names are given."""
        if len(values) != self._count:
            return None
        try:
            return self._pick(values)
        except KeyError:
            return None

    def __call__(self, values: Mapping[str, object]) -> list[Any] | None:
        """The inputs in order, integers copied; None: they look otherwise."""
        lent, found = storage.leases.all, self.pick(values)
        if found is None:
            return None
        at, lent_at = id(found) + objects.ITEMS, id(lent.words) + FIELD
        if not self._take(at, self.expected, self._count, objects.ARRAY, lent_at):
            return None
        copies = zip(found, self.copies, strict=True)
        return [array if copy is None else copy for array, copy in copies]


class _Row:
    """What one input has to be."""

    def __init__(self, port: Port, like: Array, check: Narrowest | None):
        self.copy = np.empty_like(like) if like.dtype.kind in "iu" else None
        self.check = check if self.copy is not None and like.dtype == _INT64 else None
        self._dims = np.array(like.shape, np.int64)
        low, high = (0, 0) if self.check is None else (self.check.lowest, self.check.highest)
        low, high = max(low, _LOWEST), min(high, -1 - _LOWEST)
        self.expected = intake.Expected(
            id(port.dtype),
            like.ndim,
            address(self._dims),
            like.nbytes,
            0 if self.copy is None else address(self.copy),
            int(self.check is not None),
            low,
            high,
        )


def of(
    feeds: Sequence[tuple[int, Port]], given: Sequence[object], checks: Sequence[Check]
) -> Intake | None:
    """What takes inputs that look like those ``given``; None: they are nothing to be taken so.

    Args:
        feeds: slots and ports.
        given: arrays as a run takes them, one for each port.
        checks: of these shapes.
    """
    rows = []
    narrow = {check.slot: check for check in checks if isinstance(check, Narrowest)}
    for (slot, port), array in zip(feeds, given, strict=True):
        # an input of another rank, or type, was made into one of the declared one
        if type(array) is not np.ndarray or array.dtype is not port.dtype or array.dtype.hasobject:
            return None
        if array.dtype.kind in "iu" and array.nbytes > _MOST:
            return None
        rows.append(_Row(port, array, narrow.get(slot)))
    names = [port.name for _, port in feeds]
    if not names:
        return None
    pick: Callable[..., tuple[Any, ...]] = operator.itemgetter(*names)
    if len(names) == 1:
        only = names[0]
        pick = lambda values: (values[only],)  # noqa: E731
    return Intake(pick, rows)
