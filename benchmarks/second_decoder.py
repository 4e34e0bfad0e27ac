"""A GPT-like decoder of random 4-bit weights, of any size: LayerNorm, GELU, biases everywhere."""

import dataclasses

import numpy as np

from onnx_inplace.compiler import Program
from onnx_inplace.dsl import (
    FLOAT,
    FLOAT16,
    INT64,
    Alias,
    Mutable,
    Tensor,
    domain,
    kv,
    model,
    op,
    weight,
)

microsoft = domain("com.microsoft", 1)
BLOCK = 32  # weights that share a scale


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a decoder is made of.

    ``positions``: that it has learned. ``accuracy``: 4 lets activations be rounded to 8 bits.
    """

    layers: int = 16
    heads: int = 16
    kv_heads: int = 4
    size: int = 64
    inner: int = 4096
    vocabulary: int = 32000
    positions: int = 8192
    accuracy: int = 4

    @property
    def width(self) -> int:
        """Numbers of a token between layers."""
        return self.heads * self.size


class Weights:
    """Random numbers, each under a name of its own."""

    def __init__(self, seed: int, accuracy: int) -> None:
        self._random, self._count = np.random.default_rng(seed), 0
        self._accuracy = accuracy

    def floats(self, *shape: int, around: float = 0.0, scale: float = 0.1) -> Tensor:
        """float32."""
        values = self._random.standard_normal(shape, np.float32) * np.float32(scale)
        return self._named(values + np.float32(around))

    def linear(self, x: Tensor, inputs: int, outputs: int) -> Tensor:
        """A product with 4-bit weights, and a bias."""
        blocks = inputs // BLOCK
        codes = self._random.integers(0, 256, (outputs, blocks, BLOCK // 2), dtype=np.uint8)
        # codes are 4.6 wide: results are as large as inputs
        scales = (0.5 + self._random.random((outputs, blocks), np.float32)) / (4.6 * inputs**0.5)
        y = microsoft.MatMulNBits(
            x,
            self._named(codes),
            self._named(scales.astype(np.float16).astype(np.float32)),
            K=inputs,
            N=outputs,
            bits=4,
            block_size=BLOCK,
            accuracy_level=self._accuracy,
        )
        return y + self.floats(outputs)

    def norm(self, x: Tensor, width: int) -> Tensor:
        """LayerNorm."""
        return op.LayerNormalization(x, self.floats(width, around=1.0), self.floats(width))

    def _named(self, values: np.ndarray) -> Tensor:
        self._count += 1
        return weight(values, f"w{self._count}")


def decoder(s: Sizes, seed: int = 0) -> Program:
    """Tokens -> logits of the last one."""
    w = Weights(seed, s.accuracy)
    Caches = tuple[(Mutable[FLOAT16[1, s.kv_heads, "max_length", s.size]],) * s.layers]

    def heads_of(x: Tensor, heads: int) -> Tensor:
        x = op.Transpose(op.Reshape(x, [0, 0, heads, s.size]), perm=[0, 2, 1, 3])
        return op.Cast(x, to=FLOAT16.dtype)

    @model
    def second(
        tokens: INT64[1, "new_length"], keys: Caches, values: Caches, position: INT64[()]
    ) -> tuple[FLOAT[1, s.vocabulary], Alias["keys"], Alias["values"]]:
        end = position + op.Shape(tokens)[1]
        length = op.Reshape(end, [1])
        places = op.Reshape(op.Range(position, end, 1), op.Shape(tokens))
        x = op.Gather(w.floats(s.vocabulary, s.width, scale=1.0), tokens)
        x = x + op.Gather(w.floats(s.positions, s.width), places)
        new_keys, new_values = [], []
        for old_keys, old_values in zip(keys, values, strict=True):
            h = w.norm(x, s.width)
            query = heads_of(w.linear(h, s.width, s.width), s.heads)
            key = heads_of(w.linear(h, s.width, s.kv_heads * s.size), s.kv_heads)
            value = heads_of(w.linear(h, s.width, s.kv_heads * s.size), s.kv_heads)
            k = kv.CacheUpdate(old_keys, key, position)
            v = kv.CacheUpdate(old_values, value, position)
            h = op.Attention(query, k, v, nonpad_kv_seqlen=length, is_causal=1)
            h = op.Transpose(op.Cast(h, to=FLOAT.dtype), perm=[0, 2, 1, 3])
            x = x + w.linear(op.Reshape(h, [0, 0, s.width]), s.width, s.width)
            h = op.Gelu(w.linear(w.norm(x, s.width), s.width, s.inner))
            x = x + w.linear(h, s.inner, s.width)
            new_keys.append(k)
            new_values.append(v)
        logits = w.linear(w.norm(x, s.width)[:, -1], s.width, s.vocabulary)
        return logits, new_keys, new_values

    return second
