"""A plan becomes closures over slots. Storage and inputs have been checked before.

Three layers, by what they belong to: an ``Engine`` (one per session: loaded sub-sessions and
kernels, immutable), an ``Execution`` (one per binding: the caller's storage), and a frame (one per
tuple of input dimensions: buffers and prepared bindings). A run takes its slots from a frame's
template, so nothing of a run outlives it but its outputs.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numba
import numpy as np

from onnx_inplace.compiler import errors, extents, sizes
from onnx_inplace.compiler.fused import NOTHING, ROWS, Fused
from onnx_inplace.compiler.steps import (
    Block,
    Branch,
    ExecutionPlan,
    Kernel,
    Repeat,
    ScanStep,
    Step,
    Storage,
    SubSession,
    View,
)
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import control, library, registry, standard, views
from onnx_inplace.runner.actions import Action, Array, Settings, Slots
from onnx_inplace.runner.frames import Frame
from onnx_inplace.runner.fused import region, weights
from onnx_inplace.runner.fused.region import Region
from onnx_inplace.runner.fused.table import NotFused

_FRAMES = 16  # a server sees many lengths of prompts: the least recently used are given up


Observe = Callable[[Step, Action], Action]
"""Makes another action of that of a step, which does the same and looks at it."""


def _alone(_: Step, action: Action) -> Action:
    return action


class Engine:
    """What all bindings of a session execute."""

    def __init__(self, plan: ExecutionPlan, settings: Settings, model: Path | None = None):
        """Load sub-sessions, kernels, and weights of fused steps; ``model``: the file, if any.

        Raises:
            errors.UnsupportedOperator: a kernel is missing, or does not support a node.
        """
        self.plan, self._settings = plan, settings
        self._fused = plan.fused if settings.fuse else NOTHING
        # kernels first: they refuse at once, sub-sessions take their time
        steps = list(_all_steps(plan.block))
        if self._fused.block is not None:
            steps += list(_all_steps(self._fused.block))
        self._kernels = {
            id(s): registry.compile_step(s, settings) for s in steps if isinstance(s, Kernel)
        }
        loader = library.Library(settings.threads)
        self._library = loader  # holds the weights: onnxruntime keeps no reference to them
        self._sub_sessions = {
            id(s): standard.SubSessionRunner(s, plan, loader)
            for s in steps
            if isinstance(s, SubSession)
        }
        self._weights = weights.load(self._fused, model)
        self._constants = {slot: _read_only(t.numpy()) for slot, t in plan.constants.items()}

    @property
    def constants(self) -> Mapping[int, Array]:
        """Arrays that steps read and nobody writes, by slot."""
        return MappingProxyType(self._constants)

    def open(self, roots: Mapping[str, Any]) -> Execution:
        """An execution on the caller's storage."""
        return Execution(self, roots)

    def build(self, frame: Frame, observe: Observe) -> Action:
        """The closures of a frame, prepared as far as its shapes are known."""
        return _Builder(self._kernels, self._sub_sessions, frame, observe).block(frame.block)

    def choose(
        self, dims: Mapping[str, int], roots: Mapping[str, Array]
    ) -> tuple[Block, Mapping[int, Region]]:
        """The steps of a frame, and its fused steps."""
        fused, ordinary = self._fused, self.plan.block
        if fused.block is None or not _few(fused.rows, dims):
            return ordinary, {}
        threads = min(self._settings.threads, numba.config.NUMBA_NUM_THREADS)
        try:
            return fused.block, {
                id(step): region.build(
                    step, dims, roots, self._weights, threads, self._settings.portable
                )
                for step in fused.regions
            }
        except NotFused:
            return ordinary, {}


def _few(rows: Sequence[sizes.Size], dims: Mapping[str, int]) -> bool:
    """Whether all products have few enough rows; not where a dimension is known only in a run."""
    try:
        return all(rows_ <= ROWS for rows_ in sizes.numbers(rows, dims))
    except KeyError:
        return False


class Execution:
    """The runs on one caller's storage. Not thread-safe: the binding lets one run at a time."""

    def __init__(self, engine: Engine, roots: Mapping[str, Any]):
        self._engine, self._roots = engine, roots
        self._frames: OrderedDict[tuple[tuple[int, ...], ...], Run] = OrderedDict()
        self._observe: Observe = _alone

    def observe(self, observe: Observe) -> None:
        """From the next run on, steps do what ``observe`` makes of what they did."""
        self._observe = observe
        self._frames.clear()

    def run(self, shapes: tuple[tuple[int, ...], ...]) -> Run:
        """What runs with ordinary inputs of these shapes, in order of the graph."""
        found = self._frames.get(shapes)
        if found is not None:
            self._frames.move_to_end(shapes)
            return found
        while len(self._frames) >= _FRAMES:
            self._frames.popitem(last=False)
        found = self._frames[shapes] = Run(self._engine, self._frame(shapes), self._observe)
        return found

    def _frame(self, shapes: tuple[tuple[int, ...], ...]) -> Frame:
        plan = self._engine.plan
        template: Slots = [None] * plan.slots
        for slot, array in self._engine.constants.items():
            template[slot] = array
        given = iter(shapes)
        dims: dict[str, int] = {}
        for i in plan.inputs:
            if i.mutable:
                template[i.slot] = self._roots[i.name]
            shape = self._roots[i.name].shape if i.mutable else next(given)
            named = plan.values[i.slot].shape or (None,) * len(shape)
            for axis, (name, size) in enumerate(zip(named, shape, strict=False)):
                if not isinstance(name, int):
                    dims[name or extents.unnamed(i.name, axis)] = size
        block, regions = self._engine.choose(dims, self._roots)
        return Frame(plan, block, regions, self._roots, dims, template)


