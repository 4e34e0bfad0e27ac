"""What kernels of the library (onnxruntime) do with memory: facts, measured, not promised.

They are of onnxruntime 1.32 on x86-64; ``tests/test_library_memory.py`` asks the library again,
operator by operator. For operators that are not named here nothing is known but their results:
``subsession_memory`` says which those are.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnx_inplace.compiler import sizes
from onnx_inplace.compiler.extents import Extents
from onnx_inplace.compiler.memory import THREADS
from onnx_inplace.compiler.sizes import Size

MICROSOFT = "com.microsoft"
_CACHE_LINE = 64  # [bytes] room to align what a kernel allocates for itself

SHARES = {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}
"""The result is the input's memory under another shape."""

OVERWRITES = {
    *("Relu", "LeakyRelu", "ThresholdedRelu", "Elu", "Selu", "Clip", "Sigmoid", "HardSigmoid"),
    *("Tanh", "Softplus", "Softsign", "Softmax", "LogSoftmax", "Cast"),
}
"""The result is written over the first input where nobody else reads that, and the size is one."""

PLAIN = {
    *("Abs", "Add", "And", "ArgMax", "ArgMin", "BatchNormalization", "Ceil", "Concat"),
    *("ConstantOfShape", "Cos", "CumSum", "DequantizeLinear", "Div", "DynamicQuantizeLinear"),
    *("Equal", "Erf", "Exp", "Expand", "Floor", "Gather", "GatherElements", "GatherND", "Gelu"),
    *("Gemm", "Greater", "GreaterOrEqual", "IsNaN", "LayerNormalization", "Less", "LessOrEqual"),
    *("Log", "MatMul", "MatMulInteger", "Max", "Mean", "Min", "Mod", "Mul", "Neg", "Not", "OneHot"),
    *("Or", "PRelu", "Pad", "Pow", "QuantizeLinear", "RMSNormalization", "Range", "Reciprocal"),
    *("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "RotaryEmbedding"),
    *("Round", "ScatterElements", "ScatterND", "Shape", "Sign", "Sin", "Size", "Slice", "Split"),
    *("Sqrt", "Sub", "Sum", "TensorScatter", "Tile", "Transpose", "Trilu", "Xor"),
    *("AveragePool", "GlobalAveragePool", "MaxPool", "Constant"),
}
"""Results only: no memory beside them, nothing overwritten."""

HALF = {
    *("Cast", "Concat", "ConstantOfShape", "Expand", "Flatten", "Gather", "GatherElements"),
    *("GatherND", "Identity", "LayerNormalization", "Pad", "RMSNormalization", "Reshape"),
    *("ScatterElements", "ScatterND", "Shape", "Size", "Slice", "Split", "Squeeze", "Tile"),
    *("TensorScatter", "Transpose", "Unsqueeze"),
}
"""Kernels that take float16 as it is; others compute in float32, between two casts."""

ESTIMATED = {"Attention", "Conv", "LSTM", "GRU"}
"""Their workspace depends on more than what a model says: versions, the CPU, lengths."""

Workspace = Callable[[ir.Node, Extents], tuple[Size, ...] | None]


def workspace(node: ir.Node, known: Extents) -> tuple[Size, ...] | None:
    """Bytes that a kernel takes beside its results, one number an allocation; None: not known."""
    found = _WORKSPACES.get((node.domain, node.op_type))
    if found is not None:
        return found(node, known)
    if node.domain == "" and node.op_type in PLAIN | SHARES | OVERWRITES:
        return ()
    return None


def packed(node: ir.Node) -> int:
    """Bytes of copies that the library keeps of the constants of a node, in a form of its own."""
    found = _PACKED.get((node.domain, node.op_type))
    return 0 if found is None else found(node)


def elements(value: ir.Value | None, known: Extents) -> Size | None:
    """Number of elements."""
    shape = None if value is None else known.shape(value)
    return None if shape is None else sizes.product(shape)


def _quantized_product(node: ir.Node, known: Extents) -> tuple[Size, ...] | None:
    """The rows in 8 bits, with a scale and a sum a block; or 8-bit weights as float32."""
    inner, columns = _integer(node, "K"), _integer(node, "N")
    bits, block = _integer(node, "bits", 4), _integer(node, "block_size")
    if _integer(node, "accuracy_level") == 4:
        rows = elements(node.inputs[0], known)
        if rows is None or not inner or not block:
            return None
        size = sizes.product((sizes.operation("//", rows, inner), -(-inner // block), block + 8))
        return (sizes.operation("+", size, _CACHE_LINE),)
    if bits == 4:
        return ()
    return (inner * columns * 4,) if bits == 8 else None


def _where(node: ir.Node, known: Extents) -> tuple[Size, ...] | None:
    """What is taken of either side, before they are put together."""
    both = _bytes(node.outputs[0], known)
    return None if both is None else (both, both)


def _softmax(node: ir.Node, known: Extents) -> tuple[Size, ...] | None:
    """Along another axis than the last one: the input and the result, transposed."""
    shape = None if node.inputs[0] is None else known.partial(node.inputs[0])
    if shape is None:
        return None
    axis = _integer(node, "axis", -1)
    if axis in (-1, len(shape) - 1):
        return ()
    size = _bytes(node.inputs[0], known)
    return None if size is None else (size, size)


def _convolution(node: ir.Node, known: Extents) -> tuple[Size, ...] | None:
    """A working buffer for each thread, where there is more to do than one product."""
    kernel = None if node.inputs[1] is None else known.partial(node.inputs[1])
    if kernel is None:
        return None
    if all(size == 1 for size in kernel[2:]):
        return ()
    return (sizes.operation("*", 1 << 16, THREADS),)


def _recurrent(gates: int, vectors: int, rows: int) -> Workspace:
    """All gates of all steps, and a few states."""

    def of(node: ir.Node, known: Extents) -> tuple[Size, ...] | None:
        shape = None if node.inputs[0] is None else known.shape(node.inputs[0])
        hidden = _integer(node, "hidden_size")
        if shape is None or not hidden:
            return None
        length, batch = shape[0], shape[1]
        state = sizes.operation("*", batch, hidden * 4)
        every = sizes.product((length, batch, gates * hidden * 4))
        return (every, *(state for _ in range(vectors)), *(hidden * 4 for _ in range(rows)))

    return of


def _attention(node: ir.Node, known: Extents) -> tuple[Size, ...] | None:
    """Scores of all queries with all keys, twice, and a mask; an estimate.

    That is its functional meaning, which runs where there is no kernel of the operator's version. A
    kernel takes the scores once.
    """
    query, key = (None if v is None else known.shape(v) for v in node.inputs[:2])
    if query is None or key is None or any(v is not None for v in node.inputs[4:6]):
        return None
    heads = query[1] if len(query) == 4 else _integer(node, "q_num_heads")
    axis = 2 if len(query) == 4 else 1
    scores = sizes.product((query[axis], key[axis], 4))
    return (*2 * (sizes.product((query[0], heads, scores)),), scores)


def _none(node: ir.Node, known: Extents) -> tuple[Size, ...] | None:
    return ()


_WORKSPACES: dict[tuple[str, str], Workspace] = {
    (MICROSOFT, "MatMulNBits"): _quantized_product,
    (MICROSOFT, "QuickGelu"): _none,
    (MICROSOFT, "Gelu"): _none,
    (MICROSOFT, "FastGelu"): _none,
    (MICROSOFT, "BiasGelu"): _none,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): _none,
    (MICROSOFT, "SkipLayerNormalization"): _none,
    ("", "Where"): _where,
    ("", "Softmax"): _softmax,
    ("", "LogSoftmax"): _softmax,
    ("", "Conv"): _convolution,
    ("", "LSTM"): _recurrent(4, 5, 6),
    ("", "GRU"): _recurrent(3, 6, 0),
    ("", "Attention"): _attention,
}


def _packed_product(node: ir.Node) -> int:
    """Columns in groups of 16, padded."""
    weight = _constant(node, 1)
    if weight is None or weight.dtype != ir.DataType.FLOAT:
        return 0
    shape = weight.shape.numpy()
    if len(shape) != 2:
        return 0
    inner, columns = shape[::-1] if _integer(node, "transB") else shape
    return inner * -(-columns // 16) * 16 * 4


def _packed_quantized(node: ir.Node) -> int:
    """The same codes in another order; for 8-bit rows also scales and their products with sums."""
    quants, scales = _constant(node, 1), _constant(node, 2)
    if quants is None or scales is None:
        return 0
    if _integer(node, "accuracy_level") == 4:
        return quants.nbytes + 2 * scales.nbytes + 2 * _CACHE_LINE
    return quants.nbytes if _integer(node, "bits", 4) == 4 else 0


def _packed_recurrent(node: ir.Node) -> int:
    """Weights of inputs and of states, each transposed."""
    return sum(t.nbytes for t in (_constant(node, 1), _constant(node, 2)) if t is not None)


_PACKED: dict[tuple[str, str], Callable[[ir.Node], int]] = {
    ("", "MatMul"): _packed_product,
    ("", "Gemm"): _packed_product,
    ("", "LSTM"): _packed_recurrent,
    ("", "GRU"): _packed_recurrent,
    (MICROSOFT, "MatMulNBits"): _packed_quantized,
}


def _constant(node: ir.Node, port: int) -> ir.TensorProtocol | None:
    value = node.inputs[port] if port < len(node.inputs) else None
    return None if value is None else value.const_value


def _bytes(value: ir.Value | None, known: Extents) -> Size | None:
    number = elements(value, known)
    if number is None or value is None or value.dtype is None:
        return None
    return sizes.operation("*", max(value.dtype.bitwidth // 8, 1), number)


def _integer(node: ir.Node, name: str, default: int = 0) -> int:
    found = node.attributes.get(name)
    return default if found is None else found.as_int()
