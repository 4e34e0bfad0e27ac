"""Measured peaks agree with what the plan states: malloc's, onnxruntime's, numpy's, resident.

What a run holds beside tensors is Python's and onnxruntime's bookkeeping of a binding: prepared
calls, closures, slots. It is no part of the plan: at most ``BOOKKEEPING`` bytes a step.
"""

from collections.abc import Mapping
from pathlib import Path

import allocations
import generate
import numpy as np
import peak_models
import pytest
from decoder import Precision
from peak_models import RANDOM, SIZE, WIDTH, normal
from peaks import Job, Peaks, measure

from onnx_inplace import compiler
from onnx_inplace.dsl import FLOAT, FLOAT16

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not allocations.AVAILABLE, reason="needs Linux and a C compiler"),
]

BOOKKEEPING = 4096  # [bytes] a step, and 16 steps' worth for a binding
CHECKS = 2048  # [bytes] of the checks before a run, which onnxruntime computes too
ZERO = np.zeros((), np.int64)


def tokens(n: int, b: int = 2, m: int = 2048) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    return {"x": normal(b, n, WIDTH)}, {"b": b, "n": n, "m": m}


def plain(n: int) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    feeds, dims = tokens(n)
    return {**feeds, "position": ZERO}, dims


def attended(n: int) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    feeds, dims = plain(n)
    return {**feeds, "length": np.full(dims["b"], n)}, dims


