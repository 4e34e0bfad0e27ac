"""Attention with masks, windows and soft caps in fused steps: float64 and ordinary steps agree."""

import dataclasses
import functools

import numpy as np
import pytest

from onnx_inplace import Session, compiler
from onnx_inplace.dsl import (
    BOOL,
    DOUBLE,
    FLOAT,
    FLOAT16,
    INT64,
    Alias,
    Mutable,
    kv,
    model,
    op,
    weight,
)

pytestmark = pytest.mark.kernel

SIZE, HEADS, KV_HEADS, CAPACITY = 32, 4, 2, 96
WIDTH = HEADS * SIZE
RANDOM = np.random.default_rng(11)
QUERY = (RANDOM.standard_normal((WIDTH, WIDTH)) / 11).astype(np.float32)
BOTH = (RANDOM.standard_normal((WIDTH, 2 * KV_HEADS * SIZE)) / 11).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Kind:
    """``seen``: keys that the mask is about; ``rows``: its axes before those of tokens and keys."""

    mask: type | None = BOOL
    seen: int = CAPACITY
    rows: tuple[int, ...] = (1, 1)
    cache: type = FLOAT
    attributes: tuple[tuple[str, object], ...] = ()
    layers: int = 2


KINDS = {
    "bool": Kind(),
    "bool, causal": Kind(attributes=(("is_causal", 1),)),
    "bool for each head": Kind(rows=(1, HEADS)),
    "matrix": Kind(rows=()),
    "fewer keys than the cache": Kind(seen=70),
    "floats": Kind(mask=FLOAT),
    "floats for each head, capped": Kind(
        mask=FLOAT, rows=(1, HEADS), attributes=(("softcap", 1.5), ("scale", 0.4))
    ),
    "float16": Kind(mask=FLOAT16, cache=FLOAT16, attributes=(("is_causal", 1),)),
    "window": Kind(mask=None, attributes=(("is_causal", 1), ("left_window_size", 5))),
    "window and mask": Kind(attributes=(("is_causal", 1), ("left_window_size", 40))),
    "capped": Kind(mask=None, attributes=(("softcap", 2.0),)),
}


@functools.cache
def program(kind: Kind, kv_heads: int = KV_HEADS) -> compiler.Program:
    Caches = tuple[(Mutable[kind.cache[1, kv_heads, CAPACITY, SIZE]],) * kind.layers]
    element, options = kind.mask or BOOL, dict(kind.attributes)

    def heads(x, count):
        return op.Transpose(op.Reshape(x, [0, 0, count, SIZE]), perm=[0, 2, 1, 3])

    @model
    def masked(
        x: FLOAT[1, "n", WIDTH],
        keys: Caches,
        values: Caches,
        position: INT64[()],
        mask: element[(*kind.rows, "n", kind.seen)],
    ) -> tuple[FLOAT[1, "n", WIDTH], Alias["keys"], Alias["values"]]:
        length = op.Reshape(position + op.Shape(x)[1], [1])
        given = mask if kind.mask is not None else None
        new_keys, new_values = [], []
        for old_keys, old_values in zip(keys, values, strict=True):
            query = heads(op.MatMul(x, weight(QUERY, "query")), HEADS)
            key, value = op.Split(
                heads(op.MatMul(x, weight(BOTH, "both")), 4), axis=1, num_outputs=2
            )
            query, key, value = (op.Cast(v, to=kind.cache.dtype) for v in (query, key, value))
            new_keys.append(kv.CacheUpdate(old_keys, key, position))
            new_values.append(kv.CacheUpdate(old_values, value, position))
            h = op.Attention(
                query, new_keys[-1], new_values[-1], given, nonpad_kv_seqlen=length, **options
            )
            x = op.Transpose(op.Cast(h, to=FLOAT.dtype), perm=[0, 2, 1, 3])
            x = op.Reshape(x, [0, 0, WIDTH])
        return x, new_keys, new_values

    return masked


def masks(kind: Kind, tokens: int, seed: int) -> np.ndarray:
    """Some keys are hidden, by False, by -inf or by numbers; a row of each may see nothing."""
    random, shape = np.random.default_rng(seed), (*kind.rows, tokens, kind.seen)
    hidden = random.random(shape) < 0.4
    hidden[..., -1, :] |= seed % 5 == 4
    if kind.mask is BOOL or kind.mask is None:
        return ~hidden
    return np.where(hidden, -np.inf, random.standard_normal(shape)).astype(kind.mask.dtype.numpy())


def attended(kind: Kind, query, keys, values, mask, position, length):
    """(heads, tokens, size) in float64 over (kv heads, length, size)."""
    options, tokens = dict(kind.attributes), query.shape[1]
    bias = np.full((HEADS, tokens, length), -np.inf)
    given = np.broadcast_to(mask if kind.mask else np.True_, (1, HEADS, tokens, kind.seen))[0]
    given = np.where(given, 0.0, -np.inf) if given.dtype == bool else given.astype(np.float64)
    least = min(length, kind.seen)
    bias[..., :least] = given[..., :least]
    at, key = position + np.arange(tokens)[:, None], np.arange(length)
    if options.get("is_causal"):
        bias = np.where(key > at, -np.inf, bias)
    if "left_window_size" in options:
        bias = np.where(key < at - options["left_window_size"], -np.inf, bias)
    group = HEADS // len(keys)
    scores = query @ np.repeat(keys, group, 0).transpose(0, 2, 1) * options.get("scale", SIZE**-0.5)
    if "softcap" in options:
        scores = options["softcap"] * np.tanh(scores / options["softcap"])
    scores = scores + bias
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total, total, 1) @ np.repeat(values, group, 0)


