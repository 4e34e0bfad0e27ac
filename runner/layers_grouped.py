"""Layers that are one step: GroupQueryAttention, which writes its caches and attends over them."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from onnx_inplace.compiler import grouped_query, steps
from onnx_inplace.numba_kernels import objects, rows_append_attend
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.numba_kernels.rows_append_attend import Layer
from onnx_inplace.runner import journal, layer, operators_gqa, team
from onnx_inplace.runner.actions import Settings, Slots
from onnx_inplace.runner.layer import INT64

_INT32 = np.dtype(np.int32)
_LINE = 64  # bytes: pieces of workspace begin with a line


def find(block: Sequence[steps.Step], index: int) -> layer.Layer | None:
    """The layer that begins with a step, if there is one: without mask, sinks, smooth softmax."""
    step = block[index]
    if not isinstance(step, steps.Kernel):
        return None
    if (step.domain, step.op_type) != ("com.microsoft", "GroupQueryAttention"):
        return None
    slot = grouped_query.named(step.inputs)
    if slot["attention_bias"] is not None or slot["head_sink"] is not None:
        return None
    both = 1 in step.roots and 2 in step.roots and step.roots[1] != step.roots[2]
    return None if step.attributes.get("smooth_softmax", 0) or not both else _Layer((step,))


@dataclasses.dataclass(frozen=True)
class _Layer(layer.Layer):
    """See ``layer.Layer``."""

    calls: ClassVar[types.ModuleType] = rows_append_attend
    steps: tuple[steps.Kernel]

    def serves(self, roots: Mapping[str, Any]) -> bool:
        """Whether both caches are there."""
        return all(isinstance(roots.get(self.steps[0].roots[k]), np.ndarray) for k in (1, 2))

    def prepare(
        self, slots: Slots, roots: Mapping[str, Any], settings: Settings
    ) -> layer.Prepared | None:
        """A call for arrays like those in slots."""
        (step,) = self.steps
        slot = grouped_query.named(step.inputs)
        rotary = bool(step.attributes.get("do_rotary", 0))
        names = ["query", "key", "value", "past_key", "past_value", "seqlens_k"]
        places = [slot[name] for name in (*names, "total_sequence_length")]
        places += [slot[n] if rotary else None for n in ("cos_cache", "sin_cache", "position_ids")]
        places.append(step.outputs[0])
        found = layer.expect(slots, places, {3: roots[step.roots[1]], 4: roots[step.roots[2]]})
        arrays: list[Any] = [None if place is None else slots[place] for place in places]
        query, key, value, keys, values, last, total, cosines, sines, positions, output = arrays
        batch, tokens = query.shape[:2]
        given = last.dtype, total.dtype, last.size, total.size
        if found is None or given != (_INT32, _INT32, batch, 1):
            return None
        if positions is not None and (
            positions.dtype != INT64 or positions.shape != (batch, tokens)
        ):
            return None
        prompt = tokens == int(total.reshape(()))
        ready = operators_gqa.prepare(
            step, operators_gqa.kernels_of(step, settings),
            query, key, value, keys, values, None, cosines, sines, prompt,
        )  # fmt: skip
        plain, layouts = ready.call.plain, ready.places
        numbers = _after(plain.space)
        row = _after(numbers + 8 * batch * (2 + tokens))
        rotated = _after(row + ready.workspace)
        queries = 0 if ready.rotated_query is None else address(layouts[0])
        end = rotated + 4 * math.prod(ready.rotated_query or (0,))
        table = rows_append_attend.table(
            found[0],
            Layer(
                objects.ARRAY, batch, tokens, keys.shape[2], int(prompt),
                0 if cosines is None else cosines.shape[0], plain.kernel, plain.layout,
                queries, address(layouts[1]), address(layouts[2]),
                ready.key_offset, ready.value_offset, numbers, row, rotated,
            ),
            plain.sharing,
        )  # fmt: skip
        return _Prepared(
            table=table,
            at=address(table),
            space=end,
            shape=output.shape,
            dtype=output.dtype,
            helpers=team.helpers(ready.call.clock, settings.threads, batch),
            kept=(ready, found[1]),
            entry=(step, None, None),
        )


def _after(size: int) -> int:
    """The next line behind so many bytes."""
    return -(-size // _LINE) * _LINE


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared(layer.Prepared):
    """See ``layer.Prepared``. ``entry``: of the journal."""

    entry: journal.Entry

    def note(self, slots: Slots, done: int) -> None:
        """Tokens are anywhere."""
        slots[journal.JOURNAL].append(self.entry)
