"""Runs a fused step: checks, what a run brings, one call, what it leaves.

Everything that can be refused is refused before the call; the call itself cannot fail. Which bytes
it has written stands in the journal afterwards, as after ordinary steps.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numba
import numpy as np

from onnx_inplace.compiler import errors
from onnx_inplace.compiler.fused import Fused, Operation
from onnx_inplace.numba_kernels.fused import interpreter, moves
from onnx_inplace.numba_kernels.memory import FIELD, address
from onnx_inplace.runner import journal, threads
from onnx_inplace.runner.actions import Action, Array, Slots
from onnx_inplace.runner.fused import heads, products, templates
from onnx_inplace.runner.fused.clock import Clock
from onnx_inplace.runner.fused.instruction import Instruction, Range, range_
from onnx_inplace.runner.fused.table import Bound, Builder, NotFused, Table
from onnx_inplace.runner.fused.weights import Weights

_LONGEST_PAUSE = 128  # runs on one thread, before several are tried again: half a second


def build(
    region: Fused,
    dims: Mapping[str, int],
    roots: Mapping[str, Any],
    weights: Weights,
    workers: int,
    portable: bool,
) -> Region:
    """A fused step for storage of a caller and one tuple of shapes.

    Raises:
        NotFused: the ordinary steps have to serve these shapes.
    """
    b = Builder(region, dims, roots, weights, workers, portable)
    entering = {}
    for link in region.inputs:
        if b.value(link.value).root is None:
            entering[link.value] = b.enter(link.value)
    last = _last_uses(region.operations, b.leaving | set(entering))
    for k, operation in enumerate(region.operations):
        before = len(b.bounds)
        templates.write(b, operation)
        for at, bound in enumerate(b.bounds[before:], before):
            b.bounds[at] = dataclasses.replace(bound, location=operation.location)
        b.end_operation(last.get(k, ()))
    b.instructions = heads.share(b.instructions, _looked_at(b, roots))
    products.link(b)
    b.settle()
    return Region(region, b, entering, roots)


def _looked_at(b: Builder, roots: Mapping[str, Any]) -> list[Range]:
    """Bytes that somebody reads after a run: results, the caller's storage, what is counted."""
    results = [b.array(k) for k in b.leaving if b.value(k).root is None]
    numbers = [numbers for i in b.instructions for numbers, _ in i.growing]
    lent = [root for root in roots.values() if isinstance(root, np.ndarray)]
    return [range_(array) for array in (*results, *numbers, *lent)]


def _last_uses(operations: tuple[Operation, ...], kept: set[int]) -> dict[int, list[int]]:
    """Values by the operation that uses, or makes, them last; but for those that are kept."""
    last: dict[int, int] = {}
    for k, operation in enumerate(operations):
        for index in (*operation.inputs, *operation.outputs):
            if index is not None and index not in kept:
                last[index] = k
    found: dict[int, list[int]] = {}
    for index, k in last.items():
        found.setdefault(k, []).append(index)
    return found


class Region:
    """A fused step that is ready to run. Its buffers serve one run at a time.

    Attributes:
        settled: the caller's storage that it leaves, by slot: the same object in all runs, which
            a frame puts there once.
        own: slots of results that every run makes anew.
    """

    def __init__(
        self,
        region: Fused,
        b: Builder,
        entering: Mapping[int, Array],
        roots: Mapping[str, Any],
    ):
        self._table = Table(b)
        self._keep = b  # its buffers and the arrays of its arguments
        slots = {link.value: link.slot for link in (*region.inputs, *region.outputs)}
        self._enter = [(slots[index], array) for index, array in entering.items()]
        self._bounds = [*_merged(b.bounds, slots, b), *b.checks.values()]
        named = [roots[name] for name in sorted(_named(region))]
        self._moved = _Moved([root for root in named if isinstance(root, np.ndarray)])
        self._pages = b.pages
        self._workers = min(
            b.threads, numba.config.NUMBA_NUM_THREADS
        )  # who cannot come is not awaited
        self._control = b.control
        self._control_at = address(self._control)
        self._streamed = sum(i.streamed for i in b.instructions)
        self._growing = _totals(b.instructions)
        self._clock: Clock | None = None
        self._policy = threads.Policy(longest=_LONGEST_PAUSE)
        self._run = interpreter.run.ready()
        self._parallel = interpreter.run_parallel.ready() if b.threads > 1 else None
        self._fresh = [(slots[p.value], b.fresh[p.value], p.words) for p in self._table.patches]
        self.settled: dict[int, Any] = {}
        self._copied: list[tuple[int, Array]] = []
        for link in region.outputs:
            root = b.value(link.value).root
            if link.value in b.fresh:
                continue
            if root is None:
                self._copied.append((link.slot, b.array(link.value)))
                continue
            self.settled[link.slot] = _as_output(roots[root], b, link.value)
        fresh, copied = (s for s, *_ in self._fresh), (s for s, _ in self._copied)
        self.own: frozenset[int] = frozenset((*fresh, *copied))
        writes = [w for o in region.operations if (w := _writes(b, o)) is not None]
        distinct = {id(w.position): w.position for w in writes if w.position is not None}
        self._positions = list(distinct.values())
        places = {key: place for place, key in enumerate(distinct)}
        self._notes = [(w.operation, places.get(id(w.position)), w.length) for w in writes]

    @property
    def instructions(self) -> int:
        """Number of instructions."""
        return self._table.count

    @property
    def nbytes(self) -> int:
        """Bytes of buffers."""
        return self._keep.nbytes

    def observe(self) -> Clock:
        """From now on, runs on all threads add up what their instructions take."""
        self._clock = Clock(self._keep.instructions, self._workers)
        return self._clock

    def action(self) -> Action:
        """What a run does."""
        table, words = self._table, self._table.words
        instructions = address(table.table)
        bounds, enter, fresh = self._bounds, self._enter, self._fresh
        copied, check = self._copied, self._moved
        pages = self._pages if self._pages.accesses else None

        def act(slots: Slots) -> None:
            for bound in bounds:
                bound(slots)
            check()
            if pages is not None:
                pages.prepare(slots)
            for slot, array in enter:
                np.copyto(array, slots[slot], casting="no")
            for slot, like, places in fresh:
                result = slots[slot] = np.empty(like.shape, like.dtype)
                at = address(result)
                for word, offset in places:
                    words[word] = at + offset
            try:
                self._call(instructions, table.count)
            finally:  # an interrupt may come between the call and the notes, too
                self._note(slots)
                if pages is not None:
                    pages.finish()
            for slot, array in copied:
                slots[slot] = array.copy()

        return act

    def _call(self, instructions: int, count: int) -> None:
        if self._clock is not None:
            with threads.region(self._workers):
                self._clock.run(instructions, self._control)
            return
        work = max(1.0, self._streamed)  # a pace is seconds for some work
        for numbers, each in self._growing:
            work += each * int(numbers.sum())
        parallel = self._parallel is not None and self._policy.parallel()
        start = time.perf_counter()
        if parallel and self._parallel is not None:
            with threads.region(self._workers):
                self._parallel(instructions, count, self._control_at, self._workers)
            self._policy.parallel_took(work, time.perf_counter() - start)
        else:
            self._run(instructions, count)
            self._policy.serial_took(work, time.perf_counter() - start)

    def _note(self, slots: Slots) -> None:
        """All writes of the region; many layers share one position, which is read once."""
        positions = [array.tolist() for array in self._positions]
        slots[journal.JOURNAL].append(journal.Together(self._notes, positions))


