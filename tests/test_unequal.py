"""Very unequal sequences in one call of attention, which is split as the longest one needs."""

from typing import Any

import deciding
import driven
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_inplace import PagedCache, Session, formats
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, Paged, kv, model, op
from onnx_inplace.numba_kernels import append_attend, pages_append_attend
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.numba_kernels.sharing import Sharing, splits_at
from onnx_inplace.runner import attend, operators_paged_attention, work

pytestmark = pytest.mark.kernel

HEADS, KV_HEADS, PAGE, SIZE, CAPACITY = 6, 3, 16, 32, 2048
LENGTHS = pytest.mark.parametrize(
    "lengths", [[60, 120, 500, 2048], [1, 2000, 17], [1, 1, 1, 1, 1999]], ids=str
)
Query = FLOAT["b", HEADS, 1, SIZE]
Cache = FLOAT["b", KV_HEADS, CAPACITY, SIZE]
Pages = Paged[FLOAT[2, KV_HEADS, PAGE, SIZE], formats.FLOAT32]


@model
def dense(
    keys: Mutable[Cache],
    values: Mutable[Cache],
    query: Query,
    new: FLOAT["b", KV_HEADS, 1, SIZE],
    position: INT64["b"],
    lengths: INT64["b"],
) -> tuple[Query, Alias["keys"], Alias["values"]]:
    new_keys = kv.CacheUpdate(keys, new, position, batch_axis=0)
    new_values = kv.CacheUpdate(values, new, position, batch_axis=0)
    attended = op.Attention(query, new_keys, new_values, nonpad_kv_seqlen=lengths, is_causal=1)
    return attended, new_keys, new_values


@model
def paged(
    cache: Mutable[Pages],
    table: INT64["b", "blocks"],
    query: Query,
    values: FLOAT[2, "b", KV_HEADS, 1, SIZE],
    position: INT64["b"],
    lengths: INT64["b"],
) -> tuple[Query, Alias["cache"]]:
    updated = kv.PagedCacheUpdate(cache, table, values, position)
    return kv.PagedAttention(query, updated, table, lengths, is_causal=1), updated


@pytest.fixture
def decider(monkeypatch):
    """Says who runs a call; all calls are long enough for two threads."""
    for module in (attend, operators_paged_attention):
        monkeypatch.setattr(module, "PARALLEL", 0)
    monkeypatch.setattr(work, "SHORTEST_SPLIT", 16)
    return deciding.Decider(monkeypatch)


def problem(lengths: list[int]) -> tuple[np.ndarray, ...]:
    """A query and keys and values of rows, and the position of their last token."""
    rng, batch = np.random.default_rng(len(lengths)), len(lengths)
    query = rng.standard_normal((batch, HEADS, 1, SIZE), np.float32)
    stored = rng.standard_normal((2, batch, KV_HEADS, CAPACITY, SIZE), np.float32)
    return query, stored, np.array(lengths) - 1


