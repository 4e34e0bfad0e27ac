"""Sizes: their simplest form, and how they are followed where inference gives up."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_inplace.compiler import sizes
from onnx_inplace.compiler.extents import Extents
from onnx_inplace.compiler.sizes import Size

NAMES = {"n": 3, "m": 4, "zero": 0}


@pytest.mark.parametrize(
    "text, simple",
    [
        ("1*n*576//(18*32)", "n"),
        ("n*m//m", "n"),
        ("2*n*m//(2*m)", "n"),
        ("n+0", "n"),
        ("n+1-1", "n"),
        ("n-3+5", "(n + 2)"),
        ("n+m-m", "n"),
        ("m-n+n", "m"),
        ("n-n", "0"),
        ("m*n", "(m * n)"),
        ("n*m", "(m * n)"),
        ("7//2", "3"),
        ("n//2", "(n // 2)"),
        ("3*n//2", "((3 * n) // 2)"),
        ("n*(m+2)-2*n", "(m * n)"),
        ("(4*n+8)//4", "(n + 2)"),
        ("1-n", "(1 - n)"),
        ("0-n", "(0 - n)"),
        ("7//0", "0"),
        ("n//2+n//2", "(2 * (n // 2))"),
    ],
)
def test_equal_sizes_look_alike(text: str, simple: str) -> None:
    assert str(sizes.parse(text, NAMES)) == simple


def test_what_is_no_arithmetic_of_known_names_is_not_known() -> None:
    for text in ("unk__0", "n+unk__0", "f(n)", "n-", "n.m", "-n", "1.5", ""):
        assert sizes.parse(text, NAMES) is None
    assert sizes.parse("past-length", {"past-length"}) == "past-length"


terms = st.recursive(
    st.one_of(st.integers(-4, 4), st.sampled_from(sorted(NAMES))),
    lambda inner: st.tuples(st.sampled_from("+-*"), inner, inner),
    max_leaves=8,
)


def build(term: Any) -> tuple[Size, int]:
    """A size in its simplest form, and its number by plain arithmetic."""
    if not isinstance(term, tuple):
        return term, NAMES[term] if isinstance(term, str) else term
    operator, (a, x), (b, y) = term[0], build(term[1]), build(term[2])
    number = {"+": x + y, "-": x - y, "*": x * y}[operator]
    return sizes.operation(operator, a, b), number


@given(terms)
@settings(max_examples=300, deadline=None)
def test_the_simplest_form_is_the_same_number(term: Any) -> None:
    size, number = build(term)
    assert sizes.evaluate(size, NAMES) == number


def test_evaluation_does_not_overflow() -> None:
    big = {"n": 2**40, "m": 2**40}
    assert sizes.evaluate(sizes.product(["n", "m", 8]), big) == 2**83


@given(terms, terms)
@settings(max_examples=300, deadline=None)
def test_what_covers_is_never_less(one: Any, other: Any) -> None:
    (larger, a), (smaller, b) = build(one), build(other)
    if sizes.covers(larger, smaller):
        assert a >= b
    assert sizes.evaluate(sizes.total((larger, smaller)), NAMES) == a + b
    for operator, choose in (("min", min), ("max", max)):
        assert sizes.evaluate(sizes.operation(operator, larger, smaller), NAMES) == choose(a, b)


@given(terms)
@settings(max_examples=100, deadline=None)
def test_numbers_for_some_names_leave_the_same_number(term: Any) -> None:
    size, number = build(term)
    assert sizes.evaluate(sizes.partly(size, {"n": NAMES["n"]}), NAMES) == number
    assert sizes.partly(size, NAMES) == number


def extents(text: str) -> tuple[Extents, dict[str, ir.Value]]:
    proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 23]>\n' + text)
    model = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(proto, data_prop=True))
    values = {str(v.name): v for node in model.graph for v in node.outputs}
    return Extents(model.graph, {}), values


STEPS = {
    "y = Reshape (x, minus)": "(1, 'n', 18, 32)",
    "r = Reshape (x, minus) y = Transpose <perm = [0, 2, 1, 3]> (r)": "(1, 18, 'n', 32)",
    "r = Reshape (x, minus) s = ReduceSum <keepdims = 0> (r, last) y = Add (s, s)": "(1, 'n', 18)",
    "r = Reshape (x, flat) y = Add (r, x)": "(1, 'n', 576)",
    "r = Reshape (x, flat) y = MatMul (r, w)": "(1, 'n', 4)",
    """r = Reshape (x, flat) a, b = Split <axis = -1, num_outputs = 2> (r)
       y = Concat <axis = 2> (a, b)""": "(1, 'n', 576)",
    "r = Reshape (x, flat) y = Concat <axis = 0> (r, x)": "(2, 'n', 576)",
    """s = Shape <start = 1, end = 2> (x) t = Concat <axis = 0> (one, s, one, minus1)
       y = Reshape (x, t)""": "(1, 'n', 1, 576)",
    "r = Reshape (x, flat) f = Flatten <axis = 2> (r) y = Unsqueeze (f, zero)": "(1, 'n', 576)",
    "r = Reshape (x, flat) y = Gather <axis = 1> (r, row)": "(1, 576)",
    "s = Size (x) t = Reshape (s, one) y = Slice (x, t, minus1, one)": "(1, None, 576)",
    "s = Size (x) t = Reshape (s, one) y = Slice (x, t, minus1, minus1)": "(1, 'n', None)",
    "s = Size (x) t = Reshape (s, one) y = Slice (x, t, minus1)": "(None, 'n', 576)",
}


@pytest.mark.parametrize("steps, shape", STEPS.items())
def test_a_size_is_followed_behind_a_reshape(steps: str, shape: str) -> None:
    found, values = extents(
        f"""g (float[1, n, 576] x, float[576, 4] w) => (float y_out) {{
        minus = Constant <value_ints: ints = [1, -1, 18, 32]> ()
        flat = Constant <value_ints: ints = [0, -1, 576]> ()
        minus1 = Constant <value_ints: ints = [-1]> ()
        one = Constant <value_ints: ints = [1]> ()
        zero = Constant <value_ints: ints = [0]> ()
        last = Constant <value_ints: ints = [3]> ()
        row = Constant <value_int: int = 0> ()
        {steps}
        y_out = Identity (y)
    }}"""
    )
    assert str(found.partial(values["y"])) == shape


def test_a_range_is_as_long_as_its_end_is_away() -> None:
    found, values = extents(
        """g (int64[1, n] x, int64 p) => (int64[a] y) {
        one = Constant <value_int: int = 1> ()
        two = Constant <value_int: int = 2> ()
        s = Shape <start = 1, end = 2> (x)
        axes = Constant <value_ints: ints = [0]> ()
        n1 = Squeeze (s, axes)
        end = Add (p, n1)
        y = Range (p, end, one)
        before = Range (end, p, one)
        wide = Range (p, end, two)
        from_data = Range (p, p, one)
        other = Range (one, p, one)
    }"""
    )
    assert found.partial(values["y"]) == ("n",) and found.partial(values["from_data"]) == (0,)
    for name in ("before", "wide", "other"):
        assert found.size(values[name], 0) is None


@pytest.mark.parametrize(
    "attributes", ["pads = [2, 1], strides = [3]", "dilations = [2]", "strides = [2]", ""]
)
def test_a_convolution_is_as_long_as_onnxruntime_makes_it(attributes: str) -> None:
    text = f"""g (float[1, 2, n] x, float[5, 2, 3] w) => (float y_out) {{
        y = Conv{f" <{attributes}>" if attributes else ""} (x, w)
        y_out = Identity (y)
    }}"""
    found, values = extents(text)
    proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 23]>\n' + text)
    stock = onnxruntime.InferenceSession(proto.SerializeToString())
    for n in (5, 6, 7, 8, 20):
        feeds = {"x": np.zeros((1, 2, n), np.float32), "w": np.zeros((5, 2, 3), np.float32)}
        [y] = stock.run(None, feeds)
        shape = found.shape(values["y"])
        assert shape is not None and sizes.numbers(shape, {"n": n}) == y.shape


def test_what_a_scan_stacks_has_one_element_a_round() -> None:
    found, values = extents(
        """g (float[3] h, float[4, t] xs) => (float[3] last, float[a, b] ys) {
        last, ys = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
            body = inner (float[3] s, float[4] x) => (float[3] s_out, float[3] y) {
                s_out = Identity (s)
                y = Exp (s)
            }> (h, xs)
    }"""
    )
    assert found.partial(values["ys"]) == (3, "t")


def test_a_long_chain_of_floats_is_asked_for_no_integer() -> None:
    steps = "\n".join(f"x{k + 1} = Add (x{k}, x{k})" for k in range(3000))
    found, values = extents(f"g (float[n] x0) => (float y) {{\n{steps}\ny = Identity (x3000)\n}}")
    assert found.integer(values["y"]) is None and found.integers(values["y"]) is None
    assert found.affine(values["y"]) is None


def test_what_depends_on_data_is_not_known() -> None:
    found, values = extents(
        """g (float[n] x, bool[n] mask, int64[1] k) => (float y) {
        kept = Compress <axis = 0> (x, mask)
        any = Reshape (x, k)
        y = Identity (kept)
    }"""
    )
    assert found.partial(values["kept"]) == (None,) and found.size(values["any"], 0) is None


def test_names_that_an_author_gave_a_result_are_not_believed() -> None:
    found, values = extents(
        """g (float[n] x) => (float[n] y) {
        y = Concat <axis = 0> (x, x)
    }"""
    )
    assert str(found.size(values["y"], 0)) == "(2 * n)"


def test_sizes_agree_with_onnxruntime_on_random_chains() -> None:
    """Whatever is claimed about a shape is so."""
    rng, compared = np.random.default_rng(0), 0
    for _ in range(25):
        lines, last = [], "x"
        for k in range(int(rng.integers(1, 6))):
            step = rng.integers(0, 5)
            name = f"v{k}"
            lines.append(
                [
                    f"{name} = Reshape ({last}, fold)",
                    f"{name} = Transpose <perm = [1, 0, 2]> ({last})",
                    f"{name} = Add ({last}, {last})",
                    f"{name} = Concat <axis = 1> ({last}, {last})",
                    f"{name} = ReduceMax <keepdims = 1> ({last}, axis)",
                ][step]
            )
            last = name
        text = "\n".join(lines)
        source = f"""g (float[a, b, 4] x) => (float[p, q, r] y) {{
            fold = Constant <value_ints: ints = [0, 2, -1]> ()
            axis = Constant <value_ints: ints = [1]> ()
            {text}
            y = Identity ({last})
        }}"""
        found, values = extents(source)
        proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 23]>\n' + source)
        session = onnxruntime.InferenceSession(
            proto.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        x = np.zeros((2, 6, 4), np.float32)
        try:
            (y,) = session.run(None, {"x": x})
        except onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException:
            continue  # this chain does not fit this shape
        shape = found.partial(values[last])
        assert shape is not None
        for size, actual in zip(shape, y.shape, strict=True):
            assert size is None or sizes.evaluate(size, {"a": 2, "b": 6}) == actual
            compared += size is not None
    assert compared > 30
