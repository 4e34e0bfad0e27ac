"""Paged caches in runs: what is bound, judged, written, and what a refused run leaves."""

import tracemalloc
from pathlib import Path

import numpy as np
import page_specification as spec
import pytest

from onnx_inplace import Session, errors, formats
from onnx_inplace.compiler.contract import Access
from onnx_inplace.dsl import (
    FLOAT,
    FLOAT16,
    INT64,
    Alias,
    Mutable,
    Paged,
    SparsePaged,
    kv,
    model,
    op,
)
from onnx_inplace.runner import page_memory
from onnx_inplace.runner.page import Use
from onnx_inplace.runner.page_memory import PageMemory
from onnx_inplace.runner.pages import PagedCache

H, PAGE, D = 2, 32, 64
DIMS = 2, H, PAGE, D
Page = FLOAT16[2, H, PAGE, D]
Pages = Paged[Page]
Values = FLOAT16[2, H, "n", D]
F16, I8 = (f.page_bytes(DIMS) for f in (formats.FLOAT16, formats.INT8))


@model
def write(
    cache: Mutable[Pages], page: INT64[()], values: Values, position: INT64[()]
) -> Alias["cache"]:
    return kv.PagedCacheUpdate(cache, page, values, position, quantized_type="INT8")


@model
def append(
    cache: Mutable[Pages], table: INT64["blocks"], values: Values, position: INT64[()]
) -> Alias["cache"]:
    return kv.PagedCacheUpdate(cache, table, values, position, quantized_type="FLOAT16")


@model
def write_existing(cache: Mutable[Pages], page: INT64[()], values: Values) -> Alias["cache"]:
    return kv.PagedCacheUpdate(cache, page, values, 0)


@model
def decode(
    cache: Mutable[Pages],
    table: INT64["blocks"],
    query: FLOAT[1, 4, "n", D],
    values: Values,
    position: INT64[()],
) -> tuple[FLOAT[1, 4, "n", D], Alias["cache"]]:
    updated = kv.PagedCacheUpdate(cache, table, values, position, quantized_type="FLOAT16")
    return kv.PagedAttention(query, updated, table, position + 1, is_causal=1), updated


@model
def batched(
    cache: Mutable[Pages],
    tables: INT64["batch", "blocks"],
    query: FLOAT[2, 4, 1, D],
    values: FLOAT16[2, 2, H, 1, D],
    lengths: INT64[2],
) -> tuple[FLOAT[2, 4, 1, D], Alias["cache"]]:
    updated = kv.PagedCacheUpdate(cache, tables, values, lengths, quantized_type="INT8")
    return kv.PagedAttention(query, updated, tables, lengths + 1), updated


@model
def attend(
    cache: Pages, table: INT64["blocks"], query: FLOAT[1, 4, "n", D], length: INT64[1]
) -> FLOAT[1, 4, "n", D]:
    return kv.PagedAttention(query, cache, table, length, left_window_size=20)


@model
def gather(cache: Pages, ids: INT64["n"]) -> FLOAT16[2, H, "tokens", D]:
    return kv.PageGather(cache, ids)


@model
def convert(cache: Mutable[Pages], ids: INT64["n"]) -> Alias["cache"]:
    return kv.PagedCacheConvert(cache, ids, quantized_type="INT4")


@model
def two_layers(
    one: Mutable[Pages], two: Mutable[Pages], page: INT64[()], values: Values, other: INT64[()]
) -> tuple[Alias["one"], Alias["two"]]:
    first = kv.PagedCacheUpdate(one, page, values, 0, quantized_type="FLOAT16")
    return first, kv.PagedCacheUpdate(two, other, values, 0, quantized_type="FLOAT16")


@model
def loop(cache: Mutable[Pages], pages: INT64["count"], values: Values) -> Alias["cache"]:
    for k in range(op.Squeeze(op.Shape(pages))):
        cache = kv.PagedCacheUpdate(cache, pages[k], values, k, quantized_type="FLOAT16")
    return cache


SESSIONS: dict[str, Session] = {}


def session(program: object) -> Session:
    """Loaded once for all tests."""
    name = str(id(program))
    if name not in SESSIONS:
        SESSIONS[name] = Session(program)
    return SESSIONS[name]


