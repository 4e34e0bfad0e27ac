"""Large weights stand in one file beside the model, whole, and nobody else's file is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnx_inplace import compiler
from onnx_inplace.compiler import errors, program, weights
from onnx_inplace.compiler.contract import Access
from onnx_inplace.compiler.errors import Location

BIG = weights.LARGE // 4  # elements of a float32 weight that is just large


def heavy(*tensors: Any, name: str = "heavy") -> program.Program:
    """``Assign`` to a state, and a result that depends on every weight."""
    state = ir.val("state", ir.DataType.FLOAT, [4])
    x = ir.val("x", ir.DataType.FLOAT, [4])
    position = ir.val("i", ir.DataType.INT64, [1])
    initializers, nodes, outputs = [], [], []
    for k, tensor in enumerate(tensors):
        if not hasattr(tensor, "dtype") or isinstance(tensor, np.ndarray):
            tensor = ir.tensor(tensor, name=f"w{k}")
        tensor.name = f"w{k}"
        value = ir.Value(
            name=f"w{k}",
            type=ir.TensorType(tensor.dtype),
            shape=tensor.shape,
            const_value=tensor,
        )
        initializers.append(value)
        node = ir.node("Gather", [value, position])
        node.outputs[0].name = f"row{k}"
        node.outputs[0].type = ir.TensorType(tensor.dtype)
        node.outputs[0].shape = ir.Shape([1, *tensor.shape.numpy()[1:]])
        nodes.append(node)
        outputs.append(node.outputs[0])
    assign = ir.Node("onnx_inplace", "Assign", [state, x], version=1)
    assign.outputs[0].name = "updated"
    graph = ir.Graph(
        [state, x, position],
        [assign.outputs[0], *outputs],
        nodes=[*nodes, assign],
        initializers=initializers,
        opset_imports={"": 24, "onnx_inplace": 1},
        name=name,
    )
    return program.build(
        program.Declaration(
            ir.Function("model", name, graph=graph, attributes=[]),
            (Access.READ_WRITE, Access.READ_ONLY, Access.READ_ONLY),
            ("state", *(None for _ in outputs)),
            (),
            Location(__file__, 1),
        )
    )


def rows(model: Any, index: int) -> list[np.ndarray]:
    """What stock onnxruntime reads from each weight."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    source = model if isinstance(model, bytes) else os.fspath(model)
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    zeros = np.zeros(4, np.float32)
    return session.run(None, {"state": zeros, "x": zeros, "i": np.array([index])})[1:]


def data_files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.suffix == ".data")


def test_large_weights_stand_beside_the_model(tmp_path: Path) -> None:
    small, large = np.arange(12, dtype=np.float32), np.arange(BIG, dtype=np.float32)
    built = heavy(small, large)
    assert set(built.weights) == {"w1"}
    built.save(tmp_path / "m.onnx")
    (name,) = data_files(tmp_path)
    assert name.startswith("m.onnx.")
    assert (tmp_path / "m.onnx").stat().st_size < 10_000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", name]
    np.testing.assert_array_equal(np.concatenate(rows(tmp_path / "m.onnx", 11)), [11, 11])
    onnx.checker.check_model(tmp_path / "m.onnx")
    np.testing.assert_array_equal(
        onnx.numpy_helper.to_array(onnx.load(tmp_path / "m.onnx").graph.initializer[1]), large
    )


def test_small_models_are_one_file(tmp_path: Path) -> None:
    heavy(np.arange(12, dtype=np.float32)).save(tmp_path / "m.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_loading_maps_and_does_not_read(tmp_path: Path) -> None:
    heavy(np.arange(BIG, dtype=np.float32)).save(tmp_path / "m.onnx")
    loaded = compiler.load(tmp_path / "m.onnx")
    tensor = loaded.model.graph.initializers["w0"].const_value
    assert isinstance(tensor, ir.ExternalTensor) and tensor.raw is None  # nothing was touched yet
    np.testing.assert_array_equal(tensor.numpy(), np.arange(BIG))
    assert not tensor.numpy().flags.owndata


def test_the_array_of_the_author_is_not_copied() -> None:
    array = np.arange(BIG, dtype=np.float32)
    built = heavy(array)
    assert np.shares_memory(built.weights["w0"].numpy(), array)
    loaded = compiler.load(built)
    assert np.shares_memory(loaded.model.graph.initializers["w0"].const_value.numpy(), array)


@pytest.mark.parametrize(
    "dtype",
    [np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_, ml_dtypes.float8_e4m3fn],
)
def test_every_byte_of_every_type(dtype: Any, tmp_path: Path) -> None:
    size = 2 * weights.LARGE // np.dtype(dtype).itemsize
    array = (np.arange(size) % 2).astype(dtype)
    heavy(np.arange(7, dtype=np.float32), array, array[::2]).save(tmp_path / "m.onnx")
    graph = compiler.load(tmp_path / "m.onnx").model.graph
    for name, expected in (("w1", array), ("w2", array[::2])):
        found = graph.initializers[name].const_value.numpy()
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found.view(np.uint8), expected.copy().view(np.uint8))


