"""Do the facts that a plan states beside its steps agree with each other?

The first half of the verifier, which follows the steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx_inplace.compiler.steps import ExecutionPlan, MustAlias, Storage, Value


def violations(plan: ExecutionPlan) -> Iterator[str]:
    """What contradicts itself."""
    inputs = {i.slot for i in plan.inputs}
    roots = {i.name for i in plan.inputs if i.mutable}
    for place, value in enumerate(plan.values):
        callers = value.root is not None or place in inputs
        yield from _value(value, place, roots, callers, place in plan.constants)
    reused = {v.slot for v in plan.values if v.storage is Storage.BUFFER}
    if reused != plan.inplace_reuse:
        yield f"reused: {sorted(plan.inplace_reuse)}, buffers: {sorted(reused)}"
    stated = set(plan.must_alias)
    expected = {
        MustAlias(v.slot, v.root)
        for v in plan.values
        if v.root is not None and v.slot not in inputs
    }
    if expected != stated:
        odd = sorted(alias.slot for alias in expected ^ stated)
        yield f"must_alias and the roots of values differ in slots {odd}"
    if tuple(o.slot for o in plan.outputs) != plan.block.outputs:
        yield "the outputs of the plan are not those of its block"
    for output in plan.outputs:
        if output.root != plan.values[output.slot].root:
            yield f"output `{output.name}`: {output.root} is not its root"
    for i in plan.inputs:
        if plan.values[i.slot].root != (i.name if i.mutable else None):
            yield f"input `{i.name}` has the root {plan.values[i.slot].root}"


def _value(
    value: Value, place: int, roots: set[str], callers: bool, constant: bool
) -> Iterator[str]:
    name = f"`{value.name}` (slot {place})"
    if value.slot != place:
        yield f"slot {place} is described as slot {value.slot}"
    if value.root is not None and value.root not in roots:
        yield f"{name}: `{value.root}` is no mutable input"
    if callers != (value.storage is Storage.CALLER):
        yield f"{name} is {'' if callers else 'not '}the caller's, stated is {value.storage}"
    if constant != (value.storage is Storage.CONSTANT):
        yield f"{name} is {'a' if constant else 'no'} constant, stated is {value.storage}"
    if (value.version is None) != (value.root is None):
        yield f"{name}: a root without a version, or a version without a root"
