"""Sequences on shared pages: each operation, what it costs, and what it refuses."""

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

from onnx_inplace import Session
from onnx_inplace.compiler import errors, formats
from onnx_inplace.dsl import FLOAT, FLOAT16, INT64, Alias, Mutable, Paged, kv, model
from onnx_inplace.runner import checkpoint, relocation
from onnx_inplace.runner.costs import FREE, Cost
from onnx_inplace.runner.pages import PagedCache
from onnx_inplace.runner.sequence import Sequence
from onnx_inplace.runner.sequences import NO_PAGE, SequencePool

PAGE, SIZE = 16, 32
DIMS = 2, 1, PAGE, SIZE
BYTES = formats.FLOAT16.page_bytes(DIMS)


def a_pool(caches: int = 1, **options: object) -> SequencePool:
    made = [PagedCache(DIMS, np.float16, name=f"cache{k}") for k in range(caches)]
    return SequencePool(made, **options)  # type: ignore[arg-type]


def write(sequence: Sequence, tokens: list[int]) -> None:
    with sequence.writing(len(tokens)):
        put(sequence, tokens)


def put(sequence: Sequence, tokens: list[int]) -> None:
    for k, token in enumerate(tokens):
        page, place = divmod(sequence.length + k, PAGE)
        for cache in sequence.pool.caches:
            cache.write(sequence.pages[page], np.full((2, 1, 1, SIZE), token, np.float16), place)


def read(sequence: Sequence, cache: int = 0) -> list[int]:
    pages = [sequence.pool.caches[cache].page(p).decode()[0, 0, :, 0] for p in sequence.pages]
    return [round(x) for page in pages for x in page.tolist()][: sequence.length]


def a_text(pool: SequencePool, length: int) -> Sequence:
    sequence = pool.new()
    write(sequence, list(range(length)))
    return sequence


# -- writing


def test_a_sequence_gets_pages_as_it_grows() -> None:
    sequence = a_text(pool := a_pool(2), 20)
    assert sequence.length == 20 and len(sequence.pages) == 2
    assert read(sequence, 0) == read(sequence, 1) == list(range(20))
    assert pool.nbytes == 2 * 2 * BYTES


def test_a_commit_cuts_the_pages_that_have_more_and_no_others() -> None:
    sequence = a_text(pool := a_pool(3), 5)
    sequence.reserve(4)
    (page,) = sequence.pages
    for cache in (pool.caches[0], pool.caches[2]):
        cache.write(page, np.ones((2, 1, 4, SIZE), np.float16), 5)
    sequence.commit(1)
    assert [cache.page(page).fill for cache in pool.caches] == [6, 5, 6]
    assert read(sequence, 0) == read(sequence, 2) == [0, 1, 2, 3, 4, 1]


def test_what_is_committed_is_kept_and_the_rest_is_given_back() -> None:
    pool = a_pool()
    sequence = a_text(pool, 10)
    sequence.reserve(40)
    put(sequence, list(range(10, 50)))
    sequence.commit(3)
    assert sequence.length == 13 and pool.pages.used == 1
    assert pool.caches[0].page(sequence.pages[0]).fill == 13


def test_a_run_that_fails_is_rolled_back() -> None:
    pool = a_pool()
    sequence = a_text(pool, 10)
    twin = sequence.fork()
    with pytest.raises(ZeroDivisionError), sequence.writing(30):
        put(sequence, [7] * 30)
        raise ZeroDivisionError
    assert read(sequence) == list(range(10)) and sequence.pages == twin.pages
    assert pool.pages.used == 1


def test_a_batch_is_reserved_whole_or_not_at_all() -> None:
    pool = a_pool(max_pages=3)
    rows = [a_text(pool, 16), a_text(pool, 16)]
    with pytest.raises(errors.PoolExhausted), pool.writing(rows, 1):
        raise AssertionError("no room for two more pages")
    assert pool.pages.used == 2 and [row.reserved for row in rows] == [0, 0]