def tokens(n: int, seed: int = 0, dtype: type = np.float16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, H, n, D)).astype(dtype)


def with_pages(*names: str, fill: int = PAGE, **options: object) -> PagedCache:
    cache = PagedCache(DIMS, np.float16, **options)
    for seed, name in enumerate(names):
        page = cache.allocate_page(name)
        cache.write(page, tokens(fill, seed), 0)
    return cache


# -- binding


def test_a_paged_cache_is_allocated_for_a_paged_input() -> None:
    cache = session(write).allocate("cache")
    assert (cache.dims, cache.elem_type, len(cache), cache.name) == (DIMS, np.float16, 0, "cache")
    assert session(write).allocate("cache", budget=5).budget == 5
    with pytest.raises(errors.BindingError):
        session(write).allocate("cache", pages=3)


def test_the_result_is_the_cache() -> None:
    cache = session(write).allocate("cache")
    with session(write).bind(cache=cache) as step:
        out = step.run(page=0, values=tokens(3), position=0)
    assert out[0] is cache and "PagedCache" in repr(out)


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(DIMS, np.float16),
        PagedCache(DIMS, np.float32),
        PagedCache((2, H, 64, D), np.float16),
        PagedCache((2, H + 1, PAGE, D), np.float16),
        PagedCache(DIMS, np.float16, sparse_ids=True),
    ],
    ids=["array", "element type", "page size", "heads", "ids"],
)
def test_storage_of_another_kind_is_refused(wrong: object) -> None:
    with pytest.raises(errors.StorageMismatch) as caught:
        session(write).bind(cache=wrong)
    assert caught.value.name == "cache"


def test_pages_may_only_have_formats_that_the_model_allows() -> None:
    @model
    def limited(
        cache: Mutable[Paged[Page, formats.INT8, formats.FLOAT16]], values: Values
    ) -> Alias["cache"]:
        return kv.PagedCacheUpdate(cache, 0, values, 0, quantized_type="INT8")

    with pytest.raises(errors.StorageMismatch) as caught:
        Session(limited).bind(cache=PagedCache(DIMS, np.float16))
    assert "INT4" in str(caught.value.given)
    cache = PagedCache(DIMS, np.float16, [formats.INT8])
    with Session(limited).bind(cache=cache) as step:
        step.run(values=tokens(4))
    assert cache.page(0).quantized_type == "INT8"


def test_a_cache_is_lent_to_one_binding() -> None:
    cache = session(write).allocate("cache")
    with session(write).bind(cache=cache):
        with pytest.raises(errors.BindingInUse) as caught:
            session(append).bind(cache=cache)
        assert caught.value.holder == "cache"
    session(append).bind(cache=cache).close()
    with pytest.raises(errors.SharedStorage):
        session(two_layers).bind(one=cache, two=cache)


def test_an_input_that_overlaps_a_page_is_refused() -> None:
    cache = with_pages("FLOAT16", "FLOAT16")
    view = cache.page(1).raw.view(np.float16).reshape(DIMS)
    with session(write).bind(cache=cache) as step:
        before = cache.snapshot()
        with pytest.raises(errors.SharedStorage) as caught:
            step.run(page=0, values=view, position=0)
        assert (caught.value.name, caught.value.other) == ("values", "cache")
        assert cache.snapshot() == before
        step.run(page=0, values=view.copy(), position=0)
    np.testing.assert_array_equal(cache.page(0).decode(), cache.page(1).decode())


def test_the_owner_changes_pages_between_runs_while_bound() -> None:
    """Case 101: the next run reads the table again."""
    cache = with_pages("FLOAT16", "FLOAT16")
    with session(write).bind(cache=cache) as step:
        step.run(page=0, values=tokens(2, 7), position=0)
        cache.convert(0, "INT4")
        cache.free(1)
        step.run(page=1, values=tokens(2, 8), position=0)
        step.run(page=0, values=tokens(2, 9), position=30)
        assert [cache.page(p).quantized_type for p in cache] == ["INT4", "INT8"]
        assert step.generation == 3


