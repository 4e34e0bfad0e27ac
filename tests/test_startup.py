"""What the start of a process does not do: compile, or load what is not used."""

import subprocess
import sys

import pytest

MODULES = (
    "onnx_inplace.runner.session",
    "onnx_inplace.runner.sequences",
    "onnx_inplace.runner.checkpoint",
    "onnx_inplace.cli.commands",
)
HEAVY = {"llvmlite", "numba", "numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "rich"}


def output(program: str) -> list[str]:
    """The words that a fresh interpreter prints."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("module", MODULES)
def test_import_compiles_nothing(module):
    program = f"""
import importlib
from numba.core import event
with event.install_recorder("numba:compile") as found:
    importlib.import_module("{module}")
print(len(found.buffer))
"""
    assert output(program) == ["0"]


def test_what_counts_compilations_sees_one():
    program = """
import numba
from numba.core import event
with event.install_recorder("numba:compile") as found:
    numba.njit("int64(int64)")(lambda x: x + 1)
print(len(found.buffer) > 0)
"""
    assert output(program) == ["True"]


def test_the_package_alone_loads_nothing_heavy():
    assert not HEAVY & set(output("import onnx_inplace, sys; print(*sys.modules)"))
