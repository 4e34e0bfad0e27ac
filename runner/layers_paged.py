"""Layers over pages: PagedCacheUpdate, and PagedAttention over what it has written."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

from onnx_inplace.compiler import steps
from onnx_inplace.numba_kernels import objects, pages, pages_append_attend, pages_join
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.numba_kernels.pages_append_attend import (
    CLIPPED,
    IDS,
    LENGTHS,
    OUTPUT,
    POSITIONS,
    QUERY,
    VALUES,
    Cache,
    Layer,
)
from onnx_inplace.runner import journal, layer, operators_paged_attention, operators_pages, team
from onnx_inplace.runner.actions import Settings, Slots
from onnx_inplace.runner.layer import INT64
from onnx_inplace.runner.operators_paged_attention import Call, Options
from onnx_inplace.runner.pages import PagedCache


def find(block: Sequence[steps.Step], index: int) -> layer.Layer | None:
    """The layer that begins with a step, if there is one."""
    if index + 2 > len(block):
        return None
    update, attention = block[index : index + 2]
    if not (_is(update, "PagedCacheUpdate") and _is(attention, "PagedAttention")):
        return None
    query, cache, table, lengths = attention.inputs[:4]
    written = update.outputs[0]
    if (cache, table) != (written, update.inputs[1]) or written in (query, lengths, *update.inputs):
        return None
    return _Layer((update, attention))


def _is(step: steps.Step, op_type: str) -> TypeGuard[steps.Kernel]:
    """Whether a step is this operator of pages, with all inputs."""
    return (
        isinstance(step, steps.Kernel)
        and (step.domain, step.op_type) == ("onnx_inplace", op_type)
        and None not in step.inputs[:4]
    )


@dataclasses.dataclass(frozen=True)
class _Layer(layer.Layer):
    """See ``layer.Layer``."""

    calls: ClassVar[types.ModuleType] = pages_append_attend
    steps: tuple[steps.Kernel, steps.Kernel]

    def ready(self) -> Callable[[int, int, int, int], int]:
        """See ``layer.Layer``; what is called by address, too."""
        pages_join.joiner.ready()
        return super().ready()

    def serves(self, roots: Mapping[str, Any]) -> bool:
        """Whether the cache is there, and page ids are places in its table."""
        cache = roots.get(self.steps[0].roots[0])
        return isinstance(cache, PagedCache) and not cache.sparse_ids

    def prepare(
        self, slots: Slots, roots: Mapping[str, Any], settings: Settings
    ) -> layer.Prepared | None:
        """A call for arrays like those in slots, and pages of the same formats."""
        update, attention = self.steps
        cache: PagedCache = roots[update.roots[0]]
        store = cache.store
        query, output, lengths = attention.inputs[0], attention.outputs[0], attention.inputs[3]
        wanted = *update.inputs[1:4], query, output, lengths
        places = [slot for slot in wanted if slot is not None]
        found = layer.expect(slots, places, {})
        arrays = [slots[place] for place in places]
        if found is None:
            return None
        if any(arrays[k].dtype != INT64 for k in (IDS, POSITIONS, LENGTHS)):
            return None
        ids, values, query = arrays[IDS], arrays[VALUES], arrays[QUERY]
        tables = ids.reshape(ids.shape[0] if ids.ndim == 2 else 1, ids.shape[-1] if ids.ndim else 1)
        batch, blocks = tables.shape
        if {arrays[POSITIONS].size, arrays[LENGTHS].size} != {batch} or not values.size:
            return None
        options = Options.of(attention.attributes)
        fast = operators_paged_attention.compile_step(attention, settings)
        call = Call(store, query, tables, options, settings.threads, fast)
        new = operators_pages.layout_of(ids, values)
        (expected, kept), plain = found, call.plain
        tokens, reach = values.shape[-2], -1 if options.left < 0 else query.shape[2] + options.left
        sizes = batch, blocks, store.page_size, tokens, reach
        joiner = pages_join.joiner.ready().address if tokens == query.shape[2] == 1 else 0
        writer = pages.writer.ready().address
        calls = writer, joiner, address(new), plain.kernel, plain.layout, call.page_kernels
        words = address(store.table.words), address(store.codec.words)
        numbers = pages_append_attend.table(
            expected,
            Cache(update.inputs[0] or 0, id(cache), *words, store.codec.key),
            Layer(objects.ARRAY, *sizes, *calls),
            plain.sharing,
        )
        return _Prepared(
            table=numbers,
            at=address(numbers),
            space=max(plain.space, store.codec.space),
            shape=arrays[OUTPUT].shape,
            dtype=arrays[OUTPUT].dtype,
            helpers=team.helpers(call.clock, settings.threads, batch),
            kept=(call, new, kept, store.table, store.codec),
            storage=cache,
            entry=(update, None, None),
            formats=store.codec.key,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared(layer.Prepared):
    """See ``layer.Prepared``.

    Attributes:
        storage: that the update writes.
        entry: of the journal.
        formats: key of its codec.
    """

    storage: PagedCache
    entry: journal.Entry
    formats: int

    @property
    def outlived(self) -> bool:
        """Whether formats are others than they were."""
        return self.storage.store.codec.key != self.formats

    def note(self, slots: Slots, done: int) -> None:
        """Pages are anywhere; clipped numbers are counted."""
        self.count(done)
        slots[journal.JOURNAL].append(self.entry)

    def count(self, done: int) -> None:
        """Clipped numbers are counted."""
        if done >= CLIPPED:
            self.storage.store.clipped += done // CLIPPED
