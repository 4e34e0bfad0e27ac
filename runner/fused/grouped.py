"""Template of com.microsoft GroupQueryAttention over caches: turn, write, attend.

Each thread does all of its kv heads, from the turning of their keys to the attention of their
queries, so that none waits for another (``heads`` brings other graphs to that form).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from onnx_inplace.compiler import errors, grouped_query
from onnx_inplace.compiler.fused import Operation
from onnx_inplace.numba_kernels.fused import moves, places
from onnx_inplace.numba_kernels.fused import rotary as turning
from onnx_inplace.numba_kernels.memory import OnDemand, address
from onnx_inplace.runner import attend, operators_gqa
from onnx_inplace.runner.actions import Array, Slots
from onnx_inplace.runner.attend import KINDS, Heads
from onnx_inplace.runner.fused import angles, attending
from onnx_inplace.runner.fused.table import Builder, NotFused
from onnx_inplace.runner.fused.template import Loading, template

Inputs = dict[str, int | None]


def _kernels(loading: Loading, o: Operation) -> Iterator[OnDemand]:
    cache = loading.value(grouped_query.named(o.inputs)["past_key"])
    group = o.attributes["num_heads"] // o.attributes["kv_num_heads"]
    shape = attend.Shape(attend.kind_of(cache), attend.known_dim(cache, 3), group)
    yield from (places.span, places.ends, turning.rotary, moves.rows)
    yield from attending.kernels_of(loading, shape)


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """Where the new tokens stand, see ``places.Span``; ``of_run``: starts and lengths of a run."""

    lengths: Array
    starts: Array
    positions: Array
    of_run: Callable[[Slots], tuple[Array, Array]]


@template(_kernels)
def grouped(b: Builder, o: Operation) -> None:
    """GroupQueryAttention, of separate or packed queries, keys and values."""
    slot = grouped_query.named(o.inputs)
    query, key, value, past_key, past_value, cosines, sines = (
        None if slot[name] is None else b.array(slot[name])
        for name in ("query", "key", "value", "past_key", "past_value", "cos_cache", "sin_cache")
    )
    assert query is not None and past_key is not None and past_value is not None
    new, past, tables = (query, key, value), (past_key, past_value), (cosines, sines)
    if not o.attributes.get("do_rotary", 0):
        tables = None, None
    try:
        s = operators_gqa.sizes(o.attributes, new, past, tables)
    except errors.StorageMismatch as error:
        raise NotFused(str(error)) from None
    span = _span(b, o, slot, s, past_key.shape[2])
    turned = _angles(b, slot, s, span) if s.rotated else None
    queries, keys, values = _heads(b, s, new)
    for source, cache, table in ((keys, past_key, turned), (values, past_value, None)):
        for row in range(s.batch):  # each begins at a place of its own
            at = span.starts[row : row + 1]
            _put(b, s, source[row : row + 1], cache[row : row + 1], (row, table), at)
    if turned is not None:
        query = b.temporary((s.batch, s.tokens, s.heads, s.head_size))
        _put(b, s, queries, query.transpose(0, 2, 1, 3), (0, turned), None)
    _attend(b, o, slot, s, span.lengths, (query, past_key, past_value))
    for index, cache in zip(o.outputs[1:3], past, strict=False):
        if index is not None:
            b.view(index, cache)


def _span(b: Builder, o: Operation, slot: Inputs, s: operators_gqa.Sizes, capacity: int) -> _Span:
    last_at, total_at = slot["seqlens_k"], slot["total_sequence_length"]
    assert last_at is not None
    last, total = b.array(last_at), b.array(total_at)
    if last.size != s.batch or total.size != 1 or last.dtype != total.dtype:
        raise NotFused(f"GroupQueryAttention with seqlens_k {last.shape} for {s.batch} rows")
    lasts, totals = b.source(last_at), b.source(total_at)

    def of_run(slots: Slots) -> tuple[Array, Array]:
        lengths = lasts(slots).reshape(-1).astype(np.int64) + 1
        all_new = totals(slots).item() == s.tokens
        return np.zeros_like(lengths) if all_new else lengths - s.tokens, lengths

    def check(slots: Slots) -> None:
        starts, lengths = of_run(slots)
        operators_gqa.check(root, starts, s.tokens, lengths, s.batch, capacity)

    def fill(target: Array) -> None:
        lengths, starts, positions = _parts(target, s)
        block = places.Span(
            address(last),
            address(total),
            address(lengths),
            address(starts),
            address(positions),
            s.batch,
            s.tokens,
            int(last.itemsize == 8),
        )
        b.emit(places.span, block, [last, total], [target])

    root = o.roots.get(1, "past_key")
    b.check((last_at, total_at, s.tokens, capacity), check)
    size = s.batch * (2 + s.tokens)
    parts = b.derived(last_at, f"span of {total_at}", (size,), np.int64, fill)
    return _Span(*_parts(parts, s), of_run)


def _parts(span: Array, s: operators_gqa.Sizes) -> tuple[Array, Array, Array]:
    """Lengths, starts and positions."""
    lengths, starts, positions = np.split(span, (s.batch, 2 * s.batch))
    return lengths, starts, positions.reshape(s.batch, s.tokens)


def _angles(b: Builder, slot: Inputs, s: operators_gqa.Sizes, span: _Span) -> tuple[Array, Array]:
    """Cosines and sines of all new tokens."""
    tables, given = (slot["cos_cache"], slot["sin_cache"]), slot["position_ids"]
    limit, shape = len(b.array(tables[0])), (s.batch, s.tokens)
    owner = slot["seqlens_k"] if given is None else given
    assert owner is not None
    found, named = span.positions if given is None else b.array(given), b.source(owner)
    if found.shape != shape:
        raise NotFused(f"GroupQueryAttention with position_ids {found.shape}")

    def check(slots: Slots) -> None:
        positions = named(slots) if given is not None else _following(span.of_run(slots)[0], s)
        operators_gqa.check_positions(positions, shape, limit)

    b.check((owner, slot["total_sequence_length"], s.tokens, "angles", limit), check)
    cos, sin = (angles.at(b, table, found, owner) for table in tables)
    return cos, sin


def _following(starts: Array, s: operators_gqa.Sizes) -> Array:
    positions: Array = starts[:, None] + np.arange(s.tokens)
    return positions


def _heads(
    b: Builder, s: operators_gqa.Sizes, new: tuple[Array, Array | None, Array | None]
) -> list[Array]:
    """Queries, keys and values as (batch, heads, tokens, head_size) float32."""
    rows = [_rows(b, array) for array in new if array is not None]
    parts = [a.reshape(s.batch, s.tokens, -1, s.head_size).transpose(0, 2, 1, 3) for a in rows]
    if len(parts) == 3:
        return parts
    return np.split(parts[0], (s.heads, s.heads + s.kv_heads), axis=1)


def _rows(b: Builder, array: Array) -> Array:
    if array.dtype == np.float32 and array.strides[-1] == array.itemsize:
        return array
    return b.contiguous(array)


def _put(
    b: Builder,
    s: operators_gqa.Sizes,
    source: Array,
    target: Array,
    angles_of: tuple[int, tuple[Array, Array] | None],
    start: Array | None,
) -> None:
    """Heads, turned where there are angles, converted, ``start`` tokens behind the first one.

    ``angles_of``: the row of the batch that ``source`` begins with, and angles of all rows.
    """
    row, tables = angles_of
    turned = None if tables is None else (tables[0][row:], tables[1][row:])
    block = angles.turn(source, target, turned, s.interleaved)._replace(
        position=0 if start is None else address(start), units=s.kv_heads
    )
    reads = [array for array in (source, *(turned or ()), start) if array is not None]
    units = s.kv_heads if s.batch == 1 else 0
    b.emit(turning.rotary, block, reads, [target], first=False, units=units)


def _attend(
    b: Builder,
    o: Operation,
    slot: Inputs,
    s: operators_gqa.Sizes,
    lengths: Array,
    arrays: tuple[Array, Array, Array],
) -> None:
    """Over (queries, keys, values)."""
    query, past_key, past_value = arrays
    output, mask = b.result(o.outputs[0]), attending.mask_of(b, slot["attention_bias"])
    if not query.flags.c_contiguous:
        query = b.contiguous(query, query.dtype)
    kinds = KINDS[query.dtype], KINDS[output.dtype]
    strides = query.strides if query.ndim == 3 else query.reshape(s.batch, s.tokens, -1).strides
    queries = Heads(strides[0], s.head_size * query.itemsize, strides[1])
    past = past_key, past_value
    try:
        problem = operators_gqa.problem(o.attributes, s, queries, kinds, past, mask, prompt=False)
    except errors.StorageMismatch as error:
        raise NotFused(str(error)) from None
    if output.shape != problem.shape:
        raise NotFused(f"GroupQueryAttention to {output.shape}")
    facts = _facts(b, slot, s, problem)
    sinks = _sinks(b, o, slot["head_sink"], s)
    operands = attending.Operands(facts, query, past_key, past_value, output, lengths, mask, sinks)
    attending.attend_to(b, problem, operands)


def _facts(b: Builder, slot: Inputs, s: operators_gqa.Sizes, problem: attend.Problem) -> Array:
    """The layout, which says whether all tokens are new; once for all layers that are alike."""
    owner, total_at = slot["seqlens_k"], slot["total_sequence_length"]
    fixed, total = attend.facts(problem), b.array(total_at)
    assert owner is not None

    def fill(target: Array) -> None:
        source, wide = b.lasting(fixed), int(total.itemsize == 8)
        block = places.Ends(address(source), address(target), address(total), s.tokens, wide)
        b.emit(places.ends, block, [total], [target])

    return b.derived(owner, f"{total_at} {fixed.tobytes().hex()}", fixed.shape, np.int64, fill)


def _sinks(b: Builder, o: Operation, given: int | None, s: operators_gqa.Sizes) -> Array | None:
    if given is None:
        smooth = o.attributes.get("smooth_softmax", 0)
        return b.lasting(np.zeros(s.heads, np.float32)) if smooth else None
    if b.shape(given) != (s.heads,):
        raise NotFused(f"GroupQueryAttention with head_sink {b.shape(given)}")
    return b.contiguous(b.array(given))
