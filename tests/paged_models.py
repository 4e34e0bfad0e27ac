"""Programs over pages that several tests run."""

from typing import Any

from onnx_inplace.compiler import Program
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model


def batched(pages: Any, heads: int, kv_heads: int, size: int) -> Program:
    """New tokens of several sequences join ``pages``, and their queries look up all of them."""

    @model
    def batched(
        cache: Mutable[pages],
        table: INT64["batch", "blocks"],
        query: FLOAT["batch", heads, "n", size],
        values: FLOAT[2, "batch", kv_heads, "n", size],
        position: INT64["batch"],
        lengths: INT64["batch"],
    ) -> tuple[FLOAT["batch", heads, "n", size], Alias["cache"]]:
        updated = kv.PagedCacheUpdate(cache, table, values, position)
        return kv.PagedAttention(query, updated, table, lengths, is_causal=1), updated

    return batched