def test_a_sequence_that_is_being_written_is_left_alone() -> None:
    sequence = a_text(a_pool(), 3)
    with sequence.writing(1):
        for operation in (sequence.fork, lambda: sequence.truncate(0), lambda: sequence.reserve(1)):
            with pytest.raises(errors.PageError, match="being written"):
                operation()


def test_block_tables_of_a_batch_have_one_width_and_name_no_page_behind_the_end() -> None:
    pool = a_pool()
    rows = [a_text(pool, 20), a_text(pool, 3)]
    batch = pool.batch(rows, blocks=4)
    assert batch.block_table.tolist() == [[0, 1, NO_PAGE, NO_PAGE], [2, NO_PAGE, NO_PAGE, NO_PAGE]]
    assert batch.position.tolist() == [20, 3]
    with pytest.raises(ValueError, match="1 blocks for 2 pages"):
        pool.batch(rows, blocks=1)


# -- sharing


def test_a_fork_copies_nothing_and_the_first_write_copies_one_page() -> None:
    pool = a_pool()
    parent = a_text(pool, 20)
    assert parent.cost.fork() == FREE
    child = parent.fork()
    assert pool.pages.used == 2
    assert child.cost.reserve(1) == Cost(pages=1, allocated=BYTES, copied=BYTES)
    write(child, [99])
    assert pool.pages.used == 3 and child.pages[0] == parent.pages[0]
    assert read(parent) == list(range(20)) and read(child) == [*range(20), 99]


def test_a_fork_at_the_end_of_a_page_copies_nothing_at_all() -> None:
    parent = a_text(a_pool(), PAGE)
    child = parent.fork()
    assert child.cost.reserve(1) == Cost(pages=1, allocated=BYTES)


def test_a_child_does_not_move_the_counters_of_its_parent() -> None:
    parent = a_text(a_pool(), 5)
    before = parent.pool.batch([parent])
    write(child := parent.fork(), [1, 2, 3])
    assert parent.length == 5 and child.length == 8
    assert before.position.tolist() == [5]
    assert not np.shares_memory(before.position, parent.pool.batch([child]).position)


def test_a_child_outlives_its_parent() -> None:
    """Case 59; a thousand operations more in ``test_sequences_machine``."""
    parent = a_text(a_pool(), 20)
    child = parent.fork()
    parent.free()
    assert read(child) == list(range(20))
    with pytest.raises(errors.PageError, match="freed"):
        parent.fork()


def test_beams_are_reordered_by_their_tables() -> None:
    pool = a_pool()
    beams = [a_text(pool, 18 + k) for k in range(4)]
    texts = [read(beam) for beam in beams]
    raw = {p: bytes(pool.caches[0].page(p).raw) for beam in beams for p in beam.pages}
    for _ in range(50):
        pool.reorder(beams, [2, 0, 1, 1])
        texts = [texts[i] for i in (2, 0, 1, 1)]
        assert [read(beam) for beam in beams] == texts
    assert all(bytes(pool.caches[0].page(p).raw) == raw[p] for b in beams for p in b.pages)


@pytest.mark.parametrize("indices", [[0], [0, 2], [-1, 0]])
def test_indices_of_a_reorder_are_rows(indices: list[int]) -> None:
    pool = a_pool()
    beams = [a_text(pool, 3), a_text(pool, 4)]
    with pytest.raises(ValueError, match="indices"):
        pool.reorder(beams, indices)
    assert [beam.length for beam in beams] == [3, 4]


# -- cutting


def test_truncation_frees_whole_pages_and_hides_the_rest() -> None:
    sequence = a_text(a_pool(), 40)
    assert sequence.cost.truncate(20) == Cost(freed=BYTES)
    sequence.truncate(20)
    assert read(sequence) == list(range(20))
    write(sequence, [77])
    assert read(sequence) == [*range(20), 77]


def test_whole_pages_are_dropped_without_moving_anything() -> None:
    pool = a_pool()
    sequence = a_text(pool, 60)
    pages = sequence.pages
    assert sequence.cost.drop(16, 48) == Cost(freed=2 * BYTES)
    sequence.drop(16, 48)
    assert sequence.pages == (pages[0], pages[3])
    assert read(sequence) == [*range(16), *range(48, 60)]
    batch = pool.batch([sequence])
    assert batch.position.tolist() == [28] and batch.rotary_position.tolist() == [60]


