"""A run that lets one sequence grow is judged at once, and as the long way judges it."""

import numpy as np
import pytest

from onnx_inplace import Session
from onnx_inplace.compiler import errors
from onnx_inplace.compiler.page_checks import Mode, Operand, PageAccess
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, Paged, kv, model
from onnx_inplace.runner import page_growth
from onnx_inplace.runner.page_growth import Growth
from onnx_inplace.runner.page_pieces import Outlook, pieces, reading
from onnx_inplace.runner.pages import PagedCache

PAGE, DIMS = 16, (2, 1, 16, 32)


def random_cache(random):
    """Up to six pages: some are freed, not full, or of two owners."""
    cache = PagedCache(DIMS, np.float32)
    for page in range(random.integers(3, 7)):
        cache.allocate_page("FLOAT32")
        fill = PAGE if random.random() < 0.8 else random.integers(0, PAGE)
        cache.write(page, np.ones((2, 1, fill, 32), np.float32), 0)
        if random.random() < 0.05:
            cache.share(page)
    if random.random() < 0.1 and cache.store.table.owners[0] == 1:
        cache.free(0)
    return cache


def played(store, ids, position, tokens, left):
    """Whether the long way accepts the run, and makes no page. ``left`` None: nothing is read."""
    outlook = Outlook(store)
    try:
        outlook.update(pieces("cache", ids, np.array([position]), tokens, PAGE), None)
        if left is not None:
            outlook.read(reading(store, ids, np.array([position + tokens]), tokens, left))
    except (errors.PageError, errors.CapacityError):
        return False
    return True


def test_the_verdict_is_that_of_the_long_way():
    random, found = np.random.default_rng(2), {True: 0, False: 0}
    for _ in range(600):
        caches = [random_cache(random) for _ in range(2)]
        ids = random.permutation(7)[: random.integers(1, 6)] - (random.random() < 0.1)
        tokens, left = int(random.integers(1, 20)), (-1, -1, 0, 20, None)[random.integers(5)]
        position = int(random.integers(-1, PAGE * len(ids)))
        growth = Growth(2, tokens, 0 if left is None else left)
        stores = [cache.store for cache in caches]
        expected = all(played(s, ids, position, tokens, left) for s in stores)
        assert growth.allowed(stores, ids, position) == expected
        found[expected] += 1
    assert min(found.values()) > 100


def test_a_table_of_pages_that_grows_is_looked_at_again():
    cache = PagedCache(DIMS, np.float32)
    growth, ids = Growth(1, 1, -1), np.array([20])
    assert not growth.allowed([cache.store], ids, 0)
    for _ in range(21):
        cache.allocate_page("FLOAT32")
    assert growth.allowed([cache.store], ids, 0)


@model
def grow(
    cache: Mutable[Paged[FLOAT[DIMS]]],
    ids: INT64["blocks"],
    query: FLOAT[1, 2, "n", 32],
    values: FLOAT[2, 1, "n", 32],
    position: INT64[()],
    length: INT64[()],
) -> tuple[FLOAT[1, 2, "n", 32], Alias["cache"]]:
    updated = kv.PagedCacheUpdate(cache, ids, values, position)
    return kv.PagedAttention(query, updated, ids, length, is_causal=1), updated


def test_a_run_that_reads_another_length_is_judged_by_that():
    session, random = Session(grow), np.random.default_rng(0)
    cache = session.allocate("cache")
    cache.allocate_pages(3, "FLOAT32")
    written = random.standard_normal((2, 1, 40, 32)).astype(np.float32)
    ids, query = np.array([2, 0, 1]), random.standard_normal((1, 2, 1, 32)).astype(np.float32)
    with session.bind(cache=cache) as step:
        for t in range(40):
            values = written[:, :, t : t + 1]
            feeds = {"ids": ids, "query": query, "values": values, "position": np.array(t)}
            if t in (10, 30):
                before = cache.snapshot()
                with pytest.raises(errors.UnwrittenTokens) as caught:
                    step.run(**feeds, length=np.array(t + 2))
                assert (caught.value.length, cache.snapshot()) == (t + 2, before)
                with pytest.raises(errors.CapacityError):
                    step.run(**feeds, length=np.array(-1))
                assert cache.snapshot() == before
            length = t - 3 if t in (20, 35) else t + 1
            output = step.run(**feeds, length=np.array(length))[0]
            keys, content = written[:, 0, :length].astype(np.float64)
            weights = np.exp(query[0, :, 0] @ keys.T / np.sqrt(32))
            expected = weights @ content / weights.sum(-1, keepdims=True)
            assert np.abs(output[0, :, 0] - expected).max() < 1e-5


