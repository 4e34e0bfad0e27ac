"""Rules of fused steps for operators on ordinary values: products, rows, numbers one by one."""

from __future__ import annotations

import onnx_ir as ir

from onnx_inplace.compiler.fusable_context import (
    LARGEST_HEAD,
    Context,
    Rule,
    floats,
    given,
    integer,
    is_float,
    number,
    only,
    parameters,
)

BLOCK = 32  # numbers that share a scale
POWERS = (0.5, 1.0, 2.0, 3.0)
_SCALES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_INDICES = (ir.DataType.INT64, ir.DataType.INT32)
_BY_PLACE = {"Gather", "TensorScatter", "CacheUpdate", "PagedCacheUpdate", "RotaryEmbedding"}
_BY_LENGTH = {"Attention", "PagedAttention", "GroupQueryAttention"}


# -- products


def _empty(weight: ir.Value | None, context: Context) -> str | None:
    return "its weight is empty" if 0 in (context.shape(weight) or ()) else None


def _matmul_bits(node: ir.Node, context: Context) -> str | None:
    if integer(node, "bits", 4) not in (4, 8):
        return f"{integer(node, 'bits', 4)} bits"
    size = integer(node, "block_size", 0)
    if not size or size % BLOCK:
        return f"blocks of {size}, which is no multiple of {BLOCK}"
    if given(node, 4) is not None:
        return "with g_idx"
    weights = [given(node, k) for k in (1, 2, 3, 5)]
    if not all(v is None or context.constant(v) for v in weights):
        return "its weights are not constant"
    scales = weights[1]
    if scales is None or scales.dtype not in _SCALES:
        return "scales of another type than FLOAT and FLOAT16"
    return None if is_float(node.inputs[0]) else "its input is no float"


def _matmul(node: ir.Node, context: Context) -> str | None:
    weight = given(node, 1)
    if not context.constant(weight):
        return "its second input is no weight"
    if context.rank(weight) != 2 or context.rank(node.inputs[0]) < 2:
        return "its weight is no matrix"
    return _empty(weight, context) or floats(node, context)


def _gemm(node: ir.Node, context: Context) -> str | None:
    weight, bias = given(node, 1), given(node, 2)
    if not context.constant(weight) or not (bias is None or context.constant(bias)):
        return "its weights are not constant"
    factors = [number(node, name, 1.0) for name in ("alpha", "beta")]
    if factors != [1.0, 1.0] or integer(node, "transA", 0):
        return "with alpha, beta or transA"
    if bias is not None:
        shape, out = context.shape(bias), context.shape(node.outputs[0])
        if shape is None or out is None or len(shape) != 1 or shape[0] != out[1]:
            return "its bias is no row"
    return _empty(weight, context) or floats(node, context)


# -- numbers one by one


def _power(node: ir.Node, context: Context) -> str | None:
    base, exponent = node.inputs
    if not is_float(base):
        return "its input is no float"
    tensor = context.tensor(exponent)
    if tensor is None:
        return "its exponent is no weight"
    if tensor.size != 1 or tensor.numpy().item() not in POWERS:
        return f"its exponent is none of {', '.join(map(str, POWERS))}"
    return None


# -- rows


def _factors(node: ir.Node, context: Context, first: int) -> str | None:
    """The inputs from ``first`` on are numbers for each column."""
    columns = (context.shape(node.inputs[0]) or (None,))[-1]
    for value in node.inputs[first:]:
        shape = context.shape(value)
        if shape is not None and shape != (*[1] * (len(shape) - 1), columns):
            return f"`{value.name if value else ''}` is no row"
    return None


def _norm(node: ir.Node, context: Context) -> str | None:
    axis = integer(node, "axis", -1)
    if axis not in (-1, context.rank(node.inputs[0]) - 1):
        return f"over more than the last axis (axis={axis})"
    return _factors(node, context, 1) or only(node, 0) or floats(node, context)


def _skip_norm(node: ir.Node, context: Context) -> str | None:
    return _factors(node, context, 2) or only(node, 0, 3) or floats(node, context)


def _rotary_heads(node: ir.Node, context: Context, places: ir.Value | None) -> str | None:
    """What both operators of this name share; ``places``: position_ids."""
    shape = context.shape(node.inputs[0]) or ()
    if len(shape) == 3 and not integer(node, "num_heads", 0):
        return "without num_heads"
    if len(shape) == 4 and not (isinstance(shape[3], int) and shape[3] <= LARGEST_HEAD):
        return f"heads of more than {LARGEST_HEAD}"
    if places is None:
        return None
    if places.dtype != ir.DataType.INT64:
        return "its position_ids are not INT64"
    if context.rank(places) != 2 and context.shape(places) != (1,):
        return "its position_ids are no matrix"
    return None


