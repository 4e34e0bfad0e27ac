"""The same source gives the same bytes, however Python orders its sets."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SEEDS = range(32)
RUN_SEEDS = (0, 1, 31)

# Five values are carried, two of them caches. `first` and `second` swap roles at every step: a
# wrong order of the carried values gives other numbers, not only other bytes.
PROGRAM = """
import sys

from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model, op

Cache, New = FLOAT["heads", "capacity", 4], FLOAT["heads", 1, 4]


@model
def five(
    keys: Mutable[Cache], values: Mutable[Cache], new: New, steps: INT64[()]
) -> tuple[Alias["keys"], Alias["values"], INT64[()], INT64[()], FLOAT[()]]:
    first = op.Constant(value_int=0)
    second = op.Constant(value_int=1)
    total = op.ReduceSum(new, keepdims=0)
    for i in range(steps):
        keys = kv.CacheUpdate(keys, new * total, i)
        values = kv.CacheUpdate(values, new + op.Cast(second, to=1), i)
        first, second = second, first + second
        total = total + op.Cast(first, to=1)
    return keys, values, first, second, total


if __name__ == "__main__":
    sys.stdout.buffer.write(five.serialized)
"""

RUN = """
import numpy as np
from five import five
from onnx_inplace import Session

session = Session(five)
keys, values = (session.allocate(n, heads=2, capacity=6) for n in ("keys", "values"))
with session.bind(keys=keys, values=values) as step:
    out = step.run(new=np.ones((2, 1, 4), np.float32), steps=5)
    assert out[0] is keys and out[1] is values
np.savez("results.npz", *out)
"""


def start(folder: Path, seed: int, file: str) -> bytes:
    """Standard output of a program under a seed."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, file]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()
    return run.stdout


def test_one_digest_under_every_hash_seed(tmp_path: Path) -> None:
    """Compiled by 32 fresh interpreters; two at a time, since each mostly imports."""
    (tmp_path / "five.py").write_text(PROGRAM)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        files = list(pool.map(lambda seed: start(tmp_path, seed, "five.py"), SEEDS))
    assert files[0]
    assert len({hashlib.sha256(f).hexdigest() for f in files}) == 1


def test_another_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    """A file says `file.py:line`, never where a checkout stands."""
    files = []
    for name in ("here", "there"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "five.py").write_text(PROGRAM)
        files.append(start(folder, 0, "five.py"))
    assert files[0] == files[1]
    assert str(tmp_path).encode() not in files[0]


@pytest.mark.parametrize("seed", RUN_SEEDS)
def test_results_are_right_under_several_seeds(tmp_path: Path, seed: int) -> None:
    """Five carried values arrive as what they are."""
    (tmp_path / "five.py").write_text(PROGRAM)
    (tmp_path / "run.py").write_text(RUN)
    start(tmp_path, seed, "run.py")
    got = list(np.load(tmp_path / "results.npz").values())
    keys, values = np.zeros((2, 2, 6, 4), np.float32)
    first, second, total = 0, 1, np.float32(8)
    for i in range(5):
        keys[:, i], values[:, i] = total, 1 + second
        first, second = second, first + second
        total += first
    for array, wanted in zip(got, (keys, values, first, second, total), strict=True):
        np.testing.assert_array_equal(array, wanted)