def test_a_run_waits_for_no_other_run() -> None:
    """Case 98."""
    cache = with_pages("FLOAT16")
    other = Use("other")
    cache.begin(other, Access.READ_WRITE)  # as a run of another session would
    with session(write).bind(cache=cache) as step:
        with pytest.raises(errors.BindingInUse):
            step.run(page=0, values=tokens(1), position=0)
        cache.end(other)
        step.run(page=0, values=tokens(1), position=0)


def test_a_cache_may_be_read_by_several_but_not_while_it_is_lent() -> None:
    cache = with_pages("FLOAT16", "INT8")
    expected = np.concatenate([cache.page(p).decode() for p in (1, 0, 1)], axis=2)
    with session(gather).bind() as first, session(gather).bind() as second:
        for step in (first, second):
            np.testing.assert_array_equal(step.run(cache=cache, ids=[1, 0, 1])[0], expected)
        with session(write).bind(cache=cache), pytest.raises(errors.SharedStorage):
            first.run(cache=cache, ids=[0])
        with pytest.raises(errors.StorageMismatch):
            first.run(cache=np.zeros(3), ids=[0])


# -- what is refused leaves every byte as it was


@pytest.mark.parametrize(
    "page, position, n, error",
    [
        (0, 30, 3, errors.CapacityError),
        (0, -1, 1, errors.CapacityError),
        (0, -(2**63), 1, errors.CapacityError),
        (0, 2**63 - 1, 1, errors.CapacityError),
        (0, 0, 33, errors.CapacityError),
        (-1, 0, 1, errors.PageError),
        (2, 0, 1, errors.PageError),
        (2**40, 0, 1, errors.PageError),
        (-(2**63), 0, 1, errors.PageError),
    ],
)
def test_pages_and_positions_out_of_range_are_refused(page, position, n, error) -> None:
    """Cases 40, 44, 67."""
    cache = with_pages("INT8")
    before = cache.snapshot()
    with session(write).bind(cache=cache) as step:
        with pytest.raises(error) as caught:
            step.run(page=page, values=tokens(n), position=position)
        assert cache.snapshot() == before and caught.value.cache == "cache"
        step.run(page=0, values=tokens(1), position=31)


@pytest.mark.parametrize("position, n", [(127, 2), (128, 1), (-1, 1), (0, 129)])
def test_tokens_beyond_a_block_table_are_refused(position, n) -> None:
    cache = with_pages("INT8", "FLOAT16", "INT4", "INT8")
    before = cache.snapshot()
    with session(append).bind(cache=cache) as step:
        with pytest.raises(errors.CapacityError) as caught:
            step.run(table=np.arange(4), values=tokens(n), position=position)
        assert (caught.value.position, caught.value.length) == (position, n)
        assert caught.value.capacity == 128 and cache.snapshot() == before


def test_tokens_of_length_zero_touch_no_page() -> None:
    """Case 43."""
    cache = session(append).allocate("cache")
    with session(append).bind(cache=cache) as step:
        for position in (0, 64):
            assert step.run(table=[5, 9], values=tokens(0), position=position)[0] is cache
        with pytest.raises(errors.CapacityError):
            step.run(table=[5, 9], values=tokens(0), position=65)
    assert len(cache) == 0


def test_a_sequence_makes_the_next_page_only() -> None:
    cache = session(append).allocate("cache")
    with session(append).bind(cache=cache) as step:
        for table, position in (([1], 0), ([0, 2], 40), ([0, 1], 32), ([-1], 0)):
            with pytest.raises(errors.PageError):
                step.run(table=table, values=tokens(1), position=position)
            assert len(cache) == 0
        step.run(table=[0, 7, 7], values=tokens(32), position=0)
        step.run(table=[0, 1, 2, -5], values=tokens(40), position=32)
    assert len(cache) == 3 and [cache.page(p).fill for p in cache] == [32, 32, 8]


def test_a_freed_page_is_not_made_again_by_a_run() -> None:
    cache = with_pages("INT8", "INT8", "INT8")
    cache.free(1)
    with session(write).bind(cache=cache) as step:
        with pytest.raises(errors.PageError, match="freed"):
            step.run(page=1, values=tokens(1), position=0)
        cache.allocate_page("FLOAT16", 1)
        step.run(page=1, values=tokens(1), position=0)


