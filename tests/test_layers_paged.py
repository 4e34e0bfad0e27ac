"""An update of pages and attention as one action: what it computes, and what is left to steps."""

from collections.abc import Iterator
from typing import Any

import deciding
import driven
import numpy as np
import paged_models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_inplace import PagedCache, Session, errors, formats
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, Paged, SparsePaged, kv, model
from onnx_inplace.numba_kernels import memory, pages_append_attend
from onnx_inplace.numba_kernels.append_attend import DONE, REFUSED
from onnx_inplace.runner.profile import profile

HEADS, KV_HEADS, PAGE, SIZE = 4, 2, 16, 32
DIMS = 2, KV_HEADS, PAGE, SIZE
NAMES = "FLOAT32", "FLOAT16", "INT8", "INT4"
Page = FLOAT[2, KV_HEADS, PAGE, SIZE]
Pages = Paged[(Page, *[formats.BUILTIN[name] for name in NAMES])]


@model
def sequence(
    cache: Mutable[Pages],
    table: INT64["blocks"],
    query: FLOAT[1, HEADS, "n", SIZE],
    values: FLOAT[2, KV_HEADS, "n", SIZE],
    position: INT64[()],
    lengths: INT64[()],
) -> tuple[FLOAT[1, HEADS, "n", SIZE], Alias["cache"]]:
    updated = kv.PagedCacheUpdate(cache, table, values, position, quantized_type="INT8")
    return kv.PagedAttention(query, updated, table, lengths, is_causal=1), updated


@model
def windowed(
    cache: Mutable[Pages],
    table: INT64["blocks"],
    query: FLOAT[1, HEADS, "n", SIZE],
    values: FLOAT[2, KV_HEADS, "n", SIZE],
    position: INT64[()],
    lengths: INT64[()],
) -> tuple[FLOAT[1, HEADS, "n", SIZE], Alias["cache"]]:
    updated = kv.PagedCacheUpdate(cache, table, values, position)
    attended = kv.PagedAttention(query, updated, table, lengths, is_causal=1, left_window_size=20)
    return attended, updated


batched = paged_models.batched(Pages, HEADS, KV_HEADS, SIZE)


