"""The benchmark of accuracy measures what it says: its policies, its measures, its model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import accuracy
import paged_layers
import policies
import smollm2_reference
import teacher
import tokenizer
import weights
from config import SMOLLM2_135M

from onnx_inplace import formats

TIERS = policies.Policy(
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


def tokens(pages: int, heads: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((heads, pages * policies.PAGE_SIZE, 64), dtype=np.float32)


ERRORS = {"FLOAT16": 0.0002, "INT8": 0.006, "INT4": 0.09, "INT4T": 0.09, "INT2": 0.33}
ERRORS |= {"FP8_E4M3": 0.027, "K8V4": 0.064, "K4V2": 0.24}
each_policy = pytest.mark.parametrize("policy", policies.POLICIES, ids=lambda policy: policy.name)


@each_policy
def test_what_is_seen_is_stored_as_the_policy_says(policy: policies.Policy, monkeypatch) -> None:
    """The newest page is not yet converted, the first one may never be, later tokens are unseen."""
    seen: dict[int, np.ndarray] = {}

    def spy(query: np.ndarray, visible: teacher.Visible, page_size: int) -> np.ndarray:
        seen.update({newest: np.stack(visible(newest)) for newest in (0, 3, 6)})
        return query

    monkeypatch.setattr(paged_layers, "attend", spy)
    query, keys, values = tokens(7, 9), tokens(7, 3, 1), tokens(7, 3, 2)
    paged_layers.by_numpy(policy, specification=True)(query, keys, values)
    for newest, kv in seen.items():
        assert kv.shape == (2, 3, (newest + 1) * policy.page_size, 64)
        error = kv - np.stack([keys, values])[:, :, : kv.shape[2]]
        by_page = np.split(error, newest + 1, axis=2)
        for page, found in enumerate(by_page):
            expected = ERRORS[policy.format(page, newest).name]
            assert 0.9 * expected < np.sqrt((found**2).mean()) < 1.1 * expected


@pytest.mark.kernel
@each_policy
def test_the_runner_stores_what_the_specification_says(policy: policies.Policy) -> None:
    """Every stage of every page, through a model that writes and the owner who converts."""
    x = np.stack([tokens(3, 3), tokens(3, 3, 1)]) + np.float32(1)
    stored = paged_layers.stored_by_runner(x, policy.chain, policy.page_size)
    specified = paged_layers.stored_by_specification(x, policy.chain, policy.page_size)
    for ours, expected in zip(stored, specified, strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.kernel
@pytest.mark.parametrize("policy", policies.POLICIES[1:6], ids=lambda policy: policy.name)
def test_decoding_step_by_step_is_what_numpy_sees(policy: policies.Policy) -> None:
    """The runner writes, attends and converts; numpy attends over the specification's pages."""
    query, keys, values = tokens(4, 9), tokens(4, 3, 1), tokens(4, 3, 2)
    stepwise = paged_layers.by_kernels(policy)(query, keys, values)
    expected = paged_layers.by_numpy(policy, specification=True)(query, keys, values)
    np.testing.assert_allclose(stepwise, expected, atol=2e-3)


@pytest.mark.kernel
@pytest.mark.parametrize(("accuracy_level", "limit"), [(0, 2e-3), (4, 3e-2)])
def test_one_token_a_step_is_what_numpy_sees(accuracy_level: int, limit: float) -> None:
    query, keys, values = tokens(3, 9), tokens(3, 3, 1), tokens(3, 3, 2)
    stepwise = paged_layers.by_tokens(TIERS, accuracy_level)(query, keys, values)
    expected = paged_layers.by_numpy(TIERS, specification=True)(query, keys, values)
    np.testing.assert_allclose(stepwise, expected, atol=limit * np.abs(expected).max())


def test_what_is_seen_does_not_depend_on_later_tokens() -> None:
    """Neither K and V of later pages, nor those behind a query in its own page."""
    query, keys, values = tokens(3, 9), tokens(3, 3, 1), tokens(3, 3, 2)
    attend = paged_layers.by_numpy(TIERS, specification=True)
    expected = attend(query, keys, values)
    keys[:, 200:] *= 100
    values[:, 200:] = 7
    found = attend(query, keys, values)
    np.testing.assert_array_equal(found[:, :128], expected[:, :128])
    np.testing.assert_allclose(found[:, 128:200], expected[:, 128:200], atol=1e-5)
    assert not np.allclose(found[:, 200:], expected[:, 200:])


def test_the_newest_page_cannot_have_a_format_of_whole_pages() -> None:
    with pytest.raises(ValueError, match="token by token"):
        policies.Policy("INT4 everywhere", (), formats.INT4)


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
@pytest.mark.slow
@pytest.mark.kernel
def test_bounds_hold_on_a_text() -> None:
    """Half as many tokens as the benchmark takes, every second policy that has a bound."""
    bounded = [policy for policy in policies.POLICIES if policy.bound is not None][::2]
    text_tokens = accuracy.read_text("code")[: 8 * policies.PAGE_SIZE]
    claims = accuracy.compare("code", text_tokens, bounded, paged_layers.by_kernels)
    assert len(claims) == len(bounded) == 3
    for claim, divergence, bound in claims:
        assert 0 < divergence <= bound, claim


@pytest.mark.model
def test_the_teacher_is_the_model() -> None:
    """Against the reference of the other tests, which grows its caches token by token."""
    text = "In place: a cache that is updated where it is. " * 4
    text_tokens = tokenizer.read(weights.gguf_path()).encode(text).ids[:32]
    model = teacher.Teacher(SMOLLM2_135M, weights.gguf_path())
    hidden = model.hidden(text_tokens, teacher.exact(16))
    found = np.concatenate(list(model.log_probabilities(hidden, rows=7)))
    reference = smollm2_reference.Decoder()
    for position in (0, 31):
        reference.length = 0
        expected = teacher.log_softmax(reference.feed(text_tokens[: position + 1]))
        np.testing.assert_allclose(found[position], expected, atol=2e-3)
