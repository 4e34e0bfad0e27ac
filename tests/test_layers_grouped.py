"""GroupQueryAttention as one compiled call: what it computes, and what is left to the step."""

import functools
from collections.abc import Iterator
from typing import Any

import deciding
import driven
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_inplace import Session, errors
from onnx_inplace.dsl import (
    BFLOAT16,
    FLOAT,
    FLOAT16,
    INT32,
    INT64,
    Alias,
    Mutable,
    domain,
    model,
)
from onnx_inplace.numba_kernels import memory, rows_append_attend
from onnx_inplace.numba_kernels.append_attend import DONE, REFUSED

HEADS, KV_HEADS, SIZE, CAPACITY, ANGLES = 6, 2, 16, 40, 36
ELEMENTS = {np.float32: FLOAT, np.float16: FLOAT16, ml_dtypes.bfloat16: BFLOAT16}
ERROR = {np.float32: 1e-5, np.float16: 4e-3, ml_dtypes.bfloat16: 3e-2}
microsoft = domain("com.microsoft", 1)


@functools.cache
def layer(dtype: type = np.float32, packed: bool = False, given: bool = False, **more: int) -> Any:
    """Rotates, appends, attends; packed or not, with given positions or without."""
    t = ELEMENTS[dtype]
    attend = functools.partial(
        microsoft.GroupQueryAttention,
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        do_rotary=1,
        _outputs=3,
        **more,
    )
    Cache = Mutable[t["b", KV_HEADS, "m", SIZE]]
    Output = t["b", "n", HEADS * SIZE]
    Angle = t[ANGLES, SIZE // 2]

    @model
    def all_in_one(
        keys: Cache,
        values: Cache,
        query: t["b", "n", (HEADS + 2 * KV_HEADS) * SIZE],
        last: INT32["b"],
        total: INT32[()],
        cos: Angle,
        sin: Angle,
    ) -> tuple[Output, Alias["keys"], Alias["values"]]:
        return attend(query, None, None, keys, values, last, total, cos, sin)

    @model
    def apart(
        keys: Cache,
        values: Cache,
        query: t["b", "n", HEADS * SIZE],
        key: t["b", "n", KV_HEADS * SIZE],
        value: t["b", "n", KV_HEADS * SIZE],
        last: INT32["b"],
        total: INT32[()],
        cos: Angle,
        sin: Angle,
    ) -> tuple[Output, Alias["keys"], Alias["values"]]:
        return attend(query, key, value, keys, values, last, total, cos, sin)

    @model
    def placed(
        keys: Cache,
        values: Cache,
        query: t["b", "n", HEADS * SIZE],
        key: t["b", "n", KV_HEADS * SIZE],
        value: t["b", "n", KV_HEADS * SIZE],
        last: INT32["b"],
        total: INT32[()],
        cos: Angle,
        sin: Angle,
        positions: INT64["b", "n"],
    ) -> tuple[Output, Alias["keys"], Alias["values"]]:
        return attend(query, key, value, keys, values, last, total, cos, sin, positions)

    return all_in_one if packed else placed if given else apart


@functools.cache
def session(*arguments: Any) -> Session:
    """Loaded once for all tests."""
    return Session(layer(*arguments), fuse="off")


def feeds_of(
    lengths: list[int], tokens: int = 1, dtype: type = np.float32, packed: bool = False
) -> dict[str, np.ndarray]:
    """Tokens that make rows so long."""
    rng = np.random.default_rng(sum(lengths) + tokens)
    widths = {"query": HEADS * SIZE, "key": KV_HEADS * SIZE, "value": KV_HEADS * SIZE}
    feeds = {
        name: rng.standard_normal((len(lengths), tokens, width)).astype(dtype)
        for name, width in widths.items()
    }
    if packed:
        parts = [feeds.pop(name) for name in widths]
        feeds["query"] = np.concatenate(parts, axis=2)
    angles = np.random.default_rng(0).uniform(-3, 3, (ANGLES, SIZE // 2))
    return feeds | {
        "last": np.array(lengths, np.int32) - 1,
        "total": np.array(max(lengths), np.int32),
        "cos": np.cos(angles).astype(dtype),
        "sin": np.sin(angles).astype(dtype),
    }


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Heads (heads, tokens, size), whose halves are pairs; (tokens, size / 2) angles."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def expected(
    feeds: dict[str, np.ndarray], keys: Any, values: Any, positions: Any = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output, keys and values in float64; caches as they were before."""
    exact = {name: np.asarray(x, np.float64) for name, x in feeds.items()}
    keys, values = np.asarray(keys, np.float64).copy(), np.asarray(values, np.float64).copy()
    parts = [exact[n] for n in ("query", "key", "value") if n in exact]
    if len(parts) == 1:
        parts = np.split(parts[0], [HEADS * SIZE, (HEADS + KV_HEADS) * SIZE], axis=2)
    batch, tokens = parts[0].shape[:2]
    out = np.zeros((batch, tokens, HEADS * SIZE))
    for b, length in enumerate(feeds["last"] + 1):
        start = 0 if feeds["total"] == tokens else int(length) - tokens
        query, key, value = (part[b].reshape(tokens, -1, SIZE).swapaxes(0, 1) for part in parts)
        at = start + np.arange(tokens) if positions is None else positions[b]
        query, key = (rotated(x, exact["cos"][at], exact["sin"][at]) for x in (query, key))
        keys[b, :, start : start + tokens] = key
        values[b, :, start : start + tokens] = value
        for h, t in np.ndindex(HEADS, tokens):
            seen = slice(0, start + t + 1)
            k, v = (cache[b, h * KV_HEADS // HEADS, seen] for cache in (keys, values))
            scores = k @ query[h, t] / np.sqrt(SIZE)
            weights = np.exp(scores - scores.max())
            out[b, t, h * SIZE : (h + 1) * SIZE] = weights @ v / weights.sum()
    return out, keys, values


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the compiled call said, each time."""
    return driven.answers(monkeypatch, rows_append_attend)


# -- what it computes


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 1), (1, 4)])
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_tokens_are_rotated_written_and_read(
    dtype, batch, tokens, packed, guarded, answers
) -> None:
    caches = [guarded((batch, KV_HEADS, CAPACITY, SIZE), dtype) for _ in "kv"]
    for cache in caches:  # rows begin at different tokens: what is before them has to be numbers
        cache[...] = np.random.default_rng(1).standard_normal(cache.shape).astype(dtype)
    with session(dtype, packed).bind(keys=caches[0], values=caches[1]) as step:
        for at in range(6):
            lengths = [2 + at + row + tokens for row in range(batch)]
            feeds = feeds_of(lengths, tokens, dtype, packed)
            wanted, keys, values = expected(feeds, *caches)
            got = step.run(**feeds)
            assert got[1] is caches[0] and got[2] is caches[1]
            for one, other in zip(got, (wanted, keys, values), strict=True):
                np.testing.assert_allclose(
                    np.asarray(one, np.float64), other, atol=ERROR[dtype], rtol=ERROR[dtype]
                )
    assert answers == [DONE] * 4


