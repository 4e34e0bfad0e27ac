"""Faults that others had with capacity and at the border to the caller (CASES, D and I)."""

import numpy as np
import pytest

from onnx_inplace import Session, errors
from onnx_inplace.dsl import (
    BOOL,
    FLOAT,
    FLOAT16,
    INT8,
    INT64,
    Alias,
    Mutable,
    function,
    kv,
    model,
    op,
)

Cache = FLOAT["heads", "capacity", 8]
New = FLOAT["heads", "length", 8]


def tokens(length: int, value: float = 1, heads: int = 2) -> np.ndarray:
    return np.full((heads, length, 8), value, np.float32)


@model
def append(cache: Mutable[Cache], new: New, p: INT64[()]) -> Alias["cache"]:
    return kv.CacheUpdate(cache, new, p)


def codes(caught: pytest.ExceptionInfo[errors.ContractError]) -> set[str]:
    return {finding.code for finding in caught.value.findings}


def test_the_shape_that_is_written_down_is_the_capacity() -> None:
    """Case 38. Never capacity plus new tokens: the file declares one shape for both."""
    (given,) = (i for i in append.proto.graph.input if i.name == "cache")
    (result,) = append.proto.graph.output
    dims = [d.dim_param or d.dim_value for d in given.type.tensor_type.shape.dim]
    assert dims == ["heads", "capacity", 8]
    assert [d.dim_param or d.dim_value for d in result.type.tensor_type.shape.dim] == dims


@pytest.mark.parametrize("heads, capacity", [(0, 8), (0, 0), (2, 0), (2, 8)])
def test_nothing_is_written_anywhere(heads: int, capacity: int, guarded, untouched) -> None:
    """Case 43. No tokens at the first and the last position, with no heads or no capacity."""
    cache = guarded((heads, capacity, 8))
    with Session(append).bind(cache=cache) as step, untouched(cache):
        for position in (0, capacity):
            assert step.run(new=tokens(0, heads=heads), p=position)[0] is cache
        with pytest.raises(errors.CapacityError):
            step.run(new=tokens(0, heads=heads), p=capacity + 1)


@function
def again(cache: Mutable[Cache], new: New, p: INT64[()]) -> Alias["cache"]:
    return kv.CacheUpdate(cache, new, p)


@model
def everywhere(
    cache: Mutable[Cache], new: New, n: INT64[()], flag: BOOL[()]
) -> tuple[Alias["cache"], FLOAT["heads"]]:
    cache = again(cache, new, 0)
    for i in range(n):
        if flag:
            cache = again(cache, new * 2.0, i)
        else:
            cache = kv.CacheUpdate(cache, new, i)
    return cache, op.ReduceSum(new, op.Constant(value_ints=[1, 2]), keepdims=0)


@model
def one_copy(
    cache: Mutable[Cache], new: New, p: INT64[()]
) -> tuple[Alias["cache"], FLOAT["heads", "capacity", 8]]:
    cache = kv.CacheUpdate(cache, new, p)
    return cache, kv.Copy(cache)


@pytest.mark.parametrize("flag", [False, True])
def test_peak_bytes_of_a_run(flag: bool, peak_bytes) -> None:
    """Case 103. Nothing of the size of a cache, and with a copy exactly one."""
    capacity = 2**17  # 8 MiB
    session, copying = Session(everywhere), Session(one_copy)
    cache = session.allocate("cache", heads=2, capacity=capacity)
    with session.bind(cache=cache) as step:
        for _ in range(3):  # the first of a shape, then prepared ones
            peak = peak_bytes(lambda: step.run(new=tokens(1), n=5, flag=flag))
            assert peak < cache.nbytes / 100
    with copying.bind(cache=cache) as step:
        for _ in range(3):
            peak = peak_bytes(lambda: step.run(new=tokens(1), p=3))
            assert abs(peak - cache.nbytes) < cache.nbytes / 100


def test_the_step_of_a_strided_view_is_not_ignored() -> None:
    """Case 104. Every second token is no storage to write to, and is read as what it is."""
    with pytest.raises(errors.ContractError) as caught:

        @model
        def second_tokens(cache: Mutable[Cache], new: New) -> Alias["cache"]:
            return kv.CacheUpdate(cache[:, ::2], new, 0)

    assert codes(caught) & {"E106", "E110"}
    session, wide = Session(append), np.zeros((2, 16, 8), np.float32)
    with pytest.raises(errors.StorageMismatch, match="not C-contiguous"):
        session.bind(cache=wide[:, ::2])
    cache, new = session.allocate("cache", heads=2, capacity=8), tokens(6)
    new[:, ::2] = 2
    with session.bind(cache=cache) as step:
        step.run(new=new[:, ::2], p=1)
    assert cache[0, :, 0].tolist() == [0, 2, 2, 2, 0, 0, 0, 0]


def test_a_functional_update_is_not_destroyed_by_a_later_write() -> None:
    """Case 106. ``y = TensorScatter(cache)``, then a write to the old cache: refused, or a copy."""
    with pytest.raises(errors.ContractError) as caught:

        @model
        def forked(
            cache: Mutable[Cache], new: New, p: INT64["heads"]
        ) -> tuple[Alias["cache"], FLOAT["heads", "capacity", 8]]:
            y = op.TensorScatter(cache, new, p, axis=1)
            return kv.CacheUpdate(cache, new * 0.0, 0), y

    assert {"E105", "E111"} <= codes(caught)

    @model
    def apart(
        cache: Mutable[Cache], new: New, p: INT64["heads"]
    ) -> tuple[Alias["cache"], FLOAT["heads", "capacity", 8]]:
        y = op.TensorScatter(kv.Copy(cache), new, p, axis=1)
        return kv.CacheUpdate(cache, new * 0.0, 0), y

    session = Session(apart)
    assert len(session.plan.copies) == 1
    cache = session.allocate("cache", heads=2, capacity=4)
    cache[:] = 5
    with session.bind(cache=cache) as step:
        updated, y = step.run(new=tokens(1), p=[0, 0])
    assert updated is cache and not np.shares_memory(y, cache)
    assert cache[0, :, 0].tolist() == [0, 5, 5, 5] and y[0, :, 0].tolist() == [1, 5, 5, 5]


