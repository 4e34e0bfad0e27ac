"""Sizes of inputs that nothing but sub-sessions notices, and those in no result.

A mask of padding is longer with every token of a text. Where attention does not read it, only what
a library makes of it matters, its length to nobody: runs that differ in it are alike.
"""

from __future__ import annotations

from onnx_inplace.compiler import lifetimes
from onnx_inplace.compiler.fused import Fused
from onnx_inplace.compiler.steps import Branch, ExecutionPlan, Repeat, ScanStep, SubSession


def axes(plan: ExecutionPlan) -> dict[int, tuple[int, ...]]:
    """By slot of an ordinary input, its axes of such a size; inputs without one are left out."""
    noticed: set[int] = {output.slot for output in plan.outputs}
    for block in filter(None, (plan.block, plan.fused.block)):
        for step in block.steps:
            if isinstance(step, Branch | Repeat | ScanStep):
                return {}  # a body may run with any of them
            if not isinstance(step, SubSession | Fused):
                noticed.update(lifetimes.reads(step))
    named = set(plan.fused.dims)
    ordinary = {i.slot for i in plan.inputs if not i.mutable} - noticed
    for value in plan.values:
        if value.slot in ordinary:
            continue
        if value.fixed and (value.shape is None or None in value.shape):
            return {}  # it follows from the sizes of inputs, the plan does not say how
        named.update(n for n in value.shape or () if isinstance(n, str))
    found = {}
    for slot in ordinary:
        shape = plan.values[slot].shape or ()
        free = tuple(k for k, n in enumerate(shape) if isinstance(n, str) and n not in named)
        if free:
            found[slot] = free
    return found
