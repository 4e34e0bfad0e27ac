"""What the instructions of a fused step take: time, waiting, bytes, by kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from onnx_inplace.numba_kernels.fused import interpreter
from onnx_inplace.numba_kernels.fused.product import Product
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.fused.instruction import Instruction


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """All instructions of one kind, in one run. ``work`` and ``wait`` together are their time.

    Attributes:
        kind: of the kernel; of a product with its inputs and outputs.
        count: of instructions.
        work: [s] that a thread computes, mean over the threads.
        wait: [s] that a thread waits behind them for others, mean over the threads.
        nbytes: of weights and caches.
    """

    kind: str
    count: int
    work: float
    wait: float
    nbytes: int


class Clock:
    """Adds up the times of runs.

    Attributes:
        threads: that are wanted.
        runs: on all threads.
        incomplete: runs in which a thread began too late to take part; they are not counted.
    """

    def __init__(self, instructions: Sequence[Instruction], threads: int):
        """Begin with nothing."""
        self._instructions, self.threads = instructions, threads
        self._run = interpreter.run_clocked.ready()
        self._once = interpreter.clocks(len(instructions), threads)
        self._all = np.zeros_like(self._once)
        self.runs = self.incomplete = 0

    def run(self, instructions: int, control: Array) -> None:
        """Run the instructions at an address; inside of a region of so many threads."""
        self._once[:] = 0
        count = len(self._instructions)
        self._run(instructions, count, address(control), self.threads, address(self._once))
        if interpreter.team(control) < self.threads:
            self.incomplete += 1
            return
        self._all += self._once
        self.runs += 1

    def parts(self) -> tuple[Part, ...]:
        """By kind, in order of the first of each; without times where no run was complete."""
        seconds = 1e-9 * self._all.mean(axis=0) / max(self.runs, 1)
        found: dict[str, Part] = {}
        for instruction, (work, wait) in zip(self._instructions, seconds.tolist(), strict=True):
            kind = _kind(instruction)
            before = found.get(kind, Part(kind, 0, 0.0, 0.0, 0))
            found[kind] = Part(
                kind,
                before.count + 1,
                before.work + work,
                before.wait + wait,
                before.nbytes + instruction.nbytes,
            )
        return tuple(found.values())


def _kind(instruction: Instruction) -> str:
    block = instruction.block
    name = type(block).__name__
    if isinstance(block, Product):
        return f"{name} {block.inputs} to {block.outputs}"
    return name
