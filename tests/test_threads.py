"""Several threads where they pay, one where they do not."""

import collections

import numpy as np
import pytest

from onnx_inplace import PagedCache, Session, formats
from onnx_inplace.dsl import FLOAT, INT64, Paged, kv, model
from onnx_inplace.runner import operators_paged_attention, team, threads
from onnx_inplace.runner.threads import Policy


@pytest.fixture
def policy():
    policy = Policy()
    assert not policy.parallel()  # nothing is known of one thread
    policy.serial_took(1000, 1.0)
    return policy


def test_a_gain_goes_on(policy):
    for _ in range(100):
        assert policy.parallel()
        policy.parallel_took(1000, 0.6)


def test_a_loss_among_gains_is_forgiven(policy):
    """A core that is away for a moment must not cost the calls that follow."""
    for call in range(100):
        assert policy.parallel()
        policy.parallel_took(1000, 5.0 if call % 4 == 3 else 0.6)


def test_losses_in_a_row_are_followed_by_a_pause_that_ends(policy):
    while policy.parallel():
        policy.parallel_took(1000, 10.0)
    waited = 1
    while not policy.parallel():
        policy.serial_took(1000, 1.0)
        waited += 1
    assert waited == 32


def test_after_a_pause_one_loss_is_enough(policy):
    while policy.parallel():
        policy.parallel_took(1000, 10.0)
    policy.pause = 0
    assert policy.parallel()
    policy.parallel_took(1000, 10.0)
    assert not policy.parallel()


def test_as_many_losses_as_gains_are_too_many(policy):
    calls = 0
    while policy.parallel():
        policy.parallel_took(1000, 10.0 if calls % 2 else 0.6)
        calls += 1
    assert calls < 20


def test_pauses_grow_on_a_busy_machine_and_shrink_on_a_quiet_one(policy):
    lost = 0
    for _ in range(10_000):
        if policy.parallel():
            policy.parallel_took(1000, 10.0)
            lost += 1
        else:
            policy.serial_took(1000, 1.0)
    assert lost < 12
    policy.pause = 0
    for _ in range(5_000):
        policy.parallel_took(1000, 0.5)
    while not policy.pause:
        policy.parallel_took(1000, 10.0)
    assert policy.pause == 32


def test_work_of_any_size_is_compared(policy):
    for _ in range(9):
        policy.parallel_took(100_000, 60.0)  # one thread: 100 s
    assert policy.parallel()
    for _ in range(9):
        policy.parallel_took(10, 0.02)  # one thread: 0.01 s
    assert not policy.parallel()


def test_a_first_measurement_that_was_too_slow_is_corrected():
    policy = Policy()
    policy.serial_took(1000, 50.0)  # cold memory
    kept = 0
    for _ in range(1000):
        if policy.parallel():
            policy.parallel_took(1000, 2.0)
            kept += 1
        else:
            policy.serial_took(1000, 1.0)
    assert kept < 300


def test_without_pauses_a_loss_costs_nothing_but_its_call(policy):
    while policy.parallel():
        policy.parallel_took(1000, 9.0)
    with threads.without_pauses():
        made_meanwhile = Policy()
        made_meanwhile.serial_took(1000, 1.0)
        for one in (policy, made_meanwhile):
            for _ in range(99):
                assert one.parallel()
                one.parallel_took(1000, 9.0)
    for one in (policy, made_meanwhile):
        while one.parallel():
            one.parallel_took(1000, 9.0)
        assert one.pause == 31


@model
def prompt(
    cache: Paged[FLOAT[2, 1, 16, 32], formats.INT8],
    table: INT64["blocks"],
    query: FLOAT[1, 2, 16, 32],
    length: INT64[()],
) -> FLOAT[1, 2, 16, 32]:
    return kv.PagedAttention(query, cache, table, length, is_causal=1)


def test_what_a_part_of_a_prompt_has_shown_counts_for_the_parts_that_follow(monkeypatch):
    """Each has a shape of its own: if each had to show what one thread takes, none ran on two."""
    monkeypatch.setattr(operators_paged_attention, "PARALLEL", 0)
    fresh: dict[object, Policy] = collections.defaultdict(Policy)
    monkeypatch.setattr(operators_paged_attention, "_policies", fresh)
    teams, run = [], team.run
    monkeypatch.setattr(team, "run", lambda *given: (teams.append(given[2]), run(*given)))
    cache = PagedCache((2, 1, 16, 32), np.float32, allowed=[formats.INT8])
    values = np.random.default_rng(0).standard_normal((2, 1, 16, 32), np.float32)
    with Session(prompt, threads=2).bind() as step:
        for part in range(1, 4):
            cache.write(cache.allocate_page("INT8"), values, 0)
            table = np.arange(part)
            step.run(cache=cache, table=table, query=values[:1].repeat(2, 1), length=16 * part)
    assert teams == [2, 2]
