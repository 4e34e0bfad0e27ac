"""The peer of ``accuracy.py``: llama.cpp's own caches, of which it quantizes all tokens alike.

It runs the same weights over the same tokens with flash attention. Its reference is its own float32
cache, so that what it computes otherwise than this project's reference does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np
from teacher import Array, log_softmax

TYPES = {
    "q8_0": (llama_cpp.GGML_TYPE_Q8_0, 8.5),
    "q5_1": (llama_cpp.GGML_TYPE_Q5_1, 6.0),
    "q4_0": (llama_cpp.GGML_TYPE_Q4_0, 4.5),
    "float32": (llama_cpp.GGML_TYPE_F32, 32.0),
}
"""Names and bits of an element, scales included."""


def bits(name: str) -> float:
    """Bits of an element."""
    return TYPES[name][1]


def logits(path: Path, tokens: list[int], name: str) -> Array:
    """[tokens, vocabulary] of all positions, with a cache of this type."""
    model = llama_cpp.Llama(
        str(path),
        n_ctx=len(tokens),
        n_batch=512,
        logits_all=True,
        flash_attn=True,
        type_k=TYPES[name][0],
        type_v=TYPES[name][0],
        verbose=False,
    )
    try:
        model.eval(tokens)
        return np.array(model.scores[: len(tokens)], np.float32)
    finally:
        model.close()


def log_probabilities(logits_: Array, rows: int = 256) -> Iterator[Array]:
    """[rows, vocabulary] of one piece of the text after the other."""
    for start in range(0, len(logits_), rows):
        yield log_softmax(logits_[start : start + rows])
