"""What a step of a plan becomes at run time: a closure over slots. Types only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
Slots = list[Any]
"""The values of a run by number: arrays, or None where an optional value is absent."""

Action = Callable[[Slots], None]
"""Reads its input slots, writes its output slots."""


class KernelStep(Protocol):
    """What a kernel's factory reads of a step; see ``compiler.steps.Kernel``."""

    @property
    def domain(self) -> str: ...  # noqa: D102
    @property
    def op_type(self) -> str: ...  # noqa: D102
    @property
    def inputs(self) -> tuple[int | None, ...]: ...  # noqa: D102
    @property
    def outputs(self) -> tuple[int | None, ...]: ...  # noqa: D102
    @property
    def attributes(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def roots(self) -> Mapping[int, str]:
        """Name of the root by output index, for aliased outputs."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How kernels may use the machine.

    Attributes:
        threads: upper bound for one kernel.
        portable: use no instruction beyond what every CPU has, for comparison and for tests.
    """

    threads: int = 1
    portable: bool = False


Factory = Callable[[KernelStep, Settings], Action]
