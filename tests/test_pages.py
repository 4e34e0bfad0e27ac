"""A paged cache as its owner sees it: pages come, go, change, and nothing else moves."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from onnx_inplace.compiler import errors, formats
from onnx_inplace.compiler.contract import Access
from onnx_inplace.runner import page_memory
from onnx_inplace.runner.page import Use
from onnx_inplace.runner.page_memory import PageMemory
from onnx_inplace.runner.pages import PagedCache

DIMS = 2, 2, 32, 64
F16 = formats.FLOAT16.page_bytes(DIMS)
F8 = formats.FP8_E4M3.page_bytes(DIMS)


@pytest.fixture
def memory() -> PageMemory:
    return PageMemory()


@pytest.fixture
def cache(memory: PageMemory) -> PagedCache:
    return PagedCache(DIMS, np.float16, memory=memory)


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 2, n, 64)).astype(np.float16)


def filled(cache: PagedCache, *names: str) -> list[int]:
    """Full pages of these formats."""
    made = []
    for seed, name in enumerate(names):
        made.append(cache.allocate_page(name))
        cache.write(made[-1], tokens(32, seed), 0)
    return made


class Failing(PageMemory):
    """The system has no more memory after some pages."""

    def __init__(self, pages: int):
        super().__init__(keep=0)
        self.left = pages

    def _one(self, size: int, zeroed: bool) -> np.ndarray:
        self.left -= 1
        if self.left < 0:
            raise MemoryError
        return super()._one(size, zeroed)


# -- pages and ids


def test_a_new_cache_takes_no_memory(cache: PagedCache) -> None:
    assert len(cache) == 0 and cache.nbytes == 0 and list(cache) == []


def test_a_page_is_aligned_zero_and_has_one_owner(cache: PagedCache) -> None:
    page = cache.page(cache.allocate_page("FLOAT16"))
    assert (page.quantized_type, page.fill, page.owners, page.nbytes) == ("FLOAT16", 0, 1, F16)
    assert page.address % 64 == 0 and not page.raw.any() and not page.decode().any()
    assert cache.nbytes == F16


def test_pages_decode_to_the_element_type(cache: PagedCache) -> None:
    (page,) = filled(cache, "BFLOAT16")
    assert cache.page(page).decode().dtype == np.float16
    assert cache.page(page).decode(np.float64).dtype == np.float64
    assert cache.page(page).decode().shape == DIMS


def test_tokens_are_written_at_any_place_and_counted(cache: PagedCache) -> None:
    page, values = cache.allocate_page("FLOAT16"), tokens(32)
    cache.write(page, values[:, :, 20:25], 20)
    assert cache.page(page).fill == 25
    cache.write(page, values[:, :, :20], 0)
    assert cache.page(page).fill == 25
    expected = np.where(np.arange(32)[:, None] < 25, values, 0)
    np.testing.assert_array_equal(cache.page(page).decode(), expected)


@pytest.mark.parametrize("position, length", [(-1, 1), (32, 1), (30, 3), (0, 33), (2**62, 1)])
def test_tokens_that_leave_the_page_are_refused(
    cache: PagedCache, position: int, length: int
) -> None:
    (page,) = filled(cache, "FLOAT16")
    before = cache.snapshot()
    with pytest.raises(errors.CapacityError) as caught:
        cache.write(page, tokens(length), position)
    assert (caught.value.position, caught.value.length) == (position, length)
    assert caught.value.capacity == 32 and cache.snapshot() == before


def test_nothing_may_be_written_right_behind_the_last_token(cache: PagedCache) -> None:
    (page,) = filled(cache, "FLOAT16")
    cache.write(page, tokens(0), 32)
    assert cache.page(page).fill == 32


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((2, 2, 1, 63), np.float16),
        np.zeros((2, 1, 1, 64), np.float16),
        np.zeros((2, 2, 64), np.float16),
        np.zeros((2, 2, 1, 64), np.float64),
        np.zeros((2, 2, 1, 64), np.uint16),
    ],
)
def test_values_of_another_kind_are_refused(cache: PagedCache, values: np.ndarray) -> None:
    """Case 74: bits of one float type are never taken for those of another."""
    (page,) = filled(cache, "FLOAT16")
    with pytest.raises(errors.StorageMismatch):
        cache.write(page, values, 0)


def test_numbers_are_converted_not_reinterpreted(cache: PagedCache) -> None:
    """Case 74."""
    page = cache.allocate_page("BFLOAT16")
    cache.write(page, np.full((2, 2, 1, 64), 1.5, np.float16), 0)
    assert (cache.page(page).decode()[:, :, 0] == 1.5).all()


def test_dense_ids_are_given_in_order_and_holes_first(cache: PagedCache) -> None:
    assert cache.allocate_pages(4, "FLOAT16") == [0, 1, 2, 3]
    cache.free(1)
    assert list(cache) == [0, 2, 3] and len(cache) == 4 and 1 not in cache
    assert cache.allocate_pages(2, "FLOAT16") == [1, 4]


def test_freeing_the_last_page_shortens_a_dense_cache(cache: PagedCache) -> None:
    cache.allocate_pages(4, "FLOAT16")
    cache.free(2)
    cache.free(3)
    assert len(cache) == 2


def test_dense_ids_have_no_gaps(cache: PagedCache) -> None:
    for page in (1, -1, 2**63):
        with pytest.raises(errors.PageError) as caught:
            cache.allocate_page("FLOAT16", page)
        assert caught.value.page == page
    assert cache.allocate_page("FLOAT16", 0) == 0


def test_sparse_ids_are_any_int64() -> None:
    cache = PagedCache(DIMS, np.float16, sparse_ids=True)
    ids = [7, -(2**63), 2**63 - 1, -1, 0]
    for page in ids:
        assert cache.allocate_page("FLOAT16", page) == page
    assert list(cache) == sorted(ids) and len(cache) == 5
    cache.free(-1)
    assert cache.allocate_page("FLOAT16") == 1, "the smallest that is free, from 0 on"
    rows = cache.store.table.ids.rows(np.array([0, 5, -1, 7, -(2**63)]))
    assert (rows >= 0).tolist() == [True, False, False, True, True]
    with pytest.raises(errors.PageError):
        cache.allocate_page("FLOAT16", 2**63)


def test_an_id_that_is_taken_is_refused(cache: PagedCache) -> None:
    (page,) = filled(cache, "FLOAT16")
    before = cache.snapshot()
    with pytest.raises(errors.PageError):
        cache.allocate_page("FLOAT16", page)
    assert cache.snapshot() == before


@pytest.mark.parametrize("page", [-1, 2, 5, 2**63])
def test_a_missing_page_is_an_error_everywhere(cache: PagedCache, page: int) -> None:
    filled(cache, "FLOAT16", "FLOAT16")
    for use in (
        cache.page,
        cache.free,
        cache.share,
        cache.release,
        cache.copy_page,
        lambda p: cache.convert(p, "FLOAT16"),
        lambda p: cache.write(p, tokens(1), 0),
    ):
        with pytest.raises(errors.PageError) as caught:
            use(page)
        assert caught.value.page == page and caught.value.cache == "cache"


def test_a_page_that_was_looked_up_is_gone_when_it_was_freed(cache: PagedCache) -> None:
    page = cache.page(cache.allocate_page("FLOAT16"))
    cache.free(page.id)
    with pytest.raises(errors.PageError):
        page.decode()
    assert "freed" in repr(page)


# -- formats


def test_formats_may_be_limited() -> None:
    cache = PagedCache(DIMS, np.float16, [formats.FLOAT16, formats.FP8_E4M3])
    cache.allocate_page(formats.FP8_E4M3)
    for format in ("INT8", formats.INT8, "unknown"):
        with pytest.raises(errors.PageError):
            cache.allocate_page(format)


def test_another_format_of_the_same_name_is_not_the_same() -> None:
    cache = PagedCache(DIMS, np.float16)
    other = formats.PageFormat("FLOAT16", formats.FLOAT32.key, formats.FLOAT32.value)
    with pytest.raises(errors.PageError):
        cache.allocate_page(other)


def test_a_format_that_cannot_store_the_pages_is_refused_at_once() -> None:
    with pytest.raises(errors.FormatError):
        PagedCache((2, 2, 96, 64), np.float16, [formats.INT4])
    with pytest.raises(errors.FormatError):
        PagedCache((2, 2, 32, 15), np.float16)


def test_one_page_is_converted_the_others_keep_address_and_bytes(cache: PagedCache) -> None:
    filled(cache, "FLOAT16", "FLOAT16", "FLOAT16")
    others = {p: (cache.page(p).address, cache.page(p).raw.tobytes()) for p in (0, 2)}
    values = cache.page(1).decode()
    cache.convert(1, formats.FP8_E4M3)
    assert cache.page(1).quantized_type == "FP8_E4M3" and cache.page(1).fill == 32
    np.testing.assert_allclose(cache.page(1).decode(), values, rtol=0.07, atol=0.002)
    assert {p: (cache.page(p).address, cache.page(p).raw.tobytes()) for p in (0, 2)} == others
    assert cache.nbytes == 2 * F16 + F8


def test_a_format_of_the_same_size_is_written_where_the_page_lies(cache: PagedCache) -> None:
    (page,) = filled(cache, "FLOAT16")
    place, values = cache.page(page).address, cache.page(page).decode()
    cache.convert(page, "BFLOAT16")
    assert cache.page(page).address == place
    np.testing.assert_allclose(cache.page(page).decode(), values, rtol=0.01)


def test_conversion_to_the_same_format_changes_no_byte(cache: PagedCache) -> None:
    (page,) = filled(cache, "FLOAT16")
    place, before = cache.page(page).address, cache.snapshot()
    cache.convert(page, "FLOAT16")
    assert cache.snapshot() == before and cache.page(page).address == place


def test_conversion_allocates_that_page_and_nothing_of_its_size(memory: PageMemory) -> None:
    dims = 2, 4, 256, 128
    cache = PagedCache(dims, np.float16, memory=memory)
    page = cache.allocate_page("FLOAT16")
    cache.write(page, np.ones((2, 4, 256, 128), np.float16), 0)
    cache.convert(cache.copy_page(page), "FP8_E4M3")  # a first use may load code
    size = formats.FP8_E4M3.page_bytes(dims)
    memory.trim()
    tracemalloc.start()
    try:
        cache.convert(page, "FP8_E4M3")
        assert tracemalloc.get_traced_memory()[1] < size + 20_000
    finally:
        tracemalloc.stop()


# -- owners


def test_a_shared_page_is_not_written_nor_freed(cache: PagedCache) -> None:
    (page,) = filled(cache, "FLOAT16")
    cache.share(page)
    before = cache.snapshot()
    for use in (lambda: cache.write(page, tokens(1), 0), lambda: cache.free(page)):
        with pytest.raises(errors.PageError):
            use()
    assert cache.snapshot() == before and cache.page(page).owners == 2
    assert not cache.release(page) and cache.release(page) and page not in cache


def test_a_copy_has_the_bytes_and_one_owner(cache: PagedCache) -> None:
    """Case 109: a copy on write takes one page; the other owners' bytes stay."""
    (page,) = filled(cache, "FP8_E4M3")
    cache.share(page)
    before = cache.page(page).raw.tobytes()
    copy = cache.copy_page(page)
    assert cache.page(copy).raw.tobytes() == before and cache.page(copy).fill == 32
    assert (cache.page(copy).owners, cache.page(page).owners) == (1, 2)
    assert cache.nbytes == 2 * F8
    cache.write(copy, tokens(1, 9), 3)
    assert cache.page(page).raw.tobytes() == before