def test_without_a_format_pages_must_exist() -> None:
    cache = session(write_existing).allocate("cache")
    with session(write_existing).bind(cache=cache) as step:
        with pytest.raises(errors.PageError, match="quantized_type"):
            step.run(page=0, values=tokens(1))
        cache.allocate_page("FP8_E4M3")
        step.run(page=0, values=tokens(1))
    assert cache.page(0).fill == 1


@pytest.mark.parametrize("table", [[0, 0], [1, 1]])
def test_pages_that_one_call_writes_are_distinct(table) -> None:
    cache = with_pages("INT8", "INT8")
    before = cache.snapshot()
    with session(append).bind(cache=cache) as step:
        with pytest.raises(errors.PageError) as caught:
            step.run(table=table, values=tokens(10), position=27)
        assert caught.value.page == table[0] and cache.snapshot() == before
        step.run(table=table, values=tokens(5), position=27)  # one page only


def test_a_page_with_several_owners_is_not_written() -> None:
    """Case 109."""
    cache = with_pages("INT8", "INT8")
    cache.share(1)
    before = cache.snapshot()
    with session(append).bind(cache=cache) as step:
        with pytest.raises(errors.PageError) as caught:
            step.run(table=[0, 1], values=tokens(10), position=27)
        assert caught.value.page == 1 and cache.snapshot() == before
        copy = cache.copy_page(1)
        step.run(table=[0, copy], values=tokens(10), position=27)
    assert cache.page(1).raw.tobytes() == before.pages[1].raw


def test_a_second_cache_that_refuses_protects_the_first() -> None:
    one, two = with_pages("INT8"), with_pages("INT8")
    before = one.snapshot(), two.snapshot()
    with session(two_layers).bind(one=one, two=two) as step:
        with pytest.raises(errors.PageError) as caught:
            step.run(page=0, values=tokens(3), other=2)
        assert caught.value.cache == "two" and (one.snapshot(), two.snapshot()) == before
        step.run(page=0, values=tokens(3), other=1)


def test_a_budget_is_judged_before_the_first_write() -> None:
    one, two = with_pages("INT8"), with_pages("INT8", budget=F16)
    before = one.snapshot(), two.snapshot()
    with session(two_layers).bind(one=one, two=two) as step:
        with pytest.raises(errors.PageBudget) as caught:
            step.run(page=0, values=tokens(3), other=1)
        assert caught.value.needed == F16 and (one.snapshot(), two.snapshot()) == before
        two.budget = None
        step.run(page=0, values=tokens(3), other=1)


class Exhausted(PageMemory):
    def _one(self, size: int, zeroed: bool) -> np.ndarray:
        raise MemoryError


def test_without_memory_for_a_later_page_nothing_is_written() -> None:
    one, two = with_pages("INT8"), with_pages(memory=Exhausted())
    page_memory.shared.trim()
    before = one.snapshot()
    with session(two_layers).bind(one=one, two=two) as step:
        with pytest.raises(MemoryError):
            step.run(page=1, values=tokens(3), other=0)
        assert one.snapshot() == before and len(two) == 0
        assert page_memory.shared.kept == F16, "what was taken for the first cache is given back"
        with pytest.raises(MemoryError):  # not DirtyState: nothing was written
            step.run(page=1, values=tokens(3), other=0)


def test_a_loop_is_judged_as_a_whole() -> None:
    cache = with_pages("INT8", "INT8")
    before = cache.snapshot()
    with session(loop).bind(cache=cache) as step:
        for pages in ([0, 1, 2, 4], [0, -1], [0, 1, 2, 3, 5]):
            with pytest.raises(errors.PageError):
                step.run(pages=pages, values=tokens(1))
            assert cache.snapshot() == before
        step.run(pages=[0, 1, 2, 3, 2, 0], values=tokens(1))
    assert [cache.page(p).fill for p in cache] == [32, 32, 5, 4]


