"""Kernel steps on paged caches: PagedCacheUpdate, PagedCacheConvert, PageGather.

Each step judges its pages before it writes, unless the checks before the run have found all that
the run does to them right, and takes the memory of all pages that it will make first: a step writes
all or nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onnx_inplace.compiler import errors, steps
from onnx_inplace.numba_kernels import pages
from onnx_inplace.runner.actions import Action, Array, Settings, Slots, result, reusable
from onnx_inplace.runner.attend import KINDS, Calls
from onnx_inplace.runner.page_codec import tokens_layout
from onnx_inplace.runner.page_pieces import Outlook, pieces
from onnx_inplace.runner.page_store import PageStore


def paged_cache_update(step: steps.Kernel, settings: Settings) -> Action:
    """``PagedCacheUpdate(cache, page_id, values, position)``: quantizes tokens into their pages."""
    cache_slot, ids_slot, values_slot, position_slot = _slots(step, 4)
    (output,) = _outputs(step)
    wanted: str | None = step.attributes.get("quantized_type")
    pages.write.ready()
    pages.writer.ready()
    calls: Calls[_Tokens] = Calls()

    def act(slots: Slots) -> None:
        cache, ids, values = slots[cache_slot], slots[ids_slot], slots[values_slot]
        store: PageStore = cache.store
        positions = slots[position_slot]
        key = values.shape, values.strides, values.dtype, ids.shape, store.codec.key
        tokens = calls.get(key) or calls.put(key, _tokens(store, ids, values))
        if store.reserved or not store.judged:
            touched = pieces(store.name, ids, positions, values.shape[-2], store.page_size)
            outlook = Outlook(store)
            outlook.update(touched, created_format(store, wanted))
            if outlook.created:
                store.add(outlook.created)
        if tokens.some:
            _write(store, ids, values, positions, tokens)
        slots[output] = cache

    return act


class _Tokens(NamedTuple):
    """What shapes say of an update.

    Attributes:
        batch: sequences.
        some: whether there is anything to write.
        layout: see ``page_codec.tokens_layout``; None: values are made contiguous first.
    """

    batch: int
    some: bool
    layout: Array | None


def _tokens(store: PageStore, ids: Array, values: Array) -> _Tokens:
    """Raises StorageMismatch where values do not fit."""
    batch = check_values(store, ids, values)
    if values.strides[-1] != values.itemsize:
        return _Tokens(batch, bool(values.size), None)
    return _Tokens(batch, bool(values.size), layout_of(ids, values))


def layout_of(ids: Array, values: Array) -> Array:
    """What kernels are told of new tokens, for pages of these ids."""
    blocks = ids.shape[-1] if ids.ndim else 1
    return tokens_layout(values if ids.ndim == 2 else values[:, None], blocks)


def _write(store: PageStore, ids: Array, values: Array, positions: Array, tokens: _Tokens) -> None:
    """Write tokens into pages that are there."""
    if positions.size != tokens.batch:
        positions = np.repeat(positions.reshape(-1), tokens.batch)
    elif not positions.flags.c_contiguous:
        positions = positions.copy("C")
    layout = tokens.layout
    if layout is None:
        values = np.ascontiguousarray(values)
        layout = layout_of(ids, values)
    store.write(store.table.rows_of(ids, tokens.batch), values, positions, layout)


def created_format(store: PageStore, wanted: str | None) -> int | None:
    """Index of the format of pages that an update makes; None: it makes none.

    Without ``quantized_type`` it is the only one that the cache allows.
    """
    if wanted is not None:
        return store.format(wanted)
    return 0 if len(store.codec.formats) == 1 else None


def check_values(store: PageStore, ids: Array, values: Array) -> int:
    """Number of sequences that values are of.

    Raises:
        errors.StorageMismatch: the values are no tokens of the pages, or not of these sequences.
    """
    two, heads, _, size = store.codec.dims
    batch = ids.shape[0] if ids.ndim == 2 else 1
    middle = (batch,) if ids.ndim == 2 else ()
    expected = (two, *middle, heads, values.shape[-2] if values.ndim > 1 else 0, size)
    if values.shape != expected or values.dtype not in KINDS or ids.ndim > 2:
        raise errors.StorageMismatch(
            f"`{store.name}`: values {values.dtype}{list(values.shape)} for page ids "
            f"{list(ids.shape)} and pages {list(store.codec.dims)}",
            store.name,
            expected,
            values.shape,
        )
    return batch


def paged_cache_convert(step: steps.Kernel, settings: Settings) -> Action:
    """``PagedCacheConvert(cache, page_id)``: pages get another format."""
    cache_slot, ids_slot = _slots(step, 2)
    (output,) = _outputs(step)
    wanted: str = step.attributes["quantized_type"]
    pages.convert.ready()

    def act(slots: Slots) -> None:
        cache = slots[cache_slot]
        store: PageStore = cache.store
        ids = slots[ids_slot].reshape(-1).tolist()
        format = store.format(wanted)
        Outlook(store).convert(ids, format)
        store.convert([store.row(page) for page in ids], format)
        slots[output] = cache

    return act


def page_gather(step: steps.Kernel, settings: Settings) -> Action:
    """``PageGather(cache, page_ids)``: pages decoded into one tensor, one after the other."""
    cache_slot, ids_slot = _slots(step, 2)
    (output,) = _outputs(step)
    reuse = reusable(step, output)
    pages.read.ready()

    def act(slots: Slots) -> None:
        store: PageStore = slots[cache_slot].store
        ids = slots[ids_slot]
        two, heads, page_size, size = store.codec.dims
        rows = [store.row(page) for page in ids.reshape(-1).tolist()]
        batch, count = ids.shape[:-1], ids.shape[-1] if ids.ndim else 1
        shape = (two, *batch, heads, count * page_size, size)
        target = result(slots, output, reuse, shape, store.elem_type)
        whole = target.reshape(two, -1, heads, count * page_size, size)
        for k, row in enumerate(rows):
            first = k % count * page_size
            part = whole[:, k // count, :, first : first + page_size]
            store.codec.read(store.block(row), int(store.table.format[row]), page_size, part)
        slots[output] = target

    return act


def _slots(step: steps.Kernel, count: int) -> list[int]:
    found = [slot for slot in step.inputs[:count] if slot is not None]
    if len(found) != count:
        raise errors.UnsupportedOperator(step.domain, step.op_type, f"{count} inputs are needed")
    return found


def _outputs(step: steps.Kernel) -> list[int]:
    return [slot for slot in step.outputs[:1] if slot is not None]
