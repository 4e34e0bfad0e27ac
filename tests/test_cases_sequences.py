"""Sections E and G of the fault cases: cuts, windows and moves of sequences on pages."""

import itertools

import numpy as np
import pytest

from onnx_inplace import Session, errors, formats
from onnx_inplace.dsl import FLOAT, FLOAT16, INT64, Alias, Mutable, Paged, kv, model
from onnx_inplace.runner.pages import PagedCache
from onnx_inplace.runner.sequence import Sequence
from onnx_inplace.runner.sequences import SequencePool

PAGE, SIZE, WINDOW = 16, 32, 5
Pages = Paged[FLOAT16[2, 1, PAGE, SIZE], formats.FLOAT16, formats.INT8]


@model
def look(
    full: Pages, windowed: Pages, table: INT64["blocks"], query: FLOAT[1, 1, 1, SIZE], n: INT64[()]
) -> tuple[FLOAT[1, 1, 1, SIZE], FLOAT[1, 1, 1, SIZE]]:
    """A layer that sees everything, and one that sees a token and ``WINDOW`` before it."""
    return (
        kv.PagedAttention(query, full, table, n),
        kv.PagedAttention(query, windowed, table, n, left_window_size=WINDOW),
    )


@pytest.fixture(scope="module")
def session() -> Session:
    return Session(look)


@pytest.fixture
def pool() -> SequencePool:
    return a_pool()


def a_pool(**options: int) -> SequencePool:
    allowed = [formats.FLOAT16, formats.INT8]
    dims = (2, 1, PAGE, SIZE)
    caches = [PagedCache(dims, np.float16, allowed, name=n) for n in ("full", "windowed")]
    return SequencePool(caches, **options)


