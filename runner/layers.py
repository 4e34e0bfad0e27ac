"""Neighbouring steps of a decoder's layer as one action: keys and values written, attention.

Each of these steps looks at shapes, positions and storage in Python, which takes longer than what
it is for, where one token comes at a time. Here one compiled call does all of it for arrays that
are like those of the run before. It only recognises what is surely right: whatever looks otherwise
is left to the steps, one by one, which also say what is wrong, in their order and at their place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from onnx_inplace.compiler import steps
from onnx_inplace.numba_kernels import append_attend, objects
from onnx_inplace.numba_kernels.append_attend import Attention, Expected, Write
from onnx_inplace.numba_kernels.memory import FIELD, address
from onnx_inplace.runner import journal, operators, operators_attention, workspace
from onnx_inplace.runner.actions import Action, Array, DType, Settings, Slots, reusable
from onnx_inplace.runner.attend import Call

_INT64 = np.dtype(np.int64)
_FIRST = 2  # runs of steps one by one: for what comes only once, no call is prepared
_Step = steps.Step


def join(
    block: Sequence[_Step],
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
        paused = index in pauses or index + 1 in pauses
        dense = None if paused else _Dense.of(block[index : index + 3], roots)
        if dense is None:
            yield index, singles[index]
            index += 1
        else:
            yield index + 2, _dense(dense, tuple(singles[index : index + 3]), settings)
            index += 3


@dataclasses.dataclass(frozen=True, slots=True)
class _Dense:
    """Two writes and attention over what they have written.

    Attributes:
        writes: of keys and values, in order of the plan.
        attention: that reads both.
        key: which write is that of keys.
        storage: that they write, likewise.
    """

    writes: tuple[steps.Kernel, steps.Kernel]
    attention: steps.Kernel
    key: int
    storage: tuple[Array, Array]

    @classmethod
    def of(cls, block: Sequence[_Step], roots: Mapping[str, Any]) -> _Dense | None:
        """Three steps, if they are such."""
        if len(block) < 3:
            return None
        first, second, attention = block
        if not (_writes_tokens(first) and _writes_tokens(second) and _attends(attention)):
            return None
        written = first.outputs[0], second.outputs[0]
        query, *read, _, _, _, lengths = attention.inputs[:7]
        if set(read) != set(written) or set(written) & {*second.inputs, query, lengths}:
            return None
        one, two = roots.get(first.roots[0]), roots.get(second.roots[0])
        if one is two or not isinstance(one, np.ndarray) or not isinstance(two, np.ndarray):
            return None
        return cls((first, second), attention, written.index(read[0]), (one, two))

    @property
    def slots(self) -> tuple[int, ...]:
        """Of the arrays that :mod:`append_attend` looks at, in its order."""
        query, _, _, _, _, _, lengths = self.attention.inputs[:7]
        found = (
            *self.writes[0].inputs[:3], *self.writes[1].inputs[:3],
            query, self.attention.outputs[0], lengths,
        )  # fmt: skip
        return tuple(slot for slot in found if slot is not None)


def _writes_tokens(step: _Step) -> TypeGuard[steps.Kernel]:
    """Whether a step writes tokens into an array from a position on."""
    return (
        isinstance(step, steps.Kernel)
        and (step.domain, step.op_type) in journal.TOKENS
        and len(step.inputs) > 2
        and None not in step.inputs[:3]
        and step.attributes.get("mode", "linear") == "linear"
    )


def _attends(step: _Step) -> TypeGuard[steps.Kernel]:
    """Whether a step attends over the valid tokens of whole caches, without a mask."""
    return (
        isinstance(step, steps.Kernel)
        and (step.domain, step.op_type) == ("", "Attention")
        and [slot is not None for slot in step.inputs] == [True] * 3 + [False] * 3 + [True]
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared:
    """What a compiled call takes.

    Attributes:
        kept: what the table has addresses of.
        table: see ``append_attend.table``.
        at: its address.
        space: bytes of workspace.
        lengths: tokens of each write.
        shape: of the output.
        dtype: likewise.
    """

    kept: tuple[object, ...]
    table: Array
    at: int
    space: int
    lengths: tuple[int, int]
    shape: tuple[int, ...]
    dtype: DType


def _dense(layer: _Dense, singles: tuple[Action, ...], settings: Settings) -> Action:
    """The action of two writes and attention over arrays."""
    run = append_attend.append_and_attend.ready()
    first, second = layer.writes
    cache, _, position, other, _, place, _, output, _ = layer.slots
    updated, newer = (step.outputs[0] for step in layer.writes)
    assert updated is not None and newer is not None
    fresh, attend = not reusable(layer.attention, output), singles[2]
    prepared: _Prepared | None = None
    runs = 0

    def one_by_one(slots: Slots) -> None:
        nonlocal runs, prepared
        for single in singles:
            single(slots)
        runs += 1
        if runs == _FIRST:
            prepared = _prepare(layer, slots, settings)

    def note(slots: Slots, lengths: tuple[int, int]) -> None:
        one, two = slots[position].tolist(), slots[place].tolist()
        slots[journal.JOURNAL] += (first, one, lengths[0]), (second, two, lengths[1])

    def act(slots: Slots) -> None:
        if prepared is None:
            one_by_one(slots)
            return
        if fresh:
            slots[output] = np.empty(prepared.shape, prepared.dtype)
        space = workspace.of_thread(prepared.space)
        try:
            done = run(id(slots), prepared.at, id(space) + FIELD)
            if done != append_attend.REFUSED:
                note(slots, prepared.lengths)
        except BaseException:  # an interrupt may come between the writes and their note
            note(slots, prepared.lengths)
            raise
        if done == append_attend.REFUSED:
            one_by_one(slots)
            return
        slots[updated], slots[newer] = slots[cache], slots[other]
        if done == append_attend.WRITTEN:
            attend(slots)

    return act


def _prepare(layer: _Dense, slots: Slots, settings: Settings) -> _Prepared | None:
    """A call for arrays like those in slots, which the steps have taken; None: there is none."""
    arrays = [slots[slot] for slot in layer.slots]
    if any(type(array) is not np.ndarray or not array.flags.c_contiguous for array in arrays):
        return None
    writes = [_write(step, *arrays[3 * k : 3 * k + 3]) for k, step in enumerate(layer.writes)]
    first, second = writes
    if first is None or second is None or arrays[8].dtype != _INT64:
        return None
    query, keys, values = arrays[6], arrays[3 * layer.key], arrays[3 - 3 * layer.key]
    found = operators_attention.problem(
        layer.attention.attributes, query, keys, values, mask=None, has_lengths=True
    )
    call = Call(found, operators_attention.kernels(layer.attention, settings))
    dims = tuple(np.array(array.shape, np.int64) for array in arrays)
    storage = {3 * k: address(array) for k, array in enumerate(layer.storage)}
    expected = [
        Expected(slot, storage.get(k, 0), id(array.dtype), array.ndim, address(dims[k]))
        for k, (slot, array) in enumerate(zip(layer.slots, arrays, strict=True))
    ]
    alone, output = call.alone, arrays[7]
    sizes = layer.key, found.batch, found.capacity, alone.most
    attention = Attention(objects.ARRAY, alone.kernel, alone.layout, *sizes)
    table = append_attend.table(expected, (first, second), attention)
    return _Prepared(
        kept=(call, dims, tuple(array.dtype for array in arrays)),
        table=table,
        at=address(table),
        space=alone.space,
        lengths=(first.length, second.length),
        shape=output.shape,
        dtype=output.dtype,
    )


def _write(step: steps.Kernel, cache: Array, values: Array, positions: Array) -> Write | None:
    """Sizes of a write at one position, or at one of each row; None: it is something else."""
    axis, batch_axis = operators.axes(step)
    x = operators.geometry_of(step.roots[0], cache, values, axis, batch_axis)
    sizes = x.capacity, x.length, x.token
    if positions.dtype != _INT64:
        return None
    if positions.ndim == 0 or positions.shape == (1,) == (x.batch,):
        return Write(1, x.rows, *sizes)
    outer, batch, rows = x.sizes[:3]
    if positions.shape != (x.batch,) or x.inside or outer != 1:
        return None
    return Write(batch, rows if x.rows else 0, *sizes)