def test_packed_elements(tmp_path: Path) -> None:
    array = (np.arange(2 * weights.LARGE + 2) % 15 - 7).astype(ml_dtypes.int4)
    tensor = ir.tensor(array, dtype=ir.DataType.INT4)
    heavy(tensor).save(tmp_path / "m.onnx")
    assert (tmp_path / data_files(tmp_path)[0]).stat().st_size == weights.LARGE + 1
    found = compiler.load(tmp_path / "m.onnx").model.graph.initializers["w0"].const_value
    np.testing.assert_array_equal(found.numpy().astype(np.int8), array.astype(np.int8))


def test_saving_again_changes_no_byte(tmp_path: Path) -> None:
    built = heavy(np.arange(BIG, dtype=np.float32))
    built.save(tmp_path / "m.onnx")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    built.save(tmp_path / "m.onnx")
    compiler.load(tmp_path / "m.onnx").save(tmp_path / "m.onnx")  # over the file that is mapped
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_two_models_in_one_folder(tmp_path: Path) -> None:
    arrays = {name: np.arange(BIG, dtype=np.float32) + k for k, name in enumerate("ab")}
    for name, array in arrays.items():
        heavy(array).save(tmp_path / f"{name}.onnx")
    assert len(data_files(tmp_path)) == 2
    for k, name in enumerate("ab"):
        assert rows(tmp_path / f"{name}.onnx", 5)[0] == 5 + k


def test_a_copy_of_a_model_keeps_its_weights(tmp_path: Path) -> None:
    """The file of weights of an older version may belong to a copy: it stays."""
    heavy(np.arange(BIG, dtype=np.float32)).save(tmp_path / "m.onnx")
    (tmp_path / "copy.onnx").write_bytes((tmp_path / "m.onnx").read_bytes())
    heavy(np.arange(BIG, dtype=np.float32) + 1).save(tmp_path / "m.onnx")
    assert rows(tmp_path / "copy.onnx", 5)[0] == 5
    assert rows(tmp_path / "m.onnx", 5)[0] == 6


def test_a_failing_save_leaves_what_was_there(tmp_path: Path, monkeypatch: Any) -> None:
    heavy(np.arange(BIG, dtype=np.float32)).save(tmp_path / "m.onnx")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "_put", full)
    with pytest.raises(OSError, match="No space"):
        heavy(np.arange(BIG, dtype=np.float32) + 1).save(tmp_path / "m.onnx")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_text_and_json_refer_to_the_same_weights(tmp_path: Path) -> None:
    built = heavy(np.arange(BIG, dtype=np.float32))
    for name in ("m.textproto", "m.json"):
        built.save(tmp_path / name)
        graph = compiler.load(tmp_path / name).model.graph
        assert graph.initializers["w0"].const_value.numpy()[7] == 7


def test_embedded(tmp_path: Path) -> None:
    built = heavy(np.arange(BIG, dtype=np.float32))
    assert rows(built.serialized, 9)[0] == 9
    loaded = compiler.load(built.serialized)
    assert loaded.program.weights["w0"].numpy()[9] == 9
    assert loaded.program.serialized == built.serialized