def test_a_drop_of_whole_pages_elsewhere_makes_one_page() -> None:
    sequence = a_text(a_pool(), 60)
    cost = sequence.cost.drop(5, 5 + 2 * PAGE)
    assert cost == Cost(pages=1, allocated=BYTES, recoded=BYTES, freed=3 * BYTES)
    sequence.drop(5, 5 + 2 * PAGE)
    assert read(sequence) == [*range(5), *range(37, 60)]


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (3, 10), (15, 17), (0, 60), (59, 60), (7, 7)])
def test_any_range_can_be_dropped(start: int, stop: int) -> None:
    sequence = a_text(a_pool(2), 60)
    twin = sequence.fork()
    sequence.drop(start, stop)
    for cache in (0, 1):
        assert read(sequence, cache) == [*range(start), *range(stop, 60)]
        assert read(twin, cache) == list(range(60))


def test_a_drop_without_room_changes_nothing() -> None:
    sequence = a_text(pool := a_pool(max_pages=4), 60)
    with pytest.raises(errors.PoolExhausted):
        sequence.drop(3, 10)
    assert read(sequence) == list(range(60)) and pool.pages.used == 4 and sequence.dropped == 0


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (5, 4), (0, 61)])
def test_a_range_that_is_none_is_refused(start: int, stop: int) -> None:
    sequence = a_text(a_pool(), 60)
    for operation in (sequence.drop, sequence.cost.drop):
        with pytest.raises(ValueError, match="of a sequence of 60"):
            operation(start, stop)


# -- positions


