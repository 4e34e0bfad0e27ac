"""If, Loop and Scan that touch a root: their blocks run step by step, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onnx_inplace.compiler import errors
from onnx_inplace.compiler.steps import Block, Branch, Repeat, Scanned, ScanStep, Stacked
from onnx_inplace.runner import journal
from onnx_inplace.runner.actions import Action, Array, Slots

BlockAction = Callable[[Block], Action]


def branch(step: Branch, run: BlockAction) -> Action:
    """An If. The results of the branch that ran become its outputs; nothing is copied."""
    condition = step.condition
    then, otherwise = run(step.then), run(step.otherwise)
    then_results = tuple(zip(step.outputs, step.then.outputs, strict=True))
    other_results = tuple(zip(step.outputs, step.otherwise.outputs, strict=True))

    def act(slots: Slots) -> None:
        if slots[condition]:
            then(slots)
            results = then_results
        else:
            otherwise(slots)
            results = other_results
        for target, source in results:
            slots[target] = slots[source]

    return act


def repeat(step: Repeat, run: BlockAction, dims: Mapping[str, int]) -> Action:
    """A Loop: at most ``count`` rounds, as long as the condition holds."""
    body = run(step.body)
    rounds = len(step.initial)
    again = step.body.outputs[0]
    results = step.body.outputs[1 : 1 + rounds]
    stacked = step.body.outputs[1 + rounds :]

    def act(slots: Slots) -> None:
        count = None if step.count is None else int(slots[step.count])
        going = step.condition is None or bool(slots[step.condition])
        state = [slots[s] for s in step.initial]
        elements: list[list[Any]] = [[] for _ in stacked]
        number = 0
        while going and (count is None or number < count):
            # new arrays in every round: the body may return or stack them
            slots[step.number] = np.asarray(number, np.int64)
            slots[step.going] = np.asarray(going)
            for formal, value in zip(step.carried, state, strict=True):
                slots[formal] = value
            body(slots)
            journal.end_round(slots)
            going = bool(slots[again])
            state = [slots[s] for s in results]
            for found, s in zip(elements, stacked, strict=True):
                found.append(slots[s])
            number += 1
        _finish(slots, step, state, elements, dims)

    return act


def scan(step: ScanStep, run: BlockAction, dims: Mapping[str, int]) -> Action:
    """A Scan: one round for each element of the scanned inputs."""
    body = run(step.body)
    results = step.body.outputs[: len(step.initial)]
    stacked = step.body.outputs[len(step.initial) :]

    def act(slots: Slots) -> None:
        state = [slots[s] for s in step.initial]
        elements: list[list[Any]] = [[] for _ in stacked]
        wholes = [_taken_apart(slots[whole.slot], whole) for whole in step.scanned]
        lengths = {len(whole) for whole in wholes}
        if len(lengths) != 1:
            raise errors.StorageMismatch(
                f"Scan takes inputs of different lengths apart: {sorted(lengths)}"
            )
        for number in range(lengths.pop()):
            for formal, value in zip(step.carried, state, strict=True):
                slots[formal] = value
            for formal, whole in zip(step.elements, wholes, strict=True):
                # elements along an inner axis are not contiguous where they stand
                slots[formal] = np.ascontiguousarray(whole[number]).reshape(whole.shape[1:])
            body(slots)
            journal.end_round(slots)
            state = [slots[s] for s in results]
            for found, s in zip(elements, stacked, strict=True):
                found.append(slots[s])
        _finish(slots, step, state, elements, dims)

    return act


def _taken_apart(whole: Array, how: Scanned) -> Array:
    elements = np.moveaxis(whole, how.axis, 0)
    return elements[::-1] if how.reverse else elements


def _finish(
    slots: Slots,
    step: Repeat | ScanStep,
    state: Sequence[Any],
    elements: list[list[Any]],
    dims: Mapping[str, int],
) -> None:
    for slot, value in zip(step.outputs, state, strict=True):
        slots[slot] = value
    for whole, found in zip(step.stacked, elements, strict=True):
        slots[whole.slot] = _stack(whole, found, dims)


def _stack(whole: Stacked, elements: list[Array], dims: Mapping[str, int]) -> Array:
    if elements:
        return np.stack(elements[::-1] if whole.reverse else elements, whole.axis)
    # without a round only the declaration tells; what it does not tell is empty, as in onnxruntime
    shape = [dims.get(d, 0) if isinstance(d, str) else d or 0 for d in whole.shape or ()]
    shape.insert(whole.axis % (len(shape) + 1), 0)
    if whole.dtype is None:
        raise errors.UnsupportedOperator("", "Loop", "the type of a stacked output is not known")
    return np.empty(shape, whole.dtype.numpy())
