"""A Llama decoder whose caches are updated in place.

The functions up to `decoder` are ordinary Python: they run while the graph is built, and what they
do with tensors is recorded. `decoder` closes over a config and weights and gives a model, for one
new token or for many.
"""

from enum import Enum

import numpy as np
from config import Config
from numpy.typing import NDArray
from weights import BLOCK, Layer, Linear4Bit, Norm, Weights

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


class Precision(Enum):
    """How a product with quantized weights is computed. The weights are the same."""

    EXACT = 0  # in float32
    FAST = 4  # with inputs rounded to 8 bits, a block at a time


def norm(x: Tensor, factors: Norm, config: Config) -> Tensor:
    """Vectors of length one on average, scaled."""
    return op.RMSNormalization(x, weight(factors.scale, factors.name), epsilon=config.norm_epsilon)


def linear(x: Tensor, matrix: Linear4Bit, precision: Precision) -> Tensor:
    """``x @ matrix.T``."""
    quantized = microsoft.MatMulNBits(
        x,
        weight(matrix.quants, f"{matrix.name}.quants"),
        weight(matrix.scales, f"{matrix.name}.scales"),
        weight(matrix.zeros, f"{matrix.name}.zeros"),
        K=matrix.inputs,
        N=matrix.outputs,
        bits=4,
        block_size=BLOCK,
        accuracy_level=precision.value,
    )
    blocks = op.Reshape(x, [0, 0, matrix.inputs // BLOCK, BLOCK])
    sums = op.ReduceSum(blocks, [3], keepdims=0)
    return quantized + op.MatMul(sums, weight(matrix.remainder, f"{matrix.name}.remainder"))


def feed_forward(x: Tensor, layer: Layer, precision: Precision) -> Tensor:
    """What each token makes of what it has read."""
    gate, up = op.Split(linear(x, layer.gate_up, precision), axis=2, num_outputs=2)
    return linear(gate * op.Sigmoid(gate) * up, layer.down, precision)


def head(x: Tensor, weights: Weights, precision: Precision) -> Tensor:
    """The logits of the next token."""
    vocabulary, width = weights.embedding.shape
    if precision is Precision.EXACT:
        return op.Gemm(x, weight(weights.embedding, "embedding"), transB=1)
    return microsoft.MatMulNBits(
        x,
        weight(weights.head_quants, "head.quants"),
        weight(weights.head_scales, "head.scales"),
        K=width,
        N=vocabulary,
        bits=8,
        block_size=BLOCK,
        accuracy_level=precision.value,
    )


def angles(config: Config) -> dict[str, NDArray[np.float32]]:
    """Cosines and sines, ``[context, head_size / 2]``: how far a pair is turned at a position."""
    frequency = config.rope_base ** (-np.arange(0, config.head_size, 2) / config.head_size)
    angle = np.outer(np.arange(config.context), frequency)
    return {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}


def rotations(tokens: Tensor, position: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Cosines and sines for ``tokens``, the first of which stands at ``position``."""
    end = position + op.Shape(tokens)[1]
    places = op.Reshape(op.Range(position, end, 1), op.Shape(tokens))
    cos, sin = (op.Gather(weight(table, name), places) for name, table in angles(config).items())
    return cos, sin


def project(
    x: Tensor,
    layer: Layer,
    turn: tuple[Tensor, Tensor],
    config: Config,
    precision: Precision,
    element: type[FLOAT] | type[FLOAT16],
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the new tokens, [1, heads, new_length, size]."""
    heads, kv_heads, size = config.heads, config.kv_heads, config.head_size
    h = linear(norm(x, layer.attention_norm, config), layer.query_key_value, precision)
    h = op.Reshape(h, [0, 0, heads + 2 * kv_heads, size])
    h = op.Transpose(h, perm=[0, 2, 1, 3])
    turned, value = op.Split(h, [heads + kv_heads, kv_heads], axis=1)
    turned = op.RotaryEmbedding(turned, *turn, interleaved=1)
    turned, value = op.Cast(turned, to=element.dtype), op.Cast(value, to=element.dtype)
    query, key = op.Split(turned, [heads, kv_heads], axis=1)
    return query, key, value


def conclude(x: Tensor, h: Tensor, layer: Layer, config: Config, precision: Precision) -> Tensor:
    """What a layer adds to ``x``, when its attention has given ``h``."""
    h = op.Transpose(h, perm=[0, 2, 1, 3])
    h = op.Reshape(h, [0, 0, config.heads * config.head_size])
    x = x + linear(h, layer.attention_output, precision)
    return x + feed_forward(norm(x, layer.feed_forward_norm, config), layer, precision)


def decoder(
    config: Config, weights: Weights, precision: Precision, element: type[FLOAT] | type[FLOAT16]
) -> Program:
    """One program for the prompt and for each token after it, with caches of type ``element``."""
    kv_heads, size = config.kv_heads, config.head_size
    Cache = Mutable[element[1, kv_heads, "max_length", size]]
    Caches = tuple[(Cache,) * config.layers]

    @model
    def smollm2(
        tokens: INT64[1, "new_length"], keys: Caches, values: Caches, position: INT64[()]
    ) -> tuple[FLOAT[1, config.vocabulary], Alias["keys"], Alias["values"]]:
        """Logits after the last of ``tokens``, the first of which stands at ``position``."""
        end = position + op.Shape(tokens)[1]
        length = op.Reshape(end, [1])
        turn = rotations(tokens, position, config)

        x = op.Gather(weight(weights.embedding, "embedding"), tokens)
        updated_keys, updated_values = [], []
        for layer, old_keys, old_values in zip(weights.layers, keys, values, strict=True):
            query, key, value = project(x, layer, turn, config, precision, element)

            # Keys and values join those of the earlier tokens; the queries look up all of them.
            new_keys = kv.CacheUpdate(old_keys, key, position)
            new_values = kv.CacheUpdate(old_values, value, position)
            h = op.Attention(query, new_keys, new_values, nonpad_kv_seqlen=length, is_causal=1)
            updated_keys.append(new_keys)
            updated_values.append(new_values)
            x = conclude(x, op.Cast(h, to=FLOAT.dtype), layer, config, precision)

        logits = head(norm(x[:, -1], weights.norm, config), weights, precision)
        return logits, updated_keys, updated_values

    return smollm2