def test_given_positions(answers) -> None:
    caches = [np.zeros((2, KV_HEADS, CAPACITY, SIZE), np.float32) for _ in "kv"]
    with session(np.float32, False, True).bind(keys=caches[0], values=caches[1]) as step:
        for at in range(6):
            feeds = feeds_of([3 + at, 5 + at])
            positions = np.array([[30 - at], [at]])
            wanted = expected(feeds, *caches, positions)[0]
            got = step.run(**feeds, positions=positions)[0]
            np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert answers == [DONE] * 4


def test_prompts_of_one_length_and_tokens_behind_them(answers) -> None:
    """A run whose tokens are all that there are begins at token 0, whatever the runs before did."""
    caches = [np.zeros((1, KV_HEADS, CAPACITY, SIZE), np.float32) for _ in "kv"]
    with session().bind(keys=caches[0], values=caches[1]) as step:
        for length in (3, 3, 3, 6, 3, 6, 9):
            feeds = feeds_of([length], 3)
            wanted, keys, _ = expected(feeds, *caches)
            np.testing.assert_allclose(step.run(**feeds)[0], wanted, atol=1e-5)
            np.testing.assert_allclose(caches[0], keys, atol=1e-5)
    assert answers == [DONE, REFUSED, DONE, REFUSED, REFUSED]


@pytest.mark.parametrize("parallel", [False, True], ids=["one thread", "several threads"])
def test_long_rows_are_read_in_parts(parallel, monkeypatch, answers) -> None:
    deciding.Decider(monkeypatch, parallel)
    monkeypatch.setattr("onnx_inplace.runner.attend.PARALLEL", 12 * HEADS * SIZE)
    caches = [np.zeros((1, KV_HEADS, CAPACITY, SIZE), np.float32) for _ in "kv"]
    with Session(layer(), fuse="off", threads=2).bind(keys=caches[0], values=caches[1]) as step:
        for length in range(9, 16):
            feeds = feeds_of([length])
            wanted = expected(feeds, *caches)[0]
            np.testing.assert_allclose(step.run(**feeds)[0], wanted, atol=1e-5)
    assert answers == [DONE] * 5


