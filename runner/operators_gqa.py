"""Kernel step of com.microsoft GroupQueryAttention whose past and present are one bound cache.

New keys and values are written behind the valid tokens, then the queries read the valid tokens.
Everything that can be wrong is checked before the first of the writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnx_inplace.compiler import errors, grouped_query, steps
from onnx_inplace.numba_kernels import floats, rows
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Action, Array, Settings, Slots, result, reusable
from onnx_inplace.runner.attend import (
    KINDS,
    Call,
    Calls,
    Heads,
    Kernels,
    Problem,
    Shape,
    kind_of,
    known_dim,
)
from onnx_inplace.runner.masks import mask_layout, mask_values


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What a call is about; ``rotated`` elements of a head, in neighbours where ``interleaved``."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_size: int
    rotated: int
    interleaved: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """What depends on shapes only."""

    call: Call
    places: tuple[Array, Array, Array]  # RowsLayout of queries, keys and values
    key_offset: int  # bytes from the beginning of a packed query
    value_offset: int
    rotated_query: tuple[int, ...] | None  # shape of workspace for rotated queries
    workspace: int


def group_query_attention(step: steps.Kernel, settings: Settings) -> Action:
    """``GroupQueryAttention``: writes new keys and values into the caches, attends over them.

    Raises:
        UnsupportedOperator: for what no kernel does, by the name of the input or attribute.
    """
    slot = grouped_query.named(step.inputs)
    _refuse(step, slot)
    attributes = step.attributes
    output, key_output, value_output = (*step.outputs, None, None)[:3]
    assert output is not None
    root = step.roots.get(1, "past_key")
    rotary = bool(attributes.get("do_rotary", 0))
    smooth = bool(attributes.get("smooth_softmax", 0))
    heads: int = attributes["num_heads"]
    reuse = reusable(step, output)
    calls: Calls[Ready] = Calls()
    place = rows.place.ready()
    kernels = kernels_of(step, settings)

    def value_of(slots: Slots, name: str) -> Any:
        place = slot[name]
        return None if place is None else slots[place]

    def act(slots: Slots) -> None:
        query = np.ascontiguousarray(value_of(slots, "query"))
        key, value = (_contiguous(value_of(slots, n)) for n in ("key", "value"))
        past_key, past_value = value_of(slots, "past_key"), value_of(slots, "past_value")
        bias = value_of(slots, "attention_bias")
        mask = None if bias is None else mask_values(bias)
        total = int(value_of(slots, "total_sequence_length").reshape(()))
        lengths = value_of(slots, "seqlens_k").reshape(-1).astype(np.int64) + 1
        cosines, sines = (
            (_contiguous(value_of(slots, n)) for n in ("cos_cache", "sin_cache"))
            if rotary
            else (None, None)
        )
        prompt = query.shape[1] == total
        arrays = query, key, value, past_key, past_value, mask, cosines, sines
        shapes = prompt, *[None if array is None else array.shape for array in arrays]
        ready = calls.get(shapes)
        if ready is None:
            ready = prepare(
                step, kernels, query, key, value, past_key, past_value, mask, cosines, sines, prompt
            )
            calls.put(shapes, ready)
        batch, tokens = query.shape[:2]
        capacity = past_key.shape[2]
        starts = np.zeros(batch, np.int64) if prompt else lengths - tokens
        check(root, starts, tokens, lengths, batch, capacity)
        positions = None
        if cosines is not None:
            given = value_of(slots, "position_ids")
            positions = (
                starts[:, None] + np.arange(tokens)
                if given is None
                else np.ascontiguousarray(given, dtype=np.int64)
            )
            check_positions(positions, (batch, tokens), cosines.shape[0])
        sinks = _sinks(value_of(slots, "head_sink"), smooth, heads)
        target = result(slots, output, reuse, ready.call.shape, query.dtype)

        # from here on nothing can fail
        space = np.empty(ready.workspace, np.uint8)
        angles = (
            0 if positions is None else address(positions),
            0 if cosines is None else address(cosines),
            0 if sines is None else address(sines),
            address(space),
        )
        queries, keys, values = ready.places
        at = address(query)
        key_source = at + ready.key_offset if key is None else address(key)
        value_source = at + ready.value_offset if value is None else address(value)
        place(address(keys), key_source, address(past_key), address(starts), *angles)
        place(address(values), value_source, address(past_value), address(starts), *angles)
        rotated = None
        if ready.rotated_query is not None:
            rotated = np.empty(ready.rotated_query, np.float32)
            place(address(queries), at, address(rotated), 0, *angles)
            at = address(rotated)
        ready.call(
            at,
            address(past_key),
            address(past_value),
            address(target),
            lengths,
            root,
            0 if mask is None else address(mask),
            0 if sinks is None else address(sinks),
        )
        if key_output is not None:
            slots[key_output] = past_key
        if value_output is not None:
            slots[value_output] = past_value

    return act


def kernels_of(step: steps.Kernel, settings: Settings) -> Kernels:
    """The kernels of a step, compiled."""
    cache = step.values.get(grouped_query.named(step.inputs)["past_key"] or 0)
    group = step.attributes["num_heads"] // step.attributes["kv_num_heads"]
    return Kernels(settings, Shape(kind_of(cache), known_dim(cache, 3), group))


def _contiguous(array: Array | None) -> Array | None:
    return array if array is None or array.flags.c_contiguous else np.ascontiguousarray(array)


def _refuse(step: steps.Kernel, slot: dict[str, int | None]) -> None:
    def refuse(reason: str) -> errors.UnsupportedOperator:
        return errors.UnsupportedOperator(step.domain, step.op_type, reason)

    for name in grouped_query.REFUSED_INPUTS:
        if slot[name] is not None:
            raise refuse(f"input {name}")
    for name, default in grouped_query.REFUSED_ATTRIBUTES.items():
        if step.attributes.get(name, default) != default:
            raise refuse(f"{name}={step.attributes[name]}")
    if (slot["key"] is None) != (slot["value"] is None):
        raise refuse("key and value are both inputs, or both packed into query")
    if slot["past_key"] is None or slot["past_value"] is None:
        raise refuse("no past_key and past_value to write to")
    if len(step.outputs) > 3 and step.outputs[3] is not None:
        raise refuse("output_qk is not computed")
    for name in ("query", "past_key", "past_value"):
        value = step.values.get(slot[name])  # type: ignore[arg-type]
        if value is not None and value.dtype is not None and value.dtype.numpy() not in KINDS:
            raise refuse(f"{name} of type {value.dtype.name}")
    if step.attributes.get("do_rotary", 0) and (
        slot["cos_cache"] is None or slot["sin_cache"] is None
    ):
        raise refuse("do_rotary without cos_cache and sin_cache")


def check(root: str, starts: Array, tokens: int, lengths: Array, batch: int, capacity: int) -> None:
    """Refuse tokens beyond the capacity, and lengths of other rows.

    Raises:
        StorageMismatch: there is not one length for each row.
        CapacityError: a row begins or ends outside of the cache.
    """
    if lengths.shape != (batch,):
        raise errors.StorageMismatch(f"{root}: seqlens_k {list(lengths.shape)} for {batch} rows")
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if not 0 <= start <= capacity - tokens:
            raise errors.CapacityError(root, start, tokens, capacity, row)
        if not 0 <= length <= capacity:
            raise errors.CapacityError(root, 0, length, capacity, row)


def check_positions(positions: Array, shape: tuple[int, int], limit: int) -> None:
    """Refuse positions that have no angles.

    Raises:
        StorageMismatch: there is not one position for each token.
        CapacityError: a position is negative, or not less than ``limit``.
    """
    if positions.shape != shape:
        raise errors.StorageMismatch(
            f"position_ids {list(positions.shape)}, expected {list(shape)}"
        )
    low, high = int(positions.min(initial=0)), int(positions.max(initial=0))
    if low < 0 or high >= limit:
        raise errors.CapacityError("cos_cache", low if low < 0 else high, 1, limit)


def _sinks(given: Array | None, smooth: bool, heads: int) -> Array | None:
    if given is not None:
        if given.shape != (heads,):
            raise errors.StorageMismatch(f"head_sink {list(given.shape)} for {heads} heads")
        return np.ascontiguousarray(given, dtype=np.float32)
    return np.zeros(heads, np.float32) if smooth else None


def prepare(
    step: steps.Kernel,
    kernels: Kernels,
    query: Array,
    key: Array | None,
    value: Array | None,
    past_key: Array,
    past_value: Array,
    mask: Array | None,
    cosines: Array | None,
    sines: Array | None,
    prompt: bool,
) -> Ready:
    """What follows from the shapes of inputs, whose tokens are a ``prompt`` or come behind others.

    Raises:
        StorageMismatch: they do not belong together.
    """
    attributes = step.attributes
    s = sizes(attributes, (query, key, value), (past_key, past_value), (cosines, sines))
    batch, tokens, heads, kv_heads = s.batch, s.tokens, s.heads, s.kv_heads
    head_size, rotated, item = s.head_size, s.rotated, query.itemsize
    width, new = query.shape[2], kv_heads * head_size
    packed = Heads(tokens * width * item, head_size * item, width * item)
    single = Heads(tokens * new * item, head_size * item, new * item)
    query_at, query_kind = packed, KINDS[query.dtype]
    if rotated:  # rotated queries stay in float32
        query_at = Heads(tokens * heads * head_size * 4, head_size * 4, heads * head_size * 4)
        query_kind = 0
    cache_at = Heads.of(past_key, head_size)

    def layout(count: int, source: Heads, kind: int, target: Heads, rotated: int) -> Array:
        angle = cosines if cosines is not None else query
        facts: list[int] = [
            batch, count, tokens, head_size, KINDS[query.dtype], kind, KINDS[angle.dtype],
            rotated, s.interleaved, head_size * item,
            *dataclasses.astuple(source), *dataclasses.astuple(target), angle.strides[0],
        ]  # fmt: skip
        return np.array(rows.RowsLayout(*facts), np.int64)

    source, kind = packed if key is None else single, KINDS[past_key.dtype]
    kinds = query_kind, KINDS[query.dtype]
    call = problem(attributes, s, query_at, kinds, (past_key, past_value), mask, prompt=prompt)
    return Ready(
        call=Call(call, kernels),
        places=(
            layout(heads, packed, 0, query_at, rotated),
            layout(kv_heads, source, kind, cache_at, rotated),
            layout(kv_heads, source, kind, cache_at, 0),
        ),
        key_offset=heads * head_size * item,
        value_offset=(heads + kv_heads) * head_size * item,
        rotated_query=(batch, tokens, heads, head_size) if rotated else None,
        workspace=(head_size + rotated) * 4,
    )


def sizes(
    attributes: Mapping[str, Any],
    new: tuple[Array, Array | None, Array | None],
    past: tuple[Array, Array],
    angles: tuple[Array | None, Array | None],
) -> Sizes:
    """What (query, key, value), the caches and (cosines, sines) have in common.

    Raises:
        StorageMismatch: they do not belong together.
    """
    (query, key, value), (cosines, sines) = new, angles
    heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
    batch, tokens, width = query.shape
    head_size = width // (heads + 2 * kv_heads if key is None else heads)
    rows = (batch, tokens, kv_heads * head_size)
    cache = (batch, kv_heads, past[0].shape[2], head_size)
    given = [] if key is None or value is None else [key.shape, value.shape]
    if any(p.shape != cache for p in past) or any(shape != rows for shape in given):
        raise errors.StorageMismatch(
            f"GroupQueryAttention: query {list(query.shape)}, new {given}, "
            f"caches {list(past[0].shape)}"
        )
    rotated = 0 if cosines is None else 2 * cosines.shape[1]
    if cosines is not None and (sines is None or sines.shape != cosines.shape):
        raise errors.StorageMismatch("cos_cache and sin_cache differ in shape")
    if rotated > head_size:
        raise errors.StorageMismatch(f"cos_cache of {rotated // 2} angles for heads of {head_size}")
    interleaved = int(attributes.get("rotary_interleaved", 0))
    return Sizes(batch, tokens, heads, kv_heads, head_size, rotated, interleaved)


def problem(
    attributes: Mapping[str, Any],
    s: Sizes,
    query: Heads,
    kinds: tuple[int, int],
    past: tuple[Array, Array],
    mask: Array | None,
    *,
    prompt: bool,
) -> Problem:
    """A call of attention. ``kinds``: of queries, which lie as ``query`` says, and of the output.

    Raises:
        StorageMismatch: the mask is for other rows.
    """
    scale, window = attributes.get("scale", 0.0), attributes.get("local_window_size", -1)
    head = s.head_size * floats.SIZES[kinds[1]]
    capacity = past[0].shape[2]
    return Problem(
        shape=(s.batch, s.tokens, s.heads * s.head_size),
        batch=s.batch,
        heads=s.heads,
        kv_heads=s.kv_heads,
        tokens=s.tokens,
        capacity=capacity,
        head_size=s.head_size,
        value_size=s.head_size,
        query=query,
        key=Heads.of(past[0], s.head_size),
        value=Heads.of(past[1], s.head_size),
        output=Heads(s.tokens * s.heads * head, head, s.heads * head),
        kinds=(kinds[0], KINDS[past[0].dtype], KINDS[past[1].dtype], kinds[1]),
        left=window - 1 if window > 0 else -1,  # the window counts the query itself
        right=0 if attributes.get("causal", 1) else -1,
        at_end=not prompt,
        mask=mask_layout(mask, (s.batch, s.heads, s.tokens), capacity),
        scale=scale or s.head_size**-0.5,
        softcap=attributes.get("softcap", 0.0),
    )
