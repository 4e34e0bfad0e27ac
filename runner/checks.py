"""Executes the checks of ``compiler.positions`` before the first write of a run.

All that depends only on sizes is computed once for each combination of shapes. What is left for a
run is, for each input that holds positions, one comparison with the narrowest bounds of all writes
that use it; and, where control flow or arithmetic decides about positions, one call of a small
model that writes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as ort

from onnx_inplace.compiler import errors, positions, sizes
from onnx_inplace.compiler.conditions import Kind
from onnx_inplace.runner import pools
from onnx_inplace.runner.storage import Array

Slots = list[Any]
Check = Callable[[Slots], None]
_FEW = 64  # numbers that Python compares faster than numpy


def violation(
    bound: positions.Bound, number: int, length: int, capacity: int, place: int
) -> errors.InplaceError:
    """The error that a violated bound is.

    Args:
        bound: what is violated.
        number: the position, length or size at fault.
        length: tokens from the position on.
        capacity: size of the axis; of a shape, the size that is expected.
        place: index of the number in the flattened tensor.
    """
    if bound.kind is Kind.SHAPE:
        where = "" if bound.location is None else f"{bound.location}: "
        return errors.StorageMismatch(
            f"{where}`{bound.root}`: {bound.operator} gets {bound.port} with a size of {number} "
            f"where the storage has {capacity}.",
            bound.root,
            capacity,
            number,
        )
    row = place if bound.rows else None
    if bound.kind is Kind.LENGTH:
        return errors.CapacityError(bound.root, 0, number, capacity, row, bound.location)
    return errors.CapacityError(bound.root, number, length, capacity, row, bound.location)


@dataclasses.dataclass(frozen=True, slots=True)
class _Limits:
    """A direct check with its sizes as numbers."""

    bound: positions.Bound
    slot: int
    offset: int
    low: tuple[int, ...]
    high: tuple[int, ...]
    length: int
    capacity: tuple[int, ...]

    def enforce(self, slots: Slots) -> None:
        """Raise the error of the first number that is out of bounds."""
        given = [int(n) for n in slots[self.slot].reshape(-1)]
        _enforce(self.bound, [n + self.offset for n in given], self)


def load(model: bytes) -> onnxruntime.InferenceSession:
    """A slice of a model, ready to run.

    Raises:
        errors.ModelFileError: onnxruntime refuses it.
    """
    options = onnxruntime.SessionOptions()
    pools.set_threads(options, 1)
    options.log_severity_level = 4  # faults are raised
    options.enable_cpu_mem_arena = False  # a few integers: nothing to keep between runs
    # Nothing to gain, and onnxruntime 1.32 loses results of an If when its optimizer
    # inlines an If in one of its branches whose condition is a constant.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except (ort.InvalidGraph, ort.Fail, ort.NotImplemented) as error:
        reason = f"what decides about positions cannot be loaded: {error}"
        raise errors.ModelFileError("model", reason) from None


class Prechecks:
    """The checks of one session. Used by all of its bindings, in any thread."""

    def __init__(self, checks: positions.Checks, slot_of: Mapping[str, int]):
        """``slot_of`` says where a run holds the inputs of the graph."""
        self._checks, self._slot_of = checks, slot_of
        self._session = None
        if checks.sliced is not None:
            self._session = load(checks.sliced.model)

    def prepare(self, dims: Mapping[str, int]) -> tuple[Check, ...]:
        """Checks of a run with these dimensions.

        Raises:
            errors.StorageMismatch: two shapes do not fit.
            errors.CapacityError: something cannot fit at any position.
        """
        for static in self._checks.static:
            limits = self._limits(static.bound, -1, 0, dims)
            _enforce(static.bound, list(sizes.numbers(static.sizes, dims)), limits)
        found: list[Check] = []
        direct = [
            self._limits(d.bound, self._slot_of[d.input], sizes.evaluate(d.offset, dims), dims)
            for d in self._checks.direct
        ]
        for slot in dict.fromkeys(limits.slot for limits in direct):
            found.append(_narrowest(slot, [limits for limits in direct if limits.slot == slot]))
        if self._session is not None and self._checks.sliced is not None:
            found.append(self._slice(self._session, self._checks.sliced, dims))
        return tuple(found)

    def _limits(
        self, bound: positions.Bound, slot: int, offset: int, dims: Mapping[str, int]
    ) -> _Limits:
        return _Limits(
            bound,
            slot,
            offset,
            sizes.numbers(bound.low, dims),
            sizes.numbers(bound.high, dims),
            0 if bound.length is None else sizes.evaluate(bound.length, dims),
            sizes.numbers(bound.capacity, dims),
        )

    def _slice(
        self,
        session: onnxruntime.InferenceSession,
        sliced: positions.Sliced,
        dims: Mapping[str, int],
    ) -> Check:
        vectors = {
            name: np.asarray(sizes.numbers(vector, dims), np.int64) for name, vector in sliced.sizes
        }
        inputs = [(name, self._slot_of[name]) for name in sliced.inputs]
        names = [session.get_outputs()[0].name]
        run = session._sess.run  # InferenceSession.run checks names on every call

        def check(slots: Slots) -> None:
            feeds = {name: slots[slot] for name, slot in inputs}
            try:
                number, *values = run(names, {**vectors, **feeds}, None)[0].tolist()
            except Exception as error:
                raise errors.OperatorError(f"positions cannot be computed: {error}") from None
            if number:
                position, length, capacity, place = values
                bound = sliced.bounds[number - 1]
                raise violation(bound, position, length, capacity, place)

        return check


def _narrowest(slot: int, all_limits: list[_Limits]) -> Check:
    """One comparison in place of many; the many are consulted to name the fault."""
    if any(len(limits.low) != 1 or len(limits.high) != 1 for limits in all_limits):

        def each(slots: Slots) -> None:
            for limits in all_limits:
                limits.enforce(slots)

        return each
    lowest = max(limits.low[0] - limits.offset for limits in all_limits)
    highest = min(limits.high[0] - limits.offset for limits in all_limits)
    return Narrowest(slot, lowest, highest, tuple(all_limits))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Narrowest:
    """A check that every number of an input is within two bounds.

    Attributes:
        slot: of the input.
        lowest: that a number may be.
        highest: likewise.
        all_limits: of which these are the narrowest.
    """

    slot: int
    lowest: int
    highest: int
    all_limits: tuple[_Limits, ...]

    def __call__(self, slots: Slots) -> None:
        """Raise the error of the first number that is out of bounds."""
        lowest, highest = self.lowest, self.highest
        numbers: Array = slots[self.slot]
        if numbers.size == 1:
            fits = lowest <= int(numbers.item()) <= highest
        elif numbers.size <= _FEW:
            fits = all(lowest <= n <= highest for n in numbers.ravel().tolist())
        else:
            fits = lowest <= int(numbers.min()) and int(numbers.max()) <= highest
        if not fits:
            for limits in self.all_limits:
                limits.enforce(slots)


def _enforce(bound: positions.Bound, numbers: list[int], limits: _Limits) -> None:
    for place, number in enumerate(numbers):
        low, high = limits.low[place % len(limits.low)], limits.high[place % len(limits.high)]
        if not low <= number <= high:
            capacity = limits.capacity[place % len(limits.capacity)]
            raise violation(bound, number, limits.length, capacity, place)
