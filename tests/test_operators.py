"""Functional bodies against a numpy oracle, in onnxruntime and onnx.reference: the same file, the
same bits."""

import ctypes

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from onnx_inplace.compiler import contract, operators, reference

DTYPES = [
    np.float32,
    np.float16,
    np.float64,
    ml_dtypes.bfloat16,
    np.int8,
    np.uint8,
    np.int32,
    np.int64,
    np.bool_,
]
OPTIONS = onnxruntime.SessionOptions()
OPTIONS.intra_op_num_threads = 1
OPTIONS.log_severity_level = 3


def oracle_update(cache, values, position, axis, mode="linear", batch_axis=None):
    """Token by token, row by row."""
    updated, axis = cache.copy(), axis % cache.ndim
    for index in np.ndindex(values.shape):
        start = (
            position
            if batch_axis is None or np.ndim(position) == 0
            else position[index[batch_axis % cache.ndim]]
        )
        place = int(start) + index[axis]
        place = place % cache.shape[axis] if mode == "circular" else place
        updated[(*index[:axis], place, *index[axis + 1 :])] = values[index]
    return updated


def make_model(op_type, inputs, opset=operators.OPSET, **attributes):
    """One node and the variant of its body. A body must not depend on the dimensions."""
    values = [
        ir.val(n, ir.DataType.from_numpy(x.dtype), [f"{n}_{k}" for k in range(x.ndim)])
        for n, x in inputs.items()
    ]
    node = ir.node(op_type, values, attributes, domain=contract.DOMAIN, num_outputs=1)
    node.outputs[0].name = "result"
    node.outputs[0].type, node.outputs[0].shape = values[0].type, values[0].shape
    functions = operators.attach_bodies([node], opset)
    imports = {"": opset, contract.DOMAIN: contract.VERSION}
    graph = ir.Graph(values, node.outputs, nodes=[node], name="g", opset_imports=imports)
    proto = ir.to_proto(ir.Model(graph, ir_version=11, functions=functions))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def run_everywhere(proto, inputs):
    """What onnxruntime returns, and onnx.reference with the bodies and with our operators."""
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), OPTIONS, providers=["CPUExecutionProvider"]
    )
    feeds = {
        n: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(x, onnx.TensorProto.BFLOAT16)
        if x.dtype == ml_dtypes.bfloat16
        else onnxruntime.OrtValue.ortvalue_from_numpy(x)
        for n, x in inputs.items()
    }
    if any(x.dtype == ml_dtypes.bfloat16 for x in inputs.values()):
        raw = _raw(session.run_with_ort_values(None, feeds)[0])
    else:
        raw = session.run_with_ort_values(None, feeds)[0].numpy()
    ours = ReferenceEvaluator(proto, new_ops=list(reference.OPERATORS))
    return raw, ReferenceEvaluator(proto).run(None, inputs)[0], ours.run(None, inputs)[0]


def _raw(value):
    """onnxruntime has no numpy view of bfloat16: take its bits through dlpack's address."""
    count = int(np.prod(value.shape()))
    bits = (ctypes.c_uint16 * count).from_address(value.data_ptr()) if count else []
    return np.array(bits, np.uint16).view(ml_dtypes.bfloat16).reshape(value.shape())


def random(rng, shape, dtype):
    return rng.integers(0, 2 if dtype is np.bool_ else 100, shape).astype(dtype)


def check_update(cache, values, position, opset=operators.OPSET, **attributes):
    inputs = {"cache": cache, "values": values, "position": np.asarray(position, np.int64)}
    expected = oracle_update(cache, values, position, **{"axis": -2, **attributes})
    before = cache.copy()
    for result in run_everywhere(make_model("CacheUpdate", inputs, opset, **attributes), inputs):
        assert result.dtype == cache.dtype
        np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(cache, before)


SHAPE = (2, 3, 4, 5, 2, 3)
AXES = [(rank, axis) for rank in range(1, 7) for axis in {*range(rank), -1, -rank, max(-2, -rank)}]


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize(("rank", "axis"), AXES)
def test_a_scalar_position_serves_every_rank_and_axis(rank, axis, mode):
    rng = np.random.default_rng(rank * 10 + axis)
    shape = SHAPE[:rank]
    capacity = shape[axis]
    length = max(1, capacity - 1)
    new = list(shape)
    new[axis] = length
    position = capacity - length if mode == "linear" else 2 * capacity - 1
    check_update(
        random(rng, shape, np.float32), random(rng, new, np.float32), position, axis=axis, mode=mode
    )


