"""Layers over two arrays: two updates, and Attention over what they have written."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

import numpy as np

from onnx_inplace.compiler import steps
from onnx_inplace.numba_kernels import append_attend, objects
from onnx_inplace.numba_kernels.append_attend import LENGTHS, OUTPUT, QUERY, Attention, Write
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import journal, layer, operators, operators_attention, team
from onnx_inplace.runner.actions import Array, Settings, Slots
from onnx_inplace.runner.attend import Call
from onnx_inplace.runner.layer import INT64


def find(block: Sequence[steps.Step], index: int) -> layer.Layer | None:
    """The layer that begins with a step, if there is one."""
    if index + 3 > len(block):
        return None
    first, second, attention = block[index : index + 3]
    if not (_writes_tokens(first) and _writes_tokens(second) and _attends(attention)):
        return None
    written = first.outputs[0], second.outputs[0]
    query, *read, _, _, _, lengths = attention.inputs
    if set(read) != set(written) or set(written) & {*second.inputs, query, lengths}:
        return None
    if first.roots[0] == second.roots[0]:
        return None
    return _Layer((first, second, attention), written.index(read[0]))


def _writes_tokens(step: steps.Step) -> TypeGuard[steps.Kernel]:
    """Whether a step writes tokens into an array from a position on."""
    return (
        isinstance(step, steps.Kernel)
        and (step.domain, step.op_type) in journal.TOKENS
        and len(step.inputs) > 2
        and None not in step.inputs[:3]
        and step.attributes.get("mode", "linear") == "linear"
    )


def _attends(step: steps.Step) -> TypeGuard[steps.Kernel]:
    """Whether a step attends over the valid tokens of whole caches, without a mask."""
    return (
        isinstance(step, steps.Kernel)
        and (step.domain, step.op_type) == ("", "Attention")
        and [slot is not None for slot in step.inputs] == [True] * 3 + [False] * 3 + [True]
    )


@dataclasses.dataclass(frozen=True)
class _Layer(layer.Layer):
    """See ``layer.Layer``.

    Attributes:
        key: which update is that of keys.
    """

    calls: ClassVar[types.ModuleType] = append_attend
    steps: tuple[steps.Kernel, steps.Kernel, steps.Kernel]
    key: int

    def serves(self, roots: Mapping[str, Any]) -> bool:
        """Whether both caches are there."""
        return all(isinstance(roots.get(s.roots[0]), np.ndarray) for s in self.steps[:2])

    def prepare(
        self, slots: Slots, roots: Mapping[str, Any], settings: Settings
    ) -> layer.Prepared | None:
        """A call for arrays like those in slots."""
        *updates, attention = self.steps
        inputs = [slot for step in updates for slot in step.inputs[:3]]
        wanted = *inputs, attention.inputs[0], attention.outputs[0], attention.inputs[6]
        places = [slot for slot in wanted if slot is not None]
        storage = {3 * k: roots[step.roots[0]] for k, step in enumerate(updates)}
        found = layer.expect(slots, places, storage)
        arrays = [slots[place] for place in places]
        if found is None or arrays[LENGTHS].dtype != INT64:
            return None
        first, second = (_write(step, *arrays[3 * k : 3 * k + 3]) for k, step in enumerate(updates))
        if first is None or second is None:
            return None
        keys, values = arrays[3 * self.key], arrays[3 - 3 * self.key]
        problem = operators_attention.problem(
            attention.attributes, arrays[QUERY], keys, values, mask=None, has_lengths=True
        )
        call = Call(problem, operators_attention.kernels(attention, settings))
        plain, (expected, kept) = call.plain, found
        sizes = self.key, problem.batch, problem.capacity
        last = Attention(objects.ARRAY, plain.kernel, plain.layout, *sizes)
        table = append_attend.table(expected, (first, second), last, plain.sharing)
        return _Prepared(
            table=table,
            at=address(table),
            space=plain.space,
            shape=arrays[OUTPUT].shape,
            dtype=arrays[OUTPUT].dtype,
            helpers=team.helpers(call.clock, settings.threads, problem.batch),
            kept=(call, kept),
            writes=((updates[0], first.length), (updates[1], second.length)),
            positions=(places[2], places[5]),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared(layer.Prepared):
    """See ``layer.Prepared``.

    Attributes:
        writes: updates and the tokens of each.
        positions: slots.
    """

    writes: tuple[tuple[steps.Kernel, int], tuple[steps.Kernel, int]]
    positions: tuple[int, int]

    def note(self, slots: Slots, done: int) -> None:
        """As numbers, not as the arrays: those may be buffers which the run uses again."""
        (first, length), (second, other) = self.writes
        one, two = self.positions
        slots[journal.JOURNAL] += (
            (first, slots[one].tolist(), length),
            (second, slots[two].tolist(), other),
        )


def _write(step: steps.Kernel, cache: Array, values: Array, positions: Array) -> Write | None:
    """Sizes of a write at one position, or at one of each row; None: it is something else."""
    axis, batch_axis = operators.axes(step)
    x = operators.geometry_of(step.roots[0], cache, values, axis, batch_axis)
    sizes = x.capacity, x.length, x.token
    if positions.dtype != INT64:
        return None
    if positions.ndim == 0 or positions.shape == (1,) == (x.batch,):
        return Write(1, x.rows, *sizes)
    outer, batch, rows = x.sizes[:3]
    if positions.shape != (x.batch,) or x.inside or outer != 1:
        return None
    return Write(batch, rows if x.rows else 0, *sizes)
