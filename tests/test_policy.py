"""Policies: which pages become what, between runs, and what that saves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from onnx_inplace.compiler import formats
from onnx_inplace.runner.pages import PagedCache
from onnx_inplace.runner.policy import ByAge, ByLayer, Tier, Within, apply
from onnx_inplace.runner.sequence import Sequence
from onnx_inplace.runner.sequences import SequencePool

PAGE, SIZE = 16, 32
DIMS = 2, 1, PAGE, SIZE
BYTES = {f.name: f.page_bytes(DIMS) for f in formats.BUILTIN.values()}


def a_pool(layers: int = 1) -> SequencePool:
    return SequencePool([PagedCache(DIMS, np.float16, name=f"layer{k}") for k in range(layers)])


def write(sequence: Sequence, count: int) -> None:
    rng = np.random.default_rng(sequence.length)
    with sequence.writing(count):
        for k in range(count):
            page, place = divmod(sequence.length + k, PAGE)
            for cache in sequence.pool.caches:
                values = rng.standard_normal((2, 1, 1, SIZE)).astype(np.float16)
                cache.write(sequence.pages[page], values, place)


def names(sequence: Sequence, layer: int = 0) -> list[str]:
    cache = sequence.pool.caches[layer]
    return [cache.page(page).quantized_type for page in sequence.pages]


def a_text(pool: SequencePool, pages: float) -> Sequence:
    write(sequence := pool.new(), int(pages * PAGE))
    return sequence


def test_pages_go_down_the_tiers_as_they_age() -> None:
    sequence = a_text(pool := a_pool(), 6)
    policy = ByAge([("FLOAT16", 2), ("INT8", 2), ("INT4", None)])
    report = apply(policy, pool)
    assert names(sequence) == ["INT4", "INT4", "INT8", "INT8", "FLOAT16", "FLOAT16"]
    assert report.before == 6 * BYTES["FLOAT16"]
    assert report.after == pool.nbytes == 2 * sum(BYTES[n] for n in ("FLOAT16", "INT8", "INT4"))
    assert report.converted == {"layer0": {0: "INT4", 1: "INT4", 2: "INT8", 3: "INT8"}}


def test_a_policy_that_was_applied_does_nothing_more() -> None:
    pool = a_pool()
    a_text(pool, 6)
    policy = ByAge([("FLOAT16", 2), ("INT8", 2), ("INT4", None)])
    apply(policy, pool)
    before = pool.caches[0].snapshot()
    assert not apply(policy, pool).converted
    assert pool.caches[0].snapshot() == before


def test_first_pages_keep_their_precision() -> None:
    sequence = a_text(pool := a_pool(), 4)
    apply(ByAge([("FLOAT16", 1), ("INT4", None)], first=1), pool)
    assert names(sequence) == ["FLOAT16", "INT4", "INT4", "FLOAT16"]
    apply(ByAge([("FLOAT16", 1), ("INT4", None)], first=1, first_format="INT8"), pool)
    assert names(sequence)[0] == "INT8"


def test_tiers_in_tokens_are_a_guaranteed_window() -> None:
    """A page stays while fewer than 20 tokens are newer than its last one, wherever pages end."""
    pool = a_pool()
    sequence = a_text(pool, 2)
    policy = ByAge([Tier("FLOAT16", tokens=20), Tier("INT4")])
    for length in range(32, 80):
        apply(policy, pool)
        for place, name in enumerate(names(sequence)):
            newer = length - (place + 1) * PAGE
            assert (name == "INT4") == (newer >= 20), (length, place)
        write(sequence, 1)


def test_a_page_that_is_not_full_gets_no_format_of_whole_pages() -> None:
    sequence = a_text(pool := a_pool(), 1.5)
    apply(ByAge([("INT4", None)]), pool)
    assert names(sequence) == ["INT4", "FLOAT16"]
    apply(ByAge([("INT8", None)]), pool)
    assert names(sequence) == ["INT4", "INT8"]


def test_pages_never_grow() -> None:
    sequence = a_text(pool := a_pool(), 3)
    apply(ByAge([("INT4", None)]), pool)
    assert not apply(ByAge([("FLOAT16", None)]), pool).converted
    assert names(sequence) == ["INT4"] * 3


def test_a_shared_page_is_as_young_as_its_youngest_use() -> None:
    pool = a_pool()
    old = a_text(pool, 2)
    young = old.fork()
    write(old, 10 * PAGE)
    apply(ByAge([("FLOAT16", 2), ("INT4", None)]), pool)
    assert names(young) == ["FLOAT16", "FLOAT16"]
    young.free()
    apply(ByAge([("FLOAT16", 2), ("INT4", None)]), pool)
    assert names(old)[:2] == ["INT4", "INT4"]


def test_a_budget_takes_from_the_oldest_and_only_what_is_needed() -> None:
    sequence = a_text(pool := a_pool(), 6)
    saved = BYTES["FLOAT16"] - BYTES["INT8"]
    report = apply(Within(pool.nbytes - 2 * saved, ["INT8", "INT4"]), pool)
    assert names(sequence) == ["FLOAT16", "INT8", "INT8", "FLOAT16", "FLOAT16", "FLOAT16"]
    assert report.fits and report.before - report.after == 2 * saved


def test_a_budget_goes_on_with_the_next_format() -> None:
    sequence = a_text(pool := a_pool(), 5)
    limit = 2 * BYTES["FLOAT16"] + BYTES["INT4"] + 2 * BYTES["INT8"]
    assert apply(Within(limit, ["INT8", "INT4"]), pool).fits
    assert names(sequence) == ["FLOAT16", "INT4", "INT8", "INT8", "FLOAT16"]


def test_a_budget_that_cannot_be_kept_says_so() -> None:
    a_text(pool := a_pool(), 3)
    report = apply(Within(BYTES["FLOAT16"], ["INT4"]), pool)
    assert not report.fits and report.after == 2 * BYTES["FLOAT16"] + BYTES["INT4"]


def test_layers_have_policies_of_their_own() -> None:
    sequence = a_text(pool := a_pool(3), 3)
    apply(ByLayer({"layer1": ByAge([("INT8", None)])}, ByAge([("INT4", None)])), pool)
    assert [names(sequence, layer)[0] for layer in range(3)] == ["INT4", "INT8", "INT4"]
    other = a_text(pool, 3)
    apply(ByLayer({"layer1": ByAge([("INT4", None)])}), pool)
    assert [names(other, layer)[0] for layer in range(3)] == ["FLOAT16", "INT4", "FLOAT16"]


def test_a_cache_without_sequences_is_one_text() -> None:
    cache = PagedCache(DIMS, np.float16)
    for page in range(4):
        cache.allocate_page("FLOAT16")
        cache.write(page, np.ones((2, 1, PAGE if page < 3 else 5, SIZE), np.float16), 0)
    apply(ByAge([("FLOAT16", 2), ("INT4", None)]), cache)
    found = [cache.page(page).quantized_type for page in cache]
    assert found == ["INT4", "INT4", "FLOAT16", "FLOAT16"]


@pytest.mark.parametrize("tiers", [[], [("INT8", 3)], [("FLOAT16", None), ("INT8", None)]])
def test_only_the_last_tier_takes_all_the_rest(tiers: list[tuple[str, int | None]]) -> None:
    with pytest.raises(ValueError, match="tier"):
        ByAge(tiers)


def test_names_that_nothing_has_are_refused() -> None:
    a_text(pool := a_pool(), 3)
    for policy in (ByAge([("INT5", None)]), Within(10, ["INT5"])):
        with pytest.raises(ValueError, match="INT5"):
            apply(policy, pool)
    with pytest.raises(ValueError, match="layer7"):
        apply(ByLayer({"layer7": ByAge([("INT8", None)])}), pool)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Tier("INT8", pages=-1),
        lambda: Tier("INT8", tokens=-1),
        lambda: ByAge([("FLOAT16", -1), ("INT8", None)]),
        lambda: ByAge([("INT8", None)], first=-1),
        lambda: Within(-1, ["INT8"]),
        lambda: Within(0, ["INT8"], newest=-1),
        lambda: Within(0, ["INT8"], first=-1),
    ],
)
def test_numbers_of_a_policy_are_not_negative(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="is -1, and negative"):
        make()
