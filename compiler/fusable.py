"""Which nodes a fused step can execute: a rule for each operator.

A rule looks at one node and gives a reason why not, or None. What it accepts, the runner has a
template for (``runner.fused``), and that template needs nothing which is known only in a run:
shapes and integer parameters follow from the dimensions of the inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from onnx_inplace.compiler import contract, partition
from onnx_inplace.compiler.extents import Extents
from onnx_inplace.compiler.sizes import Shape, Size

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
BLOCK = 32  # numbers that share a scale
_PRODUCTS = {("com.microsoft", "MatMulNBits"), ("", "MatMul"), ("", "Gemm")}
_SCALES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What rules ask about the graph."""

    known: Extents
    facts: partition.Facts

    def constant(self, value: ir.Value | None) -> bool:
        """Whether a value is a weight that no caller can replace."""
        return value is not None and value.is_initializer() and not value.is_graph_input()

    def shape(self, value: ir.Value | None) -> Shape | None:
        """Sizes of a value; None where there is no value, or one of them is not known."""
        return None if value is None else self.known.shape(value)

    def rank(self, value: ir.Value | None) -> int:
        """Number of axes; 0 where nothing is known."""
        return len(self.shape(value) or ())

    def root(self, value: ir.Value | None) -> bool:
        """Whether a value is storage of the caller."""
        return value is not None and value in self.facts.roots

    def content(self, value: ir.Value | None) -> tuple[Size, ...] | None:
        """The integers of a parameter, where the dimensions decide them."""
        found = self.known.integers(value)
        if found is not None:
            return None if None in found else tuple(n for n in found if n is not None)
        one = self.known.integer(value)
        return None if one is None else (one,)


Rule = Callable[[ir.Node, Context], str | None]
"""Why a fused step cannot execute a node; None: it can."""

_rules: dict[tuple[str, str], Rule] = {}


def register(domain: str, op_type: str, rule: Rule) -> None:
    """Let fused steps execute an operator of the user's; the runner needs a template for it.

    Raises:
        ValueError: the operator has another rule already.
    """
    if _rules.setdefault((domain, op_type), rule) is not rule:
        raise ValueError(f"{domain}::{op_type} has another rule already")


def reason(node: ir.Node, context: Context) -> str | None:
    """Why a fused step cannot execute a node; None: it can."""
    rule = _rules.get((node.domain, node.op_type))
    if rule is None:
        return "no template"
    for value in (*node.inputs, *node.outputs):
        if value is None or not value.name:
            continue
        if context.known.shape(value) is None:
            return f"the shape of `{value.name}` is known only in a run"
    return rule(node, context)


def is_product(node: ir.Node, context: Context) -> bool:
    """Whether a node multiplies by a weight: what a decoder spends its time on."""
    return (node.domain, node.op_type) in _PRODUCTS and any(
        context.constant(v) for v in node.inputs
    )


def rows(node: ir.Node, context: Context) -> tuple[Size, ...]:
    """Sizes of the rows of a product: all axes of its first input but the last."""
    return (context.shape(node.inputs[0]) or ())[:-1]


# -- helpers of rules


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _integer(node: ir.Node, name: str, default: int) -> int:
    found = node.attributes.get(name)
    return default if found is None else found.as_int()


def _only_first_output(node: ir.Node) -> str | None:
    if any(v.name and (v.uses() or v.is_graph_output()) for v in node.outputs[1:]):
        return "more than its first result is wanted"
    return None


def _is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype in FLOATS


def _floats(node: ir.Node, context: Context) -> str | None:
    """All inputs and outputs are floats of at most 32 bits."""
    for value in (*node.inputs, *node.outputs):
        if value is not None and value.name and value.dtype not in FLOATS:
            kind = "unknown type" if value.dtype is None else value.dtype.name
            return f"`{value.name}` is {kind}, not a float of at most 32 bits"
    return None


def _parameters(*ports: int) -> Rule:
    """Data are floats; the inputs at ``ports`` are integers that the dimensions decide."""

    def rule(node: ir.Node, context: Context) -> str | None:
        if not all(_is_float(v) for v in node.outputs if v.name):
            return "it does not make floats"
        for port in ports:
            value = _input(node, port)
            if value is not None and context.content(value) is None:
                return f"`{value.name}` is known only in a run"
        return None

    return rule


# -- rules


def _matmul_bits(node: ir.Node, context: Context) -> str | None:
    if _integer(node, "bits", 4) not in (4, 8):
        return f"{_integer(node, 'bits', 4)} bits"
    size = _integer(node, "block_size", 0)
    if not size or size % BLOCK:
        return f"blocks of {size}, which is no multiple of {BLOCK}"
    if _input(node, 4) is not None:
        return "with g_idx"
    weights = [_input(node, k) for k in (1, 2, 3, 5)]
    if not all(v is None or context.constant(v) for v in weights):
        return "its weights are not constant"
    scales = weights[1]
    if scales is None or scales.dtype not in _SCALES:
        return "scales of another type than FLOAT and FLOAT16"
    return None if _is_float(node.inputs[0]) else "its input is no float"


