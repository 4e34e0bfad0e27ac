"""Kernel step of ONNX Attention (opset 23 to 25) over bound caches: reads the valid length only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnx_inplace.compiler import errors, steps
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Action, Array, Settings, Slots, result, reusable
from onnx_inplace.runner.attend import (
    KINDS,
    Call,
    Calls,
    Heads,
    Kernels,
    Known,
    Problem,
    Shape,
    kind_of,
    known_dim,
)
from onnx_inplace.runner.masks import mask_layout, mask_values

_SOFTMAX_IN_FLOAT32 = (None, 1, 10, 16)  # float32, float16 and bfloat16 are served by float32


def attention(step: steps.Kernel, settings: Settings) -> Action:
    """``Attention(Q, K, V, attn_mask, , , nonpad_kv_seqlen)``; K and V are whole caches.

    Raises:
        UnsupportedOperator: it concatenates (``past_key``), wants scores, or computes in double.
    """
    inputs = (*step.inputs, *[None] * (7 - len(step.inputs)))
    attributes = step.attributes
    _refuse(step, inputs)
    query_slot, key_slot, value_slot, mask_slot, _, _, length_slot = inputs
    (output,) = (s for s in step.outputs[:1] if s is not None)
    assert query_slot is not None and key_slot is not None and value_slot is not None
    known = step.values.get(key_slot)
    root = known.root or known.name if known is not None else "K"
    reuse = reusable(step, output)
    calls: Calls[Call] = Calls()
    prepared = kernels(step, settings)

    def act(slots: Slots) -> None:
        query, key, value = slots[query_slot], slots[key_slot], slots[value_slot]
        mask = None if mask_slot is None else mask_values(slots[mask_slot])
        lengths = None if length_slot is None else slots[length_slot]
        if lengths is not None and not lengths.flags.c_contiguous:
            lengths = np.ascontiguousarray(lengths)
        if not query.flags.c_contiguous:
            query = np.ascontiguousarray(query)
        shapes = query.shape, key.shape, value.shape, None if mask is None else mask.shape
        call = calls.get(shapes)
        if call is None:
            found = problem(attributes, query, key, value, mask, lengths is not None)
            call = calls.put(shapes, Call(found, prepared))
        target = result(slots, output, reuse, call.shape, query.dtype)
        if mask is None:
            call.on_arrays(query, key, value, target, lengths, root)
        else:
            at = address(query), address(key), address(value), address(target)
            call(*at, lengths, root, address(mask))

    return act


def kernels(step: steps.Kernel, settings: Settings) -> Kernels:
    """The kernels of a step, compiled."""
    query, key = (None if slot is None else step.values.get(slot) for slot in step.inputs[:2])
    return Kernels(settings, shape(step.attributes, query, key))


def shape(attributes: Mapping[str, Any], query: Known | None, key: Known | None) -> Shape:
    """What the types of the model say of heads and sizes."""
    rank = len(key.shape) if key is not None and key.shape is not None else 0
    if rank == 4:
        heads, kv_heads, size = known_dim(query, 1), known_dim(key, 1), known_dim(key, 3)
    else:
        heads, kv_heads = attributes.get("q_num_heads"), attributes.get("kv_num_heads")
        width = known_dim(key, 2)
        size = width // kv_heads if rank == 3 and width is not None and kv_heads else None
    group = heads // kv_heads if heads and kv_heads else None
    return Shape(kind_of(key), size, group)


def _refuse(step: steps.Kernel, inputs: tuple[int | None, ...]) -> None:
    def refuse(reason: str) -> errors.UnsupportedOperator:
        return errors.UnsupportedOperator(step.domain, step.op_type, reason)

    if inputs[4] is not None or inputs[5] is not None:
        raise refuse(
            "past_key and past_value make a longer cache, which is new storage; "
            "write the cache with TensorScatter and pass nonpad_kv_seqlen"
        )
    if any(slot is not None for slot in step.outputs[1:]):
        raise refuse("present_key, present_value and qk_matmul_output are not computed")
    precision = step.attributes.get("softmax_precision")
    if precision not in _SOFTMAX_IN_FLOAT32:
        raise refuse(f"softmax_precision={precision}: softmax is computed in float32")
    for name, slot in zip(("Q", "K", "V"), inputs, strict=False):
        value = step.values.get(slot) if slot is not None else None
        if value is not None and value.dtype is not None and value.dtype.numpy() not in KINDS:
            raise refuse(f"{name} of type {value.dtype.name}")
    for name in ("left_window_size", "right_window_size"):
        if step.attributes.get(name, -1) < -1:
            raise refuse(f"{name}={step.attributes[name]}")


def problem(
    attributes: Any, query: Array, key: Array, value: Array, mask: Array | None, has_lengths: bool
) -> Problem:
    """A call of these shapes.

    Raises:
        StorageMismatch: they do not fit.
    """
    if query.ndim == 4:
        batch, heads, tokens, head_size = query.shape
        kv_heads, capacity, value_size = key.shape[1], key.shape[2], value.shape[3]
        expected_key: tuple[int, ...] = batch, kv_heads, capacity, head_size
        expected_value: tuple[int, ...] = batch, kv_heads, capacity, value_size
    else:
        heads, kv_heads = attributes["q_num_heads"], attributes["kv_num_heads"]
        batch, tokens, capacity = query.shape[0], query.shape[1], key.shape[1]
        head_size, value_size = query.shape[2] // heads, value.shape[2] // kv_heads
        expected_key = batch, capacity, kv_heads * head_size
        expected_value = batch, capacity, kv_heads * value_size
    if (key.shape, value.shape) != (expected_key, expected_value) or heads % kv_heads:
        raise errors.StorageMismatch(
            f"Attention: Q {list(query.shape)}, K {list(key.shape)}, V {list(value.shape)}"
        )
    if not (key.flags.c_contiguous and value.flags.c_contiguous):
        raise errors.StorageMismatch("Attention: K and V are C-contiguous")
    query_at = Heads.of(query, head_size)
    output = (
        Heads(heads * tokens * value_size, tokens * value_size, value_size)
        if query.ndim == 4
        else Heads(tokens * heads * value_size, value_size, heads * value_size)
    )
    item = query.itemsize
    causal = bool(attributes.get("is_causal", 0))
    right = attributes.get("right_window_size", -1)
    scale = attributes.get("scale")
    return Problem(
        shape=(*query.shape[:-1], value_size if query.ndim == 4 else heads * value_size),
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        tokens=tokens,
        capacity=capacity,
        head_size=head_size,
        value_size=value_size,
        query=query_at,
        key=Heads.of(key, head_size),
        value=Heads.of(value, value_size),
        output=Heads(output.batch * item, output.head * item, output.token * item),
        kinds=(KINDS[query.dtype], KINDS[key.dtype], KINDS[value.dtype], KINDS[query.dtype]),
        left=attributes.get("left_window_size", -1),
        right=0 if causal else right,
        at_end=has_lengths,
        mask=mask_layout(mask, (batch, heads, tokens), capacity),
        scale=float(scale) if scale is not None else head_size**-0.5,
        softcap=float(attributes.get("softcap", 0.0)),
    )