def test_external_data_of_other_tools(tmp_path: Path) -> None:
    """Small tensors, bodies and constants may refer to files as well: they move into the model."""
    text = """
        <ir_version: 10, opset_import: ["" : 24, "local" : 1]>
        m (bool c, float[2] x) => (float[2] y, float[2] z) {
            y = If (c) <
                then_branch = a () => (float[2] p)
                    <float[2] small = {1.0, 2.0}> { p = Add (x, small) },
                else_branch = b () => (float[2] q) { q = Constant <value = float[2] {3.0, 4.0}> () }
            >
            z = local.f (x)
        }
        <domain: "local", opset_import: ["" : 24]>
        f (x) => (y) { k = Constant <value = float[2] {5.0, 6.0}> ()
                       y = Add (x, k) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(np.array([7.0, 8.0], np.float32), "unused")
    )
    tensors = [model.graph.initializer[0], model.functions[0].node[0].attribute[0].t]
    for branch in model.graph.node[0].attribute:
        tensors += branch.g.initializer
        tensors += [a.t for n in branch.g.node for a in n.attribute if a.HasField("t")]
    assert len(tensors) == 4
    expected = [onnx.numpy_helper.to_array(t) for t in tensors]
    for k, tensor in enumerate(tensors):
        tensor.CopyFrom(onnx.numpy_helper.from_array(expected[k], tensor.name))
        onnx.external_data_helper.set_external_data(tensor, f"{k}.bin")
        (tmp_path / f"{k}.bin").write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    loaded = compiler.load(tmp_path / "m.onnx")
    assert not loaded.program.weights
    for k in range(4):
        (tmp_path / f"{k}.bin").unlink()
    session = onnxruntime.InferenceSession(
        loaded.program.serialized, providers=["CPUExecutionProvider"]
    )
    for c, y in ((True, [2, 3]), (False, [3, 4])):
        found = session.run(None, {"c": np.array(c), "x": np.ones(2, np.float32)})
        np.testing.assert_array_equal(found, [y, [6, 7]])


# -- what is refused


def reference(tmp_path: Path, **changes: str) -> Path:
    """A saved model whose reference to its weights was changed."""
    heavy(np.arange(BIG, dtype=np.float32)).save(tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        entry.value = changes.get(entry.key, entry.value)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    return tmp_path / "m.onnx"


@pytest.mark.parametrize(
    "changes",
    [
        {"location": "absent.data"},
        {"location": "../outside.data"},
        {"location": "/etc/passwd"},
        {"location": ""},
        {"offset": "4096"},
        {"offset": "-4096"},
        {"offset": "many"},
        {"length": "17"},
    ],
)
def test_references_that_lead_nowhere(changes: dict[str, str], tmp_path: Path) -> None:
    path = reference(tmp_path, **changes)
    (tmp_path.parent / "outside.data").write_bytes(bytes(8 * BIG))
    with pytest.raises(errors.ModelFileError) as caught:
        compiler.load(path)
    assert "w0" in str(caught.value) or "many" in str(caught.value)


def test_a_truncated_file_of_weights(tmp_path: Path) -> None:
    heavy(np.arange(BIG, dtype=np.float32)).save(tmp_path / "m.onnx")
    with open(tmp_path / data_files(tmp_path)[0], "r+b") as file:
        file.truncate(BIG)
    with pytest.raises(errors.ModelFileError, match="w0"):
        compiler.load(tmp_path / "m.onnx")


def test_a_link_out_of_the_folder(tmp_path: Path) -> None:
    path = reference(tmp_path, location="link.data")
    (tmp_path.parent / "elsewhere.data").write_bytes(bytes(8 * BIG))
    (tmp_path / "link.data").symlink_to(tmp_path.parent / "elsewhere.data")
    with pytest.raises(errors.ModelFileError, match=r"link\.data"):
        compiler.load(path)


def test_bytes_without_their_folder(tmp_path: Path) -> None:
    heavy(np.arange(BIG, dtype=np.float32)).save(tmp_path / "m.onnx")
    with pytest.raises(errors.ModelFileError, match="path"):
        compiler.load((tmp_path / "m.onnx").read_bytes())


# -- more than a message can hold


@pytest.mark.slow
def test_more_than_2_gib(tmp_path: Path) -> None:
    """From a sparse file to a file, in little memory."""
    elements = (2**31 + (64 << 20)) // 4
    sparse = np.memmap(tmp_path / "weights.bin", np.float32, "w+", shape=(elements,))
    sparse[-1], sparse[elements // 2] = 5, 7
    sparse.flush()
    script = f"""
import numpy as np, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_weights
from onnx_inplace import compiler
array = np.memmap({str(tmp_path / "weights.bin")!r}, np.float32, "r")
built = test_weights.heavy(array)
built.save({str(tmp_path / "m.onnx")!r})
loaded = compiler.load({str(tmp_path / "m.onnx")!r})
found = loaded.model.graph.initializers["w0"].const_value.numpy()
print(found.size, found[-1], found[found.size // 2])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [str(elements), "5.0", "7.0"], done.stderr
    (tmp_path / data_files(tmp_path)[0]).unlink()
    with pytest.raises(errors.WeightsError, match="save the model"):
        _ = heavy(sparse).serialized
