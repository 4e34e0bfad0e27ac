"""Neighbouring steps of a decoder's layer as one action: new keys and values written, attention.

Each of these steps looks at shapes, positions and storage in Python, which takes longer than what
it is for, where one token comes at a time. Here one compiled call does all of it for arrays that
are like those of the run before. It only recognises what is surely right: whatever looks otherwise
is left to the steps, one by one, which also say what is wrong, in their order and at their place.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onnx_inplace.compiler import steps
from onnx_inplace.numba_kernels.append_attend import REFUSED, WRITTEN
from onnx_inplace.numba_kernels.memory import FIELD
from onnx_inplace.runner import layers_dense, layers_grouped, layers_paged, workspace
from onnx_inplace.runner.actions import Action, Settings, Slots, reusable
from onnx_inplace.runner.layer import Layer, Prepared

_FAMILIES = layers_dense, layers_paged, layers_grouped
_FIRST = 2  # runs of steps one by one: for what comes only once, no call is prepared


def ready(block: steps.Block) -> None:
    """Compile what layers of a block, its branches and bodies are called with: at load."""
    for index, step in enumerate(block.steps):
        layer = _find(block.steps, index)
        if layer is not None:
            layer.ready()
        match step:
            case steps.Branch():
                ready(step.then)
                ready(step.otherwise)
            case steps.Repeat() | steps.ScanStep():
                ready(step.body)


def join(
    block: Sequence[steps.Step],
    singles: Sequence[Action],
    pauses: Container[int],
    roots: Mapping[str, Any],
    settings: Settings,
) -> Iterator[tuple[int, Action]]:
    """Actions that do what those of the single steps do, in order, each with its last step.

    Args:
        block: steps in order.
        singles: the action of each.
        pauses: steps behind which something else has to be done.
        roots: the caller's storage, by name.
        settings: of the session.
    """
    index = 0
    while index < len(block):
        layer, action, last = _find(block, index), singles[index], index
        if layer is not None and layer.serves(roots):
            end = index + len(layer.steps)
            if not any(step in pauses for step in range(index, end - 1)):
                action, last = _action(layer, singles[index:end], roots, settings), end - 1
        yield last, action
        index = last + 1


def _find(block: Sequence[steps.Step], index: int) -> Layer | None:
    """The layer that begins with a step, if there is one."""
    found = (family.find(block, index) for family in _FAMILIES)
    return next((layer for layer in found if layer is not None), None)


def _action(
    layer: Layer, singles: Sequence[Action], roots: Mapping[str, Any], settings: Settings
) -> Action:
    """The action of a layer; ``singles`` are those of its steps."""
    run, written = layer.ready(), layer.written
    attention, attend = layer.steps[-1], singles[-1]
    output = attention.outputs[0]
    assert output is not None
    fresh = not reusable(attention, output)
    prepared: Prepared | None = None
    runs = 0

    def one_by_one(slots: Slots) -> None:
        nonlocal runs, prepared
        for single in singles:
            single(slots)
        runs += 1
        if runs == _FIRST:
            prepared = layer.prepare(slots, roots, settings)

    def act(slots: Slots) -> None:
        nonlocal runs, prepared
        call = prepared
        if call is None:
            one_by_one(slots)
            return
        if not call.fits(slots):
            runs, prepared = _FIRST - 1, None
            one_by_one(slots)
            return
        if fresh:
            slots[output] = np.empty(call.shape, call.dtype)
        space = workspace.of_thread(call.space)
        try:
            done = run(id(slots), call.at, id(space) + FIELD)
            if done != REFUSED:
                call.note(slots, done)
        except BaseException:  # an interrupt may come between the writes and their note
            call.note(slots, REFUSED)
            raise
        if done == REFUSED:
            one_by_one(slots)
            return
        for new, old in written:
            slots[new] = slots[old]
        if done & WRITTEN:
            attend(slots)

    return act
