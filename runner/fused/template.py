"""What a template is: instructions for a run, and the kernels that they will call, known at load.

A kernel takes seconds to compile. A template therefore says, while a session loads and no dimension
is known, which kernels its instructions may name; what a dimension decides it names for all sizes
that runs with few rows can have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from onnx_inplace.compiler import sizes
from onnx_inplace.compiler.fused import ROWS, Fused, FusedValue, Operation
from onnx_inplace.numba_kernels.memory import OnDemand
from onnx_inplace.runner.fused.table import Builder
from onnx_inplace.runner.fused.weights import Weights

Write = Callable[[Builder, Operation], None]
"""Writes the instructions of one operation; ``table.NotFused`` where it cannot."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loading:
    """A fused step while its session loads.

    Attributes:
        region: the fused step.
        weights: of the session.
        portable: as in ``actions.Settings``.
    """

    region: Fused
    weights: Weights
    portable: bool

    def value(self, index: int | None) -> FusedValue | None:
        """What the plan says of a value."""
        return None if index is None else self.region.values[index]

    def rows(self, index: int | None) -> Iterable[int]:
        """How many rows a value may have in a fused run: all axes but the last."""
        value = self.value(index)
        if value is not None and value.shape is not None:
            known = sizes.product(value.shape[:-1])
            if isinstance(known, int):
                return (known,)
        return range(1, ROWS + 1)


Needs = Callable[[Loading, Operation], Iterable[OnDemand]]
"""Kernels that the instructions of an operation may name.

Raises:
    table.NotFused: the operation cannot be fused, whatever the shapes of a run.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """How an operation becomes instructions.

    Attributes:
        write: emits them, when the dimensions of a run are known.
        needs: kernels that they may name.
    """

    write: Write
    needs: tuple[OnDemand | Needs, ...]

    def __call__(self, builder: Builder, operation: Operation) -> None:
        """Write the instructions of one operation."""
        self.write(builder, operation)

    def kernels(self, loading: Loading, operation: Operation) -> Iterator[OnDemand]:
        """Kernels that the instructions of an operation may name, but for ``moves.move``."""
        for need in self.needs:
            if isinstance(need, OnDemand):
                yield need
            else:
                yield from need(loading, operation)


def template(*needs: OnDemand | Needs) -> Callable[[Write], Template]:
    """A function that writes instructions, as a template.

    Args:
        *needs: kernels, and functions that give kernels where the operation decides. Those of
            ``Builder.move`` and of what is built on it need not be named.
    """
    return lambda write: Template(write, needs)
