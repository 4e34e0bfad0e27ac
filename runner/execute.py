"""A plan becomes closures over slots. Storage and inputs have been checked before.

Three layers, by what they belong to: an ``Engine`` (one per session: loaded sub-sessions and
kernels, immutable), an ``Execution`` (one per binding: the caller's storage), and a frame (one per
tuple of input dimensions: buffers and prepared bindings). A run takes its slots from a frame's
template, so nothing of a run outlives it but its outputs.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from onnx_inplace.compiler import collector, errors, extents
from onnx_inplace.compiler.fused import ROWS, Fused
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
from onnx_inplace.runner import (
    alike,
    control,
    huge_pages,
    joined,
    layers,
    library,
    library_check,
    registry,
    standard,
    views,
)
from onnx_inplace.runner.actions import Action, Array, Fuse, Settings, Slots
from onnx_inplace.runner.frames import Frame
from onnx_inplace.runner.fused.choice import Alternative, OnStorage
from onnx_inplace.runner.fused.region import Region

_FRAMES = 16  # a server sees many lengths of prompts: the least recently used are given up


Observe = Callable[[Step, Action], Action]
"""Makes another action of that of a step, which does the same and looks at it."""


def _alone(_: Step, action: Action) -> Action:
    return action


class Engine:
    """What all bindings of a session execute."""

    @collector.paused()
    def __init__(self, plan: ExecutionPlan, settings: Settings, model: Path | None = None):
        """Compile kernels, repack weights and load what every run needs.

        Args:
            plan: of the model.
            settings: how kernels may use the machine.
            model: its file, beside which repacked weights are kept; None: it has none.

        Raises:
            errors.UnsupportedOperator: a kernel is missing, or does not support a node.
            errors.BindingError: only fused steps are wanted, and there are none.
        """
        self.plan, self._settings = plan, settings
        self._kernels: dict[int, Action] = {}
        self._sub_sessions: dict[int, standard.SubSessionRunner] = {}
        self._library = library.Library(settings.threads)  # holds the weights: onnxruntime does not
        self._joined, self.alike = joined.WhenAsked(plan, self._library), alike.Alike(plan)
        # kernels first: they refuse at once, weights and sub-sessions take their time
        if settings.fuse is not Fuse.DECODE_ONLY:
            self._enter(plan.block)
        self.fused = Alternative(plan.fused, settings, model)
        if self.fused.block is not None:
            self._enter(self.fused.block)
        elif settings.fuse is Fuse.DECODE_ONLY:
            raise _nothing_fused(plan, self.fused)
        self._load()
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
        builder = _Builder(self._kernels, self._sub_sessions, self._settings, frame, observe)
        if frame.block is not self.plan.block or observe is not _alone:
            return builder.block(frame.block)
        whole = self._joined.get()
        if whole is None:
            return builder.block(frame.block)
        return whole.action(frame, [builder.steps(call.steps) for call in whole.calls])

    def choose(
        self, dims: Mapping[str, int], fused: OnStorage
    ) -> tuple[Block, Mapping[int, Region]]:
        """The steps of a frame, and its fused steps.

        Raises:
            errors.BindingError: only fused steps are loaded, and they cannot serve these shapes.
        """
        regions = fused.regions(dims)
        if regions and self.fused.block is not None:
            return self.fused.block, regions
        if self._settings.fuse is Fuse.DECODE_ONLY:
            raise _not_loaded(self.fused, dims)
        return self.plan.block, {}

    def _enter(self, block: Block) -> None:
        for step in _all_steps(block):
            match step:
                case Kernel():
                    self._kernels[id(step)] = registry.compile_step(step, self._settings)
                case SubSession():
                    self._library.expect(step)
                    self._sub_sessions[id(step)] = standard.SubSessionRunner(
                        step, self.plan, self._library
                    )
        layers.ready(block)

    def _load(self) -> None:
        """Load the sub-sessions that most runs take.

        Where fused steps are an alternative, those of the ordinary steps wait for the first run
        that needs them, because their weights are a copy beside those of fused steps; but what
        onnxruntime cannot run at all is refused now.
        """
        usual = {id(s) for s in _all_steps(self.fused.block or self.plan.block)}
        later = [r.step for key, r in self._sub_sessions.items() if key not in usual]
        usual.update(id(step) for step in library_check.doubtful(later))
        now = [runner for key, runner in self._sub_sessions.items() if key in usual]
        nbytes = sum(w.tensor.nbytes for runner in now for w in runner.step.weights)
        with huge_pages.of_what_is_loaded(nbytes):
            if self.fused.block is None and self._joined.get() is not None:
                return
            for runner in now:
                runner.load()


def _nothing_fused(plan: ExecutionPlan, fused: Alternative) -> errors.BindingError:
    reasons = [*map(str, fused.refusals), *map(str, plan.fused.refusals)]
    more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    why = "; ".join(reasons[:3]) or "it has no product with a weight in its main graph"
    return errors.BindingError(
        f'fuse="decode-only": nothing of this model can be fused: {why}{more}. Use fuse="auto".',
        "fuse",
    )


def _not_loaded(fused: Alternative, dims: Mapping[str, int]) -> errors.BindingError:
    given = ", ".join(f"{name}={size}" for name, size in dims.items())
    why = next((r.reason for r in fused.refusals if r.dims == dims), None)
    if why is None:
        rows = ", ".join(str(size) for size in fused.fusion.rows)
        why = f"rows of products ({rows}) are 1 to {ROWS} in fused steps"
    return errors.BindingError(
        f'fuse="decode-only" has loaded nothing for runs of these sizes ({given}): {why}. Give '
        'fewer tokens at a time, or use fuse="auto".',
        "fuse",
    )


class Execution:
    """The runs on one caller's storage. Not thread-safe: the binding lets one run at a time."""

    def __init__(self, engine: Engine, roots: Mapping[str, Any]):
        self._engine, self._roots, self._fused = engine, roots, engine.fused.on(roots)
        self._frames: OrderedDict[tuple[tuple[int, ...], ...], Run] = OrderedDict()
        self._observe: Observe = _alone

    def observe(self, observe: Observe) -> None:
        """From the next run on, steps do what ``observe`` makes of what they did."""
        self._observe, self._fused = observe, self._engine.fused.on(self._roots)
        self._frames.clear()

    def run(self, shapes: tuple[tuple[int, ...], ...]) -> Run:
        """What runs with ordinary inputs of these shapes, in order of the graph."""
        key = self._engine.alike.key(shapes)
        found = self._frames.get(key)
        if found is not None:
            self._frames.move_to_end(key)
            return found
        while len(self._frames) >= _FRAMES:
            self._frames.popitem(last=False)
        found = self._frames[key] = Run(self._engine, self._frame(shapes), self._observe)
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
        block, regions = self._engine.choose(dims, self._fused)
        for region in regions.values():
            for slot, array in region.settled.items():
                template[slot] = array
        return Frame(plan, block, regions, self._roots, dims, template)


