"""Runs that are alike, though one has a longer mask than the other: they share a frame."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_inplace.compiler import unnoticed
from onnx_inplace.compiler.steps import ExecutionPlan

Shapes = tuple[tuple[int, ...], ...]


class Alike:
    """What tells the runs of a plan apart: shapes of ordinary inputs, but for unnoticed sizes."""

    def __init__(self, plan: ExecutionPlan) -> None:
        """Find the axes that do not matter."""
        axes = unnoticed.axes(plan)
        ordinary = [i.slot for i in plan.inputs if not i.mutable]
        self._axes = [(k, axes[slot]) for k, slot in enumerate(ordinary) if slot in axes]

    def key(self, shapes: Shapes) -> Shapes:
        """The same for all runs that are alike. ``shapes``: in order of the graph."""
        if not self._axes:
            return shapes
        found = list(shapes)
        for place, axes in self._axes:
            found[place] = _without(shapes[place], axes)
        return tuple(found)


def _without(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(-1 if axis in axes else size for axis, size in enumerate(shape))
