"""Where the time of a run goes: seconds and bytes of each step, and of each kind in fused steps.

The same run is repeated; what it reads and writes is counted from the arrays that it meets, not
measured. A plain run is timed first: looking at the steps costs a little.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numba
import numpy as np
import onnx

from onnx_inplace.compiler.steps import Block, Branch, Kernel, Repeat, ScanStep, Step, SubSession
from onnx_inplace.runner import bandwidth
from onnx_inplace.runner.actions import Action, Slots
from onnx_inplace.runner.fused.clock import Clock, Part
from onnx_inplace.runner.session import Session

_WARM = 10  # runs before the first that counts: caches of the CPU fill
_SETTLE = 2  # observed runs that do not count: the first notes shapes, the second makes buffers
_LENGTHS = 6  # input of Attention that says how many tokens of its caches are valid


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """A step of the plan, as it ran.

    Attributes:
        step: of the plan.
        depth: 0 in the main block, 1 in a branch or body of it, and so on.
        calls: in a run.
        seconds: in a run, with all that it calls.
        nbytes: of weights, values and caches that it reads and writes in a run; of a fused step,
            weights and caches alone, because values do not leave the CPU.
        parts: of a fused step.
        incomplete: runs in which not all threads took part; ``parts`` does not count them.
    """

    step: Step
    depth: int
    calls: float
    seconds: float
    nbytes: int
    parts: tuple[Part, ...] = ()
    incomplete: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """Repeated runs with the same inputs.

    Attributes:
        threads: that a run may use.
        runs: that were timed.
        seconds: of a run, median.
        nbytes: of all steps.
        machine: [bytes/s] reading as many bytes with as many threads.
        steps: in order of the plan, those of branches and bodies behind their owner.
    """

    threads: int
    runs: int
    seconds: float
    nbytes: int
    machine: float
    steps: tuple[Timed, ...]

    @property
    def speed(self) -> float:
        """Bytes/s."""
        return self.nbytes / self.seconds


def profile(
    session: Session, storage: Mapping[str, Any], feeds: Mapping[str, Any], runs: int = 20
) -> Profile:
    """Run a model again and again, and look at its steps.

    Args:
        session: of the model.
        storage: for the mutable inputs, which is written.
        feeds: ordinary inputs, the same for every run.
        runs: that count, once as they are and once observed.

    Raises:
        errors.InplaceError: as ``Session.bind`` and ``Binding.run``.
    """
    plain, watch = [], _Watch()
    with session.bind(**storage) as binding:
        for _ in range(_WARM):
            binding.run(**feeds)
        for _ in range(runs):
            start = time.perf_counter()
            binding.run(**feeds)
            plain.append(time.perf_counter() - start)
        frame = binding.observe(watch.observe)
        clocks: dict[int, Clock] = {}
        for number in range(_SETTLE + runs):
            if number == _SETTLE:
                watch.clear()
                clocks = {key: region.observe() for key, region in frame.regions.items()}
            binding.run(**feeds)
    timed = tuple(watch.timed(frame.block, clocks, runs, 0))
    nbytes = sum(t.nbytes for t in timed)
    threads = min(session.threads, numba.config.NUMBA_NUM_THREADS)
    speed = bandwidth.read(nbytes, threads)
    return Profile(threads, runs, statistics.median(plain), nbytes, speed, timed)


@dataclasses.dataclass(slots=True)
class _Seen:
    """Of one step: how often, how long, and the bytes of one call."""

    calls: int = 0
    seconds: float = 0.0
    nbytes: int | None = None


class _Watch:
    """Times steps while they run."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def clear(self) -> None:
        """Forget what was seen."""
        for seen in self._seen.values():
            seen.calls, seen.seconds, seen.nbytes = 0, 0.0, None

    def observe(self, step: Step, action: Action) -> Action:
        """The same action, and a look at the clock before and behind."""
        seen = self._seen.setdefault(id(step), _Seen())

        def act(slots: Slots) -> None:
            start = time.perf_counter()
            action(slots)
            seen.seconds += time.perf_counter() - start
            seen.calls += 1
            if seen.nbytes is None:
                seen.nbytes = _nbytes(step, slots)

        return act

    def timed(
        self, block: Block, clocks: Mapping[int, Clock], runs: int, depth: int
    ) -> Iterator[Timed]:
        """What was seen of the steps of a block."""
        for step in block.steps:
            seen = self._seen.get(id(step), _Seen())
            clock = clocks.get(id(step))
            parts = () if clock is None else clock.parts()
            nbytes = (seen.nbytes or 0) * seen.calls // runs + sum(p.nbytes for p in parts)
            yield Timed(
                step,
                depth,
                seen.calls / runs,
                seen.seconds / runs,
                nbytes,
                parts,
                0 if clock is None else clock.incomplete,
            )
            for inner in _blocks(step):
                yield from self.timed(inner, clocks, runs, depth + 1)


def _blocks(step: Step) -> tuple[Block, ...]:
    match step:
        case Branch():
            return step.then, step.otherwise
        case Repeat() | ScanStep():
            return (step.body,)
    return ()


def _nbytes(step: Step, slots: Slots) -> int:
    """Bytes that a call reads and writes; what stands in branches and bodies counts there."""
    match step:
        case SubSession():
            values = [slots[port.slot] for port in (*step.inputs, *step.outputs)]
            picked = _picked(step)
            weights = [w.tensor.nbytes for w in step.weights if w.name not in picked]
            return sum(weights) + sum(map(_size, values))
        case Kernel():
            return _of_kernel(step, slots)
    return 0


def _picked(step: SubSession) -> set[str]:
    """Weights of which only the rows that Gather picks are read: they count as its results."""
    names = {w.name for w in step.weights}
    whole: set[str] = set()
    rows: set[str] = set()
    for node in onnx.ModelProto.FromString(step.model).graph.node:
        for index, name in enumerate(node.input):
            if name in names:
                (rows if node.op_type == "Gather" and index == 0 else whole).add(name)
    return rows - whole


def _of_kernel(step: Kernel, slots: Slots) -> int:
    """Values, and of caches the tokens that are written or valid."""
    total = 0
    written = {alias.input_index for alias in step.aliases}
    for index, slot in enumerate(step.inputs):
        if slot is None or index in written:
            continue
        size = _size(slots[slot])
        root = step.values[slot].root if slot in step.values else None
        total += size if root is None else int(size * _valid(step, slots))
        if written and root is None and index == 1:
            total += size  # what is written over the cache
    return total + sum(
        _size(slots[slot])
        for index, slot in enumerate(step.outputs)
        if slot is not None and index not in step.roots
    )


def _valid(step: Kernel, slots: Slots) -> float:
    """The part of the capacity that attention reads."""
    lengths = step.inputs[_LENGTHS] if len(step.inputs) > _LENGTHS else None
    key = slots[step.inputs[1]] if len(step.inputs) > 1 and step.inputs[1] is not None else None
    if step.op_type != "Attention" or lengths is None or not isinstance(key, np.ndarray):
        return 1.0
    capacity = key.shape[0] * key.shape[-2]
    return float(np.sum(slots[lengths])) / capacity if capacity else 0.0


def _size(value: Any) -> int:
    """Bytes of an array, or of all pages of a paged cache."""
    return int(getattr(value, "nbytes", 0))
