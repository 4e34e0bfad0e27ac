"""How long values live, and who owns their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnx_inplace.compiler import control, partition
from onnx_inplace.compiler.fused import Fused
from onnx_inplace.compiler.steps import (
    Block,
    Branch,
    Kernel,
    Repeat,
    ScanStep,
    Step,
    SubSession,
    View,
)


def escaping(graph: ir.Graph, facts: partition.Facts) -> set[ir.Value]:
    """Values that may be seen under another name, so that no buffer may be reused for them.

    The results of a graph or body leave it. What a Loop or Scan starts from, or takes apart, may
    come out of it as it is (no trip; a value that is only handed on).
    """
    found = set(graph.outputs)
    for node in graph:
        bodies = control.bodies(node)
        if bodies and facts.is_special(node):
            found.update(v for v in node.inputs if v is not None)
            for body in bodies:
                found |= escaping(body, facts)
    return found


def lifetimes(steps: Sequence[Step], outputs: Sequence[int]) -> dict[int, tuple[int, int]]:
    """First and last step for each slot that ``steps`` fill, see ``steps.Block``."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, step in enumerate(steps):
        for slot in reads(step):
            last[slot] = index
        for slot in fills(step):
            first[slot] = index
            last[slot] = index
    last.update(dict.fromkeys(outputs, len(steps)))
    return {slot: (index, last[slot]) for slot, index in first.items()}


def reads(step: Step) -> Iterator[int]:
    """Slots that a step reads, those that its bodies take from outside included."""
    match step:
        case SubSession():
            yield from (port.slot for port in step.inputs)
        case Fused():
            yield from (link.slot for link in step.inputs)
        case Kernel():
            yield from (slot for slot in step.inputs if slot is not None)
        case View():
            yield step.source
            if step.parameter is not None:
                yield step.parameter
        case Branch():
            yield step.condition
            yield from _block_reads(step.then)
            yield from _block_reads(step.otherwise)
        case Repeat():
            yield from (slot for slot in (step.count, step.condition) if slot is not None)
            yield from step.initial
            yield from _block_reads(step.body)
        case ScanStep():
            yield from step.initial
            yield from (whole.slot for whole in step.scanned)
            yield from _block_reads(step.body)


def fills(step: Step) -> Iterator[int]:
    """Slots that a step fills for the steps after it."""
    match step:
        case SubSession():
            yield from (port.slot for port in step.outputs)
        case Fused():
            yield from (link.slot for link in step.outputs)
        case Kernel():
            yield from (slot for slot in step.outputs if slot is not None)
        case View():
            yield step.output
        case Branch():
            yield from step.outputs
        case Repeat() | ScanStep():
            yield from step.outputs
            yield from (whole.slot for whole in step.stacked)


def _block_reads(block: Block) -> Iterator[int]:
    for step in block.steps:
        yield from reads(step)
    yield from block.outputs