BATCHED = [(r, a, b) for r in (2, 3, 5) for a in range(r) for b in range(r) if a != b]


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize(
    ("rank", "axis", "batch_axis"), [*BATCHED, (4, -2, 0), (5, -2, 1), (5, -2, -4), (3, 1, -1)]
)
def test_a_position_per_row(rank, axis, batch_axis, mode):
    rng = np.random.default_rng(rank)
    shape = [3, 4, 2, 5, 3][:rank]
    shape[axis] = 6
    new = list(shape)
    new[axis] = 2
    top = 4 if mode == "linear" else 20
    position = rng.integers(0, top + 1, shape[batch_axis])
    cache, values = random(rng, shape, np.float32), random(rng, new, np.float32)
    check_update(cache, values, position, axis=axis, batch_axis=batch_axis, mode=mode)
    check_update(cache, values, 3, axis=axis, batch_axis=batch_axis, mode=mode)


@pytest.mark.parametrize("opset", [18, 21, 23])
@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize(("axis", "batch_axis"), [(-2, None), (1, 0), (0, 2), (2, -2)])
def test_bodies_before_tensor_scatter(opset, mode, axis, batch_axis):
    rng = np.random.default_rng(opset)
    shape = [4, 4, 4]
    new = list(shape)
    new[axis] = 3
    batch = {} if batch_axis is None else {"batch_axis": batch_axis}
    top = 2 if mode == "linear" else 9
    position = rng.integers(0, top, 4) if batch else 1
    check_update(
        random(rng, shape, np.float32),
        random(rng, new, np.float32),
        position,
        opset,
        axis=axis,
        mode=mode,
        **batch,
    )


@pytest.mark.parametrize("opset", [18, 24])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_element_types(dtype, mode, opset):
    rng = np.random.default_rng(0)
    cache, values = random(rng, (2, 3, 6, 4), dtype), random(rng, (2, 3, 2, 4), dtype)
    check_update(cache, values, 4, opset, mode=mode)
    check_update(cache, values, [0, 4], opset, mode=mode, batch_axis=0)


@pytest.mark.parametrize("opset", [18, 25])
@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize(
    ("shape", "length", "position"),
    [
        ((2, 5, 3), 0, 5),
        ((2, 5, 3), 0, 0),
        ((0, 5, 3), 2, 1),
        ((2, 5, 0), 5, 0),
        ((2, 0, 3), 0, 0),
        ((2, 5, 3), 5, 0),
    ],
)
def test_empty_and_full(shape, length, position, mode, opset):
    rng = np.random.default_rng(0)
    new = (shape[0], length, shape[2])
    check_update(
        random(rng, shape, np.float32),
        random(rng, new, np.float32),
        position,
        opset,
        axis=1,
        mode=mode,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 2)])