def expected(query: np.ndarray, stored: np.ndarray, lengths: list[int]) -> np.ndarray:
    """Attention in float64."""
    out = np.zeros(query.shape)
    for b, h in np.ndindex(len(lengths), HEADS):
        key, value = stored[:, b, h * KV_HEADS // HEADS, : lengths[b]].astype(np.float64)
        scores = key @ query[b, h, 0] / np.sqrt(SIZE)
        weights = np.exp(scores - scores.max())
        out[b, h, 0] = weights @ value / weights.sum()
    return out


def outputs(
    program: Any, storage: dict[str, Any], feeds: dict[str, Any], decider: deciding.Decider
) -> set[bytes]:
    """Of eight runs, half of them on two threads; step by step, and in one compiled call."""
    session, found = Session(program, threads=2, fuse="off"), set()
    for single in (False, True):
        driver = driven.Driven(session, storage, single)
        for run in range(8):
            decider.next(several=run % 2 == 0)
            found.add(driver(feeds, feeds)[0])
        driver.close()
    return found


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What compiled calls of layers say that they have done."""
    found: list[int] = []
    for module in (append_attend, pages_append_attend):
        kernel = driven.recording(module.append_and_attend, found)
        monkeypatch.setattr(module, "append_and_attend", kernel)
    return found


@LENGTHS
def test_arrays(lengths: list[int], decider: deciding.Decider, compiled: list[int]) -> None:
    query, stored, position = problem(lengths)
    rows = np.arange(len(lengths))
    new = stored[0, rows, :, position][:, :, np.newaxis]  # keys are values, too, at the end
    stored[1, rows, :, position] = stored[0, rows, :, position]
    feeds = {"query": query, "new": new, "position": position, "lengths": position + 1}
    storage = {"keys": stored[0].copy(), "values": stored[1].copy()}
    found = outputs(dense, storage, feeds, decider)
    assert len(compiled) > 3 and set(compiled) == {append_attend.DONE}
    (out,) = (np.frombuffer(one, np.float32).reshape(query.shape) for one in found)
    np.testing.assert_allclose(out, expected(query, stored, lengths), atol=2e-5)


@LENGTHS
def test_pages(lengths: list[int], decider: deciding.Decider, compiled: list[int]) -> None:
    query, stored, position = problem(lengths)
    cache = PagedCache((2, KV_HEADS, PAGE, SIZE), np.float32, [formats.FLOAT32])
    table = np.full((len(lengths), CAPACITY // PAGE), -1)
    for b, length in enumerate(lengths):
        for block in range(-(-length // PAGE)):
            begin, end = block * PAGE, min(length, (block + 1) * PAGE)
            table[b, block] = cache.allocate_page("FLOAT32")
            cache.write(int(table[b, block]), stored[:, b, :, begin:end], 0)
    new = stored[:, np.arange(len(lengths)), :, position][:, :, :, np.newaxis]
    feeds = {
        "table": table,
        "query": query,
        "values": np.ascontiguousarray(new.swapaxes(0, 1)),
        "position": position,
        "lengths": position + 1,
    }
    found = outputs(paged, {"cache": cache}, feeds, decider)
    assert len(compiled) > 3 and set(compiled) == {append_attend.DONE}
    (out,) = (np.frombuffer(one, np.float32).reshape(query.shape) for one in found)
    np.testing.assert_allclose(out, expected(query, stored, lengths), atol=2e-5)


# -- in how many parts

SHARINGS = st.builds(
    Sharing,
    most=st.integers(0, 300),
    shortest=st.just(256),
    items=st.integers(1, 64),
    reach=st.integers(1, 40_000),
    workers=st.integers(1, 12),
    merge=st.just(0),
)
CAPACITIES = st.lists(st.integers(0, 40_000), min_size=1, max_size=20).map(np.array)


@given(SHARINGS, CAPACITIES)
@settings(max_examples=300, deadline=None)
def test_a_compiled_call_splits_as_python_does(x: Sharing, lengths: np.ndarray) -> None:
    longest = int(lengths.max())
    found = splits_at(x, address(lengths), len(lengths), longest)
    assert found == work.splits(x, lengths, longest)


@given(SHARINGS, CAPACITIES)
@settings(max_examples=300, deadline=None)
def test_workspace_is_for_the_most_splits(x: Sharing, lengths: np.ndarray) -> None:
    longest = int(lengths.max())
    assert 1 <= work.splits(x, lengths, longest) <= work.most_splits(x, 40_000)


@given(SHARINGS, CAPACITIES)
@settings(max_examples=300, deadline=None)
def test_no_part_is_more_than_a_quarter_of_the_work_of_a_thread(x, lengths) -> None:
    x = x._replace(reach=40_000)
    longest = int(lengths.max())
    parts = work.splits(x, lengths, longest)
    if longest > x.most and parts < longest // x.shortest:
        assert longest / parts <= x.items * lengths.sum() / x.workers / 4


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("items", [1, 2, 3, 8])
@pytest.mark.parametrize("batch", [1, 3, 4, 64])
def test_items_of_equal_sequences_are_as_many_for_each_thread(batch, items, workers) -> None:
    x = Sharing(0, 256, items, 40_000, workers, 0)
    parts = work.splits(x, np.full(batch, 40_000), 40_000)
    assert parts * items * batch % workers == 0
    fewest = -(-4 * workers // (items * batch))
    assert fewest <= parts < fewest + workers


def test_three_heads_of_one_long_sequence_among_short_ones_are_halved() -> None:
    """Else one of two threads has two of them, and the other one waits."""
    x = Sharing(0, 256, 3, 40_000, 2, 0)
    assert work.splits(x, np.array([500, 1000, 4000, 16_384]), 16_384) == 2


def test_where_a_window_ends_lengths_are_equal() -> None:
    x = Sharing(0, 256, 4, 512, 2, 0)
    lengths = np.array([600, 20_000, 5_000, 700])
    assert work.splits(x, lengths, 20_000) == 1
