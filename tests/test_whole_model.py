"""SmolLM2 by fused steps, one token a run, against float32 numpy."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import accuracy
import generate
import tokenizer
import weights
import whole_model
from decoder import Precision

from onnx_inplace import Session, compiler
from onnx_inplace.compiler.resident import REPACKED

pytestmark = pytest.mark.model

LENGTH = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smollm2")


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    text = Path(argparse.__file__).read_text("utf-8")
    return tokenizer.read(weights.gguf_path()).encode(text).ids[:LENGTH]


@pytest.fixture(scope="module")
def reference(tokens: list[int]) -> list[whole_model.teacher.Array]:
    return whole_model.expected(tokens)


@pytest.mark.parametrize("cache", whole_model.CACHES)
@pytest.mark.parametrize(
    ("precision", "bound"), [(Precision.EXACT, 0.002), (Precision.FAST, whole_model.BOUND)]
)
def test_the_next_token_is_as_likely_as_numpy_says(
    precision, bound, cache, folder, tokens, reference
) -> None:
    path = generate.compiled(precision, whole_model.CACHES[cache], folder)
    conversation = whole_model.converse(Session(path, fuse="auto"), cache, LENGTH)
    found = accuracy.measure(reference, whole_model.decoded(conversation, tokens), tokens)
    assert found.divergence <= bound
    assert found.same_choice > 0.9
    assert all(run.frame.fused for run in conversation.binding._execution._frames.values())


@pytest.mark.parametrize("precision", Precision)
def test_repacked_weights_are_as_large_as_the_plan_says(precision, folder) -> None:
    path = generate.compiled(precision, "float16", folder)
    stated = compiler.plan(path).memory(max_length=64, new_length=1).weights_in[REPACKED]
    first, second = (Session(path, fuse="auto")._engine._weights for _ in range(2))
    assert first.nbytes == second.nbytes == stated
    assert second.mapped
