"""SmolLM2-135M in numpy, float32, all tokens of a text at once, over caches as a policy keeps them.

Teacher forced: position t is given the text's tokens up to t. Layer by layer over the whole text is
exactly causal, because what a cache holds when token t is computed depends on the tokens up to t
alone: a page is stored anew only when it is full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
from config import Config
from numpy.typing import NDArray

Array = NDArray[np.float32]
Visible = Callable[[int], tuple[Array, Array]]
"""Of a page number p: K and V [kv_heads, tokens, head_size] of the pages 0 to p, as they are while
page p is the newest."""
Cache = Callable[[Array, Array], Visible]
"""Of all K and V of a layer [kv_heads, tokens, head_size]: what queries see of them."""


def exact(page_size: int) -> Cache:
    """The reference: caches in float32."""

    def cache(keys: Array, values: Array) -> Visible:
        return lambda page: (
            keys[:, : (page + 1) * page_size],
            values[:, : (page + 1) * page_size],
        )

    return cache


class Teacher:
    """The decoder with decoded weights."""

    def __init__(self, config: Config, path: Path):
        """Decode the weights of a GGUF file."""
        self.config = config
        self.weights = {
            tensor.name.removesuffix(".weight"): gguf.quants.dequantize(
                tensor.data, tensor.tensor_type
            ).astype(np.float32)
            for tensor in gguf.GGUFReader(path).tensors
        }

    def hidden(self, tokens: list[int], cache: Cache, page_size: int) -> Array:
        """What the head gets [tokens, width], with every layer's K and V behind ``cache``."""
        x = self.weights["token_embd"][tokens]
        for layer in range(self.config.layers):
            names = (f"blk.{layer}.{part}" for part in ("attn_norm", "ffn_norm"))
            attention_norm, feed_forward_norm = (self.weights[name] for name in names)
            x = x + self._attention(self._norm(x, attention_norm), layer, cache, page_size)
            x = x + self._feed_forward(self._norm(x, feed_forward_norm), layer)
        return self._norm(x, self.weights["output_norm"])

    def log_probabilities(self, hidden: Array, rows: int = 256) -> Iterator[Array]:
        """[rows, vocabulary] of one piece of the text after the other."""
        for start in range(0, len(hidden), rows):
            yield log_softmax(hidden[start : start + rows] @ self.weights["token_embd"].T)

    def _matrix(self, layer: int, name: str) -> Array:
        return self.weights[f"blk.{layer}.{name}"].T

    def _norm(self, x: Array, scale: Array) -> Array:
        mean = (x * x).mean(-1, keepdims=True) + np.float32(self.config.norm_epsilon)
        return x / np.sqrt(mean) * scale

    def _heads(self, x: Array, heads: int) -> Array:
        return x.reshape(len(x), heads, -1).transpose(1, 0, 2)

    def _turn(self, x: Array) -> Array:
        """Rotary positions: pairs (2i, 2i + 1) of [heads, tokens, head_size]."""
        size = self.config.head_size
        angles = np.arange(x.shape[1])[:, None] * self.config.rope_base ** (
            -np.arange(0, size, 2) / size
        )
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    def _attention(self, x: Array, layer: int, cache: Cache, page_size: int) -> Array:
        config = self.config
        group = config.heads // config.kv_heads
        query = self._turn(self._heads(x @ self._matrix(layer, "attn_q"), config.heads))
        query = query * np.float32(config.head_size**-0.5)
        keys = self._turn(self._heads(x @ self._matrix(layer, "attn_k"), config.kv_heads))
        values = self._heads(x @ self._matrix(layer, "attn_v"), config.kv_heads)
        visible = cache(np.ascontiguousarray(keys), np.ascontiguousarray(values))
        output = np.empty((len(x), config.heads, config.head_size), np.float32)
        for page in range(len(x) // page_size):
            rows = slice(page * page_size, (page + 1) * page_size)
            seen_keys, seen_values = visible(page)
            later = np.arange(rows.stop)[None] > np.arange(rows.start, rows.stop)[:, None]
            for head in range(config.heads):
                score = query[head, rows] @ seen_keys[head // group].T
                score[later] = -np.inf
                weight = np.exp(score - score.max(-1, keepdims=True))
                mixed = weight @ seen_values[head // group]
                output[rows, head] = mixed / weight.sum(-1, keepdims=True)
        return output.reshape(len(x), -1) @ self._matrix(layer, "attn_output")

    def _feed_forward(self, x: Array, layer: int) -> Array:
        gate = x @ self._matrix(layer, "ffn_gate")
        up = x @ self._matrix(layer, "ffn_up")
        return gate / (1 + np.exp(-gate)) * up @ self._matrix(layer, "ffn_down")


def log_softmax(logits: Array) -> Array:
    """Along the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
