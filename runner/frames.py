"""What the runs of one binding with one tuple of input dimensions have in common.

The first run of a frame lets the library allocate and notes the shapes of what the plan calls
fixed; from the second run on those values have buffers that are prepared once. Dimensions that
come only once (a prompt) cost no buffers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnx_inplace.compiler import arena
from onnx_inplace.compiler.steps import Block, ExecutionPlan, Kernel, Storage
from onnx_inplace.runner import registry
from onnx_inplace.runner.actions import Array, DType, Slots
from onnx_inplace.runner.fused.region import Region


def carve(
    wanted: Sequence[tuple[tuple[int, ...], DType, arena.Life]],
) -> tuple[list[Array], int]:
    """Arrays, by shape, type and life, in one piece of memory, and the bytes of that.

    Values that are never alive together share bytes.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in wanted]
    lives = [life for _, _, life in wanted]
    offsets, total = arena.place(list(zip(sizes, lives, strict=True)))
    raw = _aligned(total)
    arrays = [
        raw[offset : offset + size].view(dtype).reshape(shape)
        for (shape, dtype, _), offset, size in zip(wanted, offsets, sizes, strict=True)
    ]
    return arrays, total


def _aligned(size: int) -> Array:
    raw = np.empty(size + arena.ALIGNMENT, np.uint8)
    offset = -raw.__array_interface__["data"][0] % arena.ALIGNMENT
    return raw[offset : offset + size]


@dataclasses.dataclass
class Frame:
    """Slots that keep their content between runs, and the buffers behind them.

    Attributes:
        plan: what is executed.
        block: its steps in this frame: the ordinary ones, or those with fused steps among them.
        regions: fused steps that are ready to run, by ``id`` of the step.
        roots: the caller's arrays and paged caches by name.
        dims: sizes by name of the dimension.
        template: a copy of it is where a run starts: constants, the caller's storage, buffers.
        shapes: what the first run saw, by slot, of values with a fixed shape.
        stale: shapes were noted that no buffer has been made for.
        nbytes: of all buffers.
    """

    plan: ExecutionPlan
    block: Block
    regions: Mapping[int, Region]
    roots: Mapping[str, Any]
    dims: Mapping[str, int]
    template: Slots
    shapes: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    stale: bool = False
    nbytes: int = 0

    @property
    def own(self) -> frozenset[int]:
        """Slots of results that every run makes anew, for nobody else."""
        fused = (slot for region in self.regions.values() for slot in region.own)
        steps = (step for step in self.block.steps if isinstance(step, Kernel))
        return frozenset((*fused, *(slot for step in steps for slot in registry.makes_new(step))))

    @property
    def fused(self) -> bool:
        """Whether runs of this frame take fused steps."""
        return bool(self.regions)

    def note(self, slot: int, shape: tuple[int, ...]) -> None:
        """Remember the shape of a value that has the same one in all runs of the frame."""
        if slot not in self.shapes:
            self.shapes[slot] = shape
            self.stale = True

    def buffer(self, block: Block, slot: int) -> Array:
        """The array that is the value of ``slot`` in all runs, made when first asked for."""
        held: Array | None = self.template[slot]
        if held is None:
            self._place(block)
            held = self.template[slot]
            assert held is not None
        return held

    def _place(self, block: Block) -> None:
        """Buffers for all values of a block whose shapes are known and that have none."""
        values = self.plan.values
        slots, wanted = [], []
        for slot, life in block.lifetimes.items():
            value = values[slot]
            waits = value.storage is Storage.BUFFER and self.template[slot] is None
            if waits and slot in self.shapes and value.dtype is not None:
                slots.append(slot)
                wanted.append((self.shapes[slot], value.dtype.numpy(), life))
        arrays, size = carve(wanted)
        for slot, array in zip(slots, arrays, strict=True):
            self.template[slot] = array
        self.nbytes += size