def test_what_depends_on_written_content_is_judged_by_its_step() -> None:
    @model
    def chain(cache: Mutable[Pages], values: Values) -> Alias["cache"]:
        cache = kv.PagedCacheUpdate(cache, 0, values, 0, quantized_type="FLOAT16")
        first = op.Gather(op.Reshape(kv.PageGather(cache, 0), [-1]), 0)
        return kv.PagedCacheUpdate(cache, op.Cast(first, to=7), values, 0, quantized_type="FLOAT16")

    cache = PagedCache(DIMS, np.float16)
    values = np.zeros((2, H, 1, D), np.float16)
    with Session(chain).bind(cache=cache) as step:
        values[0, 0, 0, 0] = 1
        step.run(values=values)
        assert len(cache) == 2
        values[0, 0, 0, 0] = 9
        with pytest.raises(errors.PageError) as caught:
            step.run(values=values)
        assert caught.value.page == 9 and len(cache) == 2
        with pytest.raises(errors.DirtyState) as dirty:
            step.run(values=values)
        assert dirty.value.written[0].operator == "PagedCacheUpdate"
        step.reset()
        values[0, 0, 0, 0] = 0
        step.run(values=values)


# -- what is written


@pytest.mark.parametrize("name", formats.BUILTIN)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_pages_hold_what_the_specification_says(name: str, dtype: type) -> None:
    @model
    def update(
        cache: Mutable[Paged[FLOAT16[2, H, 64, D]]],
        page: INT64[()],
        values: (FLOAT16 if dtype is np.float16 else FLOAT)[2, H, "n", D],
        position: INT64[()],
    ) -> Alias["cache"]:
        return kv.PagedCacheUpdate(cache, page, values, position, quantized_type=name)

    dims, format = (2, H, 64, D), formats.BUILTIN[name]
    cache = PagedCache(dims, np.float16)
    expected, fill = np.zeros(format.page_bytes(dims), np.uint8), 0
    with Session(update).bind(cache=cache) as step:
        for seed, (position, n) in enumerate([(0, 5), (5, 20), (25, 1), (30, 34), (7, 3)]):
            x = tokens(n, seed, dtype)
            step.run(page=0, values=x, position=position)
            expected = spec.write(format, expected, dims, x.astype(np.float32), position, fill)
            fill = max(fill, position + n)
            assert cache.page(0).raw.tobytes() == expected.tobytes()
    decoded = spec.decode(format, expected, dims)
    np.testing.assert_array_equal(cache.page(0).decode(np.float32), decoded)


def test_an_update_may_span_pages_of_several_formats() -> None:
    """Case 83: like one write for each page; other pages keep address and bytes."""
    names = ("FLOAT16", "INT8", "FP8_E4M3", "INT4", "FLOAT32")
    cache, alone = with_pages(*names), with_pages(*names)
    others = {p: (cache.page(p).address, cache.page(p).raw.tobytes()) for p in (0, 4)}
    x = tokens(60, 9)
    with session(append).bind(cache=cache) as step:
        step.run(table=[3, 2, 1], values=x, position=20)
    alone.write(3, x[:, :, :12], 20)
    alone.write(2, x[:, :, 12:44], 0)
    alone.write(1, x[:, :, 44:], 0)
    assert cache.snapshot() == alone.snapshot()
    assert {p: (cache.page(p).address, cache.page(p).raw.tobytes()) for p in others} == others


def test_one_update_writes_the_pages_of_several_sequences() -> None:
    cache = with_pages("FLOAT16", "INT8", "INT4")
    q, x = np.ones((2, 4, 1, D), np.float32), np.stack([tokens(1, 3), tokens(1, 4)], axis=1)
    with session(batched).bind(cache=cache) as step:
        before = cache.snapshot()
        for tables, lengths, error in (
            ([[0, 1], [1, 2]], [33, 5], errors.PageError),  # one page twice
            ([[0, 1], [2, 9]], [33, 32], errors.PageError),  # a gap
            ([[0, 1], [2, 3]], [64, 5], errors.CapacityError),
            ([[0, 1], [2, 3]], [5, -1], errors.CapacityError),
        ):
            with pytest.raises(error) as caught:
                step.run(tables=tables, query=q, values=x, lengths=lengths)
            assert cache.snapshot() == before
        assert caught.value.batch == 1
        out = step.run(tables=[[0, 1], [2, 3]], query=q, values=x, lengths=[32, 32])
        assert cache.page(3).quantized_type == "INT8" and cache.page(3).fill == 1
    for row, pages in enumerate(([0, 1], [2, 3])):
        alone = oracle(cache, pages, 33, q[row])
        np.testing.assert_allclose(out[0][row], alone, atol=1e-4)