# -- what is left to the step


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "given positions"])
def both(request) -> Iterator[Any]:
    """The same layer, joined and as its step, and their caches; what the compiled call said."""
    found: list[int] = []
    caches, runs = [], []
    for single in (False, True):
        pair = [
            np.random.default_rng(0).standard_normal((2, KV_HEADS, CAPACITY, SIZE), np.float32)
            for _ in "kv"
        ]
        caches.append(pair)
        storage = dict(zip(("keys", "values"), pair, strict=True))
        runs.append(driven.Driven(session(np.float32, False, request.param), storage, single))
    with pytest.MonkeyPatch.context() as patch:
        kernel = driven.recording(rows_append_attend.append_and_attend, found)
        patch.setattr(rows_append_attend, "append_and_attend", kernel)
        yield request.param, runs, caches, found
    for one in runs:
        one.close()


numbers = st.integers(-3, CAPACITY + 3) | st.sampled_from([-(2**31), 2**31 - 1])
places = st.integers(-2, ANGLES + 2) | st.sampled_from([-(2**63), 2**63 - 1])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_lengths_and_positions(both, data) -> None:
    """The same results, or the same errors, and the same bytes in both caches."""
    given_, runs, caches, found = both
    feeds = feeds_of([5, 9])
    if given_:
        feeds["positions"] = np.array([[4], [8]])
    for _ in range(4):
        right = [run(feeds, feeds) for run in runs]
        assert right[0] == right[1]
    assert found[-1] == DONE
    like = dict(feeds)
    if data.draw(st.booleans()):
        feeds["last"] = np.array([data.draw(numbers) for _ in range(2)], np.int32)
    if data.draw(st.booleans()):
        feeds["total"] = np.array(data.draw(numbers), np.int32)
    if given_ and data.draw(st.booleans()):
        feeds["positions"] = np.array([[data.draw(places)] for _ in range(2)])
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(["query", "key", "cos"]))
        feeds[name] = np.repeat(feeds[name], 2, axis=-1)[..., ::2]
    results = [run(feeds, like) for run in runs]
    assert results[0] == results[1]
    for one, other in zip(*caches, strict=True):
        assert one.tobytes() == other.tobytes()


def test_smooth_softmax_is_left_to_the_step(answers) -> None:
    caches = [np.zeros((1, KV_HEADS, CAPACITY, SIZE), np.float32) for _ in "kv"]
    smooth = Session(layer(smooth_softmax=1), fuse="off")
    with smooth.bind(keys=caches[0], values=caches[1]) as step:
        for length in range(1, 6):
            plain = expected(feeds_of([length]), *caches)[0]
            got = step.run(**feeds_of([length]))[0]
            assert np.abs(got).sum() < np.abs(plain).sum()  # a sink takes a part of the weights
    assert answers == []


# -- what is said of it


def test_the_journal_is_that_of_the_step() -> None:
    said = []
    for single in (False, True):
        pair = [np.zeros((1, KV_HEADS, CAPACITY, SIZE), np.float32) for _ in "kv"]
        storage = {"keys": pair[0], "values": pair[1]}
        run = driven.Driven(session(), storage, single)
        said.append([run(feeds_of([5]), feeds_of([5]))[1] for _ in range(4)])
        run.close()
    assert said[0] == said[1] == [[("keys", "GroupQueryAttention", None, None)]] * 4


def test_a_row_that_does_not_fit_changes_nothing(untouched) -> None:
    caches = [np.ones((1, KV_HEADS, CAPACITY, SIZE), np.float32) for _ in "kv"]
    with session().bind(keys=caches[0], values=caches[1]) as step:
        for length in range(30, 36):
            step.run(**feeds_of([length]))
        for length in (ANGLES + 1, CAPACITY + 1):
            with untouched(*caches), pytest.raises(errors.CapacityError):
                step.run(**feeds_of([length]))


def test_nothing_is_compiled_in_a_run() -> None:
    caches = [np.zeros((1, KV_HEADS, CAPACITY, SIZE), np.float32) for _ in "kv"]
    with session().bind(keys=caches[0], values=caches[1]) as step:
        before = [kernel.name for kernel in memory.made()]
        assert "rows_append_attend.append_and_attend" in before
        for length in range(1, 6):
            step.run(**feeds_of([length]))
        assert [kernel.name for kernel in memory.made()] == before
