"""What onnxruntime is asked about sub-sessions whose weights nobody loads."""

import numpy as np
import onnx
import pytest

from onnx_inplace.compiler.steps import SubSession
from onnx_inplace.runner import library_check


def layer(name: str, weight: np.ndarray, axes: list[int], op_type: str = "MatMul") -> SubSession:
    """A product and a sum along ``axes``, its values called after ``name``."""
    nodes = [
        onnx.helper.make_node(op_type, [f"x{name}", f"w{name}"], [f"y{name}"]),
        onnx.helper.make_node("ReduceSum", [f"y{name}", f"axes{name}"], [f"z{name}"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "layer",
        [onnx.helper.make_tensor_value_info(f"x{name}", onnx.TensorProto.FLOAT, [2, 32])],
        [onnx.helper.make_tensor_value_info(f"z{name}", onnx.TensorProto.FLOAT, None)],
        [
            onnx.numpy_helper.from_array(weight, f"w{name}"),
            onnx.numpy_helper.from_array(np.array(axes), f"axes{name}"),
        ],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    return SubSession(model.SerializeToString(), (), (), (), True)


@pytest.fixture
def asked(monkeypatch):
    """The models that onnxruntime is asked to load."""
    models, loads = [], library_check._loads
    monkeypatch.setattr(library_check, "_loads", lambda m: models.append(m) or loads(m))
    return models


def test_layers_that_differ_in_weights_alone_are_tried_once(asked) -> None:
    rng = np.random.default_rng(0)
    layers = [layer(str(k), rng.random((32, 16), np.float32), [1]) for k in range(4)]
    assert library_check.doubtful(layers) == []
    assert len(asked) == 1


@pytest.mark.parametrize(
    "other",
    [
        layer("b", np.ones((32, 16), np.float32), [0]),  # a small tensor says what is done
        layer("b", np.ones((32, 17), np.float32), [1]),
        layer("b", np.ones((32, 16), np.float32), [1], "Gemm"),
    ],
)
def test_other_layers_are_tried_themselves(asked, other) -> None:
    assert library_check.doubtful([layer("a", np.ones((32, 16), np.float32), [1]), other]) == []
    assert len(asked) == 2


def test_what_does_not_load_is_found_among_what_does() -> None:
    weight = np.ones((32, 16), np.float32)
    wrong = layer("b", weight.astype(np.float64), [1])  # of two types
    layers = [layer("a", weight, [1]), wrong, layer("c", weight, [1])]
    assert library_check.doubtful(layers) == [wrong]