def token(number: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal((2, 1, 1, SIZE)).astype(np.float16)


def a_text(pool: SequencePool, numbers: list[int]) -> Sequence:
    write(sequence := pool.new(), numbers)
    return sequence


def write(sequence: Sequence, numbers: list[int]) -> None:
    with sequence.writing(len(numbers)):
        for k, number in enumerate(numbers):
            page, place = divmod(sequence.length + k, PAGE)
            for cache in sequence.pool.caches:
                cache.write(sequence.pages[page], token(number), place)


QUERY = np.random.default_rng(99).standard_normal((1, 1, 1, SIZE)).astype(np.float32)


def seen(session: Session, sequence: Sequence) -> list[np.ndarray]:
    full, windowed = sequence.pool.caches
    with session.bind() as step:
        out = step.run(
            full=full,
            windowed=windowed,
            table=list(sequence.pages),
            query=QUERY,
            n=sequence.length,
        )
        return [np.array(x)[0, 0, 0] for x in out]


def expected(numbers: list[int]) -> list[np.ndarray]:
    """Attention in float64 over the tokens themselves, whole and over the window."""

    def attend(chosen: list[int]) -> np.ndarray:
        k, v = (np.stack([token(t)[i, 0, 0] for t in chosen]).astype(np.float64) for i in (0, 1))
        scores = k @ QUERY[0, 0, 0].astype(np.float64) / np.sqrt(SIZE)
        weights = np.exp(scores - scores.max())
        return weights / weights.sum() @ v

    return [attend(numbers), attend(numbers[-1 - WINDOW :])]


def check(session: Session, sequence: Sequence, numbers: list[int]) -> None:
    for found, meant in zip(seen(session, sequence), expected(numbers), strict=True):
        np.testing.assert_allclose(found, meant, atol=2e-5)


def test_a_cut_that_needs_evicted_tokens_is_refused(session: Session, pool: SequencePool) -> None:
    """Case 53. The windowed layer has given its old pages back: one token less, or many."""
    sequence = a_text(pool, list(range(3 * PAGE + 8)))
    full, windowed = pool.caches
    for page in sequence.pages[:2]:
        windowed.free(page)
    check(session, sequence, list(range(3 * PAGE + 8)))
    sequence.truncate(3 * PAGE + 7)
    check(session, sequence, list(range(3 * PAGE + 7)))
    length = 2 * PAGE + 1  # its window begins on page 1
    with session.bind() as step, pytest.raises(errors.PageError) as caught:
        step.run(full=full, windowed=windowed, table=list(sequence.pages), query=QUERY, n=length)
    assert caught.value.cache == "windowed" and caught.value.page == sequence.pages[1]


@pytest.mark.parametrize(("start", "stop"), [(2, 4), (0, 16), (1, 35), (38, 40), (16, 32)])
def test_all_layers_lose_the_same_tokens(
    session: Session, pool: SequencePool, start: int, stop: int
) -> None:
    """Case 56. What is removed in the middle is gone in the windowed layer and in the full one."""
    numbers = list(range(40))
    sequence = a_text(pool, numbers)
    sequence.drop(start, stop)
    del numbers[start:stop]
    assert sequence.length == len(numbers)
    check(session, sequence, numbers)
    write(sequence, [50, 51])
    check(session, sequence, [*numbers, 50, 51])


def test_a_removal_that_one_layer_has_no_room_for_is_none(
    session: Session, pool: SequencePool
) -> None:
    """Case 56. Refused for both: neither layer has moved a token."""
    sequence = a_text(pool, list(range(40)))
    windowed = pool.caches[1]
    windowed.budget = windowed.nbytes
    before = [cache.snapshot() for cache in pool.caches]
    with pytest.raises(errors.PoolExhausted):
        sequence.drop(2, 4)
    assert [cache.snapshot() for cache in pool.caches] == before and sequence.dropped == 0
    check(session, sequence, list(range(40)))


@pytest.mark.parametrize("start", [0, 1, 15, 17])
@pytest.mark.parametrize("count", [1, 15, 16, 17])
def test_tokens_that_move_by_less_than_they_are_long_stay_whole(
    session: Session, pool: SequencePool, start: int, count: int
) -> None:
    """Case 58. Source and destination overlap: tokens move down by a few."""
    numbers = list(range(43))
    sequence = a_text(pool, numbers)
    other = sequence.fork()
    sequence.drop(start, start + count)
    check(session, sequence, numbers[:start] + numbers[start + count :])
    check(session, other, numbers)


def test_pages_change_places_in_every_way(session: Session, pool: SequencePool) -> None:
    """Case 58. All maps of four rows: permutations with cycles, rows lost, rows doubled."""
    rows = [a_text(pool, [40 * k + t for t in range(14 + 2 * k)]) for k in range(4)]
    texts = [[40 * k + t for t in range(14 + 2 * k)] for k in range(4)]
    for chosen in itertools.product(range(4), repeat=4):
        several = [row.fork() for row in rows]
        pool.reorder(several, chosen)
        assert [row.pages for row in several] == [rows[i].pages for i in chosen]
        for row in several:
            row.free()
    pool.reorder(rows, [1, 2, 3, 0])
    pool.reorder(rows, [1, 0, 3, 2])
    for row, k in zip(rows, [2, 1, 0, 3], strict=True):
        check(session, row, texts[k])


@pytest.mark.parametrize("element", [FLOAT, FLOAT16], ids=lambda e: e.__name__)
def test_rows_change_places_in_every_way(element, guarded) -> None:
    """Case 58. The same in a dense cache, where payloads move in place."""

    @model
    def beams(cache: Mutable[element["b", 3, 5]], rows: INT64["b"]) -> Alias["cache"]:
        return kv.CacheReorder(cache, rows)

    cache = guarded((4, 3, 5), np.dtype(element.dtype.numpy()))
    start = np.random.default_rng(0).integers(-100, 100, cache.shape)
    with Session(beams).bind(cache=cache) as step:
        for chosen in itertools.product(range(4), repeat=4):
            cache[:] = start
            step.run(rows=list(chosen))
            np.testing.assert_array_equal(cache, start[list(chosen)])


def test_beams_over_quantized_and_open_pages_never_drift(pool: SequencePool) -> None:
    """Case 61. Fifty reorders: bytes and the part that is still open are what they were."""
    rows = [a_text(pool, [40 * k + t for t in range(37)]) for k in range(4)]
    for row in rows:
        for cache in pool.caches:
            for page in row.pages[:2]:
                cache.convert(page, "INT8")
    raw = {p: bytes(pool.caches[0].page(p).raw) for row in rows for p in row.pages}
    tables = [row.pages for row in rows]
    for _ in range(50):
        pool.reorder(rows, [2, 0, 1, 1])
        tables = [tables[i] for i in (2, 0, 1, 1)]
        assert [row.pages for row in rows] == tables
    for page in {page for row in rows for page in row.pages}:
        assert bytes(pool.caches[0].page(page).raw) == raw[page]


def test_a_first_run_needs_no_reset(session: Session, pool: SequencePool) -> None:
    """Case 71. The length of what was never written is 0, and nothing beyond it is read."""
    sequence = pool.new()
    assert (sequence.length, sequence.dropped, sequence.pages) == (0, 0, ())
    assert not any(out.any() for out in seen(session, sequence))
    write(sequence, [1])
    check(session, sequence, [1])
    full, windowed = pool.caches
    with session.bind() as step, pytest.raises(errors.UnwrittenTokens):
        step.run(full=full, windowed=windowed, table=list(sequence.pages), query=QUERY, n=2)


def test_an_evicted_prefix_is_found_no_more_and_a_hit_is_what_a_miss_computes(
    session: Session,
) -> None:
    """Case 107. Bit for bit the same, from pages that are known and from pages written anew."""
    pool = a_pool(max_pages=5)
    numbers = list(range(37))
    first = a_text(pool, numbers)
    pool.publish(first, numbers)
    missed = seen(session, first)
    first.free()
    hit = pool.new(numbers)
    assert hit.length == 2 * PAGE
    write(hit, numbers[hit.length :])
    for one, other in zip(missed, seen(session, hit), strict=True):
        np.testing.assert_array_equal(one, other)
    hit.free()
    a_text(pool, list(range(100, 180))).free()  # takes all pages: the known ones are given up
    assert pool.new(numbers).length == 0