@model
def grow_all(
    cache: Mutable[Paged[FLOAT[DIMS]]],
    ids: INT64["b", "blocks"],
    query: FLOAT["b", 2, "n", 32],
    values: FLOAT[2, "b", 1, "n", 32],
    position: INT64["b"],
    length: INT64["b"],
) -> tuple[FLOAT["b", 2, "n", 32], Alias["cache"]]:
    updated = kv.PagedCacheUpdate(cache, ids, values, position)
    return kv.PagedAttention(query, updated, ids, length, is_causal=1), updated


@pytest.mark.parametrize("batch", [1, 2])
def test_a_batch_is_judged_whether_it_is_of_one_sequence_or_of_several(batch, monkeypatch):
    judged, allowed = [], Growth.allowed
    monkeypatch.setattr(Growth, "allowed", lambda *given: judged.append(1) or allowed(*given))
    session = Session(grow_all)
    cache = session.allocate("cache")
    cache.allocate_pages(4, "FLOAT32")
    ids, random = np.array([[2, 0], [1, 3]])[:batch], np.random.default_rng(0)
    query = random.standard_normal((batch, 2, 1, 32)).astype(np.float32)
    written = random.standard_normal((2, batch, 1, 20, 32)).astype(np.float32)
    with session.bind(cache=cache) as step:
        for t in range(20):
            values, position = written[:, :, :, t : t + 1], np.full(batch, t)
            feeds = {"ids": ids, "query": query, "values": values, "position": position}
            before = cache.snapshot()
            with pytest.raises(errors.UnwrittenTokens):
                step.run(**feeds, length=position + 2)
            if batch == 2:  # both would write the same page
                with pytest.raises(errors.PageError, match="twice"):
                    step.run(**feeds | {"ids": ids[[0, 0]]}, length=position + 1)
            assert cache.snapshot() == before
            output = step.run(**feeds, length=position + 1)[0]
            keys, content = written[:, :, 0, : t + 1].astype(np.float64)
            weights = np.exp(np.einsum("bhd,btd->bht", query[:, :, 0], keys) / np.sqrt(32))
            expected = weights @ content / weights.sum(-1, keepdims=True)
            assert np.abs(output[:, :, 0] - expected).max() < 1e-5
    assert bool(judged) == (batch == 1)


def access(mode, root="a", ids="table", position="p", offset=0, left=-1, rank=1):
    where = Operand(position, offset)
    return PageAccess(0, mode, root, None, None, rank, Operand(ids), where, 1, 1, 4, None, left)


GROWS = [access(Mode.WRITE), access(Mode.READ, offset=1)]


@pytest.mark.parametrize(
    "accesses",
    [
        [],
        [GROWS[0], GROWS[0]],
        [*GROWS, access(Mode.WRITE, "b")],
        [access(Mode.WRITE, rank=0)],
        GROWS[::-1],
        [*GROWS, *GROWS],
        [GROWS[0], access(Mode.READ, "b", offset=1)],
        [GROWS[0], access(Mode.READ, ids="other")],
        [*GROWS, access(Mode.WRITE, "b"), access(Mode.READ, "b", offset=1, left=5)],
        [*GROWS, access(Mode.WRITE, "b", position="q"), access(Mode.READ, "b", offset=1)],
        [access(Mode.WRITE, rank=2), access(Mode.READ, offset=1)],
        [access(Mode.CONVERT), GROWS[1]],
    ],
)
def test_other_runs_are_no_growth(accesses):
    assert page_growth.pattern(accesses) is None


def test_a_decoder_of_several_layers_is_growth():
    second = [access(Mode.WRITE, "b"), access(Mode.READ, "b", offset=1)]
    assert page_growth.pattern([*GROWS, *second]) == (("a", "b"), *GROWS)


def test_writes_that_nothing_reads_are_growth():
    other = access(Mode.WRITE, "b")
    assert page_growth.pattern([GROWS[0], other]) == (("a", "b"), GROWS[0], None)