def test_assign(dtype, shape):
    rng = np.random.default_rng(0)
    inputs = {"state": random(rng, shape, dtype), "value": random(rng, shape, dtype)}
    for result in run_everywhere(make_model("Assign", inputs), inputs):
        np.testing.assert_array_equal(result, inputs["value"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy(dtype):
    inputs = {"x": random(np.random.default_rng(0), (2, 3), dtype)}
    for result in run_everywhere(make_model("Copy", inputs), inputs):
        np.testing.assert_array_equal(result, inputs["x"])


@pytest.mark.parametrize(("rank", "axis"), [(1, 0), (3, 0), (3, 1), (4, -3), (3, 2)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
def test_reorder(rank, axis, dtype):
    cache = random(np.random.default_rng(0), (4, 4, 4, 2)[:rank], dtype)
    indices = [2, 0, 0, 3]
    inputs = {"cache": cache, "indices": np.array(indices)}
    expected = np.stack([np.take(cache, i, axis) for i in indices], axis)
    for result in run_everywhere(make_model("CacheReorder", inputs, batch_axis=axis), inputs):
        np.testing.assert_array_equal(result, expected)


def make_update(shape=("b", "h", "m", "d"), **attributes):
    cache = ir.Value(
        name="cache",
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape(shape) if shape else None,
    )
    values, position = ir.Value(name="values"), ir.Value(name="position")
    return ir.node("CacheUpdate", [cache, values, position], attributes, domain=contract.DOMAIN)


def test_one_function_for_each_variant_in_use():
    nodes = [
        make_update(),
        make_update(),
        make_update(axis=1),
        make_update(mode="circular"),
        make_update(batch_axis=1),
    ]
    functions = operators.attach_bodies(nodes)
    assert nodes[0].overload == nodes[1].overload
    assert len({n.overload for n in nodes}) == len(functions) == 4
    called = {f.identifier() for f in functions}
    assert all(n.op_identifier() in called for n in nodes)
    assert not any(a.is_ref() for f in functions for n in f for a in n.attributes.values())


@pytest.mark.parametrize(
    "node",
    [
        make_update(axis=4),
        make_update(axis=-5),
        make_update(batch_axis=4),
        make_update(axis=2, batch_axis=-2),
        make_update(mode="ring"),
        make_update(shape=None, batch_axis=1),
    ],
    ids=str,
)
def test_what_has_no_meaning_has_no_body(node):
    with pytest.raises(operators.NoBody):
        operators.body(node)


def test_a_model_of_an_old_opset_is_refused():
    with pytest.raises(operators.NoBody, match="opset"):
        operators.body(make_update(), 17)


@pytest.mark.parametrize("name", operators.SCHEMAS)
def test_schemas_are_known_to_onnx_and_infer(name):
    schema = onnx.defs.get_schema(name, contract.DOMAIN)
    inputs = [p.name for p in schema.inputs]
    infos = [
        helper.make_tensor_value_info(
            n, 16 if p.type_str == "T" else 7, ["a", 3] if p.type_str == "T" else None
        )
        for n, p in zip(inputs, schema.inputs, strict=True)
    ]
    graph = helper.make_graph(
        [helper.make_node(name, inputs, ["y"], domain=contract.DOMAIN)],
        "g",
        infos,
        [helper.make_empty_tensor_value_info("y")],
    )
    imports = [helper.make_opsetid("", 25), helper.make_opsetid(contract.DOMAIN, 1)]
    model = onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=imports), strict_mode=True
    )
    assert model.graph.output[0].type == infos[0].type


def test_element_types_have_whole_bytes():
    schema = onnx.defs.get_schema("CacheUpdate", contract.DOMAIN)
    [types] = [set(c.allowed_type_strs) for c in schema.type_constraints]
    assert {"tensor(bfloat16)", "tensor(bool)", "tensor(int8)", "tensor(float8e4m3fn)"} <= types
    assert not types & {"tensor(int4)", "tensor(uint2)", "tensor(float4e2m1)", "tensor(string)"}


def test_every_schema_has_a_body_and_every_write_a_rule():
    for name in operators.SCHEMAS:
        node = ir.node(name, [ir.Value(name="x", shape=ir.Shape([1, 1]))], domain=contract.DOMAIN)
        assert operators.has_body(node) and operators.body(node).name == name
        assert (contract.rule(node) is None) == (name == "Copy")


def test_one_file_with_two_variants():
    """onnxruntime tells overloads apart; onnx.reference needs our operators for that."""
    cache = ir.val("cache", ir.DataType.FLOAT, [2, 3, 4])
    inputs = {"cache": np.zeros((2, 3, 4), np.float32)}
    nodes, value = [], cache
    for k, axis in enumerate((1, 2)):
        new = ir.val(
            f"new{k}", ir.DataType.FLOAT, [1 if j == axis else n for j, n in enumerate((2, 3, 4))]
        )
        position = ir.val(f"position{k}", ir.DataType.INT64, [])
        node = ir.node(
            "CacheUpdate", [value, new, position], {"axis": axis}, domain=contract.DOMAIN
        )
        value = node.outputs[0]
        value.name, value.type, value.shape = f"updated{k}", cache.type, cache.shape
        nodes.append(node)
        inputs[new.name] = np.full(new.shape.numpy(), k + 1, np.float32)
        inputs[position.name] = np.array(k + 1)
    values = [v for node in nodes for v in node.inputs if v.producer() is None]
    imports = {"": operators.OPSET, contract.DOMAIN: contract.VERSION}
    graph = ir.Graph(values, [value], nodes=nodes, name="g", opset_imports=imports)
    model = ir.Model(graph, ir_version=11, functions=operators.attach_bodies(nodes))
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    expected = oracle_update(inputs["cache"], inputs["new0"], 1, 1)
    expected = oracle_update(expected, inputs["new1"], 2, 2)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), OPTIONS, providers=["CPUExecutionProvider"]
    )
    np.testing.assert_array_equal(session.run(None, inputs)[0], expected)
    evaluator = ReferenceEvaluator(proto, new_ops=list(reference.OPERATORS))
    np.testing.assert_array_equal(evaluator.run(None, inputs)[0], expected)


@pytest.mark.parametrize("position", [-1, 4, 2**62])
def test_our_operators_for_onnx_reference_refuse_what_does_not_fit(position):
    cache, values = np.zeros((2, 5, 3), np.float32), np.ones((2, 2, 3), np.float32)
    inputs = {"cache": cache, "values": values, "position": np.array(position)}
    proto = make_model("CacheUpdate", inputs)
    with pytest.raises(ValueError, match="capacity"):
        ReferenceEvaluator(proto, new_ops=list(reference.OPERATORS)).run(None, inputs)
