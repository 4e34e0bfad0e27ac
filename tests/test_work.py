"""The work of a call, as the clock that chooses between one thread and several counts it."""

import collections
from typing import Any, NamedTuple

import numpy as np
import pytest

from onnx_inplace import PagedCache, Session, formats
from onnx_inplace.dsl import FLOAT, INT64, Mutable, Paged, kv, model, op
from onnx_inplace.runner import attend, operators_paged_attention, threads, work

HEADS, KV_HEADS, PAGE, SIZE = 4, 2, 16, 32


class Window(NamedTuple):
    """See ``work.Window``."""

    tokens: int
    left: int
    right: int


def visible(window: Window, length: int, at_end: bool) -> float:
    """Keys that a query sees, on average: those of all of them, counted one by one."""
    start = length - window.tokens if at_end else 0
    position = np.arange(start, start + window.tokens)[:, np.newaxis]
    key = np.arange(length)
    sees = np.ones((window.tokens, length), bool)
    if window.left >= 0:
        sees &= key >= position - window.left
    if window.right >= 0:
        sees &= key <= position + window.right
    return sees.sum() / window.tokens


def test_one_length_may_be_a_scalar() -> None:
    window = Window(1, -1, 0)
    assert work.seen(window, np.array(70), at_end=True) == 70


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (20, 0), (20, 5)])
@pytest.mark.parametrize(("tokens", "lengths"), [(1, [700]), (1, [90, 700, 300]), (64, [700, 200])])
def test_work_is_what_queries_see(tokens, lengths, left, right, at_end) -> None:
    window = Window(tokens, left, right)
    expected = sum(visible(window, length, at_end) for length in lengths)
    found = work.seen(window, np.array(lengths), at_end=at_end)
    assert found == pytest.approx(expected, rel=0.2, abs=0.5 * len(lengths))


def test_an_empty_row_is_work_too() -> None:
    assert work.seen(Window(1, -1, 0), np.array([0, 0]), at_end=True) == 2


Array = FLOAT["batch", KV_HEADS, "capacity", SIZE]
Query = FLOAT["batch", HEADS, 1, SIZE]


@model
def dense(
    keys: Mutable[Array], values: Mutable[Array], query: Query, lengths: INT64["batch"]
) -> Query:
    return op.Attention(query, keys, values, None, None, None, lengths, is_causal=1)


@model
def paged(
    cache: Paged[FLOAT[2, KV_HEADS, PAGE, SIZE], formats.INT8],
    blocks: INT64["batch", "blocks"],
    query: Query,
    lengths: INT64["batch"],
) -> Query:
    return kv.PagedAttention(query, cache, blocks, lengths, is_causal=1)


def over_arrays() -> tuple[dict[str, Any], dict[str, Any]]:
    """What is bound and what is fed: caches of four rows for 96 tokens."""
    return {name: np.ones((4, KV_HEADS, 96, SIZE), np.float32) for name in ("keys", "values")}, {}


def over_pages() -> tuple[dict[str, Any], dict[str, Any]]:
    """Likewise: six pages that all four sequences share."""
    cache = PagedCache((2, KV_HEADS, PAGE, SIZE), np.float32, allowed=[formats.INT8])
    for _ in range(6):
        values = np.ones((2, KV_HEADS, PAGE, SIZE), np.float32)
        cache.write(cache.allocate_page("INT8"), values, 0)
    return {}, {"cache": cache, "blocks": np.tile(np.arange(6), (4, 1))}


@pytest.mark.kernel
@pytest.mark.parametrize(("program", "given"), [(dense, over_arrays), (paged, over_pages)])
def test_a_batch_counts_as_many_tokens_as_it_has(program, given, monkeypatch) -> None:
    """If all rows counted as the longest, one thread would seem too fast to be beaten by two."""
    for module in (attend, operators_paged_attention):
        monkeypatch.setattr(module, "PARALLEL", 0)
        monkeypatch.setattr(module, "_policies", collections.defaultdict(threads.Policy))
    counted: list[float] = []
    monkeypatch.setattr(threads.Policy, "parallel", lambda policy: False)
    monkeypatch.setattr(threads.Policy, "serial_took", lambda _, work, took: counted.append(work))
    bound, fed = given()
    fed["query"] = np.ones((4, HEADS, 1, SIZE), np.float32)
    with Session(program, threads=2).bind(**bound) as step:
        for lengths in ([96, 96, 96, 96], [96, 10, 1, 21]):
            step.run(**fed, lengths=np.array(lengths))
    assert counted == [HEADS * SIZE * 384, HEADS * SIZE * 128]
