"""Small random decoders in the form of onnxruntime-genai's model builder.

past_key_values.N.* -> present.N.*, GroupQueryAttention, norms that add what they skip, and lengths
that are counted in a mask which is longer with every token.
"""

import dataclasses

import numpy as np
import onnx
from onnx import TensorProto, helper

FLOAT, FLOAT16, INT32, INT64 = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.INT32,
    TensorProto.INT64,
)
MICROSOFT = "com.microsoft"


@dataclasses.dataclass(frozen=True)
class Form:
    """What differs between decoders; ``grouped``: more attributes of GroupQueryAttention."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 32
    layers: int = 2
    hidden: int = 96
    vocabulary: int = 50
    packed: bool = True
    bits: int = 4
    element: int = FLOAT
    rotary: bool = True
    positions: bool = False
    sinks: bool = False
    grouped: tuple[tuple[str, object], ...] = ()

    @property
    def width(self) -> int:
        return self.heads * self.size


class _Graph:
    def __init__(self, form: Form, seed: int):
        self.form, self.random = form, np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        if array.dtype == np.float32:
            array = array.astype(helper.tensor_dtype_to_np_dtype(self.form.element))
        self.weights.append(onnx.numpy_helper.from_array(array, name))
        return name

    def node(self, op: str, inputs: list[str], outputs: int | list[str] = 1, **attributes):
        domain = MICROSOFT if op in _OPERATORS else ""
        if isinstance(outputs, int):
            outputs = [f"v{len(self.nodes)}.{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **attributes))
        return outputs[0] if len(outputs) == 1 else outputs

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        if not self.form.bits:
            matrix = self.random.standard_normal((inputs, outputs)) / np.sqrt(inputs)
            return self.node("MatMul", [x, self.weight(matrix.astype(np.float32))])
        blocks, bits = inputs // 32, self.form.bits
        codes = self.random.integers(0, 256, (outputs, blocks, 4 * bits), dtype=np.uint8)
        scales = 0.02 + 0.02 * self.random.random((outputs, blocks), dtype=np.float32)
        weights = [self.weight(codes), self.weight(scales)]
        size = {"K": inputs, "N": outputs, "bits": bits, "block_size": 32}
        return self.node("MatMulNBits", [x, *weights], **size)

    def row(self, size: int) -> str:
        return self.weight((1 + 0.1 * self.random.standard_normal(size)).astype(np.float32))


_OPERATORS = {"GroupQueryAttention", "MatMulNBits", "SkipSimplifiedLayerNormalization"}


def decoder(form: Form, seed: int = 0) -> onnx.ModelProto:
    """Tokens and a mask -> logits of all of them."""
    g, f = _Graph(form, seed), form
    info = helper.make_tensor_value_info
    inputs = [
        info("input_ids", INT64, ["batch_size", "sequence_length"]),
        info("attention_mask", INT64, ["batch_size", "total_sequence_length"]),
    ]
    if f.positions:
        inputs.append(info("position_ids", INT64, ["batch_size", "sequence_length"]))
    logits = info("logits", f.element, ["batch_size", "sequence_length", f.vocabulary])
    outputs = [logits]
    one = g.weight(np.array([1]))
    valid = g.node("ReduceSum", ["attention_mask", one], keepdims=0)
    last = g.node("Cast", [g.node("Sub", [valid, one])], to=INT32)
    width = g.node("Gather", [g.node("Shape", ["attention_mask"]), g.weight(np.array(1))], axis=0)
    total = g.node("Cast", [width], to=INT32)
    angles = np.outer(np.arange(64), 0.5 ** np.arange(f.size // 2)).astype(np.float32)
    tables = [g.weight(np.cos(angles)), g.weight(np.sin(angles))] if f.rotary else ["", ""]
    table = g.random.standard_normal((f.vocabulary, f.width)).astype(np.float32)
    x = g.node("Gather", [g.weight(table), "input_ids"])
    h = g.node("SimplifiedLayerNormalization", [x, g.row(f.width)], axis=-1, epsilon=1e-5)
    for layer in range(f.layers):
        past = [f"past_key_values.{layer}.{name}" for name in ("key", "value")]
        present = [f"present.{layer}.{name}" for name in ("key", "value")]
        for before, after in zip(past, present, strict=True):
            for ports, name, length in (
                (inputs, before, "past_sequence_length"),
                (outputs, after, "total_sequence_length"),
            ):
                ports.append(info(name, f.element, ["batch_size", f.kv_heads, length, f.size]))
        if f.packed:
            heads = [g.linear(h, f.width, (f.heads + 2 * f.kv_heads) * f.size), "", ""]
        else:
            counts = f.heads, f.kv_heads, f.kv_heads
            heads = [g.linear(h, f.width, n * f.size) for n in counts]
        sinks = g.weight(g.random.standard_normal(f.heads).astype(np.float32)) if f.sinks else ""
        taken = [*heads, *past, last, total, *tables]
        taken += ["position_ids" if f.positions else "", "", sinks]
        while not taken[-1]:
            taken.pop()
        attributes = {"num_heads": f.heads, "kv_num_heads": f.kv_heads, **dict(f.grouped)}
        made = [f"attended.{layer}", *present]
        g.node("GroupQueryAttention", taken, made, do_rotary=int(f.rotary), **attributes)
        h, x = _skip(g, x, g.linear(made[0], f.width, f.width))
        gate, up = g.linear(h, f.width, f.hidden), g.linear(h, f.width, f.hidden)
        gated = g.node("Mul", [g.node("Mul", [gate, g.node("Sigmoid", [gate])]), up])
        h, x = _skip(g, x, g.linear(gated, f.hidden, f.width))
    g.node("Identity", [g.linear(h, f.width, f.vocabulary)], ["logits"])
    graph = helper.make_graph(g.nodes, "genai", inputs, outputs, g.weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _skip(g: _Graph, x: str, added: str) -> tuple[str, str]:
    """The norm of a sum, and the sum."""
    names = [f"normed.{len(g.nodes)}", "", "", f"sum.{len(g.nodes)}"]
    inputs = [x, added, g.row(g.form.width)]
    g.node("SkipSimplifiedLayerNormalization", inputs, names, epsilon=1e-5)
    return names[0], names[3]