def test_keys_are_turned_as_if_they_had_been_written_elsewhere() -> None:
    rng = np.random.default_rng(0)
    raw = rng.standard_normal((1, 20, SIZE)).astype(np.float32)
    places = np.arange(20)

    def turned(at: np.ndarray) -> np.ndarray:  # float64, from the definition
        half = SIZE // 2
        angle = at[:, None] * 10000.0 ** (-np.arange(half) / half)
        a, b = raw[..., :half].astype(np.float64), raw[..., half:].astype(np.float64)
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
        )

    cache = PagedCache(DIMS, np.float32)
    pool = SequencePool(cache, "FLOAT32")
    sequence = pool.new()
    with sequence.writing(20):
        for k in range(20):
            value = np.stack([turned(places)[:, k : k + 1], raw[:, k : k + 1]]).astype(np.float32)
            cache.write(sequence.pages[k // PAGE], value, k % PAGE)
    twin = sequence.fork()
    assert sequence.cost.recode_keys(10, 20).pages == 2
    sequence.recode_keys(10, 20, relocation.rotary_shift(-7))
    found = np.concatenate([cache.page(p).decode() for p in sequence.pages], axis=2)[:, :, :20]
    expected = turned(np.where(places >= 10, places - 7, places))
    np.testing.assert_allclose(found[0], expected, atol=1e-5)
    np.testing.assert_array_equal(found[1], raw)
    before = np.concatenate([cache.page(p).decode() for p in twin.pages], axis=2)[:, :, :20]
    np.testing.assert_allclose(before[0], turned(places), atol=1e-6)


def test_keys_of_another_shape_change_nothing() -> None:
    sequence = a_text(pool := a_pool(), 20)
    with pytest.raises(ValueError, match="new keys"):
        sequence.recode_keys(0, 20, lambda keys, places: keys[:, :1])
    assert read(sequence) == list(range(20)) and pool.pages.used == 2


# -- room


def test_not_now_and_never_are_different() -> None:
    pool = a_pool(max_pages=4)
    first, second = a_text(pool, 40), pool.new()
    with pytest.raises(errors.PoolExhausted) as now:
        second.reserve(30)
    assert (now.value.needed, now.value.available) == (2, 1)
    with pytest.raises(errors.PoolTooSmall) as never:
        second.reserve(5 * PAGE)
    assert (never.value.needed, never.value.limit) == (5, 4)
    first.free()
    second.reserve(30)


def test_a_budget_in_bytes_speaks_the_same_language() -> None:
    cache = PagedCache(DIMS, np.float16, budget=2 * BYTES)
    pool = SequencePool(cache)
    a_text(pool, 20)
    with pytest.raises(errors.PoolExhausted):
        pool.new().reserve(1)
    small = SequencePool(PagedCache(DIMS, np.float16, budget=BYTES - 1))
    with pytest.raises(errors.PoolTooSmall):
        small.new().reserve(1)


def test_a_layer_without_memory_leaves_all_layers_as_they_were() -> None:
    caches = [PagedCache(DIMS, np.float16), PagedCache(DIMS, np.float16, budget=3 * BYTES)]
    pool = SequencePool(caches)
    sequence = a_text(pool, 20)
    with pytest.raises(errors.PoolExhausted):
        sequence.reserve(30)
    assert [len(cache) for cache in caches] == [2, 2] and sequence.reserved == 0
    sequence.reserve(10)


def test_a_page_written_best_as_a_whole_is_opened_again_for_more_tokens() -> None:
    sequence = a_text(pool := a_pool(), 20)
    sequence.truncate(16)
    pool.caches[0].convert(sequence.pages[0], "INT4")
    sequence.truncate(10)
    assert sequence.cost.reserve(1).recoded == BYTES
    write(sequence, [3])
    assert pool.caches[0].page(sequence.pages[0]).quantized_type == "FLOAT16"
    assert sequence.length == 11


def test_a_pool_begins_with_empty_caches_of_one_page_size() -> None:
    with pytest.raises(ValueError, match="one size"):
        SequencePool([PagedCache(DIMS), PagedCache((2, 1, 32, SIZE))])
    cache = PagedCache(DIMS)
    with pytest.raises(ValueError, match="each once"):
        SequencePool([cache, cache])
    cache.allocate_page("FLOAT32")
    with pytest.raises(ValueError, match="has pages already"):
        SequencePool(cache)


# -- prefixes


def test_a_prompt_that_is_known_begins_with_its_pages() -> None:
    pool = a_pool()
    tokens = list(range(40))
    first = a_text(pool, 40)
    assert pool.publish(first, tokens) == 2
    second = pool.new([*tokens[:35], 1000])
    assert second.length == 32 and second.pages == first.pages[:2]
    assert pool.pages.used == 3


def test_one_token_of_a_prompt_is_always_left_to_compute() -> None:
    pool = a_pool()
    pool.publish(a_text(pool, 32), list(range(32)))
    assert pool.new(range(32)).length == 16


def test_equal_tokens_after_another_beginning_are_another_text() -> None:
    pool = a_pool()
    pool.publish(a_text(pool, 32), list(range(32)))
    assert pool.new([5] * 16 + list(range(16, 40))).length == 0


def test_a_hash_that_lies_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 107."""
    monkeypatch.setattr("onnx_inplace.runner.prefixes._hash", lambda before, tokens: b"same")
    pool = a_pool()
    pool.publish(a_text(pool, 16), list(range(16)))
    assert pool.new([7] * 40).length == 0
    assert pool.publish(a_text(pool, 16), [3] * 16) == 0


def test_known_pages_outlive_their_sequence_and_go_when_room_is_needed() -> None:
    pool = a_pool(max_pages=3)
    for beginning in (0, 100):
        sequence = pool.new()
        write(sequence, list(range(beginning, beginning + 16)))
        pool.publish(sequence, list(range(beginning, beginning + 16)))
        sequence.free()
    assert pool.pages.used == 2
    pool.new(range(17)).free()  # found last
    third = pool.new()
    write(third, [1] * 32)
    assert pool.new(range(17)).length == 16
    assert pool.new(range(100, 117)).length == 0


def test_known_pages_are_never_written() -> None:
    pool = a_pool()
    first = a_text(pool, 16)
    pool.publish(first, list(range(16)))
    first.truncate(10)
    write(first, [99])
    assert read(pool.new(range(17))) == list(range(16))


def test_tokens_that_the_sequence_does_not_have_are_not_published() -> None:
    pool = a_pool()
    sequence = a_text(pool, 20)
    with pytest.raises(ValueError, match="19 tokens"):
        pool.publish(sequence, range(19))
    sequence.drop(0, 16)
    with pytest.raises(ValueError, match="dropped"):
        pool.publish(sequence, range(4))


# -- with a model

Pages = Paged[FLOAT16[2, 1, PAGE, SIZE], formats.FLOAT16, formats.INT8]


@model
def decode(
    cache: Mutable[Pages],
    block_table: INT64["batch", "blocks"],
    query: FLOAT["batch", 2, "n", SIZE],
    values: FLOAT16[2, "batch", 1, "n", SIZE],
    position: INT64["batch"],
    length: INT64["batch"],
) -> tuple[FLOAT["batch", 2, "n", SIZE], Alias["cache"]]:
    updated = kv.PagedCacheUpdate(cache, block_table, values, position)
    output = kv.PagedAttention(query, updated, block_table, length, is_causal=1)
    return output, updated


def test_sequences_of_several_lengths_decode_as_each_alone() -> None:
    """Case 50."""
    rng = np.random.default_rng(0)
    session = Session(decode)
    pool = SequencePool(session.allocate("cache"))
    alone = SequencePool(session.allocate("cache"))
    texts = {length: rng.standard_normal((2, 1, length + 1, SIZE)) for length in (2, 5, 17)}
    query = rng.standard_normal((3, 2, 1, SIZE), dtype=np.float32)

    def fill(chosen: SequencePool, length: int) -> Sequence:
        sequence = chosen.new()
        with sequence.writing(length):
            for k in range(length):
                value = texts[length][:, :, k : k + 1].astype(np.float16)
                chosen.caches[0].write(sequence.pages[k // PAGE], value, k % PAGE)
        return sequence

    def run(chosen: SequencePool, rows: list[Sequence], queries: np.ndarray) -> np.ndarray:
        with session.bind(cache=chosen.caches[0]) as step, chosen.writing(rows, 1) as batch:
            new = np.stack([texts[row.length][:, :, -1:] for row in rows], axis=1)
            out = step.run(
                block_table=batch.block_table,
                query=queries,
                values=new.astype(np.float16),
                position=batch.position,
                length=batch.length,
            )
        return np.array(out[0])

    rows = [fill(pool, length) for length in texts]
    together = run(pool, rows, query)
    for k, length in enumerate(texts):
        single = run(alone, [fill(alone, length)], query[k : k + 1])
        np.testing.assert_allclose(together[k], single[0], atol=1e-6)
    assert [row.length for row in rows] == [3, 6, 18]


def test_a_run_refuses_to_write_a_page_that_others_count_on() -> None:
    session = Session(decode)
    pool = SequencePool(session.allocate("cache"))
    sequence = pool.new()
    with sequence.writing(5):
        put_one = np.ones((2, 1, 5, SIZE), np.float16)
        pool.caches[0].write(sequence.pages[0], put_one, 0)
    sequence.fork()
    with session.bind(cache=pool.caches[0]) as step, pytest.raises(errors.PageError):
        step.run(
            block_table=np.array([sequence.pages]),
            query=np.ones((1, 2, 1, SIZE), np.float32),
            values=np.ones((2, 1, 1, 1, SIZE), np.float16),
            position=np.array([5]),
            length=np.array([6]),
        )


def test_operations_from_several_threads_leave_no_page_behind() -> None:
    pool = a_pool(2, max_pages=64)

    def work(seed: int) -> None:
        for k in range(20):
            sequence = a_text(pool, 10 + (seed + k) % 20)
            twin = sequence.fork()
            write(twin, [1])
            sequence.free()
            assert read(twin)[-1] == 1
            twin.free()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.pages.used == 0 and pool.nbytes == 0


# -- saved state


def test_a_saved_pool_goes_on_where_it_was(tmp_path: Path) -> None:
    pool = a_pool(2, max_pages=9, name="chat")
    first = a_text(pool, 40)
    pool.publish(first, range(40))
    second = first.fork()
    second.drop(0, 16)
    pool.save(tmp_path / "pool.state")
    again = SequencePool.load(tmp_path / "pool.state")
    assert [read(s, 1) for s in again.sequences] == [read(first), read(second)]
    assert (again.pages.limit, again.pages.name) == (9, "chat")
    assert again.sequences[1].dropped == 16
    assert again.new(range(40)).length == 32
    write(again.sequences[0], [5])
    assert read(again.sequences[0]) == [*range(40), 5]


def test_a_pool_whose_tables_do_not_fit_its_pages_is_not_saved(tmp_path: Path) -> None:
    pool = a_pool()
    sequence = a_text(pool, 40)
    pool.caches[0].share(sequence.pages[0])  # somebody else's count
    with pytest.raises(ValueError, match="do not agree"):
        pool.save(tmp_path / "pool.state")


def test_a_saved_cache_is_no_pool(tmp_path: Path) -> None:
    PagedCache(DIMS, np.float16).save(tmp_path / "cache.pages")
    with pytest.raises(errors.SavedStateError, match="no pool"):
        SequencePool.load(tmp_path / "cache.pages")


# -- who a cache belongs to


def test_state_is_not_restored_under_a_pool(tmp_path: Path) -> None:
    """Block tables would speak of other pages; nothing changes."""
    (cache,) = (pool := a_pool()).caches
    sequence = a_text(pool, 20)
    checkpoint.save(tmp_path / "state", {"cache0": cache})
    with pytest.raises(errors.PageError, match=r"pool `pool`.*SequencePool\.load"):
        checkpoint.restore(tmp_path / "state", {"cache0": cache})
    with pytest.raises(errors.PageError, match="pool `pool`"):
        cache.insert(tmp_path / "state")
    write(sequence, [7])
    assert read(sequence) == [*range(20), 7]


def test_a_closed_pool_gives_its_caches_back(tmp_path: Path) -> None:
    (cache,) = (pool := a_pool()).caches
    a_text(pool, 20)
    pool.save(tmp_path / "state")
    with pytest.raises(errors.PageError, match="belong to pool `pool`"):
        SequencePool(cache)
    pool.close()
    assert not list(cache) and not pool.sequences
    checkpoint.restore(tmp_path / "state", {"cache0": cache})
    assert len(list(cache)) == 2
    cache.clear()
    other = SequencePool(cache)
    pool.close()
    with pytest.raises(errors.PageError, match="belong to pool"):
        SequencePool(cache)
    assert other.caches == (cache,)


def test_a_pool_that_is_gone_holds_nothing() -> None:
    (cache,) = a_pool().caches
    gc.collect()
    assert SequencePool(cache).caches == (cache,)


def test_a_file_that_is_no_pool_says_what_it_is(tmp_path: Path) -> None:
    cache = PagedCache(DIMS, np.float16, name="mine")
    cache.save(tmp_path / "cache")
    with pytest.raises(errors.SavedStateError, match=r"no pool.*`mine`.*PagedCache\.load") as one:
        SequencePool.load(tmp_path / "cache")
    checkpoint.save(tmp_path / "state", {"a": cache, "b": np.zeros(3)})
    with pytest.raises(errors.SavedStateError, match=r"`b`.*checkpoint\.load reads") as two:
        SequencePool.load(tmp_path / "state")
    for caught in (one, two):
        assert "onnx_inplace.pool/" not in str(caught.value)
    a_pool(2).save(tmp_path / "pool")
    with pytest.raises(errors.SavedStateError, match=r"`cache0`, `cache1`.*SequencePool\.load"):
        PagedCache.load(tmp_path / "pool")


def test_nothing_is_said_of_the_cost_of_a_freed_sequence() -> None:
    sequence = a_text(a_pool(), 20)
    before = sequence.cost
    assert before.free().freed == 2 * BYTES
    sequence.free()
    for cost in (before, sequence.cost):
        for ask in (
            cost.fork,
            cost.free,
            lambda cost=cost: cost.reserve(1),
            lambda cost=cost: cost.truncate(0),
            lambda cost=cost: cost.drop(0, 0),
            lambda cost=cost: cost.recode_keys(0, 0),
        ):
            with pytest.raises(errors.PageError, match="was freed"):
                ask()
