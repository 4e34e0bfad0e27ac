"""Which kernels run: what the CPU has, and what the environment wants."""

import os
import subprocess
import sys

import pytest
from numba.core import config

from onnx_inplace import Session, errors
from onnx_inplace.dsl import FLOAT, model, op
from onnx_inplace.numba_kernels import cpu
from onnx_inplace.numba_kernels.cpu import Path

AVX2 = "+avx2,+fma,+f16c"
AVX512 = AVX2 + ",+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512vnni"


@pytest.fixture
def machine(monkeypatch):
    """Makes numba compile for a CPU with the given features."""
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    return lambda features: monkeypatch.setattr(config, "CPU_FEATURES", features)


@pytest.mark.parametrize(
    ("features", "best"),
    [
        ("", Path.PORTABLE),
        ("+avx2,+fma", Path.PORTABLE),
        (AVX2, Path.AVX2),
        (AVX2 + ",+avx512f,+avx512bw,+avx512dq,+avx512vl", Path.AVX2),
        (AVX2 + ",-avx512f,+avx512vnni2", Path.AVX2),
        (AVX512, Path.AVX512),
    ],
)
def test_auto_is_the_best_that_the_cpu_has(machine, features, best):
    machine(features)
    assert cpu.choose() is best
    assert cpu.runnable() == list(Path)[: best + 1]


@pytest.mark.parametrize("features", [AVX2, AVX512])
def test_a_name_chooses_before_the_environment_does(machine, monkeypatch, features):
    machine(features)
    best = cpu.runnable()[-1]
    monkeypatch.setenv(cpu.VARIABLE, "portable")
    assert cpu.choose() is Path.PORTABLE
    assert cpu.choose(best.name.lower()) is best
    monkeypatch.setenv(cpu.VARIABLE, best.name.lower())
    assert cpu.choose("portable") is Path.PORTABLE
    assert cpu.choose() is best


def test_one_process_has_no_kernels_of_two_cpus(machine, monkeypatch):
    machine(AVX512)
    with pytest.raises(ValueError, match=f"compiles for avx512; start it with {cpu.VARIABLE}=avx2"):
        cpu.choose("avx2")
    monkeypatch.setenv(cpu.VARIABLE, "avx2")  # numba was told otherwise before
    with pytest.raises(ValueError, match="NUMBA_CPU_FEATURES"):
        cpu.choose()


def test_what_the_cpu_lacks_is_named(machine):
    machine(AVX2)
    with pytest.raises(ValueError, match=r"'avx512' needs avx512f.*portable, avx2\."):
        cpu.choose("avx512")


@pytest.mark.parametrize("name", ["sse", "AVX2", "2"])
def test_other_names_are_refused(machine, monkeypatch, name):
    machine(AVX2)
    monkeypatch.setenv(cpu.VARIABLE, name)
    with pytest.raises(ValueError, match=f"{cpu.VARIABLE}={name}.*auto, portable, avx2"):
        cpu.choose()


@model
def negative(x: FLOAT[2]) -> FLOAT[2]:
    return op.Neg(x)


@pytest.mark.parametrize("name", ["sse", "", None])
def test_a_session_says_which_argument_is_wrong(name):
    with pytest.raises(errors.BindingError) as caught:
        Session(negative, kernels=name)
    assert caught.value.name == "kernels" and "portable" in str(caught.value)


def test_a_session_takes_the_kernels_that_it_is_told(monkeypatch):
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    best = cpu.runnable()[-1]
    for name, path in [("portable", Path.PORTABLE), (best.name.lower(), best), ("auto", best)]:
        assert Session(negative, kernels=name)._engine._settings.kernels is path


PROGRAM = """
from onnx_inplace import Session, errors
from onnx_inplace.dsl import FLOAT, model, op
from onnx_inplace.numba_kernels import cpu
@model
def negative(x: FLOAT[2]) -> FLOAT[2]:
    return op.Neg(x)
try:
    Session(negative)
except errors.BindingError as error:
    print(error.name)
print(cpu.has("avx512f"))
"""


def start(tmp_path, **environment):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py")]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_a_session_refuses_an_environment_of_another_machine(tmp_path):
    features = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    assert start(tmp_path, **features, ONNX_INPLACE_KERNELS="avx2") == ["kernels", "False"]


@pytest.mark.skipif(not cpu.has("avx512f"), reason="needs a CPU with AVX-512")
def test_avx2_takes_wider_registers_away(tmp_path):
    assert start(tmp_path, ONNX_INPLACE_KERNELS="avx2") == ["False"]
    assert start(tmp_path, ONNX_INPLACE_KERNELS="portable") == ["True"]
