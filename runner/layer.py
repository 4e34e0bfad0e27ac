"""What a layer is, whose steps can be one action, and a compiled call that does what they do.

Attributes:
    INT64: type of positions, lengths and page ids.
"""

from __future__ import annotations

import abc
import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from onnx_inplace.compiler import steps
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.numba_kernels.objects import NOTHING, Expected
from onnx_inplace.runner.actions import Array, DType, Settings, Slots
from onnx_inplace.runner.team import Helpers

INT64 = np.dtype(np.int64)


class Layer(abc.ABC):
    """Updates of one or two caches, and attention over what they have written.

    Attributes:
        steps: in order of the plan; the last one attends.
    """

    calls: ClassVar[types.ModuleType]
    """Kernels of its kind: ``append_and_attend``, and ``called``, the same for C."""

    steps: tuple[steps.Kernel, ...]

    @property
    def written(self) -> list[tuple[int, int]]:
        """Slots of storage that steps write: as they name it afterwards, and as they find it."""
        named = [
            (s.outputs[a.output_index], s.inputs[a.input_index])
            for s in self.steps
            for a in s.aliases
        ]
        return [(new, old) for new, old in named if new is not None and old is not None]

    def ready(self) -> Callable[[int, int, int, int], int]:
        """Compile the call: ``append_and_attend`` of ``append_attend`` or of one of its like."""
        run: Callable[[int, int, int, int], int] = self.calls.append_and_attend.ready()
        return run

    def called(self) -> int:
        """The address of the same for C, compiled."""
        at: int = self.calls.called.ready().address
        return at

    @abc.abstractmethod
    def serves(self, roots: Mapping[str, Any]) -> bool:
        """Whether there are calls for the caller's storage, which is given by name."""

    @abc.abstractmethod
    def prepare(
        self, slots: Slots, roots: Mapping[str, Any], settings: Settings
    ) -> Prepared | None:
        """A call for values like those in slots, which the steps have taken; None: there is none.

        ``roots``: storage that it serves. ``settings``: of the session.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared(abc.ABC):
    """What a compiled call takes.

    Attributes:
        table: of what is expected.
        at: its address.
        space: bytes of workspace.
        shape: of the output.
        dtype: likewise.
        helpers: who may share in attention; None: nobody.
        kept: what the table has addresses of.
    """

    table: Array
    at: int
    space: int
    shape: tuple[int, ...]
    dtype: DType
    helpers: Helpers | None
    kept: tuple[object, ...]

    @property
    def outlived(self) -> bool:
        """Whether it will always refuse from now on: what it is for has changed."""
        return False

    @abc.abstractmethod
    def note(self, slots: Slots, done: int) -> None:
        """Note in the journal what updates have written; ``done`` is what the call has said."""

    def count(self, done: int) -> None:  # noqa: B027
        """Count numbers that were clipped, where there are any; ``done`` likewise."""


def expect(
    slots: Slots, places: Sequence[int | None], storage: Mapping[int, Array]
) -> tuple[list[Expected], tuple[object, ...]] | None:
    """What to expect of the arrays in some places of slots: what they are now.

    Args:
        slots: of a run.
        places: in it; None: there is nothing.
        storage: the caller's, by index of the place.

    Returns:
        This, and what it has addresses of; None: one of them is no array, or is in pieces.
    """
    kept: list[object] = []
    expected = []
    for k, place in enumerate(places):
        if place is None:
            expected.append(Expected(NOTHING, 0, 0, 0, 0))
            continue
        array = slots[place]
        if type(array) is not np.ndarray or not array.flags.c_contiguous:
            return None
        dims, at = np.array(array.shape, np.int64), address(storage[k]) if k in storage else 0
        expected.append(Expected(place, at, id(array.dtype), array.ndim, address(dims)))
        kept += dims, array.dtype
    return expected, tuple(kept)
