"""The benchmarks run without their optional peers, judge what they measure, and write it down."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import attention
import batch
import capacity
import ggml
import hot
import memory_speed
import onnxruntime_peer
import ours
import prefill
import problem
import quantize
import record
import timing
import update

TINY = {
    attention: "--tokens 100 --shapes 64x3 32x3 --heads 2 --cache float32 INT8 --rounds 1",
    hot: "--shape 1x32x2 --cache float32 INT4 --rounds 1",
    batch: "--lengths 100,30 3x40 --shapes 2x64x3 --cache float32 INT8 --rounds 1",
    prefill: "--lengths 16/100 --shape 64x3 --heads 2 --cache float16 INT8 --rounds 1",
    capacity: "--valid 100 --capacities 128 512 --cache float32 --rounds 1",
    quantize: "--tokens 20 --formats FLOAT16 INT8 --rounds 1",
    update: "--capacities 1024 2048 --calls 1 --rounds 1",
}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama-cpp-python is not installed."""
    monkeypatch.setattr(ggml, "library", lambda: None)


@pytest.mark.kernel
@pytest.mark.parametrize("program", TINY, ids=lambda program: program.__name__)
@pytest.mark.usefixtures("alone")
def test_a_benchmark_writes_what_it_measured(program: Any, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "deep" / "result.json"
    held = program.main([*TINY[program].split(), "--json", str(path)])
    result = json.loads(path.read_text())
    assert result["benchmark"] == program.__name__
    assert result["machine"]["versions"]["onnxruntime"]
    assert all(row["us"] > 0 for row in result["rows"])
    assert held == all(claim["holds"] for claim in result["claims"])
    printed = capsys.readouterr().out
    for claim in result["claims"]:
        assert f"{'holds' if claim['holds'] else 'FAILS'}  {claim['claim']}: " in printed
    if program in (attention, quantize):
        assert result["skipped"] == ["ggml: llama-cpp-python is not installed"]
        assert "skipped: ggml" in printed


@pytest.mark.parametrize(
    ("value", "bound", "holds"),
    [
        (1.0, record.Bound.AT_LEAST, True),
        (0.9, record.Bound.AT_LEAST, False),
        (1.0, record.Bound.AT_MOST, True),
        (1.1, record.Bound.AT_MOST, False),
        (math.nan, record.Bound.AT_LEAST, False),
        (math.nan, record.Bound.AT_MOST, False),
    ],
)
def test_a_claim_has_a_right_side(value: float, bound: record.Bound, holds: bool) -> None:
    assert record.Claim("a number", value, 1.0, bound).holds is holds


def test_the_error_leaves_out_what_rounding_explains() -> None:
    exact = np.linspace(-2, 2, 101)
    assert problem.error(exact.astype(np.float16), exact, 11) == 0
    assert problem.error(exact.astype(np.float16), exact) > 1e-5
    wrong = exact.copy()
    wrong[7] += 0.5
    assert problem.error(wrong, exact) == pytest.approx(0.25, abs=1e-6)


def attend(asked: problem.Problem) -> np.ndarray:
    """Attention one query at a time."""
    group, size = asked.heads // asked.kv_heads, asked.size
    output = np.zeros(asked.query.shape)
    for head in range(asked.heads):
        for row in range(asked.new):
            seen = asked.tokens - asked.new + row + 1
            keys, values = (x[head // group, :seen].astype(np.float64) for x in asked.kv)
            scores = keys @ asked.query[head, row] / math.sqrt(size)
            weights = np.exp(scores - scores.max())
            output[head, row] = weights @ values / weights.sum()
    return output


PEERS: dict[str, Callable[[problem.Problem], Callable[[], np.ndarray]]] = {
    "float32": lambda p: onnxruntime_peer.group_query_attention([[p]], "float32", 1, spare=5)[0],
    "float16": lambda p: onnxruntime_peer.group_query_attention([[p]], "float16", 1)[0],
    "int8": lambda p: onnxruntime_peer.group_query_attention([[p]], "int8", 1)[0],
    "Attention": lambda p: onnxruntime_peer.attention([p], np.float32, 1, spare=5)[0],
}


@pytest.mark.parametrize(
    ("name", "limit"), [("float32", 1e-5), ("float16", 2e-3), ("int8", 0.05), ("Attention", 1e-5)]
)
@pytest.mark.parametrize("new", [1, 7])
def test_a_peer_computes_the_same(name: str, limit: float, new: int) -> None:
    asked = problem.random_problem(2, 3, 64, 50, new)
    expected = attend(asked)
    np.testing.assert_allclose(problem.reference(asked.query, *asked.kv), expected, atol=1e-12)
    assert problem.error(PEERS[name](asked)(), expected) < limit


@pytest.mark.peer
@pytest.mark.parametrize(("kind", "limit"), [("F16", 0.01), ("Q8_0", 0.05), ("Q4_0", 0.4)])
def test_ggml_computes_the_same(kind: str, limit: float) -> None:
    pytest.importorskip("llama_cpp")
    asked = problem.random_problem(2, 4, 64, 64)
    run = ggml.FlashAttention(asked, ggml.Type[kind]).run(2)
    assert problem.error(run(), attend(asked)) < limit


def test_a_later_layer_is_timed_behind_the_first_one_over_another_cache() -> None:
    seen: list[str] = []

    def call(name: str, seconds: float) -> Callable[[], object]:
        return lambda: (seen.append(name), time.sleep(seconds))

    pairs = {name: timing.Pair(call(f"{name}1", 4e-3), call(f"{name}2", 1e-5)) for name in "ab"}
    found = timing.layered(pairs, 2, call("cool", 0))
    assert seen == ["cool", "a1", "a2", "cool", "b1", "b2"] * 3
    assert all(spent.first >= 4e3 and spent.later < spent.first for spent in found.values())


@pytest.mark.parametrize("variants", [1, 3, 40])
def test_enough_is_read_between_two_calls_over_one_cache(
    variants: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def reading(nbytes: int, threads: int) -> tuple[Callable[[], object], int]:
        return lambda: read.append(nbytes), nbytes

    monkeypatch.setattr(memory_speed, "reading", reading)
    cool = memory_speed.cooling(variants, 2)
    for _ in range(variants):
        cool()
    assert sum(read) >= 1 << 30
    assert sum(read) - variants * (320 << 20) < 1 << 30


@pytest.mark.parametrize(("text", "lengths"), [("3x40", [40] * 3), ("100,30", [100, 30])])
def test_lengths_of_a_batch(text: str, lengths: list[int]) -> None:
    assert batch.lengths_of(text) == lengths
    assert [asked.tokens for asked in batch.batch("2x64x3", text, 1)] == lengths


UNEQUAL = [[problem.random_problem(2, 3, 64, n, 1, n + k) for n in (50, 7, 300)] for k in (0, 1)]

BATCHES: dict[str, Callable[[], list[Callable[[], np.ndarray]]]] = {
    "array": lambda: [step.run for step in ours.dense(UNEQUAL, "float16", 1)],
    "pages": lambda: [step.run for step in ours.paged(UNEQUAL, ["INT8"], 1)],
    "float16": lambda: onnxruntime_peer.group_query_attention(UNEQUAL, "float16", 1),
    "int8": lambda: onnxruntime_peer.group_query_attention(UNEQUAL, "int8", 1),
}


@pytest.mark.kernel
@pytest.mark.parametrize("name", BATCHES)
def test_each_sequence_of_each_batch_attends_to_itself(name: str) -> None:
    runs = BATCHES[name]()
    for sequences, run in [*zip(UNEQUAL, runs, strict=True)] * 2:
        for asked, output in zip(sequences, run(), strict=True):
            assert problem.error(output, attend(asked)) < 0.05  # of another one it would be about 1


@pytest.mark.kernel
def test_two_runs_of_onnxruntimes_attention_attend_each_to_its_own_cache() -> None:
    both = problem.random_problems(2, 3, 64, 50)
    runs = onnxruntime_peer.attention(both, np.float32, 1)
    for asked, run in [*zip(both, runs, strict=True)] * 2:
        assert problem.error(run(), attend(asked)) < 0.05


@pytest.mark.kernel
def test_ours_reports_an_error_of_what_it_computed() -> None:
    (step,) = ours.dense([[problem.random_problem(2, 3, 64, 50)]], "float32", 1)
    assert step.error() < 5e-6
    step.keep.run = lambda **_: {"output": np.ones((1, 6, 1, 64), np.float32)}
    assert step.error() > 0.1


@pytest.mark.kernel
@pytest.mark.parametrize("wrong", [0, 2])
def test_the_error_of_a_batch_is_that_of_its_worst_sequence(wrong: int) -> None:
    step, _ = ours.dense(UNEQUAL, "float32", 1)
    output = step.run().copy()
    assert step.error() < 5e-6
    output[wrong] += 1
    step.keep.run = lambda **_: {"output": output}
    assert step.error() > 0.1
