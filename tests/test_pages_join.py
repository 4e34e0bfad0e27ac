"""Tokens that items of attention write, each before it reads them: when, and what comes of it."""

from typing import Any

import deciding
import driven
import numpy as np
import paged_models
import pytest

from onnx_inplace import PagedCache, Session, formats
from onnx_inplace.dsl import FLOAT, Paged
from onnx_inplace.numba_kernels import pages_append_attend, pages_join
from onnx_inplace.numba_kernels.append_attend import DONE
from onnx_inplace.numba_kernels.memory import address

HEADS, KV_HEADS, PAGE, SIZE = 6, 3, 16, 32
Pages = Paged[(FLOAT[2, KV_HEADS, PAGE, SIZE], *formats.BUILTIN.values())]


batched = paged_models.batched(Pages, HEADS, KV_HEADS, SIZE)


def apart(tables: list[list[int]], positions: list[int], lengths: list[int]) -> bool:
    arrays = [np.array(numbers, np.int64) for numbers in (tables, positions, lengths)]
    return bool(pages_join.apart(*map(address, arrays), *arrays[0].shape, PAGE))


@pytest.mark.parametrize(
    ("tables", "positions", "lengths", "expected"),
    [
        ([[0, 1, 2], [3, 4, 5]], [17, 40], [18, 41], True),
        ([[0, 1, 2], [0, 4, 5]], [17, 40], [18, 41], True),  # a page that nobody writes
        ([[0, 1, 2], [3, 4, 2]], [17, 20], [18, 21], True),  # behind what is read
        ([[0, 64, 2], [64, 4, 5]], [17, 40], [18, 41], False),  # one reads another's page
        ([[0, 64, 2], [128, 4, 5]], [17, 40], [18, 41], True),
        ([[1, 1, 2], [3, 4, 5]], [17, 40], [18, 41], False),  # or its own a second time
        ([[0, 1, 2], [3, 4, 5]], [17, 40], [18, 40], False),  # a token that is not read
        ([[0, 1, 2], [3, 4, 5]], [17, 39], [18, 41], False),  # nor the last one
    ],
)
def test_when_tokens_can_be_written_while_others_attend(tables, positions, lengths, expected):
    assert apart(tables, positions, lengths) is expected


def caches(name: str, count: int) -> list[PagedCache]:
    """Two of the same pages, full of numbers."""
    made = []
    for _ in range(2):
        cache = PagedCache((2, KV_HEADS, PAGE, SIZE), np.float32, formats.BUILTIN.values())
        for seed in range(count):
            rng = np.random.default_rng(seed)
            values = rng.standard_normal((2, KV_HEADS, PAGE, SIZE), np.float32)
            cache.write(cache.allocate_page(name), values, 0)
        made.append(cache)
    return made


def feeds_of(tables: list[list[int]], positions: list[int], scale: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(positions)
    return {
        "table": np.array(tables, np.int64),
        "query": rng.standard_normal((len(tables), HEADS, 1, SIZE), np.float32),
        "values": rng.standard_normal((2, len(tables), KV_HEADS, 1, SIZE), np.float32) * scale,
        "position": np.array(positions, np.int64),
        "lengths": np.array(positions, np.int64) + 1,
    }


@pytest.fixture(params=[False, True], ids=["one thread", "several threads"])
def session(request, monkeypatch) -> Session:
    """On several threads, sequences are split."""
    deciding.Decider(monkeypatch, request.param)
    monkeypatch.setattr("onnx_inplace.runner.operators_paged_attention.PARALLEL", 8 * HEADS * SIZE)
    return Session(batched, fuse="off", threads=2)


def both(session: Session, pages: list[PagedCache], monkeypatch) -> tuple[list[Any], list[int]]:
    """The layer joined, and its steps one by one; what the compiled call says."""
    answers: list[int] = []
    kernel = driven.recording(pages_append_attend.append_and_attend, answers)
    monkeypatch.setattr(pages_append_attend, "append_and_attend", kernel)
    runs = [
        driven.Driven(session, {"cache": cache}, single)
        for cache, single in zip(pages, (False, True), strict=True)
    ]
    return runs, answers


@pytest.mark.parametrize("name", formats.BUILTIN)
def test_items_write_what_one_thread_writes_before(name, session, monkeypatch) -> None:
    """The same outputs and pages, over the border of pages, into empty ones, and out of range."""
    pages = caches(name, 9)
    tables = [[2, 0, 4], [3, 1, 5], [8, 7, 6]]
    for cache in pages:
        for page, fill in ((0, 5), (4, 0), (5, 9), (7, 0)):
            cache.truncate(page, fill)
    runs, answers = both(session, pages, monkeypatch)
    for k in range(12):
        scale = 1e5 if k == 9 else 3.0 if k == 5 else 0.5
        positions = [PAGE + 5 + k, 2 * PAGE + 9 - k % 3, PAGE + k]
        feeds = feeds_of(tables, positions, scale)
        results = [run(feeds, feeds) for run in runs]
        assert results[0] == results[1]
        assert pages[0].snapshot() == pages[1].snapshot()
        assert [pages[0].page(p).fill for p in pages[0]] == [
            pages[1].page(p).fill for p in pages[1]
        ]
    assert pages[0].clipped == pages[1].clipped
    assert [answer % pages_append_attend.CLIPPED for answer in answers[-9:]] == [DONE] * 9
    assert pages[0].clipped > 0 or not name.startswith("INT8")
    for run in runs:
        run.close()


@pytest.mark.parametrize(
    ("tables", "positions"),
    [
        ([[1, 4], [2, 3], [0, 1]], [20, 21, 22]),
        ([[1, 1], [2, 3], [5, 4]], [20, 21, 22]),
    ],
    ids=["another reads its page", "it has its page twice"],
)
def test_a_page_that_is_read_elsewhere_is_written_before(
    tables, positions, session, monkeypatch
) -> None:
    pages = caches("INT4", 6)
    runs, answers = both(session, pages, monkeypatch)
    for k in range(6):
        feeds = feeds_of(tables, [at + k for at in positions], 2.0)
        assert [run(feeds, feeds) for run in runs[:1]] == [run(feeds, feeds) for run in runs[1:]]
        assert pages[0].snapshot() == pages[1].snapshot()
    assert DONE in answers
    for run in runs:
        run.close()
