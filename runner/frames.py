"""What the runs of one binding with one tuple of input dimensions have in common.

The first run of a frame lets the library allocate and notes the shapes of what the plan calls
fixed; from the second run on those values have buffers that are prepared once. Dimensions that
come only once (a prompt) cost no buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from onnx_inplace.compiler.steps import Block, ExecutionPlan, Storage
from onnx_inplace.runner.actions import Array, DType, Slots

_ALIGNMENT = 64  # [bytes]


class Buffers:
    """Storage for the values of one block: values that are never alive together may share bytes."""

    def __init__(self) -> None:
        self._held: list[tuple[Array, list[tuple[int, int]]]] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(raw.nbytes for raw, _ in self._held)

    def take(self, shape: tuple[int, ...], dtype: DType, life: tuple[int, int]) -> Array:
        """An array for a value that lives from step ``life[0]`` to ``life[1]``, both included."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        fitting = [
            (raw, taken)
            for raw, taken in self._held
            if raw.nbytes >= size
            and all(life[1] < first or last < life[0] for first, last in taken)
        ]
        if fitting:
            raw, taken = min(fitting, key=lambda pair: pair[0].nbytes)
        else:
            raw, taken = _aligned(size), []
            self._held.append((raw, taken))
        taken.append(life)
        return raw[:size].view(dtype).reshape(shape)


def _aligned(size: int) -> Array:
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -raw.__array_interface__["data"][0] % _ALIGNMENT
    return raw[offset : offset + size]


@dataclasses.dataclass
class Frame:
    """Slots that keep their content between runs, and the buffers behind them.

    Attributes:
        plan: what is executed.
        roots: the caller's arrays by name.
        dims: sizes by name of the dimension.
        template: a copy of it is where a run starts: constants, the caller's storage, buffers.
        shapes: what the first run saw, by slot, of values with a fixed shape.
        stale: shapes were noted that no buffer has been made for.
    """

    plan: ExecutionPlan
    roots: Mapping[str, Array]
    dims: Mapping[str, int]
    template: Slots
    shapes: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    stale: bool = False
    _pools: dict[int, Buffers] = dataclasses.field(default_factory=dict)

    def note(self, slot: int, shape: tuple[int, ...]) -> None:
        """Remember the shape of a value that has the same one in all runs of the frame."""
        if slot not in self.shapes:
            self.shapes[slot] = shape
            self.stale = True

    def buffer(self, block: Block, slot: int) -> Array:
        """The array that is the value of ``slot`` in all runs, made when first asked for."""
        held: Array | None = self.template[slot]
        if held is None:
            value = self.plan.values[slot]
            assert value.storage is Storage.BUFFER and value.dtype is not None
            pool = self._pools.setdefault(id(block), Buffers())
            held = pool.take(self.shapes[slot], value.dtype.numpy(), block.lifetimes[slot])
            self.template[slot] = held
        return held

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(pool.nbytes for pool in self._pools.values())
