"""``onnx-inplace warmup``: compiled once, read by every later process."""

import json
import os
import subprocess
import sys

import decoders
import pytest

from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model

pytestmark = pytest.mark.kernel


@model
def append(
    cache: Mutable[FLOAT["batch", "capacity", 4]], new: FLOAT["batch", 1, 4], position: INT64[()]
) -> Alias["cache"]:
    return kv.CacheUpdate(cache, new, position)


@pytest.fixture
def path(tmp_path):
    append.save(tmp_path / "append.onnx")
    return tmp_path / "append.onnx"


def warmup(path, *options, kept_in=None):
    environment = {**os.environ}
    if kept_in is not None:
        environment["ONNX_INPLACE_CACHE"] = str(kept_in)
    command = [sys.executable, "-m", "onnx_inplace", "warmup", str(path), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_second_process_reads_what_the_first_one_compiled(path, tmp_path):
    first, second = (warmup(path, "--json", kept_in=tmp_path / "kept") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    first, second = json.loads(first.stdout), json.loads(second.stdout)
    names = ["dense.update", "intake.take"]
    assert [kernel["name"] for kernel in first["kernels"]] == names
    assert [kernel["name"] for kernel in second["kernels"]] == names
    kept = [kernel["kept"] for kernel in first["kernels"] + second["kernels"]]
    assert kept == [False, False, True, True]
    assert first["ok"] and first["folder"] == second["folder"]
    assert first["folder"].startswith(str(tmp_path / "kept"))
    said = warmup(path, kept_in=tmp_path / "kept").stdout
    assert "dense.update" in said and "2 kernels, 0 compiled now" in said


def test_where_nothing_can_be_kept_it_fails(path, tmp_path):
    (tmp_path / "file").touch()
    done = warmup(path, "--json", kept_in=tmp_path / "file" / "folder")
    (problem,) = json.loads(done.stdout)["problems"]
    assert done.returncode == 1 and problem["code"] == "BindingError"
    assert "ONNX_INPLACE_CACHE" in problem["message"]


def test_exit_codes(path, tmp_path):
    (tmp_path / "broken.onnx").write_bytes(b"not a model")
    assert warmup(tmp_path / "broken.onnx", kept_in=tmp_path).returncode == 1
    assert warmup(path, "--threads", "0", kept_in=tmp_path).returncode == 2


def test_it_compiles_what_sessions_with_the_same_option_need(tmp_path):
    """``--fuse off`` needs none of the kernels that fused steps are made of."""
    decoders.decoder(decoders.Shape(layers=1)).save(tmp_path / "decoder.onnx")
    found = {}
    for fuse in ("off", "decode-only"):
        done = warmup(tmp_path / "decoder.onnx", "--json", "--fuse", fuse)
        assert done.returncode == 0, done.stderr
        found[fuse] = {kernel["name"] for kernel in json.loads(done.stdout)["kernels"]}
    assert "dense.update" in found["off"] - found["decode-only"]
    assert any("interpreter" in name for name in found["decode-only"] - found["off"])
