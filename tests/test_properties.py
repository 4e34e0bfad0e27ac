"""Soundness: what is accepted runs in place as it means, what is refused has a reason."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence

import all_fused
import numpy as np
import onnx
import pytest
import scripting
import soundness
import strategies
from soundness import Verdict

from onnx_inplace import Session, errors

PROGRAMS, FLOAT_PROGRAMS, FUSED_PROGRAMS, SCRIPTS = 2000, 450, 250, 400


Seeds = Callable[[int], Iterator[int]]


@pytest.mark.seeded
@pytest.mark.slow
def test_in_place_is_the_functional_meaning(seeds: Seeds) -> None:
    """For every accepted program; accepted and refused ones come in fair numbers."""
    verdicts: collections.Counter[Verdict] = collections.Counter()
    needless: collections.Counter[str] = collections.Counter()

    for seed in seeds(PROGRAMS):
        judgement = soundness.judge(strategies.seeded(seed))
        verdicts[judgement.verdict] += 1
        if judgement.verdict is Verdict.NEEDLESS:
            needless.update(judgement.codes)
    refused = verdicts[Verdict.REFUSED] + verdicts[Verdict.NEEDLESS]
    shares = {v.name: f"{n / verdicts.total():.0%}" for v, n in verdicts.items()}
    print(f"{verdicts.total()} programs: {shares}; refused without need by code: {dict(needless)}")
    assert verdicts.total() >= PROGRAMS
    assert verdicts[Verdict.HOLDS] >= 0.3 * verdicts.total()
    assert refused >= 0.3 * verdicts.total()
    assert verdicts[Verdict.REFUSED] >= 0.5 * refused  # most refusals had a visible reason


@pytest.mark.seeded
@pytest.mark.slow
def test_fused_steps_are_the_functional_meaning(seeds: Seeds) -> None:
    """Programs on float32 with products, run with fused steps where there are some, and without."""
    verdicts, fused = _judged_floats(seeds(FLOAT_PROGRAMS), ("auto", "off"))
    assert verdicts[Verdict.HOLDS] >= 0.3 * verdicts.total()
    assert fused["any"] >= 0.3 * verdicts[Verdict.HOLDS]
    assert fused["Loop"] >= 0.05 * verdicts[Verdict.HOLDS]
    assert fused["If"] >= 0.05 * verdicts[Verdict.HOLDS]


@pytest.mark.seeded
@pytest.mark.slow
def test_whatever_can_be_fused_is_the_functional_meaning(seeds: Seeds) -> None:
    """The same programs, with fused steps that no product pays for."""
    with all_fused.all_fused():
        verdicts, fused = _judged_floats(seeds(FUSED_PROGRAMS), ("auto",))
    assert fused["any"] >= 0.7 * verdicts[Verdict.HOLDS]
    assert fused["Loop"] >= 0.1 * verdicts[Verdict.HOLDS]
    assert fused["If"] >= 0.1 * verdicts[Verdict.HOLDS]


def _judged_floats(seeds: Iterable[int], fuse: Sequence[str]) -> tuple[collections.Counter, ...]:
    """Verdicts; and of programs that ran in fused steps, what else is in them."""
    verdicts: collections.Counter[Verdict] = collections.Counter()
    fused: collections.Counter[str] = collections.Counter()

    for seed in seeds:
        example = strategies.seeded_floats(seed)
        judgement = soundness.judge(example, fuse=fuse)
        verdicts[judgement.verdict] += 1
        if judgement.fused:
            fused.update(_flow(example))
    print(f"{verdicts.total()} programs: {dict(verdicts)}; in fused steps: {dict(fused)}")
    return verdicts, fused


def _flow(example: strategies.Example) -> set[str]:
    """Control flow of the main graph, and a word for any program."""
    graph = onnx.ModelProto.FromString(example.plain()).graph
    return {"any", *({n.op_type for n in graph.node} & {"If", "Loop", "Scan"})}


@pytest.mark.seeded
@pytest.mark.slow
def test_a_text_means_what_python_says(seeds: Seeds) -> None:
    """Whatever is staged: the DSL's program and Python's own run of the text agree."""
    verdicts: collections.Counter[str] = collections.Counter()

    for seed in seeds(SCRIPTS):
        script = strategies.seeded_script(seed)
        try:
            program = scripting.load(script.source, f"script_{seed}.py")["program"]
        except errors.ContractError as error:
            assert all(f.location is not None for f in error.findings)
            assert {f.code for f in error.findings} <= set(errors.RULES) - {"E100"}, str(error)
            verdicts["refused"] += 1
            continue
        verdicts["accepted"] += 1
        storage = {name: array.copy() for name, array in script.storage.items()}
        with Session(program).bind(**storage) as step:
            for feed in script.feeds:
                wanted = scripting.native(script.source, {**feed, **storage})
                results = list(step.run(**feed))
                for k, (got, expected) in enumerate(zip(results, wanted, strict=True)):
                    assert got.dtype == expected.dtype
                    np.testing.assert_array_equal(got, expected, f"result {k}")
                assert results[0] is storage["keys"] and results[1] is storage["values"]
    print(f"{verdicts.total()} texts: {dict(verdicts)}")
    assert verdicts["accepted"] >= 0.5 * SCRIPTS
    assert verdicts["refused"] >= 0.04 * SCRIPTS
