"""Values that pass between a library and us: what a plan says of them, arrays over their bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from onnx_inplace.compiler.steps import ExecutionPlan, Port, Value
from onnx_inplace.runner.actions import Array, DType


@dataclasses.dataclass(frozen=True, slots=True)
class Border:
    """A tensor at the border of a sub-session or of a call.

    Attributes:
        name: by which the library knows it.
        slot: of a run.
        value: what the plan says.
        code: element type as ONNX numbers it.
        dtype: the same for numpy.
    """

    name: str
    slot: int
    value: Value
    code: int
    dtype: DType

    @classmethod
    def of(cls, plan: ExecutionPlan, port: Port) -> Border:
        """A port of a plan, which is a tensor."""
        value = plan.values[port.slot]
        assert value.dtype is not None
        return cls(port.name, port.slot, value, value.dtype.value, value.dtype.numpy())


class _Memory:
    """Bytes for numpy, with whatever keeps them alive; types of ml_dtypes have no other way."""

    def __init__(self, place: int, size: int, owner: object) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "data": (place, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def over(place: int, shape: Sequence[int], dtype: DType, owner: object = None) -> Array:
    """An array in C order over memory from an address on; it keeps ``owner`` alive."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    array: Array = np.asarray(_Memory(place, size, owner)).view(dtype).reshape(shape)
    return array
