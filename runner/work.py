"""How much a call of attention has to do, as the clock counts it, and in how many parts."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from onnx_inplace.numba_kernels import sharing
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.threads import Policy

SHORTEST_SPLIT = 256  # tokens


class Window(Protocol):
    """Queries of a row, and what one of them sees; see ``numba_kernels.layout.Layout``."""

    @property
    def tokens(self) -> int:
        """Queries."""

    @property
    def left(self) -> int:
        """Keys before its own; -1: all."""

    @property
    def right(self) -> int:
        """Keys behind its own; -1: all."""


def seen(window: Window, lengths: Array, *, at_end: bool) -> int:
    """Keys that the middle one of the queries sees, all rows of the batch together.

    What a call takes is in proportion to it: the clock may compare short rows with long ones, and
    layers with a window with layers without. ``lengths`` are int64, side by side.
    """
    sizes = window.tokens, window.left, window.right, at_end
    total: int = sharing.seen.ready()(address(lengths), lengths.size, *sizes)
    return total


@dataclasses.dataclass(frozen=True, slots=True)
class Clock:
    """Decides, for calls of one tuple of shapes, whether they run on several threads.

    Attributes:
        policy: that of their kernel.
        products: of elements, for one key that the queries of a row see.
        window: what that is.
        at_end: see ``seen``.
        least: [tokens] of the longest sequence: those of longer ones may.
    """

    policy: Policy
    products: int
    window: Window
    at_end: bool
    least: int

    def seen(self, lengths: Array) -> int:
        """See ``seen``."""
        return seen(self.window, lengths, at_end=self.at_end)

    def took(self, seconds: float, keys: int, *, parallel: bool) -> None:
        """A call whose queries see so many keys took so long."""
        took = self.policy.parallel_took if parallel else self.policy.serial_took
        took(self.products * keys, seconds)

    def batch(self, rows: int) -> tuple[int, ...]:
        """What ``sharing.Team`` has of so many rows, from ``BATCH`` on."""
        window = self.window
        return rows, window.tokens, window.left, window.right, int(self.at_end)


def reach(window: Window, capacity: int) -> int:
    """Tokens of a sequence that queries of a row see at most, and never less than 1."""
    if window.left < 0 or window.right < 0:
        return max(1, capacity)
    return max(1, min(capacity, window.left + window.tokens + window.right))


def splits(x: sharing.Sharing, lengths: Array, longest: int) -> int:
    """Parts of each sequence, as a compiled call finds them: see ``sharing.splits_of``."""
    total = sum(min(length, x.reach) for length in lengths.ravel().tolist())
    found: int = sharing.splits_of.py_func(x, longest, total)
    return found


def most_splits(x: sharing.Sharing, capacity: int) -> int:
    """Parts in which sequences of any lengths are split: most if all but one are empty."""
    found: int = sharing.splits_of.py_func(x, capacity, min(capacity, x.reach))
    return found
