"""Inlining, names, constants and types of the flat graph."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnx_inplace.compiler import control, errors, flat

HEADER = '<ir_version: 10, opset_import: ["": 21, "local": 1, "com.microsoft": 1]>\n'


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEADER + text)


def flattened(source: str | onnx.ModelProto) -> ir.Model:
    """The flat model; it must mean what the model meant, to onnxruntime."""
    proto = parse(source) if isinstance(source, str) else source
    original = proto.SerializeToString()
    model = ir.serde.deserialize_model(proto)
    flat.flatten(model)
    names = [v.name for v in model.graph.inputs]
    assert names == [v.name for v in proto.graph.input]
    values = _values(model)
    assert len({v.name for v in values}) == len(values)
    rng = np.random.default_rng(0)
    feeds = {
        v.name: np.asarray(rng.random(v.shape.numpy()) * 3, v.dtype.numpy())
        for v in model.graph.inputs
    }
    results = []
    for candidate in (original, ir.to_proto(model).SerializeToString()):
        session = onnxruntime.InferenceSession(candidate)
        results.append(session.run(None, feeds))
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_array_equal(got, wanted)
    return model


def _values(model: ir.Model) -> list[ir.Value]:
    graph = model.graph
    bodies = [g for node in graph.all_nodes() for g in control.bodies(node)]
    found = [*graph.inputs, *graph.initializers.values()]
    found += [v for body in bodies for v in body.inputs]
    return found + [v for node in graph.all_nodes() for v in node.outputs]


def operators(model: ir.Model) -> list[str]:
    return sorted(node.op_type for node in model.graph.all_nodes())


def test_a_function_called_twice_and_nested() -> None:
    model = flattened(
        """main (float[2] x) => (float[2] y) { a = local.outer(x)  y = local.outer(a) }
        <domain: "local", opset_import: ["": 21, "local": 1]>
        inner (x) => (y) { t = Abs(x)  y = Sqrt(t) }
        <domain: "local", opset_import: ["": 21, "local": 1]>
        outer (x) => (y) { t = local.inner(x)  y = Neg(t) }"""
    )
    assert operators(model) == ["Abs", "Abs", "Neg", "Neg", "Sqrt", "Sqrt"]
    assert not model.functions


def test_attributes_of_a_call_reach_the_body() -> None:
    model = flattened(
        """main (float[2,3] x) => (float[3,2] y, float[2,3] z) {
            y = local.turn <order = [1, 0]> (x)
            z = local.clip (x)
        }
        <domain: "local", opset_import: ["": 21]>
        turn <order> (x) => (y) { y = Transpose <perm: ints = @order> (x) }
        <domain: "local", opset_import: ["": 21]>
        clip <by: float = 2.5> (x) => (y) { y = Elu <alpha: float = @by> (x) }"""
    )
    attributes = {n.op_type: n.attributes for n in model.graph}
    assert list(attributes["Transpose"]["perm"].as_ints()) == [1, 0]
    assert attributes["Elu"]["alpha"].as_float() == 2.5


def test_overloads_are_told_apart() -> None:
    proto = parse(
        """main (float[2] x) => (float[2] y) { a = local.f(x)  y = local.f(a) }
        <domain: "local", opset_import: ["": 21]>
        f (x) => (y) { y = Abs(x) }"""
    )
    other = onnx.FunctionProto()
    other.CopyFrom(proto.functions[0])
    other.overload, other.node[0].op_type = "b", "Neg"
    proto.functions.append(other)
    proto.graph.node[1].overload = "b"
    model = ir.serde.deserialize_model(proto)
    flat.flatten(model)
    assert [n.op_type for n in model.graph] == ["Abs", "Neg"]


def test_calls_in_branches_and_bodies_capture_what_they_need() -> None:
    model = flattened(
        """main (float[2] x, bool c, int64 n) => (float[2] y) {
            outer = Exp(x)
            y = Loop (n, c, x) <
                body = b (int64 i, bool g, float[2] v) => (bool again, float[2] w) {
                    again = Identity(g)
                    w = If (g) <
                        then_branch = t () => (float[2] p) { p = local.mix(v, outer) },
                        else_branch = e () => (float[2] q) { q = local.mix(outer, v) }>
                }>
        }
        <domain: "local", opset_import: ["": 21]>
        mix (a, b) => (y) {
            t = Add(a, b)
            zero = Constant <value = float {0.0}> ()
            sum = ReduceSum <keepdims = 0> (t)
            large = Less(zero, sum)
            y = If (large) <
                then_branch = t () => (p) { p = Sub(t, b) },
                else_branch = e () => (q) { q = Identity(t) }>
        }"""
    )
    assert operators(model).count("If") == 3 and "mix" not in operators(model)


def test_results_that_are_parameters() -> None:
    """As they are, twice, and swapped: no input of the model is renamed."""
    model = flattened(
        """main (float[2] x, float[2] z) => (float[2] a, float[2] b, float[2] c) {
            a, b, c = local.f(x, z)
        }
        <domain: "local", opset_import: ["": 21]>
        f (x, z) => (u, v, v2) { v = Neg(z)  u = Identity(x)  v2 = Identity(v) }"""
    )
    assert [v.name for v in model.graph.outputs] == ["a", "b", "c"]
    proto = parse(
        """main (float[2] x, float[2] z) => (float[2] a, float[2] b, float[2] c) {
            a, b, c = local.f(x, z)
        }
        <domain: "local", opset_import: ["": 21]>
        f (x, z) => (z, x, z) { t = Neg(x) }"""
    )
    model = ir.serde.deserialize_model(proto)
    flat.flatten(model)
    assert [v.name for v in model.graph.inputs] == ["x", "z"]
    sources = [v.producer().inputs[0].name for v in model.graph.outputs]
    assert sources == ["z", "x", "z"]


def test_constants_and_initializers_of_bodies_move_to_the_main_graph() -> None:
    """Both branches call theirs ``k1``."""
    proto = parse(
        """main (float[2] x, bool c) => (float[2] y) {
            y = If (c) <
                then_branch = t () => (float[2] p) {
                    k2 = Constant <value_floats = [3.0, 4.0]> ()
                    s = Add(k1, k2)
                    p = Mul(x, s)
                },
                else_branch = e () => (float[2] q) { q = Add(x, k1) }>
        }"""
    )
    for attribute, value in zip(proto.graph.node[0].attribute, (1, 5), strict=True):
        array = np.full(2, value, np.float32)
        attribute.g.initializer.append(onnx.numpy_helper.from_array(array, "k1"))
    model = flattened(proto)
    assert "Constant" not in operators(model)
    values = {n: v.const_value.numpy()[0] for n, v in model.graph.initializers.items()}
    assert sorted(values.values()) == [1, 3, 5]


def test_a_constant_that_is_a_result_stays() -> None:
    flattened(
        """main (float[2] x, bool c) => (float[2] y, float[2] z) {
            z = Constant <value_floats = [1.0, 2.0]> ()
            y = If (c) <
                then_branch = t () => (float[2] p) { p = Constant <value_floats = [3.0, 4.0]> () },
                else_branch = e () => (float[2] q) { q = Neg(x) }>
        }"""
    )


def test_sibling_branches_use_one_name() -> None:
    model = flattened(
        """main (float[2] x, bool c) => (float[2] y) {
            y = If (c) <
                then_branch = t () => (float[2] r) { s = Abs(x)  r = Neg(s) },
                else_branch = e () => (float[2] r) { s = Neg(x)  r = Abs(s) }>
        }"""
    )
    assert {"s", "s.1", "r", "r.1"} <= {v.name for v in _values(model)}


def test_types_reach_behind_operators_that_onnx_does_not_know() -> None:
    proto = parse(
        """main (float[1,n,32] x) => (float[1,n,16] y) {
            a = com.microsoft.MatMulNBits <K = 32, N = 64, bits = 4, block_size = 32> (x, w, s)
            b = com.microsoft.QuickGelu(a)
            c = Relu(b)
            d, e = Split <axis = 2, num_outputs = 2> (c)
            y, f = Split <axis = 2, num_outputs = 2> (d)
        }"""
    )
    for name, array in (("w", np.zeros((64, 1, 16), np.uint8)), ("s", np.zeros(64, np.float32))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model = ir.serde.deserialize_model(proto)
    flat.flatten(model)
    found = {v.name: (v.dtype, [str(d) for d in v.shape]) for n in model.graph for v in n.outputs}
    assert found["c"] == (ir.DataType.FLOAT, ["1", "n", "64"])
    assert found["e"] == (ir.DataType.FLOAT, ["1", "n", "32"])


def test_an_operator_of_a_domain_that_is_not_imported_is_refused() -> None:
    model = ir.serde.deserialize_model(
        parse("main (float[2] x) => (float[2] y) { y = elsewhere.F(x) }")
    )
    with pytest.raises(errors.ModelFileError, match="elsewhere"):
        flat.flatten(model)


def test_functions_of_another_opset_are_refused() -> None:
    proto = parse(
        """main (float[2] x) => (float[2] y) { y = local.f(x) }
        <domain: "local", opset_import: ["": 20]>
        f (x) => (y) { y = Abs(x) }"""
    )
    model = ir.serde.deserialize_model(proto)
    with pytest.raises(errors.ModelFileError, match="version 20"):
        flat.flatten(model)