def test_sparse_ids_are_any_numbers() -> None:
    @model
    def put(
        cache: Mutable[SparsePaged[Page]], table: INT64["blocks"], values: Values, at: INT64[()]
    ) -> Alias["cache"]:
        return kv.PagedCacheUpdate(cache, table, values, at, quantized_type="INT8")

    cache = Session(put).allocate("cache")
    table = [10**15, -3, 0]
    with Session(put).bind(cache=cache) as step:
        step.run(table=table, values=tokens(40), at=0)
        step.run(table=table, values=tokens(30), at=40)
    assert list(cache) == sorted(table) and [cache.page(p).fill for p in table] == [32, 32, 6]


def test_pages_are_converted_by_a_run() -> None:
    cache, alone = (with_pages("FLOAT16", "INT8", "FLOAT32") for _ in range(2))
    with session(convert).bind(cache=cache) as step:
        before = cache.snapshot()
        for ids in ([0, 3], [1, 1], [-1]):
            with pytest.raises(errors.PageError):
                step.run(ids=ids)
            assert cache.snapshot() == before
        assert step.run(ids=[2, 0])[0] is cache
        step.run(ids=[])
    alone.convert(0, "INT4")
    alone.convert(2, "INT4")
    assert cache.snapshot() == alone.snapshot()


def test_a_page_is_written_once_for_all_query_heads() -> None:
    """Case 76: bytes that an update changes are those of its tokens, not of its query heads."""
    cache = with_pages("FLOAT16")
    before = cache.page(0).raw.copy()
    q = np.ones((1, 4, 1, D), np.float32)
    with session(decode).bind(cache=cache) as step:
        step.run(table=[0], query=q, values=-cache.page(0).decode()[:, :, 9:10], position=9)
    changed = np.flatnonzero(cache.page(0).raw != before)
    assert len(changed) == 2 * H * D  # the sign of each number


def test_repeated_appends_leave_old_tokens_alone() -> None:
    """Case 79: formats that are appended to never code a token twice."""
    for name in ("INT8", "INT4T", "FP8_E4M3"):
        cache = PagedCache((2, H, 128, D), np.float16)
        cache.allocate_page(name)
        cache.write(0, tokens(28), 0)
        first = cache.page(0).decode()[:, :, :28]
        for t in range(28, 128):
            cache.write(0, 1000 * tokens(1, t), t)
        np.testing.assert_array_equal(cache.page(0).decode()[:, :, :28], first)