# -- refused, or without memory: everything is as it was


def test_a_budget_refuses_before_anything_changes(memory: PageMemory) -> None:
    cache = PagedCache(DIMS, np.float16, budget=2 * F16 + F8, memory=memory)
    filled(cache, "FLOAT16", "FP8_E4M3")
    before = cache.snapshot()
    for use in (
        lambda: cache.allocate_pages(2, "FLOAT16"),
        lambda: cache.convert(1, "FLOAT32"),
        lambda: [cache.copy_page(0), cache.copy_page(0)],
    ):
        with pytest.raises(errors.PageBudget) as caught:
            use()
        assert caught.value.budget == 2 * F16 + F8 and not caught.value.never
        while len(cache) > 2:
            cache.free(len(cache) - 1)
        assert cache.snapshot() == before
    with pytest.raises(errors.PageBudget) as caught:
        cache.allocate_pages(3, "FLOAT16")
    assert caught.value.never
    cache.convert(1, "FLOAT16")
    assert cache.nbytes == 2 * F16


@pytest.mark.parametrize("pages", range(3))
def test_without_memory_the_cache_is_as_it_was(pages: int) -> None:
    cache = PagedCache(DIMS, np.float16, memory=Failing(2 + pages))
    filled(cache, "FLOAT16", "FP8_E4M3")
    before = cache.snapshot()
    places = [cache.page(p).address for p in cache]
    with pytest.raises(MemoryError):
        cache.allocate_pages(3, "FLOAT16")
    cache.store.memory.left = 0
    for use in (lambda: cache.convert(0, "FP8_E4M3"), lambda: cache.copy_page(1)):
        with pytest.raises(MemoryError):
            use()
    assert cache.snapshot() == before and [cache.page(p).address for p in cache] == places


