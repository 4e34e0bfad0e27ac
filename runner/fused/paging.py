"""Templates of operators on pages: updates, and attention. See ``page_access`` for the rest."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from onnx_inplace.compiler import errors
from onnx_inplace.compiler.fused import Operation
from onnx_inplace.numba_kernels import pages_heads
from onnx_inplace.numba_kernels.fused import paging as kernels
from onnx_inplace.numba_kernels.memory import OnDemand, address
from onnx_inplace.runner import operators_paged_attention, operators_pages
from onnx_inplace.runner.attend import KINDS
from onnx_inplace.runner.fused.attending import SHORTEST, SPLITS
from onnx_inplace.runner.fused.buffers import aligned
from onnx_inplace.runner.fused.page_access import Limits, Reading, Writing
from onnx_inplace.runner.fused.table import Builder, NotFused
from onnx_inplace.runner.fused.template import Loading, template


@template(kernels.write)
def update(b: Builder, o: Operation) -> None:
    """PagedCacheUpdate."""
    cache_at, ids_at, values_at, position_at = o.inputs
    cache, ids = b.paged(cache_at), b.array(ids_at)
    values, position = b.array(values_at), b.array(position_at)
    try:
        batch = operators_pages.check_values(cache.store, ids, values)
    except errors.StorageMismatch as error:
        raise NotFused(str(error)) from None
    if values.strides[-1] != values.itemsize:
        values = b.contiguous(values, values.dtype)
    rows = values if ids.ndim == 2 else values[:, None]  # (2, batch, heads, tokens, size)
    tokens, strides = rows.shape[3], rows.strides[:4]
    writing = Writing(
        cache,
        b.pages.ids(ids_at or 0, b.source(ids_at)),
        batch,
        b.source(position_at),
        tokens,
        o.attributes.get("quantized_type"),
    )
    layout = batch, tokens, KINDS[values.dtype], *strides, ids.size // batch
    block = kernels.Write(
        table=address(writing.table),
        layout=address(b.lasting(np.array(layout, np.int64))),
        values=address(values),
        positions=address(position),
        space=address(b.lasting(aligned(pages_heads.workspace_size(*cache.dims[2:])))),
        clipped=address(writing.clipped),
    )
    b.emit(kernels.write, block, [values], [b.pages.bytes_of(cache)])
    b.pages.accesses.append(writing)


def _kernels(loading: Loading, o: Operation) -> Iterator[OnDemand]:
    """Those for every format that pages may have, where their sizes are known."""
    query, cache = (loading.value(k) for k in o.inputs[:2])
    pages_ = None if cache is None else cache.pages
    accuracy = operators_paged_attention.Options.of(o.attributes).accuracy
    operators_paged_attention.compile_known(query, pages_, accuracy, portable=loading.portable)
    yield from (kernels.begin, kernels.attend)


@template(_kernels)
def attention(b: Builder, o: Operation) -> None:
    """PagedAttention of (batch, heads, tokens, head_size)."""
    query_at, cache_at, ids_at, lengths_at = o.inputs
    cache, query, lengths = b.paged(cache_at), b.array(query_at), b.array(lengths_at)
    target, batch = b.result(o.outputs[0]), len(query)
    if query.strides[-1] != query.itemsize:
        query = b.contiguous(query, query.dtype)
    access = Reading(
        cache,
        b.pages.ids(ids_at or 0, b.source(ids_at)),
        batch,
        b.source(lengths_at),
        (query, target),
        operators_paged_attention.Options.of(o.attributes),
        Limits(SPLITS, b.threads, b.portable),
    )
    calls = access.calls
    begin = kernels.Begin(address(calls), address(lengths), batch, SHORTEST, SPLITS)
    b.emit(kernels.begin, begin, [lengths], [calls])
    block = kernels.Attend(
        calls=address(calls),
        query=address(query),
        tables=address(access.tables),
        output=address(target),
        lengths=address(lengths),
        state=address(b.control),
    )
    reads = [query, lengths, b.pages.bytes_of(cache)]
    # formats differ from page to page: a byte a number is about what one takes
    growing = [(lengths, 2 * cache.dims[1] * cache.dims[3])]
    b.emit(kernels.attend, block, reads, [target, calls], first=False, growing=growing)
    b.pages.accesses.append(access)