def meaning(kind: Kind, x, mask, position, caches) -> np.ndarray:
    """One run in float64; ``caches``: (keys, values) of each layer, written."""
    tokens = x.shape[1]
    x = x[0].astype(np.float64)
    for keys, values in caches:
        query = (x @ QUERY).reshape(tokens, HEADS, SIZE).transpose(1, 0, 2)
        both = (x @ BOTH).reshape(tokens, 4, SIZE).transpose(1, 0, 2)
        at = np.s_[:, position : position + tokens]
        keys[at], values[at] = both[:2], both[2:]
        length = position + tokens
        h = attended(kind, query, keys[:, :length], values[:, :length], mask, position, length)
        x = h.transpose(1, 0, 2).reshape(tokens, WIDTH)
    return x[None]


def decode(kind: Kind, pieces, *, fuse="auto", threads=1, kernels="auto"):
    """What runs give, with storage that nobody else writes."""
    session = Session(program(kind), fuse=fuse, threads=threads, kernels=kernels)
    storage = {p.name: session.allocate(p.name) for p in session.mutable_inputs}
    for cache in storage.values():
        cache[...] = np.nan
    random, position, results = np.random.default_rng(2), 0, []
    with session.bind(**storage) as step:
        for k, tokens in enumerate(pieces):
            x = random.standard_normal((1, tokens, WIDTH)).astype(np.float32)
            mask = masks(kind, tokens, k)
            results.append(step.run(x=x, position=position, mask=mask)[0].copy())
            assert step._frame.frame.fused == (fuse != "off" and tokens <= 4)
            position += tokens
    return results


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kernels", ["auto", "portable"])
def test_masks_windows_and_caps_mean_what_the_operator_says(name, kernels):
    kind, pieces = KINDS[name], (60, 1, 1, 3, 1, 1, 4)
    results = decode(kind, pieces, kernels=kernels)
    plain = decode(kind, pieces, fuse="off", kernels=kernels)
    random, position = np.random.default_rng(2), 0
    caches = [tuple(np.zeros((KV_HEADS, CAPACITY, SIZE)) for _ in "kv") for _ in range(kind.layers)]
    bound = 1e-2 if kind.cache is FLOAT16 else 2e-5
    for k, (tokens, got, ordinary) in enumerate(zip(pieces, results, plain, strict=True)):
        x = random.standard_normal((1, tokens, WIDTH)).astype(np.float32)
        want = meaning(kind, x, masks(kind, tokens, k), position, caches)
        scale = max(1.0, np.abs(want).max())
        np.testing.assert_allclose(got, want, rtol=0, atol=bound * scale)
        np.testing.assert_allclose(got, ordinary, rtol=0, atol=bound * scale)
        position += tokens


@pytest.mark.parametrize("name", ["bool", "floats for each head, capped", "float16"])
def test_threads_do_not_change_a_bit(name):
    kind, pieces = KINDS[name], (60, *[1] * 8)
    one, two = (decode(kind, pieces, threads=threads) for threads in (1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one[1:], two[1:], strict=True))


def test_a_mask_is_converted_once_for_all_layers():
    """Not by each layer anew: a float16 mask of a long cache is as many numbers."""
    counts = []
    for layers in (1, 3):
        kind = dataclasses.replace(KINDS["float16"], layers=layers)
        session = Session(program(kind))
        storage = {p.name: session.allocate(p.name) for p in session.mutable_inputs}
        with session.bind(**storage) as step:
            x = np.ones((1, 1, WIDTH), np.float32)
            step.run(x=x, position=0, mask=masks(kind, 1, 0))
            (region,) = step._frame.frame.regions.values()
            blocks = [i.block for i in region._keep.instructions]
        wide = [b for b in blocks if getattr(b, "d5", 0) == CAPACITY]
        counts.append(len(wide))
    assert counts == [1, 1]


REFUSED = {
    "double": (DOUBLE, {}, "its mask is neither BOOL nor a float of at most 32 bits"),
    "precision": (BOOL, {"softmax_precision": 11}, "its softmax is not computed in float32"),
    "no length": (BOOL, {"nonpad_kv_seqlen": None}, "without nonpad_kv_seqlen"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_template_cannot_do_is_said_in_the_plan(name):
    element, options, reason = REFUSED[name]

    @model
    def other(
        x: FLOAT[1, "n", SIZE], keys: Mutable[FLOAT[1, 1, 8, SIZE]], mask: element["n", 8]
    ) -> tuple[FLOAT[1, 1, "n", SIZE], Alias["keys"]]:
        query = op.Unsqueeze(op.MatMul(x, weight(QUERY[:SIZE, :SIZE], "query")), [1])
        new, length = kv.CacheUpdate(keys, query, op.Constant(value_int=0)), op.Shape(x)[1:2]
        given = {"nonpad_kv_seqlen": length} | options
        return op.Attention(query, new, new, mask, **given), new

    said = [str(r) for r in compiler.plan(other).fused.refusals]
    assert len(said) == 1 and said[0].endswith(reason)