def test_growth_moves_descriptors_only(cache: PagedCache) -> None:
    filled(cache, "FLOAT16")
    place = cache.page(0).address
    cache.allocate_pages(300, "FP8_E4M3")
    assert cache.page(0).address == place
    assert len({cache.page(p).address for p in cache}) == 301


# -- memory


def test_freed_pages_serve_pages_of_their_size_and_are_zeroed(
    cache: PagedCache, memory: PageMemory
) -> None:
    (page,) = filled(cache, "FLOAT16")
    place = cache.page(page).address
    cache.free(page)
    assert memory.kept == F16
    cache.allocate_page("FP8_E4M3")
    other = cache.page(cache.allocate_page("BFLOAT16"))
    assert other.address == place and not other.raw.any() and memory.kept == 0


def test_pages_of_one_size_lie_side_by_side(memory: PageMemory) -> None:
    """Of all caches: a reader meets a new huge frame every 2 MiB, not a new frame in each page."""
    dims = 2, 3, 32, 80  # of no other test: nothing lies between
    caches = [PagedCache(dims, np.float16, memory=memory) for _ in range(2)]
    places = [c.page(c.allocate_page("INT8")).address for _ in range(4) for c in caches]
    size = formats.INT8.page_bytes(dims)
    assert set(np.diff(places)) == {-(-size // 64) * 64}


def test_what_is_kept_is_limited_and_given_back_on_demand(memory: PageMemory) -> None:
    memory.keep = 3 * F16
    cache = PagedCache(DIMS, np.float16, memory=memory)
    cache.allocate_pages(5, "FLOAT16")
    cache.clear()
    assert memory.kept == 3 * F16
    assert memory.trim(F16) == 2 * F16 and cache.trim() == F16 and memory.kept == 0


def test_a_view_shows_the_page_is_read_only_and_outlives_it(
    cache: PagedCache, memory: PageMemory
) -> None:
    (page,) = filled(cache, "FLOAT16")
    view = cache.page(page).raw
    assert view.dtype == np.uint8 and view.shape == (F16,) and not view.flags.writeable
    cache.write(page, tokens(1, 5), 0)
    assert view[:128].tobytes() == tokens(1, 5)[0, 0].tobytes()
    held = view.tobytes()
    cache.free(page)
    again = cache.page(cache.allocate_page("FLOAT16"))
    assert memory.kept == 0 and again.address != view.__array_interface__["data"][0]
    cache.write(0, tokens(32, 7), 0)
    assert view.tobytes() == held, "memory of a page that is held is never used again"


def test_a_view_outlives_a_conversion_and_the_cache(memory: PageMemory) -> None:
    cache = PagedCache(DIMS, np.float16, memory=memory)
    (page,) = filled(cache, "FLOAT16")
    view = cache.page(page).raw
    held = view.tobytes()
    cache.convert(page, "FP8_E4M3")
    cache.allocate_page("FLOAT16")
    del cache
    gc.collect()
    assert view.tobytes() == held


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is Linux's")
@pytest.mark.parametrize("heads", [1, 64], ids=["small pages", "large pages"])
def test_freed_memory_goes_back_to_the_system(heads: int) -> None:
    dims = 2, heads, 32, 64
    cache = PagedCache(dims, np.float32, memory=PageMemory(keep=1 << 20))
    count = (100 << 20) // formats.FLOAT16.page_bytes(dims)
    cache.allocate_pages(count, "FLOAT16")
    for page in cache:
        cache.store.block(page)[:] = 1
    before = resident()
    for page in list(cache)[: count // 2 * 2 : 2]:  # every other one: holes, not an end
        cache.free(page)
    cache.trim()
    assert before - resident() > (20 if heads == 1 else 40) << 20  # of small ones whole frames only


def test_a_cache_that_is_dropped_frees_its_pages() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        cache = PagedCache(DIMS, np.float16, memory=PageMemory())
        cache.allocate_pages(100, "FLOAT16")
        assert tracemalloc.get_traced_memory()[0] - before > 100 * F16
        del cache
        assert tracemalloc.get_traced_memory()[0] - before < F16, "without a collection"
    finally:
        tracemalloc.stop()


# -- values, threads


def test_snapshots_compare_values_not_places(memory: PageMemory) -> None:
    first, second = (PagedCache(DIMS, np.float16, memory=memory) for _ in range(2))
    filled(first, "FLOAT16", "FP8_E4M3")
    filled(second, "FLOAT16", "FP8_E4M3")
    assert first.snapshot() == second.snapshot()
    second.share(0)
    assert first.snapshot() != second.snapshot()
    second.release(0)
    second.store.block(1)[7] ^= 1
    assert first.snapshot() != second.snapshot()


@pytest.mark.parametrize("access", Access)
def test_the_owner_waits_for_the_end_of_a_run(cache: PagedCache, access: Access) -> None:
    filled(cache, "FLOAT16", "FLOAT16")
    step = Use("step")
    cache.begin(step, access)
    for use in (
        lambda: cache.convert(0, "FP8_E4M3"),
        lambda: cache.free(0),
        lambda: cache.page(0).decode(),
        lambda: cache.page(0).raw,
        lambda: cache.write(0, tokens(1), 0),
        lambda: cache.allocate_page("FLOAT16"),
        cache.snapshot,
        cache.clear,
    ):
        with pytest.raises(errors.BindingInUse) as caught:
            use()
        assert caught.value.holder == "step"
    cache.end(step)
    cache.convert(0, "FP8_E4M3")


def test_runs_that_read_go_together_a_run_that_writes_goes_alone(cache: PagedCache) -> None:
    first, second, writer = Use("first"), Use("second"), Use("writer")
    cache.begin(first, Access.READ_ONLY)
    cache.begin(second, Access.READ_ONLY)
    cache.end(first)
    with pytest.raises(errors.BindingInUse):
        cache.begin(writer, Access.READ_WRITE)
    cache.end(second)
    cache.begin(writer, Access.READ_WRITE)
    with pytest.raises(errors.BindingInUse):
        cache.begin(Use("reader"), Access.READ_ONLY)
    del writer  # its run is gone, whatever has become of its end
    cache.begin(Use("last"), Access.READ_WRITE)


def test_many_threads_get_different_pages(cache: PagedCache) -> None:
    found: list[int] = []

    def take() -> None:
        found.extend(cache.allocate_page("FP8_E4M3") for _ in range(50))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(200)) and cache.nbytes == 200 * F8


def test_caches_share_the_memory_of_freed_pages() -> None:
    first, second = PagedCache(DIMS, np.float16), PagedCache(DIMS, np.float16)
    page_memory.shared.trim()
    filled(first, "FLOAT16")
    place = first.page(0).address
    first.free(0)
    assert second.page(second.allocate_page("FLOAT16")).address == place


@pytest.mark.parametrize("elem_type", [np.int8, np.int32, np.float64, bool])
def test_pages_decode_to_floats_that_kernels_have(elem_type: Any) -> None:
    """A file of such a cache could not be loaded: it is refused when it is made."""
    with pytest.raises(ValueError, match="FLOAT, FLOAT16 or BFLOAT16"):
        PagedCache(DIMS, elem_type)


@pytest.mark.parametrize("dims", [(1, *DIMS[1:]), DIMS[1:], (*DIMS, 1)])
def test_a_page_is_keys_and_values(dims: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"K and V|\[2, heads, page_size, head_size\]"):
        PagedCache(dims, np.float16)


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        PagedCache(DIMS, np.float16, budget=-1)
    cache = PagedCache(DIMS, np.float16, budget=F16)
    with pytest.raises(ValueError, match="-1 bytes"):
        cache.budget = -1
    assert cache.budget == F16
