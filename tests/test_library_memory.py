"""What the plan says of the inside of a sub-session is what onnxruntime allocates there."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import allocations
import library_cases
import pytest

pytestmark = pytest.mark.skipif(not allocations.AVAILABLE, reason="needs Linux and a C compiler")

Measured = dict[str, tuple[int, int, list[str]]]

# operators whose kernels take more than a model says; how far the estimate may be off
ESTIMATES = {"LSTM": 0.01, "GRU": 0.01, "Conv": 0.01, "Attention": 0.15, "causal Attention": 0.15}


@pytest.fixture(scope="module", params=[1, 2], ids=["1 thread", "2 threads"])
def measured(request, tmp_path_factory) -> Iterator[Measured]:
    """All cases, in one process of their own."""
    folder = tmp_path_factory.mktemp("allocations")
    here = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, library_cases.__file__, str(request.param)],
        env={**allocations.environment(folder), "PYTHONPATH": os.pathsep.join(here)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    yield json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [n for n in library_cases.CASES if n not in ESTIMATES])
def test_what_is_stated_is_allocated_to_the_byte(name: str, measured: Measured) -> None:
    found, stated, estimates = measured[name]
    assert found > 0 and found == stated
    assert estimates == []


@pytest.mark.parametrize("name", ESTIMATES)
def test_an_estimate_is_said_to_be_one(name: str, measured: Measured) -> None:
    found, stated, estimates = measured[name]
    assert found == pytest.approx(stated, rel=ESTIMATES[name])
    assert estimates
