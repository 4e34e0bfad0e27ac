"""Where the time of a run goes: bytes that can be counted by hand, times that add up."""

import json

import numpy as np
import pytest
from decoders import Shape, decoder
from typer.testing import CliRunner

import onnx_inplace
from onnx_inplace.cli import commands
from onnx_inplace.runner import bandwidth

pytestmark = pytest.mark.kernel

SHAPE = Shape(hidden=128, vocabulary=64)
CAPACITY, POSITION = 32, 9
TOKEN = 2 * SHAPE.kv_heads * SHAPE.size * 2  # bytes of a key and a value in float16


def profiled(program, fuse, threads=1):
    session = onnx_inplace.Session(program, threads=threads, fuse=fuse)
    ports = session.mutable_inputs
    storage = {port.name: session.allocate(port.name, max_length=CAPACITY) for port in ports}
    feeds = {"tokens": [[3]], "position": POSITION}
    return onnx_inplace.profile(session, storage, feeds, runs=3), storage


@pytest.fixture(scope="module")
def program():
    return decoder(SHAPE)


@pytest.fixture(scope="module")
def fused(program):
    profile, _ = profiled(program, "auto")
    (found,) = [timed for timed in profile.steps if timed.parts]
    return found


def test_a_fused_step_reads_its_weights_once(fused):
    """4-bit codes and zero points of a byte beside scales of 4, for each block of 32 inputs."""
    width, hidden = SHAPE.width, SHAPE.hidden
    outputs_and_inputs = [
        ((SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.size, width),
        (width, width),
        (2 * hidden, width),
        (width, hidden),
    ] * SHAPE.layers + [(SHAPE.vocabulary, width)]
    numbers = sum(n * k for n, k in outputs_and_inputs)
    products = [part for part in fused.parts if part.kind.startswith("Product")]
    assert sum(part.count for part in products) == len(outputs_and_inputs)
    nbytes = sum(part.nbytes for part in products)
    assert numbers * 4 // 8 < nbytes <= numbers * (4 * 32 + 8 + 32) // (8 * 32)


def test_a_fused_step_reads_the_valid_part_of_its_caches(fused):
    (attention,) = [part for part in fused.parts if part.kind.startswith("Attend")]
    assert attention.count == SHAPE.layers
    assert attention.nbytes == SHAPE.layers * (POSITION + 1) * TOKEN


@pytest.mark.parametrize("threads", [1, 2])
def test_parts_take_no_longer_than_their_step(program, threads):
    profile, _ = profiled(program, "auto", threads)
    for timed in profile.steps:
        if timed.incomplete == 0:
            assert sum(part.work + part.wait for part in timed.parts) <= timed.seconds
    assert profile.nbytes == sum(timed.nbytes for timed in profile.steps)
    assert profile.seconds > 0 and profile.machine > 0


def test_kernels_of_ordinary_steps_count_valid_tokens(program):
    profile, _ = profiled(program, "off")
    kernels = [t for t in profile.steps if getattr(t.step, "op_type", None) == "Attention"]
    query_and_output = 2 * SHAPE.width * 2  # of the type of the caches
    for timed in kernels:
        assert timed.nbytes == (POSITION + 1) * TOKEN + query_and_output + 8
        assert timed.calls == 1 and not timed.parts
    assert len(kernels) == SHAPE.layers


def test_only_the_picked_rows_of_an_embedding_are_read():
    shape = Shape(layers=1, vocabulary=4096)
    profile, _ = profiled(decoder(shape), "off")
    first = profile.steps[0]
    embedding = shape.vocabulary * shape.width * 4
    assert embedding in [weight.tensor.nbytes for weight in first.step.weights]
    assert first.nbytes < embedding


def test_what_is_observed_is_what_runs(program):
    """Caches after a profile are those after as many runs without one."""
    for fuse in ("auto", "off"):
        _, storage = profiled(program, fuse)
        session = onnx_inplace.Session(program, fuse=fuse)
        expected = {name: np.zeros_like(cache) for name, cache in storage.items()}
        session.run({"tokens": [[3]], "position": POSITION}, writable=expected)
        for name, cache in storage.items():
            np.testing.assert_array_equal(cache, expected[name])


def test_the_command_prints_json(program, tmp_path):
    program.save(tmp_path / "model.onnx")
    arguments = ["plan", str(tmp_path / "model.onnx"), "--profile", "--runs", "2", "--json"]
    arguments += ["--dims", f"batch:1,new_length:1,max_length:{CAPACITY}", "--input", "position=9"]
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exit_code == 0, result.output
    fused, plain = json.loads(result.stdout)["profile"]
    assert (fused["fuse"], plain["fuse"]) == ("auto", "off")
    for variant in (fused, plain):
        assert variant["runs"] == 2 and variant["threads"] == 1
        assert variant["bytes"] == sum(step["bytes"] for step in variant["steps"])
        expected = variant["bytes"] / variant["seconds"]
        assert variant["bytes_per_second"] == pytest.approx(expected)
    kinds = [part["kind"] for step in fused["steps"] for part in step["parts"]]
    assert len(set(kinds)) == len(kinds) > 3


@pytest.mark.parametrize("fuse", ["off", "decode-only"])
def test_the_command_measures_one_way_alone(program, tmp_path, fuse):
    program.save(tmp_path / "model.onnx")
    arguments = ["plan", str(tmp_path / "model.onnx"), "--profile", "--runs", "1", "--json"]
    arguments += ["--dims", f"batch:1,new_length:1,max_length:{CAPACITY}", "--fuse", fuse]
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exit_code == 0, result.output
    assert [variant["fuse"] for variant in json.loads(result.stdout)["profile"]] == [fuse]


def test_the_command_prints_tables(program, tmp_path):
    program.save(tmp_path / "model.onnx")
    arguments = ["plan", str(tmp_path / "model.onnx"), "--profile", "--runs", "2"]
    arguments += ["--dims", f"batch:1,new_length:1,max_length:{CAPACITY}"]
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exit_code == 0, result.output
    assert 'fuse="auto"' in result.stdout and 'fuse="off"' in result.stdout
    assert f"all {2 * SHAPE.layers} CacheUpdate" in result.stdout


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--dims", "new_length:1"], "max_length"),
        (["--dims", f"max_length:{CAPACITY}"], "new_length"),
        (["--dims", f"max_length:{CAPACITY},new_length:1", "--input", "place=3"], "place"),
    ],
)
def test_what_is_missing_or_unknown_is_refused(program, tmp_path, more, message):
    program.save(tmp_path / "model.onnx")
    arguments = ["plan", str(tmp_path / "model.onnx"), "--profile", *more]
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exit_code in (1, 2)
    assert message in result.output


def test_the_machine_reads_memory():
    assert bandwidth.read(1 << 20, 1, passes=3) > 1e6
