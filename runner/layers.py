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
from onnx_inplace.numba_kernels import whole_run
from onnx_inplace.numba_kernels.append_attend import NEWS, REFUSED, WRITTEN
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
            if len(layer.steps) == len(block.steps):
                layer.called()
                whole_run.run.ready()
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
                last = end - 1
                action = LayerAction(layer, singles[index:end], roots, settings)
        yield last, action
        index = last + 1


def _find(block: Sequence[steps.Step], index: int) -> Layer | None:
    """The layer that begins with a step, if there is one."""
    found = (family.find(block, index) for family in _FAMILIES)
    return next((layer for layer in found if layer is not None), None)


class LayerAction:
    """The action of a layer.

    Attributes:
        prepared: the compiled call, once values have come a second time.
        output: slot of what attention gives.
        written: slots of storage, see ``layer.Layer``.
    """

    def __init__(
        self, layer: Layer, singles: Sequence[Action], roots: Mapping[str, Any], settings: Settings
    ) -> None:
        """``singles`` are the actions of its steps."""
        attention = layer.steps[-1]
        output = attention.outputs[0]
        assert output is not None
        self._layer, self._singles, self._roots, self._settings = layer, singles, roots, settings
        self._run, self.output = layer.ready(), output
        self._fresh, self._runs = not reusable(attention, output), 0
        self.prepared: Prepared | None = None
        self.written = layer.written

    def __call__(self, slots: Slots) -> None:
        """Do what the steps do."""
        call = self.prepared
        if call is None:
            self._one_by_one(slots)
            return
        if self._fresh:
            slots[self.output] = np.empty(call.shape, call.dtype)
        space, helpers = workspace.of_thread(call.space), call.helpers
        try:
            team = 0 if helpers is None else helpers.at
            done = self._run(id(slots), call.at, id(space) + FIELD, team)
            if done != REFUSED:
                call.note(slots, done)
        except BaseException:  # an interrupt may come between the writes and their note
            call.note(slots, REFUSED)
            raise
        if done == REFUSED:
            if call.outlived:
                self._runs, self.prepared = _FIRST - 1, None
            self._one_by_one(slots)
            return
        if helpers is not None and done & NEWS:
            helpers.look_after()
        self.end(slots, done)

    def end(self, slots: Slots, done: int) -> None:
        """Do what the compiled call leaves to us; ``done`` is what it has said."""
        for new, old in self.written:
            slots[new] = slots[old]
        if done & WRITTEN:
            self._singles[-1](slots)

    @property
    def finishes(self) -> bool:
        """Whether the compiled call makes an array of its own for the output, and all of it."""
        call = self.prepared
        alone = self._settings.threads == 1
        return self._fresh and call is not None and (alone or call.helpers is not None)

    @property
    def called(self) -> int:
        """Address of the compiled call, for who has no Python in between."""
        return self._layer.called()

    def _one_by_one(self, slots: Slots) -> None:
        for single in self._singles:
            single(slots)
        self._runs += 1
        if self._runs == _FIRST:
            self.prepared = self._layer.prepare(slots, self._roots, self._settings)
