"""Copies of kernel modules: on disk, shared by processes, in memory where nothing can be kept."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from onnx_inplace.numba_kernels import cache, decode, floats, specialise

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

PROGRAM = """
from onnx_inplace.numba_kernels import decode, specialise
module = specialise.specialise(decode, 0, 16, 1)
kernel = module.attend.ready()
print(module.__file__, kernel.cache_hits)
"""


def start(folder):
    environment = {**os.environ, "ONNX_INPLACE_CACHE": str(folder)}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def finish(process):
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    file, hits = out.split()
    return file, int(hits)


def test_processes_share_compiled_code(tmp_path):
    first = [finish(p) for p in [start(tmp_path), start(tmp_path)]]  # both at once
    file, hits = finish(start(tmp_path))
    assert {f for f, _ in first} == {file}
    assert file.startswith(str(tmp_path)) and hits == 1
    assert not list(tmp_path.rglob("*.tmp"))


def test_without_a_writable_folder_the_code_lives_in_memory(tmp_path):
    (tmp_path / "file").touch()
    file, hits = finish(start(tmp_path / "file" / "folder"))
    assert file.startswith("<") and hits == 0


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A new folder, and a process that has specialised nothing."""
    monkeypatch.setenv("ONNX_INPLACE_CACHE", str(tmp_path))
    monkeypatch.setattr(specialise, "_modules", {})
    cache.folder.cache_clear()
    yield
    cache.folder.cache_clear()


def test_a_changed_copy_is_not_trusted(fresh, monkeypatch):
    module = specialise.specialise(decode, 1, 16, 1)
    pathlib.Path(module.__file__).write_text("raise SystemExit('not ours')")
    monkeypatch.setattr(specialise, "_modules", {})
    again = specialise.specialise(decode, 1, 16, 1)
    assert again.__file__.startswith("<") and again.KIND == floats.FLOAT16


def test_constants_have_one_place(fresh):
    assert specialise.specialise(decode, 1, 32, 5) is specialise.specialise(decode, 1, 32, 5)
    module = specialise.specialise(decode, 1, 32, 6)
    assert (module.KIND, module.SIZE, module.GROUP) == (1, 32, 6)
    with pytest.raises(ValueError, match="0 lines to specialise"):
        specialise.specialise(floats, 1)


def test_another_version_of_any_source_has_another_folder(fresh, monkeypatch, tmp_path):
    before = cache.folder()
    sources = tmp_path / "sources"
    shutil.copytree(cache._SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "_SOURCES", sources)
    cache.folder.cache_clear()
    assert cache.folder() == before
    with (sources / "floats.py").open("a") as file:
        file.write("# changed\n")
    cache.folder.cache_clear()
    assert cache.folder() != before
