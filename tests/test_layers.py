"""Steps of a layer as one action: what it computes, and that all else is left to the steps."""

import collections
import dataclasses
import functools
import threading
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
from onnx_inplace.dsl import BFLOAT16, FLOAT, FLOAT16, INT64, Alias, Mutable, kv, model, op
from onnx_inplace.numba_kernels import append_attend, memory
from onnx_inplace.numba_kernels.team import Words
from onnx_inplace.runner import team
from onnx_inplace.runner.profile import profile

HEADS, KV_HEADS, SIZE, CAPACITY = 6, 2, 16, 40
ELEMENTS = {np.float32: FLOAT, np.float16: FLOAT16, ml_dtypes.bfloat16: BFLOAT16}
ERROR = {np.float32: 1e-5, np.float16: 2e-3, ml_dtypes.bfloat16: 2e-2}


def layer(dtype: type = np.float32, rows: bool = False, scatter: bool = False) -> Any:
    """Appends and attends; a position of each row, if there are ``rows``."""
    t = ELEMENTS[dtype]
    Cache, New = t["b", KV_HEADS, "m", SIZE], t["b", KV_HEADS, "n", SIZE]
    Position = INT64["b"] if rows else INT64[()]
    each = {"batch_axis": 0} if rows else {}
    update = op.TensorScatter if scatter else functools.partial(kv.CacheUpdate, **each)

    @model
    def append_and_attend(
        keys: Mutable[Cache],
        values: Mutable[Cache],
        query: t["b", HEADS, "n", SIZE],
        key: New,
        value: New,
        position: Position,
        lengths: INT64["b"],
    ) -> tuple[t["b", HEADS, "n", SIZE], Alias["keys"], Alias["values"]]:
        new_keys = update(keys, key, position)
        new_values = update(values, value, position)
        attended = op.Attention(query, new_keys, new_values, nonpad_kv_seqlen=lengths, is_causal=1)
        return attended, new_keys, new_values

    return append_and_attend


def expected(query: Any, keys: Any, values: Any, lengths: Any) -> np.ndarray:
    """Causal attention of the last tokens in float64."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    batch, heads, tokens, size = query.shape
    out = np.zeros(query.shape)
    for b, h, t in np.ndindex(batch, heads, tokens):
        seen = int(lengths[b]) - tokens + t + 1
        k = keys[b, h * keys.shape[1] // heads, :seen]
        v = values[b, h * keys.shape[1] // heads, :seen]
        weights = np.exp((scores := k @ query[b, h, t] / np.sqrt(size)) - scores.max())
        out[b, h, t] = weights @ v / weights.sum()
    return out


def random(rng: np.random.Generator, *shape: int, dtype: type = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def feeds_of(
    batch: int, tokens: int, dtype: type = np.float32, rows: bool = False, at: int = 0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(batch + tokens + at)
    positions = at + np.arange(batch) if rows else np.full(batch, at)
    return {
        "query": random(rng, batch, HEADS, tokens, SIZE, dtype=dtype),
        "key": random(rng, batch, KV_HEADS, tokens, SIZE, dtype=dtype),
        "value": random(rng, batch, KV_HEADS, tokens, SIZE, dtype=dtype),
        "position": positions if rows else np.array(at),
        "lengths": positions + tokens,
    }


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the compiled call said, each time."""
    return driven.answers(monkeypatch, append_attend)


# -- what it computes


@pytest.mark.parametrize(
    ("rows", "scatter"),
    [(False, False), (True, False), (True, True)],
    ids=["one position", "positions", "TensorScatter"],
)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 1), (1, 5), (2, 4)])
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_tokens_are_written_and_read(dtype, batch, tokens, rows, scatter, guarded, answers) -> None:
    keys, values = (guarded((batch, KV_HEADS, CAPACITY, SIZE), dtype) for _ in "kv")
    with Session(layer(dtype, rows, scatter), fuse="off").bind(keys=keys, values=values) as step:
        for at in range(0, 7 * tokens, tokens):
            feeds = feeds_of(batch, tokens, dtype, rows, at)
            if rows:  # rows begin at different tokens: what is before them has to be numbers
                keys[...] = random(np.random.default_rng(at), *keys.shape)
                values[...] = keys[::-1]
            before = keys.copy(), values.copy()
            attended, *caches = step.run(**feeds)
            for cache, old, new in zip(caches, before, (feeds["key"], feeds["value"]), strict=True):
                for b, start in enumerate(feeds["lengths"] - tokens):
                    old[b, :, start : start + tokens] = new[b]
                assert cache.tobytes() == old.tobytes()
            wanted = expected(feeds["query"], keys, values, feeds["lengths"])
            np.testing.assert_allclose(
                np.asarray(attended, np.float64), wanted, atol=ERROR[dtype], rtol=ERROR[dtype]
            )
    assert answers == [append_attend.DONE] * 5


