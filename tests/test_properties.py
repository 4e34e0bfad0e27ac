"""Soundness: what is accepted runs in place as it means, what is refused has a reason."""

from __future__ import annotations

import collections

import hypothesis
import pytest
import soundness
import strategies
from soundness import Verdict

PROGRAMS = 2000
STOCK = 4  # every fourth program is also run by stock onnxruntime, from the same bytes


@pytest.mark.slow
def test_in_place_is_the_functional_meaning() -> None:
    """For every accepted program; accepted and refused ones come in fair numbers."""
    verdicts: collections.Counter[Verdict] = collections.Counter()
    needless: collections.Counter[str] = collections.Counter()

    @hypothesis.settings(
        max_examples=PROGRAMS,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategies.programs())
    def holds(example: strategies.Example) -> None:
        judgement = soundness.judge(example, stock=verdicts.total() % STOCK == 0)
        verdicts[judgement.verdict] += 1
        if judgement.verdict is Verdict.NEEDLESS:
            needless.update(judgement.codes)

    holds()
    refused = verdicts[Verdict.REFUSED] + verdicts[Verdict.NEEDLESS]
    shares = {v.name: f"{n / verdicts.total():.0%}" for v, n in verdicts.items()}
    print(f"{verdicts.total()} programs: {shares}; refused without need by code: {dict(needless)}")
    assert verdicts.total() >= PROGRAMS
    assert verdicts[Verdict.HOLDS] >= 0.3 * verdicts.total()
    assert refused >= 0.3 * verdicts.total()
    assert verdicts[Verdict.REFUSED] >= 0.5 * refused  # most refusals had a visible reason
