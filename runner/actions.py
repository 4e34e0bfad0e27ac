"""What a step of a plan becomes at run time: a closure over slots."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from onnx_inplace.compiler import steps
from onnx_inplace.numba_kernels import cpu

Array: TypeAlias = npt.NDArray[Any]
DType: TypeAlias = np.dtype[Any]

Slots = list[Any]
"""The values of a run by number: arrays, or None where an optional value is absent."""

Action = Callable[[Slots], None]
"""Reads its input slots, writes its output slots."""


class Fuse(enum.Enum):
    """Which runs of a session take fused steps."""

    AUTO = "auto"
    """Those with few rows, where the plan has fused steps."""
    OFF = "off"
    """None."""
    DECODE_ONLY = "decode-only"
    """All; others are refused, and what they alone need is not loaded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How kernels may use the machine.

    Attributes:
        threads: upper bound for one kernel.
        kernels: what they may name of the CPU's instructions; by default as the environment says.
        fuse: which runs take fused steps.
    """

    threads: int = 1
    kernels: cpu.Path = dataclasses.field(default_factory=cpu.choose)
    fuse: Fuse = Fuse.AUTO

    @property
    def portable(self) -> bool:
        """Whether to use the kernels for every CPU, also where there are faster ones."""
        return self.kernels is cpu.Path.PORTABLE


Factory = Callable[[steps.Kernel, Settings], Action]


def reusable(step: steps.Kernel, slot: int) -> bool:
    """Whether an array that a run finds in an output slot is the runner's, to be written again."""
    value = step.values.get(slot)
    return value is not None and value.storage is steps.Storage.BUFFER


def result(slots: Slots, slot: int, reuse: bool, shape: tuple[int, ...], dtype: DType) -> Array:
    """Where a kernel writes a value: the buffer in the slot, or a new array, put into the slot."""
    array = slots[slot] if reuse else None
    if array is None or array.shape != shape or array.dtype != dtype:
        array = slots[slot] = np.empty(shape, dtype)
    return array
