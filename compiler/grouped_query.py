"""com.microsoft GroupQueryAttention: its inputs by name, and what nothing here computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

INPUTS = (
    "query",
    "key",
    "value",
    "past_key",
    "past_value",
    "seqlens_k",
    "total_sequence_length",
    "cos_cache",
    "sin_cache",
    "position_ids",
    "attention_bias",
    "head_sink",
    "k_scale",
    "v_scale",
    "q_norm_weight",
    "k_norm_weight",
    "query_seqlens",
)
REFUSED_INPUTS = ("k_scale", "v_scale", "q_norm_weight", "k_norm_weight", "query_seqlens")
REFUSED_ATTRIBUTES: Mapping[str, int | str] = {
    "kv_cache_bit_width": 0,
    "k_quant_type": "NONE",
    "v_quant_type": "NONE",
    "qk_output": 0,
    "sliding_window_cache": 0,
}
"""Their default is the only value that is served."""


def named(inputs: Sequence[T | None]) -> dict[str, T | None]:
    """Inputs by name; None where the node leaves one out."""
    found: dict[str, T | None] = dict.fromkeys(INPUTS)
    found.update(zip(INPUTS, inputs, strict=False))
    return found