class Run:
    """The closures of a frame. The first run notes shapes, the second prepares buffers for them."""

    def __init__(self, engine: Engine, frame: Frame, observe: Observe):
        self._engine, self.frame, self._observe = engine, frame, observe
        self._act = engine.build(frame, observe)

    def slots(self) -> Slots:
        """Slots for a run: fill in the ordinary inputs, then call."""
        if self.frame.stale:
            self.frame.stale = False
            self._act = self._engine.build(self.frame, self._observe)
        return self.frame.template.copy()

    def __call__(self, slots: Slots) -> None:
        """Execute the plan."""
        self._act(slots)


@dataclasses.dataclass(frozen=True)
class _Builder:
    """Makes the closures of one frame: steps in order, with what is due between them."""

    kernels: Mapping[int, Action]
    sub_sessions: Mapping[int, standard.SubSessionRunner]
    frame: Frame
    observe: Observe

    def block(self, block: Block) -> Action:
        """A block as one action."""
        ends = _ends(block, self.frame)
        actions = []
        for index, step in enumerate(block.steps):
            action = self._guarded(self._action(step, block), step)
            actions.append(self.observe(step, action))
            if index in ends:
                actions.append(_release(ends[index]))
        if len(actions) == 1:
            return actions[0]
        sequence = tuple(actions)

        def act(slots: Slots) -> None:
            for action in sequence:
                action(slots)

        return act

    def _action(self, step: Step, block: Block) -> Action:
        match step:
            case SubSession():
                return self.sub_sessions[id(step)].action(self.frame, block)
            case Kernel():
                return self.kernels[id(step)]
            case Fused():
                return self.frame.regions[id(step)].action()
            case View():
                return views.action(step)
            case Branch():
                return control.branch(step, self.block)
            case Repeat():
                return control.repeat(step, self.block, self.frame.dims)
            case ScanStep():
                return control.scan(step, self.block, self.frame.dims)

    def _guarded(self, action: Action, step: Step) -> Action:
        """Compare where a must-alias step wrote with where its root is."""
        for slot, root in _aliased(step):
            if root in self.frame.roots:  # pages that nobody may write are no storage of a root
                action = _guard(action, slot, root, self.frame.roots[root])
        return action


def _guard(action: Action, slot: int, root: str, array: Any) -> Action:
    expected = _place(array)

    def act(slots: Slots) -> None:
        action(slots)
        found = slots[slot]
        if found is not array:
            actual = address(found) if isinstance(found, np.ndarray) else 0
            if actual != expected:
                raise errors.AliasViolation(
                    f"a step left `{root}` at {actual:#x}; its storage is at {expected:#x}.",
                    root,
                    expected,
                    actual,
                )

    return act


def _place(storage: Any) -> int:
    """The address of an array; of a paged cache its identity, for its pages come and go."""
    return address(storage) if isinstance(storage, np.ndarray) else id(storage)


def _aliased(step: Step) -> Iterator[tuple[int, str]]:
    """Slots that a step promises to be a root."""
    match step:
        case Kernel() | Branch() | Repeat() | ScanStep():
            for index, root in step.roots.items():
                slot = step.outputs[index]
                if slot is not None:
                    yield slot, root
        case View():
            yield step.output, step.root


def _ends(block: Block, frame: Frame) -> dict[int, list[int]]:
    """Slots to release after a step, by step: values that were made for this run alone.

    In the first run of a frame these are all values; later some have buffers, which stay.
    """
    ends: dict[int, list[int]] = {}
    for slot, (_, last) in block.lifetimes.items():
        storage = frame.plan.values[slot].storage
        made = storage is Storage.FRESH or (storage is Storage.BUFFER and slot not in frame.shapes)
        if made and last < len(block.steps):
            ends.setdefault(last, []).append(slot)
    return ends


def _release(slots: Sequence[int]) -> Action:
    first, rest = slots[0], tuple(slots[1:])

    def act(values: Slots) -> None:
        values[first] = None
        for slot in rest:
            values[slot] = None

    return act


def _all_steps(block: Block) -> Iterator[Step]:
    for step in block.steps:
        yield step
        match step:
            case Branch():
                yield from _all_steps(step.then)
                yield from _all_steps(step.otherwise)
            case Repeat() | ScanStep():
                yield from _all_steps(step.body)


def _read_only(array: Any) -> Array:
    view: Array = array.view()
    view.flags.writeable = False
    return view
