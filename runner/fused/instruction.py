"""An instruction of a fused step, and where threads must meet between several.

An instruction says which bytes it reads and writes. A barrier stands where an instruction touches
what another one since the last barrier has written, or writes what it has read, unless the first
thread does both of them, or each thread reads what it wrote itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from onnx_inplace.numba_kernels.fused import interpreter
from onnx_inplace.runner.actions import Array

Range = tuple[int, int]
"""First byte, and one past the last."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A call of a kernel.

    Attributes:
        kernel: its address.
        block: its arguments.
        first: whether the first thread does all of it.
        reads, writes: bytes that others write or read, too.
        streamed: bytes of weights that come from memory in each run.
        growing: (numbers that a run brings, bytes for each unit of their sum): of caches.
        units: threads share so many things (``kernel.share``), each of which depends on itself
            alone: what one of them writes to a range, the same thread reads there in another
            instruction with as many units. 0: not so.
    """

    kernel: int
    block: Sequence[int]
    first: bool
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    streamed: int = 0
    growing: tuple[tuple[Array, int], ...] = ()
    units: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of weights and caches, with the numbers of the last run."""
        return self.streamed + sum(each * int(numbers.sum()) for numbers, each in self.growing)


def range_(array: Array) -> Range:
    """The bytes that an array reaches."""
    return np.lib.array_utils.byte_bounds(array)


def _conflict(a: Instruction, b: Instruction) -> bool:
    """Whether ``b`` must wait until all threads have done ``a``."""
    if a.first and b.first:
        return False
    if meet(a.writes, b.writes) or meet(a.reads, b.writes):
        return True
    if a.units and a.units == b.units:  # a thread reads what it wrote: the same parts of a range
        return any(meet([x], [y]) and x != y for x in a.writes for y in b.reads)
    return meet(a.writes, b.reads)


def meet(a: Sequence[Range], b: Sequence[Range]) -> bool:
    """Whether some bytes are in both."""
    return any(x[0] < y[1] and y[0] < x[1] for x in a for y in b)


def flags(instructions: Sequence[Instruction]) -> list[int]:
    """Flags of the interpreter for each instruction: who does it, and where threads meet."""
    found = [interpreter.FIRST if i.first else 0 for i in instructions]
    since = 0
    for k, instruction in enumerate(instructions):
        if any(_conflict(earlier, instruction) for earlier in instructions[since:k]):
            found[k - 1] |= interpreter.BARRIER
            since = k
    return found