def _matmul(node: ir.Node, context: Context) -> str | None:
    weight = _input(node, 1)
    if not context.constant(weight):
        return "its second input is no weight"
    if context.rank(weight) != 2 or context.rank(node.inputs[0]) < 2:
        return "its weight is no matrix"
    return _floats(node, context)


def _gemm(node: ir.Node, context: Context) -> str | None:
    weight, bias = _input(node, 1), _input(node, 2)
    if not context.constant(weight) or not (bias is None or context.constant(bias)):
        return "its weights are not constant"
    factors = [node.attributes.get(name) for name in ("alpha", "beta")]
    if any(f is not None and f.as_float() != 1.0 for f in factors) or _integer(node, "transA", 0):
        return "with alpha, beta or transA"
    if bias is not None:
        shape, out = context.shape(bias), context.shape(node.outputs[0])
        if shape is None or out is None or len(shape) != 1 or shape[0] != out[1]:
            return "its bias is no row"
    return _floats(node, context)


def _last_axis(node: ir.Node, context: Context) -> str | None:
    if _integer(node, "axis", -1) not in (-1, context.rank(node.inputs[0]) - 1):
        return f"over more than the last axis (axis={_integer(node, 'axis', -1)})"
    if not all(context.constant(v) for v in node.inputs[1:] if v is not None):
        return "its factors are not constant"
    return _only_first_output(node) or _floats(node, context)


def _rotary(node: ir.Node, context: Context) -> str | None:
    if any(not _is_float(node.inputs[k]) for k in (0, 1, 2)):
        return "not of floats"
    if _input(node, 3) is not None:
        return "with position_ids: gather the tables before it"
    return None


def _gather(node: ir.Node, context: Context) -> str | None:
    data, indices = node.inputs
    if not _is_float(data):
        return "it does not gather floats"
    if context.content(indices) is not None and context.shape(indices) == ():
        return None  # one place of an axis: a view
    if not context.constant(data):
        return "it does not gather rows of a weight"
    if _integer(node, "axis", 0) != 0 or context.rank(data) != 2:
        return "it does not gather rows of a matrix"
    return None


def _cast(node: ir.Node, context: Context) -> str | None:
    return _floats(node, context)


def _update(node: ir.Node, context: Context) -> str | None:
    if not context.root(node.outputs[0]):
        return "it does not write storage of the caller"
    position = _input(node, 2)
    shape = () if position is None else context.shape(position)
    if shape not in ((), (1,)):
        return "rows have positions of their own"
    if position is not None and position.dtype != ir.DataType.INT64:
        return "its position is not INT64"
    if shape == (1,) and (context.shape(node.inputs[0]) or (0,))[0] != 1:
        return "one position for several rows"
    return None


def _attention(node: ir.Node, context: Context) -> str | None:
    if not (context.root(_input(node, 1)) and context.root(_input(node, 2))):
        return "its keys and values are not storage of the caller"
    if not context.facts.is_kernel(node):
        return "without nonpad_kv_seqlen"
    if any(_input(node, k) is not None for k in (3, 4, 5)):
        return "with a mask or past values"
    if node.attributes.get("qk_matmul_output_mode") is not None and len(node.outputs) > 1:
        return "its scores are wanted"
    return _only_first_output(node)


for _name in ("Add", "Sub", "Mul", "Div"):
    register("", _name, _floats)
for _name in ("Sigmoid", "Tanh", "Relu", "Neg", "Exp", "Sqrt", "Abs", "Erf", "Gelu", "Swish"):
    register("", _name, _floats)
for _name in ("Gelu", "QuickGelu", "FastGelu"):
    register("com.microsoft", _name, _floats)
for _name in ("RMSNormalization", "LayerNormalization", "SimplifiedLayerNormalization"):
    register("", _name, _last_axis)
register("com.microsoft", "MatMulNBits", _matmul_bits)
register("", "MatMul", _matmul)
register("", "Gemm", _gemm)
register("", "RotaryEmbedding", _rotary)
register("", "Gather", _gather)
register("", "Cast", _cast)
register("", "Identity", _parameters())
register("", "Flatten", _parameters())
register("", "Transpose", _parameters())
register("", "Concat", _parameters())
register("", "Reshape", _parameters(1))
register("", "Squeeze", _parameters(1))
register("", "Unsqueeze", _parameters(1))
register("", "Split", _parameters(1))
register("", "Slice", _parameters(1, 2, 3, 4))
register("", "ReduceSum", _parameters(1))
register("", "ReduceMean", _parameters(1))
register("", "TensorScatter", _update)
register(contract.DOMAIN, "CacheUpdate", _update)
register("", "Attention", _attention)