def feeds_of(
    tables: list[list[int]], positions: list[int], tokens: int = 1, batch: bool = False
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(positions[0] + tokens)
    rows = (len(tables),) if batch else ()
    shape = (2, *rows, KV_HEADS, tokens, SIZE)
    return {
        "table": np.array(tables if batch else tables[0], np.int64),
        "query": rng.standard_normal((len(tables), HEADS, tokens, SIZE), np.float32),
        "values": rng.standard_normal(shape, np.float32),
        "position": np.array(positions, np.int64).reshape(rows),
        "lengths": np.array([at + tokens for at in positions], np.int64).reshape(rows),
    }


def filled(*names: str, fill: int = PAGE) -> PagedCache:
    cache = PagedCache(DIMS, np.float32, [formats.BUILTIN[name] for name in NAMES])
    for seed, name in enumerate(names):
        values = np.random.default_rng(seed).standard_normal((2, KV_HEADS, fill, SIZE), np.float32)
        cache.write(cache.allocate_page(name), values, 0)
    return cache


def expected(cache: PagedCache, feeds: dict[str, np.ndarray], left: int = -1) -> np.ndarray:
    """Attention in float64 over what pages decode to."""
    query, tables = feeds["query"], feeds["table"].reshape(len(feeds["query"]), -1)
    tokens, out = query.shape[2], np.zeros(query.shape)
    for b, length in enumerate(feeds["lengths"].reshape(-1)):
        count = -(-int(length) // PAGE)
        decoded = np.concatenate([cache.page(int(p)).decode() for p in tables[b][:count]], axis=2)
        for h, t in np.ndindex(HEADS, tokens):
            end = int(length) - tokens + t + 1
            seen = slice(max(0, end - 1 - left) if left >= 0 else 0, end)
            key, value = decoded[:, h * KV_HEADS // HEADS, seen].astype(np.float64)
            scores = key @ query[b, h, t] / np.sqrt(SIZE)
            weights = np.exp(scores - scores.max())
            out[b, h, t] = weights @ value / weights.sum()
    return out


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the compiled call said, each time."""
    return driven.answers(monkeypatch, pages_append_attend)


SESSIONS: dict[str, Session] = {}


def session(program: Any) -> Session:
    """Loaded once for all tests."""
    if program.name not in SESSIONS:
        SESSIONS[program.name] = Session(program, fuse="off")
    return SESSIONS[program.name]


# -- what it computes


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    ("names", "error"),
    [
        (("FLOAT32",) * 4, 1e-5),
        (("FLOAT16",) * 4, 1e-4),
        (("INT8",) * 4, 2e-3),
        (("INT4", "INT8", "FLOAT32", "INT8"), 2e-3),
    ],
    ids=["FLOAT32", "FLOAT16", "INT8", "mixed"],
)
def test_tokens_are_written_and_read(names, error, tokens, answers) -> None:
    """The same bytes as the owner writes, and attention over them."""
    cache, copy = filled(*names), filled(*names)
    for page in range(4):
        cache.truncate(page, 0)
        copy.truncate(page, 0)
    with session(sequence).bind(cache=cache) as step:
        for at in range(0, 4 * PAGE - tokens, tokens):
            feeds = feeds_of([[2, 0, 3, 1]], [at], tokens)
            attended = step.run(**feeds)[0]
            for k in range(tokens):
                page, place = feeds["table"][(at + k) // PAGE], (at + k) % PAGE
                copy.write(int(page), feeds["values"][:, :, k : k + 1], place)
            np.testing.assert_allclose(attended, expected(cache, feeds), atol=error)
    assert answers and set(answers) == {DONE}
    if "INT" not in "".join(names):  # codes may depend on how many tokens come at once
        assert cache.snapshot() == copy.snapshot()


def test_a_window_reads_its_pages_only(answers) -> None:
    cache = filled(*["FLOAT32"] * 4)
    with session(windowed).bind(cache=cache) as step:
        for at in range(40, 50):
            feeds = feeds_of([[-7, 1, 2, 3]], [at])
            wanted = step.run(**feeds)[0]
            np.testing.assert_allclose(
                wanted, expected(cache, feeds | {"table": np.arange(4)}, 20), atol=1e-5
            )
    assert DONE in answers


def test_sequences_of_a_batch(answers) -> None:
    cache = filled(*["FLOAT16"] * 6)
    with session(batched).bind(cache=cache) as step:
        for at in range(6):
            feeds = feeds_of([[0, 1, 2], [5, 4, 3]], [at, 2 * PAGE + at], batch=True)
            attended = step.run(**feeds)[0]
            np.testing.assert_allclose(attended, expected(cache, feeds), atol=1e-4)
    assert answers == [DONE] * 4


def test_pages_that_come_are_made_by_the_steps(answers) -> None:
    """And the call goes on with them, also when the page table has moved."""
    cache = PagedCache(DIMS, np.float32, [formats.BUILTIN[name] for name in NAMES])
    table = [*range(12)]
    with session(sequence).bind(cache=cache) as step:
        for at in range(12 * PAGE):
            feeds = feeds_of([table], [at])
            attended = step.run(**feeds)[0]
            if at % 7 == 0:
                np.testing.assert_allclose(attended, expected(cache, feeds), atol=2e-3)
    assert [cache.page(p).fill for p in cache] == [PAGE] * 12
    assert answers.count(REFUSED) in range(8, 12) and answers.count(DONE) > 11 * (PAGE - 1)


def test_formats_that_come_with_a_page(answers) -> None:
    """A cache that allows any format learns one between two runs."""

    @model
    def anything(
        cache: Mutable[Paged[Page]],
        table: INT64["blocks"],
        query: FLOAT[1, HEADS, "n", SIZE],
        values: FLOAT[2, KV_HEADS, "n", SIZE],
        position: INT64[()],
        lengths: INT64[()],
    ) -> tuple[FLOAT[1, HEADS, "n", SIZE], Alias["cache"]]:
        updated = kv.PagedCacheUpdate(cache, table, values, position)
        return kv.PagedAttention(query, updated, table, lengths, is_causal=1), updated

    cache = PagedCache(DIMS, np.float32)
    cache.allocate_pages(3, "INT8")
    own = formats.PageFormat("OWN", formats.INT8.value, formats.INT8.value)
    with Session(anything, fuse="off").bind(cache=cache) as step:
        for at in range(3 * PAGE):
            if at in (10, 30):
                cache.convert(at // PAGE + 1, own)
            feeds = feeds_of([[0, 1, 2]], [at])
            np.testing.assert_allclose(step.run(**feeds)[0], expected(cache, feeds), atol=2e-3)
    assert answers.count(DONE) > 40


@pytest.mark.parametrize("parallel", [False, True], ids=["one thread", "several threads"])
def test_long_sequences_are_read_in_parts(parallel, monkeypatch, answers) -> None:
    deciding.Decider(monkeypatch, parallel)
    names = ["FLOAT16"] * 8
    several = Session(sequence, fuse="off", threads=2)
    monkeypatch.setattr("onnx_inplace.runner.operators_paged_attention.PARALLEL", 64 * HEADS * SIZE)
    cache = filled(*names)
    with several.bind(cache=cache) as step:
        for at in range(60, 70):
            feeds = feeds_of([[*range(8)]], [at])
            np.testing.assert_allclose(step.run(**feeds)[0], expected(cache, feeds), atol=1e-4)
    assert answers == [DONE] * 8


def test_what_is_clipped_is_counted(answers) -> None:
    cache = filled("FLOAT16")
    with session(sequence).bind(cache=cache) as step:
        for at in range(5):
            feeds = feeds_of([[0]], [at])
            feeds["values"][0, 0, 0, :3] = 1e6
            step.run(**feeds)
            assert cache.clipped == 3 * (at + 1)
    assert [a % pages_append_attend.CLIPPED for a in answers] == [DONE] * 3


# -- what is left to the steps


@pytest.fixture(scope="module", params=["sequence", "batched"])
def both(request) -> Iterator[Any]:
    """The same layer, joined and one by one, and their caches; what the compiled call said."""
    program = sequence if request.param == "sequence" else batched
    found: list[int] = []
    caches = [filled(*["INT8", "FLOAT16"] * 3) for _ in range(2)]
    for cache in caches:
        cache.truncate(4, 3)  # of page 4, not all tokens are there
        cache.share(5)
        cache.allocate_page("INT8", 6)
        cache.allocate_page("INT8", 7)
        cache.free(6)
    runs = [
        driven.Driven(session(program), {"cache": cache}, single)
        for cache, single in zip(caches, (False, True), strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        kernel = driven.recording(pages_append_attend.append_and_attend, found)
        patch.setattr(pages_append_attend, "append_and_attend", kernel)
        yield program is batched, runs, caches, found
    for run in runs:
        run.close()


numbers = st.integers(-3, 3 * PAGE + 3) | st.sampled_from([-(2**63), 2**63 - 1])
ids = st.integers(-2, 20) | st.sampled_from([-(2**63), 2**63 - 1, 2**40])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_pages_positions_and_lengths(both, data) -> None:
    """The same results, or the same errors, and the same bytes in all pages."""
    batch, runs, caches, found = both
    tables, at = ([[0, 1, 2], [3, 4, 7]], [5, 2]) if batch else ([[0, 1, 2]], [17])
    feeds = feeds_of(tables, at, batch=batch)
    for cache in caches:
        cache.truncate(4, min(cache.page(4).fill, 3))
    for _ in range(4):
        right = [run(feeds, feeds) for run in runs]
        assert right[0] == right[1]
    assert found[-1] == DONE
    like = dict(feeds)
    for name, strategy in (("table", ids), ("position", numbers), ("lengths", numbers)):
        if data.draw(st.booleans()):
            flat = [data.draw(strategy) for _ in range(feeds[name].size)]
            feeds[name] = np.array(flat, np.int64).reshape(feeds[name].shape)
    results = [run(feeds, like) for run in runs]
    assert results[0] == results[1]
    assert caches[0].snapshot() == caches[1].snapshot()


def test_other_layers_are_left_to_their_steps(answers) -> None:
    """Page ids that are no places; another block table for reading; another cache."""
    Sparse = SparsePaged[Page, formats.FLOAT32]

    @model
    def sparse(
        cache: Mutable[Sparse],
        table: INT64["blocks"],
        query: FLOAT[1, HEADS, "n", SIZE],
        values: FLOAT[2, KV_HEADS, "n", SIZE],
        position: INT64[()],
        lengths: INT64[()],
    ) -> tuple[FLOAT[1, HEADS, "n", SIZE], Alias["cache"]]:
        updated = kv.PagedCacheUpdate(cache, table, values, position)
        return kv.PagedAttention(query, updated, table, lengths, is_causal=1), updated

    @model
    def other_table(
        cache: Mutable[Pages],
        table: INT64["blocks"],
        other: INT64["others"],
        query: FLOAT[1, HEADS, "n", SIZE],
        values: FLOAT[2, KV_HEADS, "n", SIZE],
        position: INT64[()],
        lengths: INT64[()],
    ) -> tuple[FLOAT[1, HEADS, "n", SIZE], Alias["cache"]]:
        updated = kv.PagedCacheUpdate(cache, table, values, position)
        return kv.PagedAttention(query, updated, other, lengths, is_causal=1), updated

    pages = Session(sparse, fuse="off").allocate("cache")
    pages.allocate_page("FLOAT32", 2**40)
    for program, cache, more in (
        (sparse, pages, {}),
        (other_table, filled("FLOAT32"), {"other": np.array([0])}),
    ):
        with Session(program, fuse="off").bind(cache=cache) as step:
            for at in range(4):
                feeds = feeds_of([[2**40 if program is sparse else 0]], [at])
                attended = step.run(**feeds, **more)[0]
                np.testing.assert_allclose(attended, expected(cache, feeds), atol=1e-5)
    assert answers == []


# -- what is said of it


def test_the_journal_names_the_cache() -> None:
    caches, said = [filled("INT8") for _ in range(2)], []
    for cache, single in zip(caches, (False, True), strict=True):
        run = driven.Driven(session(sequence), {"cache": cache}, single)
        said.append([run(feeds, feeds) for feeds in [feeds_of([[0]], [3])] * 4])
        run.close()
    assert said[0] == said[1]
    assert said[0][-1][1] == [("cache", "PagedCacheUpdate", None, None)]


def test_an_owner_between_runs_is_heard(answers) -> None:
    """A page that got a second owner is not written; one that was freed is not there."""
    cache = filled("FLOAT32", "FLOAT32")
    with session(windowed).bind(cache=cache) as step:
        for at in range(5):
            step.run(**feeds_of([[0, 1]], [at]))
        cache.share(0)
        before = cache.snapshot()
        with pytest.raises(errors.PageError):
            step.run(**feeds_of([[0, 1]], [5]))
        cache.release(0)
        cache.free(1)
        with pytest.raises(errors.PageError):
            step.run(**feeds_of([[0, 1]], [PAGE]))
        assert cache.page(0).raw.tobytes() == before.pages[0].raw
        step.run(**feeds_of([[0, 1]], [5]))
    assert answers[-1] == DONE


def test_nothing_is_compiled_in_a_run() -> None:
    cache = filled("FLOAT32")
    with session(sequence).bind(cache=cache) as step:
        before = [kernel.name for kernel in memory.made()]
        assert "pages_append_attend.append_and_attend" in before
        for at in range(5):
            step.run(**feeds_of([[0]], [at]))
        assert [kernel.name for kernel in memory.made()] == before


def test_a_profile_shows_the_steps() -> None:
    cache = filled("FLOAT32")
    seen = profile(session(sequence), {"cache": cache}, feeds_of([[0]], [3]), runs=3)
    assert [(t.step.op_type, t.calls) for t in seen.steps] == [
        ("PagedCacheUpdate", 1),
        ("PagedAttention", 1),
    ]
