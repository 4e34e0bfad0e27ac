"""Models of one layer's cache: write new keys and values, attend over all that is valid."""

from collections.abc import Sequence

from onnx_inplace import PagedCache, Session, formats
from onnx_inplace.compiler import Program
from onnx_inplace.dsl import BFLOAT16, FLOAT, FLOAT16, INT64, Alias, Mutable, Paged, kv, model, op

ELEMENTS = {"float32": FLOAT, "float16": FLOAT16, "bfloat16": BFLOAT16}


def dense(kind: str, heads: int, kv_heads: int, size: int) -> Program:
    """Over two arrays, in standard operators."""
    t = ELEMENTS[kind]

    @model
    def attend(
        key_cache: Mutable[t["batch", kv_heads, "capacity", size]],
        value_cache: Mutable[t["batch", kv_heads, "capacity", size]],
        query: t["batch", heads, "n", size],
        key: t["batch", kv_heads, "n", size],
        value: t["batch", kv_heads, "n", size],
        position: INT64["batch"],
        length: INT64["batch"],
    ) -> tuple[t["batch", heads, "n", size], Alias["key_cache"], Alias["value_cache"]]:
        keys = op.TensorScatter(key_cache, key, position)
        values = op.TensorScatter(value_cache, value, position)
        output = op.Attention(query, keys, values, None, None, None, length, is_causal=1)
        return output, keys, values

    return attend


def paged(
    names: Sequence[str],
    heads: int,
    kv_heads: int,
    page_size: int,
    size: int,
    accuracy_level: int = 0,
) -> Program:
    """Over pages of these formats, a row of the block table for each sequence."""
    allowed = [formats.BUILTIN[name] for name in dict.fromkeys(names)]
    pages = Paged[(FLOAT[2, kv_heads, page_size, size], *allowed)]

    @model
    def attend(
        cache: Mutable[pages],
        blocks: INT64["batch", "blocks"],
        query: FLOAT["batch", heads, "n", size],
        values: FLOAT[2, "batch", kv_heads, "n", size],
        position: INT64["batch"],
        length: INT64["batch"],
    ) -> tuple[FLOAT["batch", heads, "n", size], Alias["cache"]]:
        updated = kv.PagedCacheUpdate(cache, blocks, values, position)
        output = kv.PagedAttention(
            query, updated, blocks, length, is_causal=1, accuracy_level=accuracy_level
        )
        return output, updated

    return attend


def page_writer(
    kv_heads: int, page_size: int, size: int, names: Sequence[str]
) -> tuple[PagedCache, Session]:
    """A cache of pages of these formats, and what writes into it: new pages have the first one.

    Returns:
        The cache, and a session whose steps take a block table ``blocks``, new ``values`` (2,
        kv_heads, n, size) and the ``position`` of the first.
    """
    allowed = [formats.BUILTIN[name] for name in dict.fromkeys(names)]
    pages = Paged[(FLOAT[2, kv_heads, page_size, size], *allowed)]
    first = names[0]

    @model
    def write(
        cache: Mutable[pages],
        blocks: INT64["blocks"],
        values: FLOAT[2, kv_heads, "n", size],
        position: INT64[()],
    ) -> Alias["cache"]:
        return kv.PagedCacheUpdate(cache, blocks, values, position, quantized_type=first)

    session = Session(write)
    return session.allocate("cache"), session


def update(heads: int, size: int) -> Program:
    """One CacheUpdate."""

    @model
    def append(
        cache: Mutable[FLOAT[1, heads, "capacity", size]],
        values: FLOAT[1, heads, "length", size],
        position: INT64[()],
    ) -> Alias["cache"]:
        return kv.CacheUpdate(cache, values, position)

    return append


def updates(layers: int, heads: int, size: int) -> Program:
    """One CacheUpdate a layer, all at one position."""
    Caches = tuple[(Mutable[FLOAT[1, heads, "capacity", size]],) * layers]
    Values = tuple[(FLOAT[1, heads, "length", size],) * layers]

    @model
    def append(caches: Caches, values: Values, position: INT64[()]) -> Alias["caches"]:
        return [kv.CacheUpdate(c, v, position) for c, v in zip(caches, values, strict=True)]

    return append
