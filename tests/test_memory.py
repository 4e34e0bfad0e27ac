"""Decoding over large caches takes no memory of a cache's size, whoever would allocate it.

Resident memory sees every allocator (numpy, onnxruntime, kernels) once the memory is touched, and
tracemalloc sees numpy's requests even if it is not. Both meters are shown to see a copy.
"""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import generate
import meter
import numpy as np
import pytest
from decoder import Precision

from onnx_inplace import Session
from onnx_inplace.dsl import FLOAT, Alias, Mutable, kv, model, op

pytestmark = pytest.mark.skipif(not meter.AVAILABLE, reason="needs the meter of Linux")

MIB = 2**20


@model
def copying(
    cache: Mutable[FLOAT["heads", "max_length", 64]], values: FLOAT["heads", 1, 64]
) -> tuple[Alias["cache"], FLOAT["heads", "max_length", 64]]:
    updated = kv.CacheUpdate(cache, values, 0)
    copy = op.Add(updated, 1.0)
    return updated, copy


def test_the_meters_see_a_copy() -> None:
    session = Session(copying)
    cache = session.allocate("cache", heads=2, max_length=2**17)
    cache[:] = 1
    values = np.ones((2, 1, 64), np.float32)
    with session.bind(cache=cache) as step:
        meter.restart()
        before = meter.peak()
        step.run(values=values)
    assert meter.peak() - before >= cache.nbytes * 0.9
    tracemalloc.start()
    np.empty_like(cache)
    _, traced = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert traced >= cache.nbytes


GIBIBYTE = """
import sys, tracemalloc
import numpy as np
import meter
from generate import Conversation
from onnx_inplace import Session

path, max_length = sys.argv[1], int(sys.argv[2])
conversation = Conversation(Session(path), max_length)
for cache in conversation.caches:
    cache[:] = 0.01  # written, so that their memory is committed
size = sum(cache.nbytes for cache in conversation.caches)
conversation.run([1, 2, 3])
meter.restart()
conversation.run([4])
first = meter.peak()
for token in range(100):
    conversation.run([token])
growth = meter.peak() - first
tracemalloc.start()
for token in range(5):
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    conversation.run([token])
    _, peak = tracemalloc.get_traced_memory()
    traced = max(peak - before, 0)
print(size, growth, traced)
"""


@pytest.mark.model
@pytest.mark.parametrize("element", ["float32", "float16"])
def test_hundred_tokens_over_a_gibibyte_of_caches(element: str, tmp_path: Path) -> None:
    path = generate.compiled(Precision.FAST, element, tmp_path)
    folders = [str(Path(module.__file__).parent) for module in (generate, meter)]
    token = 60 * 3 * 64 * (4 if element == "float32" else 2)  # [bytes] of caches a token
    done = subprocess.run(
        [sys.executable, "-c", GIBIBYTE, str(path), str(-(-(2**30) // token))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    size, growth, traced = map(int, done.stdout.split())
    assert size >= 2**30
    assert growth < 16 * MIB
    assert traced < 2 * MIB, "a step asked numpy for more than logits and activations"
