"""What all competitors of a benchmark of attention compute, and the answer in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Problem:
    """The newest tokens of a sequence attend to all of it, causally.

    Shapes:
        query:  (heads, new, head_size) float32, exact in float16 and bfloat16
        keys:   (kv_heads, tokens, head_size) float32
        values: likewise
    """

    query: Array
    keys: Array
    values: Array

    @property
    def heads(self) -> int:
        """Of the query."""
        return int(self.query.shape[0])

    @property
    def kv_heads(self) -> int:
        """Of the cache."""
        return int(self.keys.shape[0])

    @property
    def new(self) -> int:
        """Tokens that ask, the last ones of the sequence."""
        return int(self.query.shape[1])

    @property
    def tokens(self) -> int:
        """Tokens of the sequence, the new ones included."""
        return int(self.keys.shape[1])

    @property
    def size(self) -> int:
        """Elements of a head."""
        return int(self.keys.shape[2])

    @property
    def kv(self) -> tuple[Array, Array]:
        """Keys and values."""
        return self.keys, self.values

    def __str__(self) -> str:
        new = "one new token" if self.new == 1 else f"{self.new} new tokens"
        group = self.heads // self.kv_heads
        return (
            f"{new} over {self.tokens:,}, {self.kv_heads} kv heads of {self.size}, "
            f"{group} queries a head"
        )


Batch = Sequence[Problem]
"""Sequences that one call attends to, each to itself: they differ in ``tokens`` only."""


def alone(problems: Sequence[Problem]) -> list[Batch]:
    """Each as a batch of one sequence."""
    return [(problem,) for problem in problems]


def random_problem(
    kv_heads: int, group: int, size: int, tokens: int, new: int = 1, seed: int = 0
) -> Problem:
    """Normal numbers, the same ones in every run; no page of memory is left unwritten."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((kv_heads * group, new, size), np.float32)
    query = (np.rint(query * 32) / 32).clip(-3.9, 3.9)  # at most 7 bits
    keys, values = (rng.standard_normal((kv_heads, tokens, size), np.float32) for _ in "kv")
    return Problem(query, keys, values)


def random_problems(
    kv_heads: int, group: int, size: int, tokens: int, new: int = 1
) -> tuple[Problem, Problem]:
    """Two of one shape: for the cache whose time counts, and for the one that comes before it."""
    first, second = (random_problem(kv_heads, group, size, tokens, new, seed) for seed in (0, 1))
    return first, second


def reference(query: Array, keys: Array, values: Array) -> Array:
    """Attention in float64: (heads, new, head_size), for what is stored; shapes of ``Problem``."""
    kv_heads, tokens, size = keys.shape
    heads, new, _ = query.shape
    unseen = np.arange(tokens) > np.arange(tokens - new, tokens)[:, np.newaxis]
    output = np.empty((heads, new, size))
    for head in range(heads):  # one by one: all scores of a long prompt would take gigabytes
        k, v = (half[head * kv_heads // heads].astype(np.float64) for half in (keys, values))
        scores = query[head].astype(np.float64) @ k.T / np.sqrt(size)
        scores[unseen] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        output[head] = weights @ v / weights.sum(-1, keepdims=True)
    return output


def error(output: Array, expected: Array, significant_bits: int = 24) -> float:
    """Largest error relative to the largest number, beyond what rounding the output explains.

    Args:
        output: any float type, same number of elements as ``expected``.
        expected: float64.
        significant_bits: of the type of the output: 24 float32, 11 float16, 8 bfloat16.
    """
    exact = expected.reshape(-1)
    away = np.abs(output.astype(np.float64).reshape(-1) - exact)
    half_step = np.ldexp(1.0, np.frexp(exact)[1] - significant_bits - 1)
    return float(np.maximum(away - half_step, 0).max() / np.abs(exact).max())
