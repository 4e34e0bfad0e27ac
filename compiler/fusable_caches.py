"""Rules of fused steps for storage of the caller: writes, and attention over what is valid."""

from __future__ import annotations

import onnx_ir as ir

from onnx_inplace.compiler import contract
from onnx_inplace.compiler.fusable_context import (
    LARGEST_HEAD,
    Context,
    Rule,
    given,
    integer,
    is_float,
    only,
)
from onnx_inplace.compiler.grouped_query import INPUTS, REFUSED_ATTRIBUTES, REFUSED_INPUTS, named
from onnx_inplace.compiler.sizes import Size

_SOFTMAX_IN_FLOAT32 = (1, 10, 16)  # float32, float16 and bfloat16 are served by float32


def _update(node: ir.Node, context: Context) -> str | None:
    if not context.root(node.outputs[0]):
        return "it does not write storage of the caller"
    position = given(node, 2)
    shape = () if position is None else context.shape(position)
    if shape not in ((), (1,)):
        return "rows have positions of their own"
    if position is not None and position.dtype != ir.DataType.INT64:
        return "its position is not INT64"
    if shape == (1,) and (context.shape(node.inputs[0]) or (0,))[0] != 1:
        return "one position for several rows"
    return None


def _attention(node: ir.Node, context: Context) -> str | None:
    if not (context.root(given(node, 1)) and context.root(given(node, 2))):
        return "its keys and values are not storage of the caller"
    if not context.facts.is_kernel(node):
        return "without nonpad_kv_seqlen"
    if any(given(node, k) is not None for k in (4, 5)):
        return "with past values"
    mask = given(node, 3)
    if mask is not None and not (is_float(mask) or mask.dtype == ir.DataType.BOOL):
        return "its mask is neither BOOL nor a float of at most 32 bits"
    if integer(node, "softmax_precision", 1) not in _SOFTMAX_IN_FLOAT32:
        return "its softmax is not computed in float32"
    if node.attributes.get("qk_matmul_output_mode") is not None and len(node.outputs) > 1:
        return "its scores are wanted"
    return only(node, 0)


_FLOATS = (*INPUTS[:5], "cos_cache", "sin_cache", "attention_bias", "head_sink")


def _grouped(node: ir.Node, context: Context) -> str | None:
    value = named(node.inputs)
    past_key = value["past_key"]
    if past_key is None or not (context.root(past_key) and context.root(value["past_value"])):
        return "its past is not storage of the caller"
    refused = [name for name in REFUSED_INPUTS if value[name] is not None]
    refused += [
        name
        for name, default in REFUSED_ATTRIBUTES.items()
        if name in node.attributes and node.attributes[name].value != default
    ]
    if refused:
        return f"with {', '.join(refused)}"
    if (value["key"] is None) != (value["value"] is None):
        return "one of key and value is packed into its query"
    if integer(node, "do_rotary", 0) and None in (value["cos_cache"], value["sin_cache"]):
        return "do_rotary without cos_cache and sin_cache"
    for name in _FLOATS:
        if value[name] is not None and not is_float(value[name]):
            return f"its {name} is no float of at most 32 bits"
    lengths = value["seqlens_k"], value["total_sequence_length"]
    if not all(v is not None and v.dtype == ir.DataType.INT32 for v in lengths):
        return "its seqlens_k or total_sequence_length is not INT32"
    places = value["position_ids"]
    if places is not None and (places.dtype != ir.DataType.INT64 or context.rank(places) != 2):
        return "its position_ids are no matrix of INT64"
    size = (context.shape(past_key) or (None,))[-1]
    if not (isinstance(size, int) and size <= LARGEST_HEAD):
        return f"heads of more than {LARGEST_HEAD}"
    return only(node, 0, 1, 2)


def _page_ids(node: ir.Node, context: Context, index: int) -> str | None:
    ids = given(node, index)
    if ids is None or ids.dtype != ir.DataType.INT64:
        return "its page ids are not INT64"
    if context.rank(ids) > 2:
        return "its page ids have more than two axes"
    return None


def _one_for_each(node: ir.Node, context: Context, index: int, batch: Size) -> str | None:
    """An input holds one INT64 for each of ``batch`` sequences."""
    value = given(node, index)
    if value is None or value.dtype != ir.DataType.INT64:
        return f"its input {index} is not INT64"
    if context.shape(value) != (batch,) and (batch != 1 or context.shape(value) not in ((), (1,))):
        return f"`{value.name}` is not one number for each sequence"
    return None


def _paged_update(node: ir.Node, context: Context) -> str | None:
    if not context.root(node.outputs[0]):
        return "it does not write storage of the caller"
    ids = context.shape(given(node, 1)) or ()
    batch = ids[0] if len(ids) == 2 else 1
    if not is_float(given(node, 2)):
        return "its values are no floats"
    return _page_ids(node, context, 1) or _one_for_each(node, context, 3, batch)


def _paged_attention(node: ir.Node, context: Context) -> str | None:
    if not context.root(given(node, 1)):
        return "its pages are not storage of the caller"
    query = context.shape(node.inputs[0]) or (1,)
    if not is_float(node.inputs[0]):
        return "its queries are no floats"
    return _page_ids(node, context, 2) or _one_for_each(node, context, 3, query[0])


RULES: dict[tuple[str, str], Rule] = {
    ("", "TensorScatter"): _update,
    (contract.DOMAIN, "CacheUpdate"): _update,
    ("", "Attention"): _attention,
    ("com.microsoft", "GroupQueryAttention"): _grouped,
    (contract.DOMAIN, "PagedCacheUpdate"): _paged_update,
    (contract.DOMAIN, "PagedAttention"): _paged_attention,
}
