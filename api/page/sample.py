"""Sizes to draw a plan with, where its reader has not said which."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from onnx_inplace.compiler import steps
from onnx_inplace.compiler.errors import ContractError

_CAPACITY, _OTHERS = 1024, 1


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """All dimensions of a plan; ``chosen``: those that nobody asked for."""

    dims: Mapping[str, int]
    chosen: tuple[str, ...]


def sample(plan: steps.ExecutionPlan, given: Mapping[str, int]) -> Sample | None:
    """Sizes for a picture; None where the chosen ones happen to fit together in no run.

    Raises:
        errors.BindingError: a given dimension is unknown or no size.
        errors.ContractError: no run is possible with what is given.
    """
    plan.memory(**given)
    fed = {
        dimension
        for port in plan.inputs
        if not port.mutable
        for dimension in plan.values[port.slot].shape or ()
    }
    chosen = [name for name in plan.footprint.dims if name not in given]
    sizes = {name: _OTHERS if name in fed else _CAPACITY for name in chosen}
    dims = {name: given.get(name, sizes.get(name, 0)) for name in plan.footprint.dims}
    try:
        plan.memory(**dims)
    except ContractError:
        if not chosen:
            raise
        return None
    return Sample(dims, tuple(chosen))
