"""The benchmark of accuracy measures what it says: its policies, its measures, its model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import accuracy
import smollm2_reference
import teacher
import tokenizer
import weights
from config import SMOLLM2_135M

from onnx_inplace import formats

TIERS = accuracy.Policy(
    "tiers", ((formats.FLOAT16, 1), (formats.INT8, 2)), formats.INT4, formats.FLOAT16
)


def test_a_page_goes_through_its_formats_by_age() -> None:
    assert [TIERS.chain[TIERS.stage(age)].name for age in range(5)] == [
        "FLOAT16",
        "INT8",
        "INT8",
        "INT4",
        "INT4",
    ]


def test_bits_are_averaged_over_the_cache() -> None:
    """16 pages: the first and the newest, two of INT8, twelve of INT4."""
    assert TIERS.bits(2048) == (2 * 16 + 2 * 8.25 + 12 * 4.5) / 16
    assert TIERS.bits(32768) == (2 * 16 + 2 * 8.25 + 252 * 4.5) / 256
    assert TIERS.bits(128) == 16


@pytest.mark.parametrize("policy", accuracy.POLICIES, ids=lambda policy: policy.name)
def test_what_is_seen_is_stored_as_the_policy_says(policy: accuracy.Policy) -> None:
    """The newest page is not yet converted, the first one may never be, later tokens are unseen."""
    page, pages = accuracy.PAGE_SIZE, 7
    x = np.random.default_rng(0).standard_normal((2, 3, pages * page, 64), dtype=np.float32)
    visible = accuracy.cache_of(policy, specification=True)(x[0], x[1])
    errors = {"FLOAT16": 0.0002, "INT8": 0.006, "INT4": 0.09, "INT4T": 0.09}
    errors |= {"INT2": 0.33, "FP8_E4M3": 0.027}
    for newest in (0, 3, 6):
        seen = np.stack(visible(newest))
        assert seen.shape == (2, 3, (newest + 1) * page, 64)
        for p in range(newest + 1):
            rows = slice(p * page, (p + 1) * page)
            found = np.sqrt(((seen - x[:, :, : seen.shape[2]])[:, :, rows] ** 2).mean())
            expected = policy.chain[policy.stage(newest - p)]
            if p == 0 and policy.first is not None:
                expected = policy.first
            assert 0.9 * errors[expected.name] < found < 1.1 * errors[expected.name]


@pytest.mark.kernel
@pytest.mark.parametrize("policy", accuracy.POLICIES, ids=lambda policy: policy.name)
def test_the_runner_stores_what_the_specification_says(policy: accuracy.Policy) -> None:
    """Every stage of every page, through a model that writes and the owner who converts."""
    x = np.random.default_rng(2).standard_normal((2, 3, 384, 64), dtype=np.float32) + 1
    stored, specified = (
        decode(x, policy.chain) for decode in (accuracy.by_pages, accuracy.by_specification)
    )
    for ours, expected in zip(stored, specified, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_what_is_seen_does_not_depend_on_later_tokens() -> None:
    page = accuracy.PAGE_SIZE
    x = np.random.default_rng(1).standard_normal((2, 1, 4 * page, 64), dtype=np.float32)
    changed = x.copy()
    changed[:, :, 2 * page :] *= 100
    cache = accuracy.cache_of(TIERS, specification=True)
    before, after = (np.stack(cache(*kv)(1)) for kv in (x, changed))
    np.testing.assert_array_equal(before, after)


def test_the_newest_page_cannot_have_a_format_of_whole_pages() -> None:
    with pytest.raises(ValueError, match="token by token"):
        accuracy.Policy("INT4 everywhere", (), formats.INT4)


def test_measures_are_those_of_information_theory() -> None:
    """Two tokens to foretell, over an alphabet of two; the last row foretells nothing known."""
    expected = np.log(np.float32([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]]))
    given = np.log(np.float32([[0.25, 0.75], [0.9, 0.1], [0.6, 0.4]]))
    found = accuracy.measure([expected], [given], [0, 1, 0])
    first = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    last = 0.2 * np.log(0.2 / 0.6) + 0.8 * np.log(0.8 / 0.4)
    assert found.divergence == pytest.approx((first + last) / 3, rel=1e-5)
    assert found.perplexity == pytest.approx(np.exp(-(np.log(0.75) + np.log(0.9)) / 2), rel=1e-5)
    assert found.same_choice == pytest.approx(1 / 3)
    in_pieces = accuracy.measure([expected[:2], expected[2:]], [given[:2], given[2:]], [0, 1, 0])
    assert in_pieces == found


@pytest.mark.model
def test_the_teacher_is_the_model() -> None:
    """Against the reference of the other tests, which grows its caches token by token."""
    text = "In place: a cache that is updated where it is. " * 4
    tokens = tokenizer.read(weights.gguf_path()).encode(text).ids[:32]
    model = teacher.Teacher(SMOLLM2_135M, weights.gguf_path())
    hidden = model.hidden(tokens, teacher.exact(16), 16)
    found = np.concatenate(list(model.log_probabilities(hidden, rows=7)))
    reference = smollm2_reference.Decoder()
    for position in (0, 31):
        reference.length = 0
        expected = teacher.log_softmax(reference.feed(tokens[: position + 1]))
        np.testing.assert_allclose(found[position], expected, atol=2e-3)
