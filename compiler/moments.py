"""What a run holds at each of its steps; ``memory`` says the most of it.

The same lives and sizes: the largest of what passes, and the whole of the arenas, are
``Memory.values``; what passes and workspace together are at most that much more than
``Memory.workspace`` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from onnx_inplace.compiler import sizes
from onnx_inplace.compiler.memory import BlockUse, Footprint, machine


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """Bytes that are in use while a step runs, caches left out.

    Attributes:
        block: number of the step's block, a block before those in it.
        step: index into the steps of the block; their number, when the block hands its results on.
        buffers: of the arenas, what holds a value that is still read.
        passing: values that are made anew in every run, and elements that a loop has collected.
        workspace: temporary bytes of the step, at most.
    """

    block: int
    step: int
    buffers: int
    passing: int
    workspace: int

    @property
    def values(self) -> int:
        """Buffers and what passes."""
        return self.buffers + self.passing


def moments(footprint: Footprint, dims: Mapping[str, int]) -> tuple[Moment, ...]:
    """Every step in the order of the program, the steps of branches and bodies behind their own.

    Raises:
        BindingError: a dimension is unknown, missing or no size.
    """
    footprint.layout(dims)  # refuses such dimensions
    numbers = {id(block): number for number, block in enumerate(footprint.block.all())}
    return tuple(_block(footprint.block, dims, numbers, 0, 0))


def _block(
    block: BlockUse, dims: Mapping[str, int], numbers: Mapping[int, int], buffers: int, passing: int
) -> Iterator[Moment]:
    """``buffers`` and ``passing``: what is held around the block."""
    ends = len(block.steps) + 1
    held, alive = [buffers] * ends, [passing] * ends
    for items, total in ((block.buffers, held), (block.passing, alive)):
        for item in items:
            size = sizes.evaluate(item.size, dims)
            for step in range(max(item.life[0], 0), item.life[1] + 1):
                total[step] += size
    for index, use in enumerate(block.steps):
        joined = alive[index] + sizes.evaluate(use.joined, dims)
        alive[index] += sizes.evaluate(use.collected, dims)
        passing, needed = max(alive[index], joined), use.most(machine(dims))
        yield Moment(numbers[id(block)], index, held[index], passing, needed)
        for inner in use.blocks:
            yield from _block(inner, dims, numbers, held[index], alive[index])
    yield Moment(numbers[id(block)], ends - 1, held[-1], alive[-1], 0)
