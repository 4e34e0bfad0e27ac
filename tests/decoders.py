"""Small random decoders in the DSL: every way in which a decoder may be built, one layer or two."""

import dataclasses

import numpy as np

from onnx_inplace.compiler import Program
from onnx_inplace.dsl import (
    BFLOAT16,
    FLOAT,
    FLOAT16,
    INT64,
    Alias,
    Mutable,
    domain,
    kv,
    model,
    op,
    weight,
)

microsoft = domain("com.microsoft", 1)
ELEMENTS = {"float32": FLOAT, "float16": FLOAT16, "bfloat16": BFLOAT16}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What differs between decoders; ``bits`` 0: weights are floats."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    layers: int = 2
    hidden: int = 96
    vocabulary: int = 50
    bits: int = 4
    accuracy: int = 0
    cache: str = "float16"
    weights: str = "float32"
    interleaved: int = 0
    norm: str = "rms"
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    stacked: bool = True

    @property
    def width(self) -> int:
        return self.heads * self.size


class Weights:
    """Random numbers, in the forms that operators take."""

    def __init__(self, shape: Shape, seed: int):
        self.shape, self.random, self.count = shape, np.random.default_rng(seed), 0

    def name(self, what: str) -> str:
        self.count += 1
        return f"{what}.{self.count}"

    def row(self, size: int, around: float = 0.0):
        values = around + 0.1 * self.random.standard_normal(size)
        return weight(values.astype(np.float32), self.name("row"))

    def linear(self, x, inputs: int, outputs: int):
        s = self.shape
        if not s.bits:
            matrix = self.random.standard_normal((inputs, outputs)) / np.sqrt(inputs)
            if s.weights == "float16":
                x = op.Cast(x, to=FLOAT16.dtype)
                y = op.MatMul(x, weight(matrix.astype(np.float16), self.name("matrix")))
                y = op.Cast(y, to=FLOAT.dtype)
            else:
                y = op.MatMul(x, weight(matrix.astype(np.float32), self.name("matrix")))
        else:
            blocks = inputs // 32
            quants = self.random.integers(0, 256, (outputs, blocks, 4 * s.bits), dtype=np.uint8)
            scales = 0.02 + 0.02 * self.random.random((outputs, blocks))
            if s.bits == 8:
                scales /= 16
            scales = scales.astype(np.float16).astype(np.float32)
            y = microsoft.MatMulNBits(
                x,
                weight(quants, self.name("quants")),
                weight(scales, self.name("scales")),
                K=inputs,
                N=outputs,
                bits=s.bits,
                block_size=32,
                accuracy_level=s.accuracy,
            )
        return y + self.row(outputs) if s.bias else y

    def norm(self, x):
        s = self.shape
        if s.norm == "layer":
            return op.LayerNormalization(x, self.row(s.width, 1.0), self.row(s.width))
        return op.RMSNormalization(x, self.row(s.width, 1.0), epsilon=1e-5)


def activated(x, name: str):
    if name == "silu":
        return x * op.Sigmoid(x)
    if name == "gelu":
        return op.Gelu(x)
    if name == "gelu_tanh":
        return op.Gelu(x, approximate="tanh")
    return op.Relu(x)


def decoder(s: Shape, seed: int = 0) -> Program:
    """Tokens -> logits of the last one, with caches of one K and one V a layer."""
    w = Weights(s, seed)
    element = ELEMENTS[s.cache]
    Caches = tuple[(Mutable[element[1, s.kv_heads, "max_length", s.size]],) * s.layers]
    angle = np.outer(np.arange(128), 0.5 ** np.arange(s.size // 2))
    tables = {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
    embedding = w.random.standard_normal((s.vocabulary, s.width)).astype(np.float32)

    def heads_of(h, heads: int):
        h = op.Reshape(h, [0, 0, heads, s.size])
        return op.Transpose(h, perm=[0, 2, 1, 3])

    def attention(x, old_keys, old_values, position, length, cos, sin):
        h = w.norm(x)
        if s.stacked:
            all_ = s.heads + 2 * s.kv_heads
            h = heads_of(w.linear(h, s.width, all_ * s.size), all_)
            query, key, value = op.Split(h, [s.heads, s.kv_heads, s.kv_heads], axis=1)
        else:
            query, key, value = (
                heads_of(w.linear(h, s.width, n * s.size), n)
                for n in (s.heads, s.kv_heads, s.kv_heads)
            )
        query = op.RotaryEmbedding(query, cos, sin, interleaved=s.interleaved)
        key = op.RotaryEmbedding(key, cos, sin, interleaved=s.interleaved)
        query, key, value = (op.Cast(v, to=element.dtype) for v in (query, key, value))
        keys = kv.CacheUpdate(old_keys, key, position)
        values = kv.CacheUpdate(old_values, value, position)
        h = op.Attention(query, keys, values, nonpad_kv_seqlen=length, is_causal=1)
        h = op.Transpose(op.Cast(h, to=FLOAT.dtype), perm=[0, 2, 1, 3])
        h = op.Reshape(h, [0, 0, s.width])
        return w.linear(h, s.width, s.width), keys, values

    def feed_forward(x):
        h = w.norm(x)
        if not s.gated:
            h = activated(w.linear(h, s.width, s.hidden), s.activation)
            return w.linear(h, s.hidden, s.width)
        if s.stacked:
            gate, up = op.Split(w.linear(h, s.width, 2 * s.hidden), axis=2, num_outputs=2)
        else:
            gate, up = w.linear(h, s.width, s.hidden), w.linear(h, s.width, s.hidden)
        return w.linear(activated(gate, s.activation) * up, s.hidden, s.width)

    @model
    def small(
        tokens: INT64[1, "new_length"], keys: Caches, values: Caches, position: INT64[()]
    ) -> tuple[FLOAT[1, s.vocabulary], Alias["keys"], Alias["values"]]:
        end = position + op.Shape(tokens)[1]
        length = op.Reshape(end, [1])
        places = op.Reshape(op.Range(position, end, 1), op.Shape(tokens))
        cos, sin = (op.Gather(weight(table, name), places) for name, table in tables.items())
        x = op.Gather(weight(embedding, "embedding"), tokens)
        new_keys, new_values = [], []
        for old_keys, old_values in zip(keys, values, strict=True):
            h, k, v = attention(x, old_keys, old_values, position, length, cos, sin)
            new_keys.append(k)
            new_values.append(v)
            x = x + h
            x = x + feed_forward(x)
        logits = w.linear(w.norm(x)[:, -1], s.width, s.vocabulary)
        return logits, new_keys, new_values

    return small