def grouped(n: int) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    feeds, dims = tokens(n)
    angles = normal(dims["m"], SIZE // 2)
    lengths = np.full(dims["b"], n - 1, np.int32)
    return {**feeds, "lengths": lengths, "total": np.int32(n), "cos": angles, "sin": angles}, dims


def rows(n: int, m: int = 4096) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    return {"x": normal(n, WIDTH), "at": np.arange(n)[:, None]}, {"n": n, "m": m}


def elements(n: int, m: int = 4096) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    feeds, dims = rows(n, m)
    return {**feeds, "at": RANDOM.integers(0, m, (n, WIDTH))}, dims


def scanned() -> tuple[dict[str, np.ndarray], dict[str, int]]:
    return {"x": normal(5, 2, 128, WIDTH)}, {"steps": 5, "b": 2, "n": 128, "m": 1024}


def branched(flag: int) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    feeds, dims = plain(512)
    return {**feeds, "flag": np.array(flag)}, dims


CASES = {
    "dense": (lambda: peak_models.dense, plain(512)),
    "dense, one token": (lambda: peak_models.dense, plain(1)),
    "a copy of the cache": (lambda: peak_models.copying, plain(16)),
    "feed forward": (peak_models.feed_forward, plain(512)),
    "If, taken": (lambda: peak_models.branching, branched(1)),
    "Loop": (lambda: peak_models.looping, plain(512)),
    "Scan": (lambda: peak_models.scanning, scanned()),
    "ScatterND": (lambda: peak_models.scattered, rows(2000)),
    "ScatterElements": (lambda: peak_models.scattered_elements, elements(2000)),
    "Assign": (peak_models.recurrent, ({"x": normal(1000, WIDTH)}, {"b": 1000})),
    **{
        f"attention, {element.__name__}, {n}": (
            lambda element=element: peak_models.attention(element),
            attended(n),
        )
        for element in (FLOAT, FLOAT16)
        for n in (1, 128)
    },
    "GroupQueryAttention, 1": (peak_models.grouped, grouped(1)),
    "GroupQueryAttention, 128": (peak_models.grouped, grouped(128)),
}


def steps(program: compiler.Program | Path) -> int:
    return sum(len(block.steps) for block in compiler.plan(program).footprint.block.all())


def agrees(found: int, stated: int, count: int) -> bool:
    """Within 5 %, or within the bookkeeping of ``count`` steps where that is more."""
    return found == pytest.approx(stated, rel=0.05, abs=BOOKKEEPING * (count + 16))


@pytest.fixture(scope="module", params=[1, 2], ids=["1 thread", "2 threads"])
def measured(request, tmp_path_factory) -> Mapping[str, Peaks]:
    folder = tmp_path_factory.mktemp("peaks")
    jobs = {}
    for number, (name, (make, (feeds, dims))) in enumerate(CASES.items()):
        path = folder / f"model{number}.onnx"
        make().save(path)
        jobs[name] = Job(path, feeds, dims, request.param)
    return measure(jobs, folder, ("allocations", "traced"))


@pytest.mark.parametrize("name", CASES)
def test_what_a_run_takes_is_stated(name: str, measured: Mapping[str, Peaks]) -> None:
    peaks, count = measured[name], steps(CASES[name][0]())
    assert agrees(peaks.run - peaks.caches, peaks.stated - peaks.caches, count)


@pytest.mark.parametrize("name", CASES)
def test_what_onnxruntime_takes_is_stated_to_the_byte(
    name: str, measured: Mapping[str, Peaks]
) -> None:
    peaks = measured[name]
    less_than_checks = max(peaks.library, peaks.inside) < CHECKS
    assert peaks.library == peaks.inside or less_than_checks


@pytest.mark.parametrize("name", CASES)
def test_what_numpy_takes_is_stated(name: str, measured: Mapping[str, Peaks]) -> None:
    """Values and workspace of kernels, and no more than all that is stated."""
    peaks, count = measured[name], steps(CASES[name][0]())
    traced = peaks.traced - peaks.caches
    assert traced >= peaks.stated_values * 0.95
    assert traced < peaks.stated - peaks.caches or agrees(
        traced, peaks.stated - peaks.caches, count
    )


@pytest.mark.model
@pytest.mark.parametrize("element", ["float32", "float16"])
def test_a_decoder(element: str, tmp_path: Path) -> None:
    """SmolLM2, a token and a prompt of 512, alone and with two threads.

    Its sub-sessions are joined to one, which holds what passes between them, too, and makes values
    anew that a sub-session writes over dead ones: less than is stated, never more.
    """
    model = generate.compiled(Precision.FAST, element)
    jobs = {
        f"{n}, {threads}": Job(
            model,
            {"tokens": np.ones((1, n), np.int64), "position": ZERO},
            {"new_length": n, "max_length": 1024},
            threads,
        )
        for n in (1, 512)
        for threads in (1, 2)
    }
    count = steps(model)
    for peaks in measure(jobs, tmp_path, ("allocations",)).values():
        assert 0.8 * peaks.stated < peaks.run < 1.05 * peaks.stated
        held, stated = peaks.run - peaks.caches, peaks.stated - peaks.caches
        assert held < stated or agrees(held, stated, count)
        assert 0.5 * peaks.inside < peaks.library < peaks.inside + peaks.stated_values
        assert peaks.weights == pytest.approx(peaks.packed, rel=0.05)


@pytest.mark.model
@pytest.mark.parametrize("n", [1, 512])
def test_resident_memory_of_a_decoder(n: int, tmp_path: Path) -> None:
    """At the model's context of 8,192 tokens, after a run with small sizes.

    Resident memory has what no plan can say: holes of malloc and of onnxruntime's arena. They are
    up to 16 MiB here, whatever the caches.
    """
    tokens = {"tokens": np.ones((1, n), np.int64), "position": ZERO}
    small = {"tokens": np.ones((1, 1), np.int64), "position": ZERO}
    job = Job(
        generate.compiled(Precision.FAST, "float32"),
        tokens,
        {"new_length": n, "max_length": 8192},
        warm=(small, {"new_length": 1, "max_length": 64}),
    )
    peaks = measure({"": job}, tmp_path, ("allocations", "resident"))[""]
    assert peaks.resident == pytest.approx(peaks.stated, rel=0.05)
    assert abs(peaks.resident - peaks.stated) < 16 * 2**20