def _rotary(node: ir.Node, context: Context) -> str | None:
    if any(not is_float(node.inputs[k]) for k in (0, 1, 2)):
        return "not of floats"
    return _rotary_heads(node, context, given(node, 3))


def _rotary_microsoft(node: ir.Node, context: Context) -> str | None:
    if any(not is_float(node.inputs[k]) for k in (0, 2, 3)):
        return "not of floats"
    if number(node, "scale", 1.0) != 1.0 or integer(node, "is_packed_batching", 0):
        return "with scale or is_packed_batching"
    return _rotary_heads(node, context, given(node, 1))


def _reduction(node: ir.Node, context: Context) -> str | None:
    return parameters(1)(node, context) or (
        None if is_float(node.inputs[0]) else "its input is no float"
    )


def _softmax(node: ir.Node, context: Context) -> str | None:
    rank = context.rank(node.inputs[0])
    old = context.opsets.get("", 1) < 13  # over all axes from one on
    if old and integer(node, "axis", 1) % max(rank, 1) != rank - 1:
        return "over more than one axis"
    return floats(node, context)


def _argmax(node: ir.Node, context: Context) -> str | None:
    if not is_float(node.inputs[0]):
        return "its input is no float"
    if integer(node, "select_last_index", 0):
        return "with select_last_index"
    if any(user.op_type in _BY_PLACE | _BY_LENGTH for user, _ in node.outputs[0].uses()):
        return "what it finds is used as an index, which is checked before a run"
    return None


# -- elements that only move


def _gather(node: ir.Node, context: Context) -> str | None:
    data, indices = node.inputs
    if not is_float(data):
        return "it does not gather floats"
    if context.content(indices) is not None and context.shape(indices) == ():
        return None  # one place of an axis: a view
    if not context.constant(data):
        return "it does not gather rows of a weight"
    if integer(node, "axis", 0) != 0 or context.rank(data) != 2:
        return "it does not gather rows of a matrix"
    if indices is None or indices.dtype not in _INDICES:
        return "its indices are neither INT64 nor INT32"
    return None


def _slice(node: ir.Node, context: Context) -> str | None:
    if given(node, 1) is None or given(node, 2) is None:
        return "its begin and end are attributes"
    steps = context.content(given(node, 4))
    if steps is not None and not all(isinstance(n, int) and n > 0 for n in steps):
        return "backwards"
    return parameters(1, 2, 3, 4)(node, context)


RULES: dict[tuple[str, str], Rule] = {
    **{("", name): floats for name in ("Add", "Sub", "Mul", "Div", "Cast")},
    **{("", name): floats for name in ("Sigmoid", "Tanh", "Relu", "Neg", "Exp", "Sqrt", "Abs")},
    **{("", name): floats for name in ("Erf", "Gelu", "Swish", "Reciprocal", "Softplus")},
    **{("com.microsoft", n): floats for n in ("Gelu", "QuickGelu", "FastGelu", "BiasGelu")},
    ("", "Pow"): _power,
    ("com.microsoft", "MatMulNBits"): _matmul_bits,
    ("", "MatMul"): _matmul,
    ("", "Gemm"): _gemm,
    ("", "RMSNormalization"): _norm,
    ("", "LayerNormalization"): _norm,
    ("", "SimplifiedLayerNormalization"): _norm,
    ("com.microsoft", "SkipLayerNormalization"): _skip_norm,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _skip_norm,
    ("", "RotaryEmbedding"): _rotary,
    ("com.microsoft", "RotaryEmbedding"): _rotary_microsoft,
    **{("", name): _reduction for name in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin")},
    ("", "Softmax"): _softmax,
    ("", "ArgMax"): _argmax,
    ("", "Gather"): _gather,
    ("", "Slice"): _slice,
    ("", "Identity"): parameters(),
    ("", "Flatten"): parameters(),
    ("", "Transpose"): parameters(),
    ("", "Concat"): parameters(),
    ("", "Reshape"): parameters(1),
    ("", "Squeeze"): parameters(1),
    ("", "Unsqueeze"): parameters(1),
    ("", "Split"): parameters(1),
}