VIEWS = {
    "Identity": lambda x: op.Identity(x),
    "Reshape": lambda x: op.Reshape(x, [2, 4, 8]),
    "Unsqueeze": lambda x: op.Squeeze(op.Unsqueeze(x, [0]), [0]),
    "Flatten": lambda x: op.Reshape(op.Flatten(x), [2, 4, 8]),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_between_the_write_and_the_result_copies_nothing(view) -> None:
    """Case 106. Declared it is the caller's array; undeclared it is refused, never copied."""

    @model
    def declared(
        cache: Mutable[FLOAT[2, 4, 8]], new: FLOAT[2, 1, 8], p: INT64[()]
    ) -> Alias["cache"]:
        return view(kv.CacheUpdate(cache, new, p))

    session = Session(declared)
    assert not session.plan.copies
    cache = session.allocate("cache")
    with session.bind(cache=cache) as step:
        assert step.run(new=tokens(1), p=2)[0] is cache and (cache[:, 2] == 1).all()
    with pytest.raises(errors.ContractError) as caught:

        @model
        def undeclared(
            cache: Mutable[FLOAT[2, 4, 8]], new: FLOAT[2, 1, 8], p: INT64[()]
        ) -> tuple[Alias["cache"], FLOAT[2, 4, 8]]:
            cache = kv.CacheUpdate(cache, new, p)
            return cache, view(cache)

    assert codes(caught) == {"E111"}


Keys = FLOAT[1, 2, "capacity", 8]
Query = FLOAT[1, 4, 1, 8]


@model
def shared_layers(
    k: Mutable[Keys], v: Mutable[Keys], new: FLOAT[1, 2, 1, 8], first: Query, second: Query,
    p: INT64[1],
) -> tuple[Query, Query, Alias["k"], Alias["v"]]:  # fmt: skip
    k = kv.CacheUpdate(k, new, p, batch_axis=0)
    v = kv.CacheUpdate(v, new, p, batch_axis=0)
    a = op.Attention(first, k, v, None, None, None, p + 1, is_causal=1)
    b = op.Attention(second, k, v, None, None, None, p + 1, is_causal=1)
    return a, b, k, v


def test_layers_may_read_one_cache_that_one_of_them_writes(guarded) -> None:
    """Case 110. Both read what was written in this run, and neither what nobody wrote (NaN)."""
    k, v = guarded((1, 2, 6, 8)), guarded((1, 2, 6, 8))
    rng = np.random.default_rng(7)
    with Session(shared_layers).bind(k=k, v=v) as step:
        for position in range(6):
            new, first, second = (
                rng.standard_normal((1, heads, 1, 8)).astype(np.float32) for heads in (2, 4, 4)
            )
            *found, _, _ = step.run(new=new, first=first, second=second, p=[position])
            valid = k[0, :, : position + 1]
            for query, result in zip((first, second), found, strict=True):
                scores = np.einsum("hd,htd->ht", query[0, :, 0], valid.repeat(2, 0)) / 8**0.5
                weights = np.exp(scores - scores.max(1, keepdims=True))
                weights /= weights.sum(1, keepdims=True)
                expected = np.einsum("ht,htd->hd", weights, valid.repeat(2, 0))
                np.testing.assert_allclose(result[0, :, 0], expected, rtol=1e-5, atol=1e-6)


def test_two_writers_of_one_place_have_an_order() -> None:
    """Case 110. One after the other: the last one wins. Both of one version: refused."""

    @model
    def ordered(cache: Mutable[Cache], a: New, b: New, p: INT64[()]) -> Alias["cache"]:
        return kv.CacheUpdate(kv.CacheUpdate(cache, b, p), a, p)

    session = Session(ordered)
    cache = session.allocate("cache", heads=2, capacity=4)
    with session.bind(cache=cache) as step:
        step.run(a=tokens(1, 1), b=tokens(1, 2), p=3)
    assert cache[0, :, 0].tolist() == [0, 0, 0, 1]
    with pytest.raises(errors.ContractError) as caught:

        @model
        def fork(cache: Mutable[Cache], a: New, b: New) -> Alias["cache"]:
            kv.CacheUpdate(cache, a, 0)
            return kv.CacheUpdate(cache, b, 0)

    assert "E105" in codes(caught)


@pytest.mark.parametrize("element", [FLOAT, FLOAT16, INT8], ids=lambda e: e.__name__)
def test_rows_of_any_type_are_reordered(element, guarded) -> None:
    """Case 112. Fifty times, with a row that is lost and one that is doubled."""

    @model
    def beams(cache: Mutable[element["b", 3, 5]], rows: INT64["b"]) -> Alias["cache"]:
        return kv.CacheReorder(cache, rows)

    rng, dtype = np.random.default_rng(3), np.dtype(element.dtype.numpy())
    cache = guarded((4, 3, 5), dtype)
    cache[:] = rng.integers(-100, 100, cache.shape)
    expected = cache.copy()
    with Session(beams).bind(cache=cache) as step:
        for rows in [[2, 0, 1, 1], *rng.permuted(np.tile(np.arange(4), (49, 1)), axis=1).tolist()]:
            expected = expected[rows]
            assert step.run(rows=rows)[0] is cache
            np.testing.assert_array_equal(cache, expected)
