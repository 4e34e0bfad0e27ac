"""SmolLM2-135M in numpy, float32, all tokens of a text at once, over caches of any kind.

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
Attend = Callable[[Array, Array, Array], Array]
"""Causal attention of one layer: of all queries [heads, tokens, head_size] and all K and V
[kv_heads, tokens, head_size] the results [heads, tokens, head_size], where queries of a page see K
and V as a cache holds them while that page is the newest."""
Visible = Callable[[int], tuple[Array, Array]]
"""Of a page number p: K and V [kv_heads, tokens, head_size] of the pages 0 to p, as they are while
page p is the newest."""


def attend(query: Array, visible: Visible, page_size: int) -> Array:
    """Attention in float32; see ``Attend``."""
    heads, tokens, head_size = query.shape
    output = np.empty_like(query)
    for page in range(tokens // page_size):
        rows = slice(page * page_size, (page + 1) * page_size)
        keys, values = visible(page)
        group = heads // len(keys)
        later = np.arange(rows.stop)[None] > np.arange(rows.start, rows.stop)[:, None]
        for head in range(heads):
            score = query[head, rows] @ keys[head // group].T * np.float32(head_size**-0.5)
            score[later] = -np.inf
            weight = np.exp(score - score.max(-1, keepdims=True))
            mixed = weight @ values[head // group]
            output[head, rows] = mixed / weight.sum(-1, keepdims=True)
    return output


def exact(page_size: int) -> Attend:
    """The reference: caches in float32."""

    def attend_exactly(query: Array, keys: Array, values: Array) -> Array:
        def visible(page: int) -> tuple[Array, Array]:
            end = (page + 1) * page_size
            return keys[:, :end], values[:, :end]

        return attend(query, visible, page_size)

    return attend_exactly


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

    def hidden(self, tokens: list[int], attend: Attend) -> Array:
        """What the head gets [tokens, width]; ``attend`` keeps every layer's K and V."""
        x = self.weights["token_embd"][tokens]
        for layer in range(self.config.layers):
            names = (f"blk.{layer}.{part}" for part in ("attn_norm", "ffn_norm"))
            attention_norm, feed_forward_norm = (self.weights[name] for name in names)
            x = x + self._attention(self._norm(x, attention_norm), layer, attend)
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

    def _attention(self, x: Array, layer: int, attend: Attend) -> Array:
        heads, kv_heads = self.config.heads, self.config.kv_heads
        query = self._turn(self._heads(x @ self._matrix(layer, "attn_q"), heads))
        keys = self._turn(self._heads(x @ self._matrix(layer, "attn_k"), kv_heads))
        values = self._heads(x @ self._matrix(layer, "attn_v"), kv_heads)
        mixed = attend(*(np.ascontiguousarray(part) for part in (query, keys, values)))
        return mixed.transpose(1, 0, 2).reshape(len(x), -1) @ self._matrix(layer, "attn_output")

    def _feed_forward(self, x: Array, layer: int) -> Array:
        gate = x @ self._matrix(layer, "ffn_gate")
        up = x @ self._matrix(layer, "ffn_up")
        return gate / (1 + np.exp(-gate)) * up @ self._matrix(layer, "ffn_down")


def log_softmax(logits: Array) -> Array:
    """Along the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