class Run:
    """The closures of a frame. The first run notes shapes, the second prepares buffers for them."""

    def __init__(self, engine: Engine, frame: Frame, observe: Observe):
        self._engine, self.frame, self._observe = engine, frame, observe
        self._act = engine.build(frame, observe)

    @property
    def layer(self) -> layers.LayerAction | None:
        """The layer that is all that is executed; None: there are other steps, too."""
        return self._act if isinstance(self._act, layers.LayerAction) else None

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
    settings: Settings
    frame: Frame
    observe: Observe

    def block(self, block: Block) -> Action:
        """A block as one action."""
        ends = _ends(block, self.frame)
        actions = []
        for last, action in self._actions(block.steps, block, ends):
            actions.append(action)
            if last in ends:
                actions.append(_release(ends[last]))
        return _in_order(actions)

    def steps(self, steps: Sequence[Step]) -> Action:
        """Steps of the main block as one action."""
        return _in_order([action for _, action in self._actions(steps, self.frame.block, ())])

    def _actions(
        self, steps: Sequence[Step], block: Block, ends: Container[int]
    ) -> Iterable[tuple[int, Action]]:
        """What does the steps in order: one or several of them, by the last of these."""
        singles = [self._guarded(self._action(step, block), step) for step in steps]
        if self.observe is _alone:
            return layers.join(steps, singles, ends, self.frame.roots, self.settings)
        return enumerate(map(self.observe, steps, singles))

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


def _in_order(actions: Sequence[Action]) -> Action:
    if len(actions) == 1:
        return actions[0]
    sequence = tuple(actions)

    def act(slots: Slots) -> None:
        for action in sequence:
            action(slots)

    return act


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