@pytest.mark.parametrize("number", [65504, -65504, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", formats.BUILTIN)
def test_extreme_numbers_never_spoil_a_scale(name: str, number: float) -> None:
    """Case 68: a page with one such number has finite scales; what was clipped is counted."""
    cache = PagedCache(DIMS, np.float16)
    cache.allocate_page(name)
    x = tokens(PAGE)
    x[0, 1, 5, 7] = number
    cache.write(0, x, 0)
    decoded, known = cache.page(0).decode(np.float32), formats.BUILTIN[name]
    assert np.isfinite(decoded[1]).all() and np.isfinite(decoded[0, 0]).all()
    if name in ("FLOAT16", "FLOAT32"):
        np.testing.assert_array_equal(decoded, x)
    if not known.is_float:
        assert np.isfinite(decoded).all()
        assert (cache.clipped > 0) is not bool(np.isfinite(number))


def test_clipped_numbers_are_counted() -> None:
    """Case 80."""
    cache = with_pages("FP8_E4M3")
    assert cache.clipped == 0
    cache.write(0, np.full((2, H, 3, D), 1000, np.float16), 0)
    assert cache.clipped == 2 * H * 3 * D and cache.page(0).decode().max() == 448


# -- what is read


def oracle(cache: PagedCache, pages: list[int], length: int, query: np.ndarray, left: int = -1):
    """Attention in float64 over decoded pages; the queries are the last tokens. (heads, n, D)."""
    k, v = np.concatenate([cache.page(p).decode(np.float64) for p in pages], axis=2)[:, :, :length]
    k, v = (np.repeat(a, len(query) // H, 0) for a in (k, v))
    scores = query.astype(np.float64) @ k.transpose(0, 2, 1) / np.sqrt(D)
    n = query.shape[1]
    at, token = np.arange(length - n, length)[:, None], np.arange(length)
    seen = np.ones((n, length), bool) if left < 0 else token >= at - left
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def test_attention_over_a_mixture_of_all_formats() -> None:
    """Case 82."""
    cache = with_pages(*formats.BUILTIN)
    pages = [int(p) for p in np.random.default_rng(1).permutation(len(cache))]
    query = np.random.default_rng(2).standard_normal((1, 4, 3, D), dtype=np.float32)
    length = len(pages) * PAGE - 5
    with session(attend).bind() as step:
        out = step.run(cache=cache, table=pages, query=query, length=[length])[0]
    np.testing.assert_allclose(out[0], oracle(cache, pages, length, query[0], 20), atol=2e-5)


def test_several_threads_give_what_one_gives() -> None:
    """Long contexts are split over threads, and joined."""
    pages, rng = 140, np.random.default_rng(5)
    cache, table = PagedCache(DIMS, np.float16), np.arange(pages)
    query = rng.standard_normal((1, 4, 1, D), dtype=np.float32)
    with session(append).bind(cache=cache) as step:
        step.run(table=table, values=tokens(pages * PAGE), position=0)
    for page in range(0, pages, 3):
        cache.convert(page, "INT8")
    for page in range(1, pages, 3):
        cache.convert(page, "INT4")
    expected = oracle(cache, list(cache), pages * PAGE - 3, query[0])

    @model
    def whole(
        cache: Pages, table: INT64["blocks"], query: FLOAT[1, 4, 1, D], length: INT64[()]
    ) -> FLOAT[1, 4, 1, D]:
        return kv.PagedAttention(query, cache, table, length)

    with Session(whole, threads=2).bind() as step:
        for _ in range(6):  # the first ones measure what one thread takes
            out = step.run(cache=cache, table=table, query=query, length=pages * PAGE - 3)[0]
            np.testing.assert_allclose(out[0], expected, atol=2e-5)


def test_only_tokens_that_were_written_are_read() -> None:
    """Case 52: what was cut off is not seen again."""
    cache = with_pages("FLOAT16", "FLOAT16")
    cache.write(1, np.full((2, H, PAGE, D), np.nan, np.float16), 0)
    query = np.ones((1, 4, 1, D), np.float32)
    with session(attend).bind() as step:
        cache.truncate(1, 3)
        with pytest.raises(errors.CapacityError) as caught:
            step.run(cache=cache, table=[0, 1], query=query, length=[36])
        assert (caught.value.length, caught.value.capacity) == (36, 35)
        cache.write(1, np.ones((2, H, 3, D), np.float16), 0)
        assert np.isfinite(step.run(cache=cache, table=[0, 1], query=query, length=[35])[0]).all()
        for length, error in ((-1, errors.CapacityError), (65, errors.CapacityError)):
            with pytest.raises(error):
                step.run(cache=cache, table=[0, 1], query=query, length=[length])


def test_pages_in_front_of_a_window_may_be_freed() -> None:
    """Case 64: a layer with a window keeps the pages of its window."""
    cache = with_pages(*["INT8"] * 4)
    query = np.random.default_rng(3).standard_normal((1, 4, 2, D), dtype=np.float32)
    length = 110
    expected = oracle(cache, [0, 1, 2, 3], length, query[0], 20)
    cache.free(0)
    cache.free(1)
    with session(attend).bind() as step:
        table = np.arange(4)
        out = step.run(cache=cache, table=table, query=query, length=[length])[0]
        np.testing.assert_allclose(out[0], expected, atol=2e-5)
        cache.free(2)
        with pytest.raises(errors.PageError) as caught:
            step.run(cache=cache, table=table, query=query, length=[length])
        assert caught.value.page == 2


def test_a_sequence_of_no_tokens_attends_to_nothing() -> None:
    """Case 65: zeros, not NaN."""
    query = np.ones((1, 4, 1, D), np.float32)
    with session(attend).bind() as step:
        out = step.run(cache=PagedCache(DIMS, np.float16), table=[3, 4], query=query, length=[0])
    assert not out[0].any()


# -- memory


def test_decoding_allocates_exactly_the_pages_that_it_fills() -> None:
    """Nothing else of the size of a page, and descriptors of a few bytes."""
    steps, page = 4096, F16
    query, table = np.ones((1, 4, 1, D), np.float32), np.arange(steps // PAGE)
    page_memory.shared.trim()
    cache = session(decode).allocate("cache")
    x = tokens(1)
    with session(decode).bind(cache=cache) as step:
        for position in range(3):  # buffers of the binding are made in its first runs
            step.run(table=table, query=query, values=x, position=position)
        cache.clear()
        page_memory.shared.trim()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for position in range(steps):
                step.run(table=table, query=query, values=x, position=position)
            after, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    pages = steps // PAGE
    assert len(cache) == pages and cache.nbytes == pages * page
    assert 0 <= after - before - pages * page < pages * 400 + 20_000
    assert peak - after < page


def test_an_update_of_pages_that_exist_allocates_nothing(peak_bytes) -> None:
    cache = with_pages(*["INT8"] * 8)
    x = tokens(200)
    with session(append).bind(cache=cache) as step:

        def run() -> None:
            step.run(table=np.arange(8), values=x, position=11)

        run()
        run()
        assert peak_bytes(run) < 10_000


# -- the author's line


def line_of(error: errors.PlacedError) -> str:
    file, _, line = str(error.location).partition(":")
    assert file == "test_paged_steps.py" and str(error).startswith(f"{error.location}: ")
    return Path(__file__).read_text().splitlines()[int(line) - 1]


def test_tokens_that_were_never_written_are_not_read() -> None:
    cache = with_pages("INT8", fill=5)
    with session(attend).bind() as step, pytest.raises(errors.UnwrittenTokens) as caught:
        step.run(cache=cache, table=[0], query=np.zeros((1, 4, 1, D), np.float32), length=[9])
    error = caught.value
    assert (error.length, error.capacity, error.batch) == (9, 5, None)
    assert "9 tokens are to be read, and only the first 5 were written" in str(error)
    assert "kv.PagedAttention(query, cache, table, length" in line_of(error)


@model
def late(
    cache: Mutable[Pages], table: INT64["blocks"], values: Values, query: FLOAT[1, 4, 1, D]
) -> tuple[FLOAT[1, 4, 1, D], Alias["cache"]]:
    updated = kv.PagedCacheUpdate(cache, table, values, 0, quantized_type="INT8")
    first = op.Cast(op.ReduceMax(kv.PageGather(updated, 0), keepdims=0), to=7)
    return kv.PagedAttention(query, updated, table, op.Reshape(first, [1])), updated


def test_what_is_found_at_a_step_has_its_line_too() -> None:
    """The length is content that the run itself has written."""
    cache = PagedCache(DIMS, np.float16)
    values = np.full((2, H, 3, D), 7, np.float16)
    with session(late).bind(cache=cache) as step, pytest.raises(errors.UnwrittenTokens) as caught:
        step.run(table=[0], values=values, query=np.zeros((1, 4, 1, D), np.float32))
    assert (caught.value.length, caught.value.capacity) == (7, 3)
    assert "kv.PagedAttention(query, updated" in line_of(caught.value)


@pytest.mark.parametrize(
    ("page", "position", "kind"), [(0, 31, errors.CapacityError), (7, 0, errors.PageError)]
)
def test_a_write_that_cannot_be_names_its_line(
    page: int, position: int, kind: type[errors.PlacedError]
) -> None:
    cache = with_pages("INT8")
    with session(write).bind(cache=cache) as step, pytest.raises(kind) as caught:
        step.run(page=page, values=tokens(2), position=position)
    assert "kv.PagedCacheUpdate(cache, page, values, position" in line_of(caught.value)
