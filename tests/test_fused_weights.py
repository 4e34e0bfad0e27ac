"""Repacked weights: one piece of memory, a file beside the model, every damage of which is seen."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from decoders import Shape, decoder
from test_fused_decoders import decode

from onnx_inplace import Session, compiler, dsl
from onnx_inplace.compiler import matrices as compiled
from onnx_inplace.compiler.errors import WeightsError
from onnx_inplace.dsl import FLOAT, INT64, op, weight
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.fused import blob, matrices, sources, weights

pytestmark = pytest.mark.kernel

SHAPE = Shape(bits=0, hidden=512, layers=1, bias=True)  # its matrices stand in a file of their own
OLD = 10**18  # [ns] long before any test


@pytest.fixture
def model(tmp_path):
    """A saved decoder whose files are old enough to be known by their times."""
    return save(decoder(SHAPE), tmp_path)


@pytest.fixture
def reads(monkeypatch):
    """What is read of the model: names of digests of all content, and of products."""
    found = []
    key, read = sources.Sources.key, matrices.read
    monkeypatch.setattr(sources.Sources, "key", lambda s: found.append("digest") or key(s))
    monkeypatch.setattr(matrices, "read", lambda p: found.append("product") or read(p))
    return found


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    monkeypatch.setattr(sources, "SETTLED", -(10**9))
    monkeypatch.setattr(weights, "_WORTH_A_FILE", 1)
    monkeypatch.delenv("ONNX_INPLACE_FUSED", raising=False)


def save(program, folder):
    path = folder / "model.onnx"
    program.save(path)
    return path


def load(path):
    return weights.load(compiler.plan(path).fused, path)


def expected(fusion):
    """What packing in memory gives."""
    made = weights.load(fusion)
    return [made.packed(p) for p in compiled.distinct(fusion)]


def check(path):
    """Load, and compare every byte with weights that were never in a file."""
    fusion = compiler.plan(path).fused
    found = weights.load(fusion, path)
    products = list(compiled.distinct(fusion))
    assert products
    for product, right in zip(products, expected(fusion), strict=True):
        given = found.packed(product)
        assert given.layout == right.layout
        assert given.data.tobytes() == right.data.tobytes()
        assert address(given.data) % 64 == 0 and not given.data.flags.writeable
        assert (given.bias is None) == (right.bias is None)
        if given.bias is not None:
            assert given.bias.tobytes() == right.bias.tobytes()
    return found


def file_of(path):
    return path.with_name("model.onnx.fused")


def test_the_second_session_reads_no_weight(model, reads):
    assert check(model).mapped and file_of(model).exists()
    reads.clear()
    assert load(model).mapped
    assert not reads
    assert sorted(p.suffix for p in model.parent.iterdir()) == [".data", ".fused", ".onnx"]


def test_sessions_decode_alike_with_and_without_a_file(model):
    program = decoder(SHAPE)
    without, _, _ = decode(program, SHAPE, "auto")
    first, _, _ = decode(model, SHAPE, "auto")
    second, _, regions = decode(model, SHAPE, "auto")
    assert regions == [False, True, True]
    np.testing.assert_array_equal(without, first)
    np.testing.assert_array_equal(without, second)


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def rewrite_head(path, **changes):
    """A file that is consistent in itself, but says something else."""
    found = blob.read(path)
    fields = dataclasses.asdict(found.head) | changes
    data = found.data.copy()
    text = json.dumps(fields).encode()
    start = blob._START.pack(blob._MAGIC, len(text), bytes.fromhex(blob.digest(text)))
    padding = bytes(blob._begin(len(text)) - len(start) - len(text))
    path.write_bytes(start + text + padding + data.tobytes())
    os.utime(path, ns=(fields["time"], fields["time"]))


def part(path, **changes):
    parts = [dict(p) for p in blob.read(path).head.parts]
    parts[1] |= changes
    rewrite_head(path, parts=parts)


def layout(path, field, value):
    numbers = list(blob.read(path).head.parts[1]["layout"])
    numbers[field] = value
    part(path, layout=numbers)


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "no head": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "half of the head": lambda path: path.write_bytes(path.read_bytes()[:200]),
    "one byte is missing": lambda path: os.truncate(path, path.stat().st_size - 1),
    "one byte too many": lambda path: path.write_bytes(path.read_bytes() + b"0"),
    "a page is missing": lambda path: os.truncate(path, path.stat().st_size - 4096),
    "magic": lambda path: flip(path, 3),
    "length of the head": lambda path: flip(path, 39),
    "digest of the head": lambda path: flip(path, 45),
    "head": lambda path: flip(path, 90),
    "first weight": lambda path: flip(path, -blob.read(path).head.size),
    "last byte": lambda path: flip(path, -1),
    "another version": lambda path: rewrite_head(path, version=blob.VERSION + 1),
    "of other weights": lambda path: rewrite_head(path, key="0" * 64, stamps=[]),
    "a field too many": lambda path: rewrite_head(path, more=1),
    "fewer parts": lambda path: rewrite_head(path, parts=blob.read(path).head.parts[:-1]),
    "a part beyond the end": lambda path: part(path, data=1 << 40),
    "a part before the begin": lambda path: part(path, data=-64),
    "a part off its line": lambda path: part(path, data=32),
    "a place that is no number": lambda path: part(path, data="0"),
    "a bias beyond the end": lambda path: part(path, bias=1 << 40),
    "a part without a bias": lambda path: part(path, bias=None),
    "a part without a layout": lambda path: rewrite_head(
        path, parts=[{} for _ in blob.read(path).head.parts]
    ),
    "a short layout": lambda path: part(path, layout=[0, 0]),
    "fewer panels": lambda path: layout(path, 3, 1),
    "more steps": lambda path: layout(path, 4, 1 << 20),
    "other bits": lambda path: layout(path, 0, 3),
    "an unknown kind": lambda path: layout(path, 1, 7),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_again(damage, model, reads):
    load(model)
    DAMAGES[damage](file_of(model))
    reads.clear()
    assert check(model).mapped
    assert "product" in reads, "the damage was not seen"
    reads.clear()
    assert load(model).mapped and not reads, "the file was not repaired"


def test_a_file_of_another_model_is_made_again(model, tmp_path, reads):
    other = tmp_path / "other"
    other.mkdir()
    load(save(decoder(SHAPE, seed=1), other))
    shutil.copy2(file_of(other / "model.onnx"), file_of(model))
    reads.clear()
    assert check(model).mapped and "product" in reads


def test_other_weights_under_the_same_name_replace_the_file(model, reads):
    load(model)
    save(decoder(SHAPE, seed=1), model.parent)
    reads.clear()
    assert check(model).mapped and "product" in reads
    assert len(list(model.parent.glob("*.fused*"))) == 1


def test_a_weight_that_changes_in_its_file_is_seen(model, reads):
    load(model)
    (data,) = model.parent.glob("*.data")
    content = bytearray(data.read_bytes())
    content[0] ^= 0x40
    with open(data, "r+b") as file:  # in place: the same size, name and identity
        file.write(content)
    reads.clear()
    assert check(model).mapped and "product" in reads


def test_a_copied_model_is_compared_once(model, tmp_path, reads):
    load(model)
    copy = tmp_path / "copy"
    shutil.copytree(model.parent, copy)
    reads.clear()
    assert check(copy / "model.onnx").mapped
    assert reads[0] == "digest", "its files are others"
    reads.clear()
    assert load(copy / "model.onnx").mapped and not reads


def test_a_file_that_was_touched_is_read_whole_and_kept(model, reads):
    load(model)
    os.utime(file_of(model), ns=(OLD, OLD))
    reads.clear()
    assert load(model).mapped and not reads
    assert not blob.read(file_of(model)).touched


def test_files_that_have_just_changed_are_not_known_by_their_times(model, reads, monkeypatch):
    monkeypatch.setattr(sources, "SETTLED", 3600 * 10**9)
    load(model)
    reads.clear()
    assert load(model).mapped and reads == ["digest"]
    monkeypatch.setattr(sources, "SETTLED", -(10**9))
    assert load(model).mapped and reads == ["digest", "digest"]
    assert load(model).mapped and reads == ["digest", "digest"]


@pytest.mark.parametrize("value", ["0", ""])
def test_no_file_where_none_is_wanted(value, model, monkeypatch):
    monkeypatch.setenv("ONNX_INPLACE_FUSED", value)
    assert not check(model).mapped
    assert not file_of(model).exists()


def test_a_folder_for_all_files(model, tmp_path, monkeypatch, reads):
    folder = tmp_path / "elsewhere"
    monkeypatch.setenv("ONNX_INPLACE_FUSED", str(folder))
    assert check(model).mapped and not file_of(model).exists()
    assert len(list(folder.iterdir())) == 1
    reads.clear()
    assert load(model).mapped and not reads


def test_where_nothing_can_be_written_a_session_has_its_own(model):
    file_of(model).mkdir()
    assert not check(model).mapped
    assert not list(model.parent.glob(".onnx-inplace-*")), "no temporary file stays"


def test_a_model_in_memory_has_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session = Session(decoder(SHAPE), fuse="auto")
    assert not session._engine.fused.weights.mapped
    assert not list(tmp_path.iterdir())


def test_a_small_model_has_no_file(model, monkeypatch):
    monkeypatch.undo()
    assert not check(model).mapped
    assert not file_of(model).exists()


def test_nothing_is_made_without_fused_steps(model):
    Session(model, fuse="off")
    assert not file_of(model).exists()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux says what is mapped")
def test_processes_share_the_pages_of_the_file(model):
    found = load(model)
    with open("/proc/self/maps") as lines:
        mapped = [line.split()[1] for line in lines if line.rstrip().endswith(str(file_of(model)))]
    assert found.mapped and set(mapped) == {"r--s"}, "read only, shared"


@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_weights_that_change_before_the_first_prompt_are_not_mixed(tmp_path, change):
    matrix = np.random.default_rng(0).standard_normal((300, 300)).astype(np.float32)

    @dsl.model
    def product(x: FLOAT["n", 300]) -> FLOAT["n", 300]:
        return op.MatMul(x, weight(matrix, "matrix"))

    with session_of_changed(product, tmp_path, change).bind() as step:
        (token,) = step.run(x=np.ones((1, 300), np.float32))
        np.testing.assert_allclose(token[0], matrix.sum(0), rtol=1e-4, atol=1e-4)
        with pytest.raises(WeightsError, match="has changed since the session was loaded"):
            step.run(x=np.ones((5, 300), np.float32))
        step.run(x=np.ones((1, 300), np.float32))


@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_rows_that_fused_steps_look_up_are_those_of_the_session(tmp_path, change):
    random = np.random.default_rng(0)
    table, matrix = random.integers(-3, 4, (2, 300, 300)).astype(np.float32)

    @dsl.model
    def embedded(tokens: INT64["n"]) -> FLOAT["n", 300]:
        rows = op.Gather(weight(table, "table"), tokens)
        return op.MatMul(rows, weight(matrix, "matrix"))

    with session_of_changed(embedded, tmp_path, change).bind() as step:
        (row,) = step.run(tokens=[7])
        assert step._frame.frame.fused
    np.testing.assert_allclose(row[0], table[7] @ matrix, rtol=1e-2, atol=0.1)


def session_of_changed(model, folder, change):
    """A session of the model; then another file in the place of its weights, or none."""
    model.save(folder / "m.onnx")
    (data,) = folder.glob("*.data")
    session = Session(folder / "m.onnx")
    other = data.with_name("other")
    other.write_bytes(bytes(data.stat().st_size))
    os.replace(other, data) if change == "replaced" else data.unlink()
    return session
