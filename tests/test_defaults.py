"""Inputs that have an initializer: a run may bring another value, or leave them out."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from test_adoption import info, stock

from onnx_inplace import Session, compiler, errors

INT64 = onnx.TensorProto.INT64
MATRIX = np.arange(9, dtype=np.float32).reshape(3, 3)
ROWS = np.ones((1, 3), np.float32)


def model(nodes, inputs, outputs, defaults, ir_version=10, opset=24):
    weights = [numpy_helper.from_array(array, name) for name, array in defaults.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir_version).SerializeToString()


def product(ir_version=10, opset=24):
    nodes = [
        helper.make_node("MatMul", ["x", "matrix"], ["y"]),
        helper.make_node("Add", ["y", "state"], ["stateN"]),
    ]
    inputs = [info("state", [1, 3]), info("x", [1, 3]), info("matrix", [3, 3])]
    return model(nodes, inputs, [info("stateN", [1, 3])], {"matrix": MATRIX}, ir_version, opset)


@pytest.mark.parametrize("fuse", ["auto", "off"])
@pytest.mark.parametrize("given", [{}, {"matrix": MATRIX * 3}], ids=["left out", "given"])
def test_a_weight_that_is_an_input_is_what_the_run_brings(fuse, given) -> None:
    data = product()
    session = Session(compiler.annotate(data).program, fuse=fuse)
    state = np.ones((1, 3), np.float32)
    (expected,) = stock(data).run(None, {"x": ROWS, "state": state, **given})
    (result,) = session.run({"x": ROWS, **given}, {"state": state})
    assert result is state
    np.testing.assert_array_equal(state, expected)
    with pytest.raises(errors.BindingError, match="missing: `x`"):
        session.run(given, {"state": state})


def test_before_ir_version_4_initializers_are_constants() -> None:
    """There every initializer had to be an input."""
    session = Session(compiler.annotate(product(ir_version=3, opset=8)).program)
    assert [port.name for port in session.inputs] == ["x"]
    state = np.zeros((1, 3), np.float32)
    session.run({"x": ROWS}, {"state": state})
    np.testing.assert_array_equal(state, ROWS @ MATRIX)


def scatter(default):
    node = helper.make_node("TensorScatter", ["cache", "values", "start"], ["out"], axis=1)
    inputs = [info("cache", [1, 3, 2]), info("values", [1, 1, 2]), info("start", [1], INT64)]
    return model([node], inputs, [info("out", [1, 3, 2])], {"start": np.array([default])})


def test_a_position_that_is_only_a_default_is_judged_in_the_run(guarded, untouched) -> None:
    session = Session(compiler.annotate(scatter(7)).program)
    cache, values = guarded((1, 3, 2)), np.ones((1, 1, 2), np.float32)
    with session.bind(cache=cache) as step:
        with untouched(cache), pytest.raises(errors.CapacityError) as caught:
            step.run(values=values)
        assert caught.value.position == 7
        step.run(values=values, start=[2])
    assert (cache[0, 2] == 1).all() and np.isnan(cache[0, :2]).all()


def test_a_shape_that_is_only_a_default_decides_nothing_before_the_run() -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["y"]),
        helper.make_node("Add", ["state", "state"], ["stateN"]),
    ]
    inputs = [info("state", [2]), info("x", [2, 6]), info("shape", [2], INT64)]
    outputs = [info("stateN", [2]), info("y", None)]
    data = model(nodes, inputs, outputs, {"shape": np.array([3, 4])})
    session = Session(compiler.annotate(data).program)
    x, state = np.ones((2, 6), np.float32), np.ones(2, np.float32)
    with session.bind(state=state) as step:
        assert step.run(x=x)["y"].shape == (3, 4)
        assert step.run(x=x, shape=[6, 2])["y"].shape == (6, 2)
        assert step.run(x=x)["y"].shape == (3, 4)


def test_a_default_is_not_changed_by_what_a_caller_does_with_a_result() -> None:
    nodes = [
        helper.make_node("Identity", ["offset"], ["same"]),
        helper.make_node("Add", ["state", "offset"], ["stateN"]),
    ]
    inputs = [info("state", [2]), info("offset", [2])]
    outputs = [info("stateN", [2]), info("same", [2])]
    data = model(nodes, inputs, outputs, {"offset": np.ones(2, np.float32)})
    session = Session(compiler.annotate(data).program)
    state = np.zeros(2, np.float32)
    with session.bind(state=state) as step:
        step.run()["same"][:] = 77
        assert step.run()["same"].tolist() == [1, 1]
    assert state.tolist() == [2, 2]


def test_a_result_that_is_returned_twice_under_one_name() -> None:
    """As onnxruntime allows it: two results by position, one by name."""
    nodes = [helper.make_node("Add", ["state", "x"], ["stateN"])]
    outputs = [info("stateN", [2]), info("stateN", [2])]
    data = model(nodes, [info("state", [2]), info("x", [2])], outputs, {})
    state = np.zeros(2, np.float32)
    session = Session(compiler.annotate(data).program)
    results = session.run({"x": np.ones(2, np.float32)}, {"state": state})
    assert results[0] is state and results[1] is state and state.tolist() == [1, 1]
    assert dict(results.items()) == {"stateN": state} and "stateN" in repr(results)


def test_an_operator_that_onnxruntime_does_not_know_is_named() -> None:
    nodes = [helper.make_node("Foo", ["state"], ["stateN"], domain="bar")]
    graph = helper.make_graph(nodes, "g", [info("state", [2])], [info("stateN", [2])])
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("bar", 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    program = compiler.annotate(proto.SerializeToString()).program
    with pytest.raises(errors.UnsupportedOperator) as caught:
        Session(program)
    assert (caught.value.domain, caught.value.op_type) == ("bar", "Foo")