def test_heads_in_one_row(answers) -> None:
    """Caches of three dimensions, and keys that are written after values."""
    width = KV_HEADS * SIZE

    @model
    def packed(
        keys: Mutable[FLOAT["b", "m", width]],
        values: Mutable[FLOAT["b", "m", width]],
        query: FLOAT["b", "n", HEADS * SIZE],
        key: FLOAT["b", "n", width],
        value: FLOAT["b", "n", width],
        position: INT64["b"],
        lengths: INT64["b"],
    ) -> tuple[FLOAT["b", "n", HEADS * SIZE], Alias["keys"], Alias["values"]]:
        new_values = kv.CacheUpdate(values, value, position, batch_axis=0)
        new_keys = kv.CacheUpdate(keys, key, position, axis=1, batch_axis=0)
        attended = op.Attention(
            query,
            new_keys,
            new_values,
            nonpad_kv_seqlen=lengths,
            is_causal=1,
            q_num_heads=HEADS,
            kv_num_heads=KV_HEADS,
        )
        return attended, new_keys, new_values

    keys, values = (np.zeros((2, CAPACITY, width), np.float32) for _ in "kv")
    with Session(packed, fuse="off").bind(keys=keys, values=values) as step:
        for at in range(6):
            feeds = feeds_of(2, 1, rows=True, at=at)
            flat = {
                name: feeds[name].transpose(0, 2, 1, 3).reshape(2, 1, -1)
                for name in ("query", "key", "value")
            }
            attended = step.run(**feeds | flat)[0].reshape(2, 1, HEADS, SIZE)
            heads = (x.reshape(2, CAPACITY, KV_HEADS, SIZE).swapaxes(1, 2) for x in (keys, values))
            wanted = expected(feeds["query"], *heads, feeds["lengths"])
            np.testing.assert_allclose(attended.swapaxes(1, 2), wanted, atol=1e-5)
    assert append_attend.DONE in answers


def test_caches_that_are_seen_in_another_shape(guarded, answers) -> None:
    @model
    def viewed(
        keys: Mutable[FLOAT[KV_HEADS, "m", SIZE]],
        values: Mutable[FLOAT[KV_HEADS, "m", SIZE]],
        query: FLOAT[1, HEADS, 1, SIZE],
        key: FLOAT[1, KV_HEADS, 1, SIZE],
        value: FLOAT[1, KV_HEADS, 1, SIZE],
        position: INT64[()],
        lengths: INT64[1],
    ) -> tuple[FLOAT[1, HEADS, 1, SIZE], Alias["keys"], Alias["values"]]:
        old_keys, old_values = op.Unsqueeze(keys, [0]), op.Unsqueeze(values, [0])
        new_keys = kv.CacheUpdate(old_keys, key, position)
        new_values = kv.CacheUpdate(old_values, value, position)
        attended = op.Attention(query, new_keys, new_values, nonpad_kv_seqlen=lengths)
        return attended, op.Squeeze(new_keys, [0]), op.Squeeze(new_values, [0])

    keys, values = (guarded((KV_HEADS, CAPACITY, SIZE)) for _ in "kv")
    with Session(viewed, fuse="off").bind(keys=keys, values=values) as step:
        for at in range(6):
            feeds = feeds_of(1, 1, at=at)
            attended, *caches = step.run(**feeds)
            assert caches[0] is keys and caches[1] is values
            wanted = expected(feeds["query"], keys[None], values[None], feeds["lengths"])
            np.testing.assert_allclose(attended, wanted, atol=1e-5)
    assert append_attend.DONE in answers