def _as_output(root: Any, b: Builder, index: int) -> Any:
    """What a run returns for a name of the caller's storage: itself, or in another shape."""
    if not isinstance(root, np.ndarray):
        return root
    view = b.array(index)
    return root if view.shape == root.shape else view


@dataclasses.dataclass(frozen=True, slots=True)
class _Write:
    """A write of a root: what the journal says of it."""

    operation: Operation
    position: Array | None
    length: int | None


def _writes(b: Builder, o: Operation) -> _Write | None:
    if not o.writes:
        return None
    if (o.domain, o.op_type) in journal.TOKENS and len(o.inputs) > 2 and o.inputs[1] is not None:
        axis = o.attributes.get("axis", -2)
        return _Write(o, b.array(o.inputs[2]), b.shape(o.inputs[1])[axis])
    return _Write(o, None, None)


def _totals(instructions: Iterable[Instruction]) -> list[tuple[Array, int]]:
    """What grows with the numbers of a run, each array of numbers once: layers share them."""
    found: dict[int, tuple[Array, int]] = {}
    for instruction in instructions:
        for numbers, each in instruction.growing:
            _, before = found.get(id(numbers), (numbers, 0))
            found[id(numbers)] = numbers, before + each
    return list(found.values())


def _named(region: Fused) -> set[str]:
    return {v.root for v in region.values if v.root is not None}


class _Moved:
    """Compares where arrays of the caller are with where they were when the table was made."""

    def __init__(self, arrays: list[Array]):
        self._arrays = arrays
        self._fields = np.array([id(a) + FIELD for a in arrays] or [0], np.int64)
        self._expected = np.array([address(a) for a in arrays] or [0], np.int64)
        self._check = moves.moved.ready()
        self._arguments = address(self._fields), address(self._expected), len(arrays)

    def __call__(self) -> None:
        place = self._check(*self._arguments)
        if place >= 0:
            found, expected = address(self._arrays[place]), int(self._expected[place])
            raise errors.AliasViolation(
                f"an array that was lent has moved from {expected:#x} to {found:#x}.",
                "",
                expected,
                found,
            )


def _merged(bounds: list[Bound], slots: Mapping[int, int], b: Builder) -> list[Any]:
    """One comparison for each value in place of one for each operation that reads it."""
    found = []
    for value in dict.fromkeys(bound.value for bound in bounds):
        all_ = [bound for bound in bounds if bound.value == value]
        if value not in slots:  # the dimensions decide it: once is enough
            numbers = b.array(value)
            for bound in all_:
                if numbers.size and not (bound.low <= numbers.min() and numbers.max() < bound.end):
                    raise NotFused(f"`{b.value(value).name}` is out of bounds")
            continue
        low, end = max(bound.low for bound in all_), min(bound.end for bound in all_)
        found.append(_comparison(slots[value], low, end, all_))
    return found


def _comparison(slot: int, low: int, end: int, bounds: list[Bound]) -> Any:
    def check(slots: Slots) -> None:
        numbers: Array = slots[slot]
        if numbers.size == 1:
            if low <= numbers.item() < end:
                return
        elif not numbers.size or (low <= int(numbers.min()) and int(numbers.max()) < end):
            return
        for bound in bounds:
            if not (bound.low <= int(numbers.min()) and int(numbers.max()) < bound.end):
                bound.refuse(numbers)

    return check
