"""Models for ``test_peaks``: one for each way of taking memory."""

import numpy as np

from onnx_inplace import compiler
from onnx_inplace.dsl import (
    FLOAT,
    FLOAT16,
    INT32,
    INT64,
    Alias,
    Mutable,
    domain,
    kv,
    model,
    op,
    scan,
    stack,
    weight,
)

microsoft = domain("com.microsoft", 1)
HEADS, KV_HEADS, SIZE, WIDTH = 8, 2, 64, 256
CACHE, NEW, SCALAR = FLOAT["b", "m", WIDTH], FLOAT["b", "n", WIDTH], INT64[()]
RANDOM = np.random.default_rng(0)


def matrix(rows: int, columns: int) -> np.ndarray:
    return RANDOM.standard_normal((rows, columns), np.float32) / np.float32(rows)


def normal(*shape: int, kind: type = np.float32) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(kind)


def feed_forward() -> compiler.Program:
    """Large intermediates: four times as wide, gated."""
    gate, up, down = (matrix(*shape) for shape in ((WIDTH, 1024), (WIDTH, 1024), (1024, WIDTH)))

    @model
    def wide(cache: Mutable[CACHE], x: NEW, position: SCALAR) -> tuple[Alias["cache"], NEW]:
        cache = kv.CacheUpdate(cache, x, position)
        h = op.LayerNormalization(x, np.ones(WIDTH, np.float32))
        g = op.MatMul(h, weight(gate, "gate"))
        h = g * op.Sigmoid(g) * op.MatMul(h, weight(up, "up"))
        return cache, x + op.MatMul(h, weight(down, "down"))

    return wide


@model
def dense(
    first: Mutable[CACHE], second: Mutable[CACHE], x: NEW, position: SCALAR
) -> tuple[Alias["first"], Alias["second"], NEW]:
    y = op.Relu(x)
    first = kv.CacheUpdate(first, y, position)
    z = op.Sin(op.Exp(y))
    second = kv.CacheUpdate(second, z, position)
    return first, second, op.Exp(z)


@model
def copying(cache: Mutable[CACHE], x: NEW, position: SCALAR) -> tuple[Alias["cache"], CACHE]:
    before = kv.Copy(cache)
    return kv.CacheUpdate(cache, x, position), before


@model
def branching(
    cache: Mutable[CACHE], x: NEW, position: SCALAR, flag: SCALAR
) -> tuple[Alias["cache"], NEW]:
    y = op.Exp(x)
    if flag > 0:
        cache = kv.CacheUpdate(cache, op.Sin(op.Exp(y)), position)
    else:
        cache = kv.CacheUpdate(cache, y, position)
    return cache, y


@model
def looping(cache: Mutable[CACHE], x: NEW, position: SCALAR) -> tuple[Alias["cache"], NEW]:
    state = x
    for _ in range(3):
        state = op.Tanh(op.Exp(state))
        cache = kv.CacheUpdate(cache, state, position)
    return cache, state


@model
def scanning(
    cache: Mutable[CACHE], x: FLOAT["steps", "b", "n", WIDTH]
) -> tuple[Alias["cache"], FLOAT["steps", "b", "n", WIDTH]]:
    found = stack()
    for one in scan(x):
        y = op.Exp(one)
        cache = kv.CacheUpdate(cache, y, 0)
        found.append(op.Sin(y))
    return cache, found


@model
def scattered(
    cache: Mutable[FLOAT["m", WIDTH]], at: INT64["n", 1], x: FLOAT["n", WIDTH]
) -> tuple[Alias["cache"], FLOAT["n", WIDTH]]:
    y = op.Exp(x)
    return op.ScatterND(cache, at, y), op.Sin(y)


@model
def scattered_elements(
    cache: Mutable[FLOAT["m", WIDTH]], at: INT64["n", WIDTH], x: FLOAT["n", WIDTH]
) -> tuple[Alias["cache"], FLOAT["n", WIDTH]]:
    y = op.Exp(x)
    return op.ScatterElements(cache, at, y), op.Sin(y)


def recurrent() -> compiler.Program:
    """A cell whose state is overwritten."""
    inner, outer = matrix(WIDTH, WIDTH), matrix(WIDTH, WIDTH)

    @model
    def cell(
        state: Mutable[FLOAT["b", WIDTH]], x: FLOAT["b", WIDTH]
    ) -> tuple[Alias["state"], FLOAT["b", WIDTH]]:
        new = op.Tanh(
            op.MatMul(state, weight(inner, "inner")) + op.MatMul(x, weight(outer, "outer"))
        )
        return kv.Assign(state, new), op.Exp(new)

    return cell


def attention(element: type[FLOAT] | type[FLOAT16]) -> compiler.Program:
    """Projections, updates, attention over the caches, projection."""
    shape = element["b", KV_HEADS, "m", SIZE]
    wide = (HEADS + 2 * KV_HEADS) * SIZE
    before, behind = matrix(WIDTH, wide), matrix(HEADS * SIZE, WIDTH)

    @model
    def layer(
        keys: Mutable[shape], values: Mutable[shape], x: NEW, position: SCALAR, length: INT64["b"]
    ) -> tuple[NEW, Alias["keys"], Alias["values"]]:
        h = op.Cast(op.MatMul(x, weight(before, "before")), to=element.dtype)
        h = op.Transpose(op.Reshape(h, [0, 0, HEADS + 2 * KV_HEADS, SIZE]), perm=[0, 2, 1, 3])
        query, key, value = op.Split(h, [HEADS, KV_HEADS, KV_HEADS], axis=1)
        keys, values = kv.CacheUpdate(keys, key, position), kv.CacheUpdate(values, value, position)
        h = op.Attention(query, keys, values, nonpad_kv_seqlen=length, is_causal=1)
        h = op.Reshape(op.Transpose(h, perm=[0, 2, 1, 3]), [0, 0, HEADS * SIZE])
        return x + op.MatMul(op.Cast(h, to=FLOAT.dtype), weight(behind, "behind")), keys, values

    return layer


def grouped() -> compiler.Program:
    """GroupQueryAttention with rotary embedding over packed projections."""
    wide = (HEADS + 2 * KV_HEADS) * SIZE
    shape = FLOAT["b", KV_HEADS, "m", SIZE]
    before = matrix(WIDTH, wide)

    @model
    def layer(
        keys: Mutable[shape],
        values: Mutable[shape],
        x: NEW,
        lengths: INT32["b"],
        total: INT32[()],
        cos: FLOAT["m", SIZE // 2],
        sin: FLOAT["m", SIZE // 2],
    ) -> tuple[FLOAT["b", "n", HEADS * SIZE], Alias["keys"], Alias["values"]]:
        qkv = op.MatMul(x, weight(before, "before"))
        output, keys, values = microsoft.GroupQueryAttention(
            qkv, None, None, keys, values, lengths, total, cos, sin,
            num_heads=HEADS, kv_num_heads=KV_HEADS, do_rotary=1, _outputs=3,
        )  # fmt: skip
        return op.Exp(output), keys, values

    return layer