@pytest.mark.parametrize("busy", [False, True], ids=["helpers", "helpers of another caller"])
def test_long_contexts_are_read_by_several_threads(busy, answers, monkeypatch) -> None:
    """Where another caller has the helpers, the call does all by itself."""
    if busy and not team._possible():
        pytest.skip("this system has no helpers")
    decider = deciding.Decider(monkeypatch, several=True)
    capacity = 1 << 15
    rng = np.random.default_rng(0)
    keys, values = (random(rng, 1, KV_HEADS, capacity, SIZE) for _ in "kv")
    with Session(layer(), fuse="off", threads=2).bind(keys=keys, values=values) as step:
        for at in range(capacity - 6, capacity):
            feeds = feeds_of(1, 1, at=at)
            if busy:
                team._words()[Words.OWNER] = 1
            try:
                attended = step.run(**feeds)[0]
            finally:
                if busy:
                    team._words()[Words.OWNER] = 0
            wanted = expected(feeds["query"], keys, values, feeds["lengths"])
            np.testing.assert_allclose(attended, wanted, atol=1e-5)
    assert answers == [append_attend.DONE] * 4
    assert decider.tried == 6


def test_bindings_run_in_two_threads(answers) -> None:
    session = Session(layer(), fuse="off")
    found: dict[int, list[np.ndarray]] = collections.defaultdict(list)

    def decode(who: int) -> None:
        caches = [np.zeros((1, KV_HEADS, CAPACITY, SIZE), np.float32) for _ in "kv"]
        with session.bind(keys=caches[0], values=caches[1]) as step:
            for at in range(CAPACITY):
                found[who].append(step.run(**feeds_of(1, 1, at=at))[0])

    threads = [threading.Thread(target=decode, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) > 4 * (CAPACITY - 5)
    for who in range(1, 4):
        np.testing.assert_array_equal(found[who], found[0])


# -- what is left to the steps


@pytest.fixture(scope="module", params=[False, True], ids=["one position", "positions"])
def both(request) -> Iterator[Any]:
    """The same layer, joined and one by one, and their caches; what the compiled call said."""
    session, caches, runs = Session(layer(rows=request.param), fuse="off"), [], []
    found: list[int] = []
    for single in (False, True):
        pair = [random(np.random.default_rng(0), 2, KV_HEADS, CAPACITY, SIZE) for _ in "kv"]
        caches.append(pair)
        storage = dict(zip(("keys", "values"), pair, strict=True))
        runs.append(driven.Driven(session, storage, single))
    with pytest.MonkeyPatch.context() as patch:
        kernel = driven.recording(append_attend.append_and_attend, found)
        patch.setattr(append_attend, "append_and_attend", kernel)
        yield request.param, runs, caches, found
    for one in runs:
        one.close()


def agree(both: Any, change: dict[str, np.ndarray], at: int = 3) -> None:
    """Inputs that are changed after some right ones do the same, joined and one by one."""
    rows, runs, caches, found = both
    feeds = feeds_of(2, 1, rows=rows, at=at)
    for _ in range(4):
        right = [run(feeds, feeds) for run in runs]
        assert right[0] == right[1]
    assert found[-1] == append_attend.DONE
    results = [run(feeds | change, feeds) for run in runs]
    assert results[0] == results[1]
    for one, other in zip(*caches, strict=True):
        assert one.tobytes() == other.tobytes()


numbers = st.integers(-3, CAPACITY + 3) | st.sampled_from([-(2**63), 2**63 - 1])


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_positions_and_lengths(both, data) -> None:
    position = [data.draw(numbers) for _ in range(2 if both[0] else 1)]
    lengths = [data.draw(numbers) for _ in range(2)]
    shape = (2,) if both[0] else ()
    agree(
        both,
        {
            "position": np.array(position, np.int64).reshape(shape),
            "lengths": np.array(lengths, np.int64),
        },
    )


SHAPES = {"query": (2, HEADS, 1, SIZE), "key": (2, KV_HEADS, 1, SIZE), "lengths": (2,)}


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_arrays(both, data) -> None:
    """Other types of as many bytes, sizes, and orders."""
    name = data.draw(st.sampled_from(["query", "key", "value", "position", "lengths"]))
    feeds = feeds_of(2, 1, rows=both[0], at=3)
    array = feeds[name]
    match data.draw(st.sampled_from(["type", "size", "order", "rank", "same"])):
        case "type" if name in ("key", "value"):  # the plan has types: others have as many bytes
            array = array.view(np.int32)
        case "size" if array.ndim and name != "query":
            axis = data.draw(st.integers(0, array.ndim - 1))
            array = np.repeat(array, data.draw(st.integers(0, 3)), axis)
        case "order" if array.ndim:
            array = np.repeat(array, 2, -1)[..., ::2]
        case "rank" if name != "query":
            array = array[None]
        case _:
            array = array.copy()
    agree(both, {name: array})


@model
def masked(
    keys: Mutable[FLOAT[1, KV_HEADS, CAPACITY, SIZE]],
    values: Mutable[FLOAT[1, KV_HEADS, CAPACITY, SIZE]],
    query: FLOAT[1, HEADS, 1, SIZE],
    key: FLOAT[1, KV_HEADS, 1, SIZE],
    position: INT64[()],
    lengths: INT64[1],
    mask: FLOAT[1, CAPACITY],
) -> tuple[FLOAT[1, HEADS, 1, SIZE], Alias["keys"], Alias["values"]]:
    new_keys = kv.CacheUpdate(keys, key, position)
    new_values = kv.CacheUpdate(values, key, position)
    attended = op.Attention(query, new_keys, new_values, mask, nonpad_kv_seqlen=lengths)
    return attended, new_keys, new_values


@model
def circular(
    keys: Mutable[FLOAT[1, KV_HEADS, CAPACITY, SIZE]],
    values: Mutable[FLOAT[1, KV_HEADS, CAPACITY, SIZE]],
    query: FLOAT[1, HEADS, 1, SIZE],
    key: FLOAT[1, KV_HEADS, 1, SIZE],
    position: INT64[()],
    lengths: INT64[1],
) -> tuple[FLOAT[1, HEADS, 1, SIZE], Alias["keys"], Alias["values"]]:
    new_keys = kv.CacheUpdate(keys, key, position, mode="circular")
    new_values = kv.CacheUpdate(values, key, position, mode="circular")
    attended = op.Attention(query, new_keys, new_values, nonpad_kv_seqlen=lengths)
    return attended, new_keys, new_values


@model
def whole(
    keys: Mutable[FLOAT[1, KV_HEADS, CAPACITY, SIZE]],
    values: Mutable[FLOAT[1, KV_HEADS, CAPACITY, SIZE]],
    query: FLOAT[1, HEADS, 1, SIZE],
    key: FLOAT[1, KV_HEADS, 1, SIZE],
    position: INT64[()],
) -> tuple[FLOAT[1, HEADS, 1, SIZE], Alias["keys"], Alias["values"]]:
    new_keys = kv.CacheUpdate(keys, key, position)
    new_values = kv.CacheUpdate(values, key, position)
    return op.Attention(query, new_keys, new_values), new_keys, new_values


@model
def copied(
    keys: Mutable[FLOAT[1, KV_HEADS, CAPACITY, SIZE]],
    values: Mutable[FLOAT[1, KV_HEADS, CAPACITY, SIZE]],
    query: FLOAT[1, HEADS, 1, SIZE],
    position: INT64[()],
    key: FLOAT[1, KV_HEADS, 1, SIZE],
    lengths: INT64[1],
) -> tuple[FLOAT[1, HEADS, 1, SIZE], Alias["keys"], Alias["values"]]:
    new_keys = kv.CacheUpdate(keys, key, position)
    new_values = kv.CacheUpdate(values, new_keys, 0)
    attended = op.Attention(query, new_keys, new_values, nonpad_kv_seqlen=lengths)
    return attended, new_keys, new_values


@pytest.mark.parametrize("program", [masked, circular, whole, copied], ids=lambda p: p.name)
def test_other_layers_are_left_to_their_steps(program, answers) -> None:
    rng = np.random.default_rng(0)
    keys, values = (random(rng, 1, KV_HEADS, CAPACITY, SIZE) for _ in "kv")
    mask = random(rng, 1, CAPACITY)
    session = Session(program, fuse="off")
    with session.bind(keys=keys, values=values) as step:
        for at in range(5):
            key = random(rng, 1, KV_HEADS, 1, SIZE)
            query = random(rng, 1, HEADS, 1, SIZE)
            position = CAPACITY + at if program is circular else at
            feeds = {
                "query": query,
                "key": key,
                "position": position,
                "lengths": np.array([CAPACITY]),
                "mask": mask,
            }
            wanted_keys, wanted_values = keys.copy(), values.copy()
            wanted_keys[:, :, at] = wanted_values[:, :, at] = key[:, :, 0]
            if program is copied:
                wanted_values = wanted_keys
            names = {port.name for _, port in session.feeds}
            attended = step.run(**{name: feeds[name] for name in names})[0]
            np.testing.assert_array_equal(keys, wanted_keys)
            np.testing.assert_array_equal(values, wanted_values)
            added = mask if program is masked else np.zeros_like(mask)
            np.testing.assert_allclose(attended, plain(query, keys, values, added), atol=1e-5)
    assert answers == []


def plain(query: Any, keys: Any, values: Any, mask: Any) -> np.ndarray:
    """Attention over all keys in float64."""
    k, v = (np.repeat(x.astype(np.float64), HEADS // KV_HEADS, 1) for x in (keys, values))
    weights = np.exp(query @ k.swapaxes(2, 3) / np.sqrt(SIZE) + mask)
    return weights / weights.sum(-1, keepdims=True) @ v


# -- what is said of it


@model
def failing(
    keys: Mutable[FLOAT[1, KV_HEADS, CAPACITY, SIZE]],
    values: Mutable[FLOAT[1, KV_HEADS, CAPACITY, SIZE]],
    query: FLOAT[1, HEADS, "n", SIZE],
    key: FLOAT[1, KV_HEADS, "n", SIZE],
    value: FLOAT[1, KV_HEADS, "n", SIZE],
    position: INT64[()],
    lengths: INT64[1],
    index: INT64[1],
) -> tuple[FLOAT[1, HEADS, 1, SIZE], Alias["keys"], Alias["values"]]:
    new_keys = kv.CacheUpdate(keys, key, position)
    new_values = kv.CacheUpdate(values, value, position)
    attended = op.Attention(query, new_keys, new_values, nonpad_kv_seqlen=lengths, is_causal=1)
    return op.Gather(attended, index, axis=2), new_keys, new_values


def test_a_later_failure_tells_what_was_written(answers) -> None:
    said = []
    for runs in (0, 5):  # by the steps one by one, and by the compiled call
        caches = {
            name: np.zeros((1, KV_HEADS, CAPACITY, SIZE), np.float32) for name in ("keys", "values")
        }
        with Session(failing, fuse="off").bind(**caches) as step:
            feeds = feeds_of(1, 2, at=4)
            for _ in range(runs):
                step.run(**feeds, index=np.array([1]))
            with pytest.raises(errors.OperatorError):
                step.run(**feeds, index=np.array([2]))
            with pytest.raises(errors.DirtyState) as caught:
                step.run(**feeds, index=np.array([1]))
            said.append(caught.value.written)
    assert said[0] == said[1]
    assert [dataclasses.astuple(w)[:4] for w in said[0]] == [
        ("keys", "CacheUpdate", 4, 2),
        ("values", "CacheUpdate", 4, 2),
    ]
    assert answers[-1] == append_attend.DONE


def test_nothing_is_compiled_in_a_run() -> None:
    keys, values = (np.zeros((1, KV_HEADS, CAPACITY, SIZE), np.float32) for _ in "kv")
    with Session(layer(), fuse="off").bind(keys=keys, values=values) as step:
        before = [kernel.name for kernel in memory.made()]
        assert "append_attend.append_and_attend" in before
        for at in range(5):
            step.run(**feeds_of(1, 1, at=at))
        assert [kernel.name for kernel in memory.made()] == before


def test_a_profile_shows_the_steps() -> None:
    keys, values = (np.zeros((1, KV_HEADS, CAPACITY, SIZE), np.float32) for _ in "kv")
    session = Session(layer(), fuse="off")
    seen = profile(session, {"keys": keys, "values": values}, feeds_of(1, 1, at=3), runs=3)
    assert [(t.step.op_type, t.calls) for t in seen.steps] == [
        ("CacheUpdate", 1),
        ("CacheUpdate", 1),
        ("Attention", 1),
    ]
