"""The same decoder over pages: one paged cache a layer, and one block table for all of them.

A page holds keys and values of 64 tokens, in a format of its own. The model says which formats
there may be; which page gets which is decided between runs (``paged.py``).
"""

from config import Config
from decoder import Precision, conclude, head, norm, project, rotations
from weights import Weights

from onnx_inplace import formats
from onnx_inplace.compiler import Program
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, Paged, kv, model, op, weight

PAGE_SIZE = 64  # [tokens]


def paged_decoder(config: Config, weights: Weights, precision: Precision) -> Program:
    """One program for the prompt and for each token after it."""
    kv_heads, size = config.kv_heads, config.head_size
    Pages = Paged[
        FLOAT[2, kv_heads, PAGE_SIZE, size],
        formats.FLOAT32, formats.FLOAT16, formats.INT8, formats.INT4, formats.INT2,
    ]  # fmt: skip
    Caches = tuple[(Mutable[Pages],) * config.layers]

    @model
    def smollm2_paged(
        tokens: INT64[1, "new_length"],
        caches: Caches,
        block_table: INT64["blocks"],
        position: INT64[()],
    ) -> tuple[FLOAT[1, config.vocabulary], Alias["caches"]]:
        """Logits after the last of ``tokens``, the first of which stands at ``position``."""
        end = position + op.Shape(tokens)[1]
        turn = rotations(tokens, position, config)
        x = op.Gather(weight(weights.embedding, "embedding"), tokens)
        updated = []
        for layer, old in zip(weights.layers, caches, strict=True):
            query, key, value = project(x, layer, turn, config, precision, FLOAT)
            new = kv.PagedCacheUpdate(old, block_table, op.Concat(key, value, axis=0), position)
            h = kv.PagedAttention(query, new, block_table, end, is_causal=1)
            updated.append(new)
            x = conclude(x, h, layer, config, precision)
        logits = head(norm(x[:, -1], weights.norm, config), weights, precision)
        return logits, updated

    return smollm2_paged
