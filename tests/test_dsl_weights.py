# ruff: noqa: F841  (programs as authors write them, faulty ones among them)
"""weight(): named initializers, in factories and in models."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from recorded import inputs, one, outputs, proto, refused, stock

from onnx_inplace.dsl import BFLOAT16, BOOL, FLOAT, INT64, function, model, op, weight

W = np.arange(6, dtype=np.float32).reshape(2, 3)


def initializers(program: object) -> dict[str, np.ndarray]:
    graph = proto(program).graph
    return {i.name: onnx.numpy_helper.to_array(i) for i in graph.initializer}


def test_a_weight_is_a_named_initializer() -> None:
    matrix = weight(W, "matrix")

    @model
    def program(x: FLOAT["n", 2]) -> FLOAT["n", 3]:
        return x @ matrix

    assert list(initializers(program)) == ["matrix"] and inputs(program) == ["x"]
    np.testing.assert_array_equal(one(program, x=np.eye(2)), W)


def test_a_weight_can_be_made_while_recording_and_used_like_a_tensor() -> None:
    @model
    def program(x: FLOAT[3], k: BOOL[()]):
        w = weight(W, "w")
        y = x
        if k:
            y = 2.0 * w[0] - w[-1] + y
        return y, op.Transpose(w)

    assert list(initializers(program)) == ["w"]


def test_a_factory_closes_over_weights() -> None:
    def mlp(layers: list[np.ndarray]):
        weights = [weight(w, f"layer.{k}") for k, w in enumerate(layers)]

        @model
        def program(x: FLOAT["n", 2]) -> FLOAT["n", 2]:
            for w in weights:
                x = op.Relu(x @ w)
            return x

        return program

    program = mlp([np.eye(2, dtype=np.float32) * k for k in (2, 3)])
    assert list(initializers(program)) == ["layer.0", "layer.1"]
    assert one(program, x=np.eye(2)).tolist() == [[6, 0], [0, 6]]


def test_one_array_is_stored_once() -> None:
    @model
    def program(x: FLOAT["n", 2]):
        return x @ weight(W, "w"), x @ weight(W, "w")

    assert list(initializers(program)) == ["w"]


def test_two_arrays_cannot_share_a_name() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["n", 2]):
            a = x @ weight(W, "w")
            b = x @ weight(W + 1, "w")
            c = x @ weight(W + 2, "x")
            return a

    assert refused(declare) == [("E100", 4), ("E100", 5)]


def test_variables_give_way_to_weights() -> None:
    @model
    def program(x: FLOAT["n", 2]):
        w = x * 2.0
        return w @ weight(W, "w"), w

    assert list(initializers(program)) == ["w"]
    assert outputs(program) == ["output_0", "output_1"]


def test_a_weight_that_a_loop_uses_first_keeps_its_name() -> None:
    @model
    def program(x: FLOAT[2, 2], n: INT64[()]):
        total = 0
        for _ in range(n):
            x = x @ weight(np.eye(2, dtype=np.float32), "w")
            total = total + 0.5
        w = x * 2.0
        return w, total

    assert list(initializers(program)) == ["w"]
    assert [v.tolist() for v in stock(program, x=np.eye(2), n=2).values()] == [[[2, 0], [0, 2]], 1]


def test_a_function_holds_its_weight_as_a_constant() -> None:
    w = weight(W, "w")

    @function
    def linear(x: FLOAT["n", 2]) -> FLOAT["n", 3]:
        return x @ w

    @model
    def program(x: FLOAT["n", 2]) -> FLOAT["n", 3]:
        return linear(x)

    np.testing.assert_array_equal(one(program, x=np.eye(2)), W)


def test_memory_maps_and_tensors_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    W.tofile(path)
    mapped = np.memmap(path, np.float32, "r", shape=(2, 3))
    external = onnx_ir.ExternalTensor(
        path.name, 0, W.nbytes, onnx_ir.DataType.FLOAT,
        shape=onnx_ir.Shape([2, 3]), name="external", base_dir=tmp_path,
    )  # fmt: skip
    read = []

    def load() -> onnx_ir.Tensor:
        read.append(1)
        return onnx_ir.Tensor(W)

    lazy = onnx_ir.LazyTensor(load, onnx_ir.DataType.FLOAT, onnx_ir.Shape([2, 3]), name="lazy")
    weights = [weight(a, f"w{k}") for k, a in enumerate((mapped, external, lazy))]
    assert weights[0].content.numpy().base is not None and not read

    @model
    def program(x: FLOAT["n", 2]) -> FLOAT["n", 3]:
        a, b, c = weights
        return x @ a + x @ b + x @ c

    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    np.testing.assert_array_equal(session.run(None, {"x": np.eye(2, dtype=np.float32)})[0], 3 * W)


@pytest.mark.parametrize(
    "change", [np.asfortranarray, lambda w: w.astype(">f4"), lambda w: w[:, ::-1]]
)
def test_any_layout_is_taken(change: object) -> None:
    array = change(W)

    @model
    def program(x: FLOAT["n", 2]) -> FLOAT["n", 3]:
        return x @ weight(array, "w")

    np.testing.assert_array_equal(one(program, x=np.eye(2)), array)


def test_extended_types_are_taken() -> None:
    array = W.astype(ml_dtypes.bfloat16)

    @model
    def program(x: FLOAT["n", 2]):
        low = op.Cast(x, to=BFLOAT16)
        return op.Cast(op.Concat(low, op.Transpose(weight(array, "w")), axis=0), to=FLOAT)

    np.testing.assert_array_equal(one(program, x=np.eye(2))[2:], W.T)


def test_an_object_is_no_weight() -> None:
    def declare() -> None:
        weight(np.array([object()]), "w")

    assert refused(declare) == [("E100", 1)]
