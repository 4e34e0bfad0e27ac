"""A decoder that nothing here was written for: all of it is fused, and right."""

import sys
from pathlib import Path

import numpy as np
import pytest

from onnx_inplace import Session, compiler

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import second_decoder

pytestmark = pytest.mark.kernel

SMALL = {"layers": 2, "heads": 4, "kv_heads": 1, "inner": 512, "vocabulary": 100, "positions": 64}


def logits(program, fuse):
    """Of pieces of 5, 1, 1, 2 and 1 tokens."""
    session = Session(program, fuse=fuse)
    caches = {p.name: session.allocate(p.name, max_length=16) for p in session.mutable_inputs}
    random, position, found = np.random.default_rng(1), 0, []
    with session.bind(**caches) as step:
        for count in (5, 1, 1, 2, 1):
            tokens = random.integers(0, 100, (1, count))
            found.append(step.run(tokens=tokens, position=position)["logits"].copy())
            position += count
        fused = [run.frame.fused for run in step._execution._frames.values()]
    return np.concatenate(found), fused


@pytest.mark.parametrize(("accuracy", "error"), [(0, 1e-4), (4, 3e-2)])
def test_it_agrees_with_onnxruntime(accuracy, error):
    program = second_decoder.decoder(second_decoder.Sizes(accuracy=accuracy, **SMALL))
    exact = second_decoder.decoder(second_decoder.Sizes(accuracy=0, **SMALL))
    found, fused = logits(program, "auto")
    expected, _ = logits(exact, "off")
    assert sorted(fused) == [False, True, True], "5 tokens are not fused"
    np.testing.assert_allclose(found, expected, rtol=0, atol=error * np.abs(expected).max())


def test_all_of_it_is_one_call():
    plan = compiler.plan(second_decoder.decoder(second_decoder.Sizes(**SMALL)))
    assert [type(step).__name__ for step in plan.fused.block.steps] == ["SubSession", "Fused"]
    assert not plan.fused.refusals
