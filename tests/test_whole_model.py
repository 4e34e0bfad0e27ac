"""SmolLM2 by fused steps, one token a run, against float32 numpy."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
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
from onnx_inplace.compiler.resident import GIVEN, PACKED, REPACKED

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
    first, second = (Session(path, fuse="auto")._engine.fused.weights for _ in range(2))
    assert first.nbytes == second.nbytes == stated
    assert second.mapped


def measured(path: Path, fuse: str, prompt: int) -> dict[str, dict[str, int]]:
    """What ``resident_weights`` sees in a process of its own."""
    tests = Path(__file__).parent
    folders = [tests, tests.parent / "tutorials" / "smollm2"]
    found = subprocess.run(
        [sys.executable, tests / "resident_weights.py", path, fuse, str(prompt)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
        check=True,
        capture_output=True,
        text=True,
    )
    moments: dict[str, dict[str, int]] = json.loads(found.stdout)
    return moments


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux says what is resident")
@pytest.mark.parametrize("fuse", ["decode-only", "auto"])
def test_a_process_that_decodes_holds_one_copy_of_the_weights(fuse, folder) -> None:
    """That of fused steps, in pages of the file, and of the model the rows that it looks up."""
    path = generate.compiled(Precision.EXACT, "float16", folder)
    stated = compiler.plan(path).memory(1, "decode-only", max_length=256, new_length=1)
    Session(path, fuse=fuse)  # writes the file
    decoding = measured(path, fuse, 0)["decoding"]
    assert decoding[".fused"] == pytest.approx(stated.weights_in[REPACKED], abs=1 << 16)
    assert decoding[".data"] < 0.05 * stated.weights_in[GIVEN]
    assert decoding[".fused"] + decoding[".data"] <= stated.weights


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux says what is resident")
def test_a_prompt_brings_the_copy_of_onnxruntime(folder) -> None:
    path = generate.compiled(Precision.EXACT, "float16", folder)
    stated = compiler.plan(path).memory(max_length=256, new_length=64).weights_in
    found = measured(path, "auto", 64)
    grown = found["last"][""] - found["decoding"][""]
    assert 0.9 * stated[PACKED] < grown < 1.1 * stated[PACKED] + (64 << 20)
    assert 0.5 * stated[GIVEN] < found["last"][".data"] <= stated[GIVEN]
