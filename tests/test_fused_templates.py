"""Every operator that fused steps may contain: what it gives, against float64 and the library."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import genai_form
import numpy as np
import onnx
import pytest
import test_fused_paged
from decoders import Shape, decoder

from onnx_inplace import Session, compiler, errors
from onnx_inplace.compiler import fusable
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, model, op, weight
from onnx_inplace.runner.fused import templates

pytestmark = pytest.mark.kernel

ROWS, WIDTH = 3, 48  # rows of three vectors
RNG = np.random.default_rng(5)
ANGLES = np.outer(np.arange(20), 0.7 ** np.arange(8))


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


WEIGHTS = {
    "before": random(WIDTH, WIDTH) / np.float32(7),
    "matrix": random(WIDTH, WIDTH),
    "half": random(WIDTH, WIDTH).astype(np.float16),
    "scale": 1 + 0.3 * random(WIDTH),
    "bias": 0.3 * random(WIDTH),
    "column": random(ROWS, 1),
    "codes4": RNG.integers(0, 256, (WIDTH, 2, 16), dtype=np.uint8),
    "codes8": RNG.integers(0, 256, (WIDTH, 2, 32), dtype=np.uint8),
    "zeros4": RNG.integers(0, 256, (WIDTH, 1), dtype=np.uint8),
    "zeros": 7 + random(WIDTH, 2),
    "scales": 0.02 + 0.02 * abs(random(WIDTH, 2)),
    "cos": np.cos(ANGLES).astype(np.float32),
    "sin": np.sin(ANGLES).astype(np.float32),
    "cos3": np.cos(ANGLES[None, 3:6]).astype(np.float32),
    "sin3": np.sin(ANGLES[None, 3:6]).astype(np.float32),
    **{f"n{n}": np.float32(n) for n in (1, 2, 3, 5)},
    **{f"i{n}": np.array([n]) for n in (0, 1, 2, 3, 8, 100)},
    "half_of": np.float32(0.5),
    "root2": np.float32(2**0.5),
    "root_half": np.float32(0.5**0.5),
    "small": np.float32(0.044715),
    "factor": np.float32((2 / np.pi) ** 0.5),
    "epsilon": np.float32(1e-5),
    "tenth": np.float32(0.1),
    "minus": np.array([-1]),
    "one": np.array(1),
    "two_axes": np.array([0, 2]),
    "heads": np.array([1, 3, 3, 16]),
    "cos16": np.cos(np.tile(ANGLES[3:6], 2))[None, None].astype(np.float32),
    "sin16": np.sin(np.tile(ANGLES[3:6], 2))[None, None].astype(np.float32),
    "parts": np.array([20, 28]),
    "shape": np.array([4, 36]),
}
W = {name: array.astype(np.float64) for name, array in WEIGHTS.items()}
POSITIONS = np.array([[4, 19, 0]])
FEEDS = {"input": random(1, ROWS, WIDTH), "positions": POSITIONS, "first": np.array([7])}


class Case(NamedTuple):
    """Nodes that make ``y`` of ``x``, (1, ROWS, WIDTH); the same in float64.

    ``error``: allowed, relative to the largest number of the result.
    """

    nodes: str
    meaning: Callable[[Any], Any]
    error: float = 1e-5


def erf(x):
    return np.vectorize(math.erf)(x)


def gelu(x):
    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def swish(x, factor=1.0):
    return x / (1 + np.exp(-factor * x))


def normalized(x, scale, bias=0.0, *, centered, epsilon=1e-5):
    x = x - x.mean(-1, keepdims=True) if centered else x
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale + bias


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def turned(x, places, *, interleaved=False):
    """Rotary embedding of three heads of 16 numbers, of rows at ``places``."""
    heads = x.reshape(*x.shape[:-1], 3, 16)
    cos, sin = (W[name][places][None, :, None] for name in ("cos", "sin"))
    a, b = heads[..., :8], heads[..., 8:]
    if interleaved:
        a, b = heads[..., ::2], heads[..., 1::2]
    parts = a * cos - b * sin, a * sin + b * cos
    if interleaved:
        return np.stack(parts, -1).reshape(x.shape)
    return np.concatenate(parts, -1).reshape(x.shape)


def skipped(x, bias, *, centered):
    total = x + np.tanh(x) + 0.1 * bias
    added = W["scale"] if centered else 0.0
    return normalized(total, W["scale"], added, centered=centered, epsilon=1e-12) + total


def quantized(bits, weights, codes, zeros):
    """MatMulNBits with two blocks a row, of which the second one is half empty."""
    matrix = ((codes - zeros[..., None]) * W["scales"][..., None]).reshape(WIDTH, 64)[:, :WIDTH]
    return Case(
        f"y = com.microsoft.MatMulNBits <bits = {bits}, block_size = 32, K = {WIDTH}, N = {WIDTH}>"
        f" (x, {weights})",
        lambda x: x @ matrix.T,
    )


def halves(packed):
    """4-bit numbers, two in a byte, the lower one first."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(WIDTH, 2, -1).astype(np.float64)


CODES4, ZEROS4 = halves(WEIGHTS["codes4"]), halves(WEIGHTS["zeros4"])[..., 0]
SKIP = "skip = Tanh (x) added = Mul (bias, tenth) "
ROTARY = "y = com.microsoft.RotaryEmbedding"

CASES = {
    "add": Case("y = Add (x, bias)", lambda x: x + W["bias"]),
    "subtract": Case("y = Sub (bias, x)", lambda x: W["bias"] - x),
    "multiply": Case("y = Mul (x, column)", lambda x: x * W["column"]),
    "divide": Case("y = Div (x, scale)", lambda x: x / W["scale"]),
    "square": Case("y = Pow (x, n2)", lambda x: x**2),
    "cube": Case("y = Pow (x, n3)", lambda x: x**3),
    "first power": Case("y = Pow (x, n1)", lambda x: x),
    "power of a half": Case("a = Abs (x) y = Pow (a, half_of)", lambda x: np.sqrt(abs(x))),
    "reciprocal": Case("e = Exp (x) y = Reciprocal (e)", lambda x: np.exp(-x)),
    "softplus": Case("y = Softplus (x)", lambda x: np.logaddexp(0, x)),
    "exp": Case("y = Exp (x)", np.exp),
    "negate": Case("n = Neg (x) y = Add (n, bias)", lambda x: W["bias"] - x),
    "root": Case("a = Abs (x) y = Sqrt (a)", lambda x: np.sqrt(abs(x))),
    "absolute": Case("y = Abs (x)", abs),
    "erf": Case("y = Erf (x)", erf),
    "sigmoid": Case("y = Sigmoid (x)", lambda x: 1 / (1 + np.exp(-x))),
    "tanh": Case("y = Tanh (x)", np.tanh),
    "relu": Case("y = Relu (x)", lambda x: np.maximum(x, 0)),
    "activation of no product": Case("a = Neg (x) y = Relu (a)", lambda x: np.maximum(-x, 0)),
    "silu of no product": Case("a = Neg (x) y = Swish (a)", lambda x: swish(-x)),
    "gelu of no product": Case("a = Neg (x) y = Gelu (a)", lambda x: gelu(-x)),
    "tanh of no product": Case("a = Neg (x) y = Tanh (a)", lambda x: np.tanh(-x)),
    "sigmoid of no product": Case("a = Neg (x) y = Sigmoid (a)", lambda x: 1 / (1 + np.exp(x))),
    "gate": Case("g = Swish (x) u = Neg (x) y = Mul (g, u)", lambda x: -x * swish(x)),
    "gelu": Case("y = Gelu (x)", gelu),
    "gelu by tanh": Case(
        'a = Neg (x) y = Gelu <approximate = "tanh"> (a)', lambda x: gelu_tanh(-x)
    ),
    "swish": Case("y = Swish (x)", swish),
    "swish, factor": Case("y = Swish <alpha = 1.5> (x)", lambda x: swish(x, 1.5)),
    "microsoft gelu": Case("y = com.microsoft.Gelu (x)", gelu),
    "quick gelu": Case("y = com.microsoft.QuickGelu (x)", lambda x: swish(x, 1.702)),
    "fast gelu": Case("y = com.microsoft.FastGelu (x)", gelu_tanh),
    "fast gelu, bias": Case(
        "y = com.microsoft.FastGelu (x, bias)", lambda x: gelu_tanh(x + W["bias"])
    ),
    "bias gelu": Case("y = com.microsoft.BiasGelu (x, bias)", lambda x: gelu(x + W["bias"])),
    "cast": Case("h = Cast <to = 10> (x) y = Cast <to = 1> (h)", lambda x: x, 1e-3),
    "matmul": Case("y = MatMul (x, matrix)", lambda x: x @ W["matrix"]),
    "matmul, float16": Case(
        "h = Cast <to = 10> (x) z = MatMul (h, half) y = Cast <to = 1> (z)",
        lambda x: x @ W["half"],
        3e-3,
    ),
    "4 bits": quantized(4, "codes4, scales", CODES4, np.full((WIDTH, 2), 8.0)),
    "4 bits, zero points": quantized(4, "codes4, scales, zeros4", CODES4, ZEROS4),
    "8 bits": quantized(8, "codes8, scales", W["codes8"], np.full((WIDTH, 2), 128.0)),
    "4 bits, zero points of floats": quantized(4, "codes4, scales, zeros", CODES4, W["zeros"]),
    "gemm": Case(
        "s = Squeeze (x, i0) y = Gemm <transB = 1> (s, matrix, bias)",
        lambda x: x[0] @ W["matrix"].T + W["bias"],
    ),
    "rms norm": Case(
        "y = RMSNormalization <epsilon = 0.000001> (x, scale)",
        lambda x: normalized(x, W["scale"], centered=False, epsilon=1e-6),
    ),
    "simplified layer norm": Case(
        "y = SimplifiedLayerNormalization (x, scale)",
        lambda x: normalized(x, W["scale"], centered=False),
    ),
    "layer norm": Case(
        "y = LayerNormalization <axis = 2> (x, scale, bias)",
        lambda x: normalized(x, W["scale"], W["bias"], centered=True),
    ),
    "skip layer norm": Case(
        SKIP + "z, , , t = com.microsoft.SkipLayerNormalization"
        " (x, skip, scale, scale, added) y = Add (z, t)",
        lambda x: skipped(x, W["bias"], centered=True),
    ),
    "skip rms norm": Case(
        SKIP + "z, , , t = com.microsoft.SkipSimplifiedLayerNormalization"
        " (x, skip, scale, added) y = Add (z, t)",
        lambda x: skipped(x, W["bias"], centered=False),
    ),
    "rotary": Case(
        "y = RotaryEmbedding <num_heads = 3> (x, cos3, sin3)", lambda x: turned(x, [3, 4, 5])
    ),
    "rotary by positions": Case(
        "y = RotaryEmbedding <num_heads = 3, interleaved = 1> (x, cos, sin, positions)",
        lambda x: turned(x, POSITIONS[0], interleaved=True),
    ),
    "microsoft rotary": Case(
        ROTARY + " <num_heads = 3> (x, positions, cos, sin)", lambda x: turned(x, POSITIONS[0])
    ),
    "microsoft rotary from a position": Case(
        ROTARY + " <num_heads = 3, interleaved = 1> (x, first, cos, sin)",
        lambda x: turned(x, [7, 8, 9], interleaved=True),
    ),
    "rotary by slices": Case(
        "h = Reshape (x, heads) t = Transpose <perm = [0, 2, 1, 3]> (h)"
        " a = Slice (t, i0, i8, i3) b = Slice (t, i8, i100, i3) n = Neg (b)"
        " u = Concat <axis = 3> (n, a) v = Mul (u, sin16) w = Mul (t, cos16) y = Add (w, v)",
        lambda x: turned(x, [3, 4, 5]).reshape(1, ROWS, 3, 16).transpose(0, 2, 1, 3),
    ),
    "sum": Case("y = ReduceSum (x, minus)", lambda x: x.sum(-1, keepdims=True)),
    "sum of a middle axis": Case("y = ReduceSum <keepdims = 0> (x, i1)", lambda x: x.sum(1)),
    "sum of no axis": Case("y = ReduceSum <noop_with_empty_axes = 1> (x)", lambda x: x),
    "mean": Case("y = ReduceMean (x, i2)", lambda x: x.mean(-1, keepdims=True)),
    "mean of all": Case("y = ReduceMean <keepdims = 0> (x)", lambda x: x.mean()),
    "maximum": Case("y = ReduceMax (x, minus)", lambda x: x.max(-1, keepdims=True)),
    "minimum": Case("y = ReduceMin (x, two_axes)", lambda x: x.min((0, 2), keepdims=True)),
    "softmax": Case("y = Softmax (x)", lambda x: softmax(x, -1)),
    "softmax of a middle axis": Case("y = Softmax <axis = 1> (x)", lambda x: softmax(x, 1)),
    "largest": Case("y = ArgMax <axis = 2, keepdims = 0> (x)", lambda x: x.argmax(-1), 0.0),
    "largest of a middle axis": Case(
        "y = ArgMax <axis = 1> (x)", lambda x: x.argmax(1, keepdims=True), 0.0
    ),
    "constant": Case("two = Constant <value = float {2.0}> () y = Pow (x, two)", lambda x: x**2),
    "slice": Case("y = Slice (x, i1, i100, i2, i2)", lambda x: x[:, :, 1::2]),
    "split": Case("a, y = Split <axis = 2> (x, parts)", lambda x: x[..., 20:]),
    "half of a split": Case(", y = Split <axis = 2, num_outputs = 2> (x)", lambda x: x[..., 24:]),
    "concat": Case(
        "n = Neg (x) y = Concat <axis = 1> (x, n)", lambda x: np.concatenate([x, -x], 1)
    ),
    "transpose": Case("y = Transpose <perm = [0, 2, 1]> (x)", lambda x: x.transpose(0, 2, 1)),
    "reshape": Case(
        "t = Transpose <perm = [0, 2, 1]> (x) y = Reshape (t, shape)",
        lambda x: x.transpose(0, 2, 1).reshape(4, 36),
    ),
    "squeeze": Case("y = Squeeze (x, i0)", lambda x: x[0]),
    "unsqueeze": Case("y = Unsqueeze (x, i1)", lambda x: x[:, None]),
    "flatten": Case("y = Flatten <axis = 2> (x)", lambda x: x[0]),
    "identity": Case("y = Identity (x)", lambda x: x),
    "gather a place": Case("y = Gather <axis = 1> (x, one)", lambda x: x[:, 1]),
    "gather rows": Case(
        "g = Gather (matrix, positions) y = Add (x, g)", lambda x: x + W["matrix"][POSITIONS]
    ),
}


def expected(case: Case) -> np.ndarray:
    x = FEEDS["input"].astype(np.float64) @ W["before"]
    return np.asarray(case.meaning(x))


def program(nodes: str, shape: tuple[int, ...], element: str = "float") -> onnx.ModelProto:
    """``y`` of shape ``shape`` from a product, so that a fused step is worth it."""
    inputs = f"float[1, {ROWS}, {WIDTH}] input, int64[1, {ROWS}] positions, int64[1] first"
    sizes = ", ".join(map(str, shape))
    parsed = onnx.parser.parse_model(
        '<ir_version: 11, opset_import: ["": 24, "com.microsoft": 1]>\n'
        f"case ({inputs}) => ({element}[{sizes}] y) {{ x = MatMul (input, before) {nodes} }}"
    )
    graph = parsed.graph
    used = {name for node in graph.node for name in node.input}
    for name in sorted(used & set(WEIGHTS)):
        graph.initializer.append(onnx.numpy_helper.from_array(WEIGHTS[name], name))
    for port in [port for port in graph.input if port.name not in used]:
        graph.input.remove(port)
    return parsed


def element(case: Case) -> str:
    return "int64" if "ArgMax" in case.nodes else "float"


def session(case: Case, fuse: str) -> Session:
    source = program(case.nodes, expected(case).shape, element(case))
    return Session(source.SerializeToString(), fuse=fuse)


def run(session: Session, feeds=FEEDS) -> tuple[np.ndarray, bool]:
    """The result, and whether a fused step made it."""
    with session.bind() as step:
        result = step.run(**{port.name: feeds[port.name] for port in session.inputs})["y"]
        return result.copy(), all(run.frame.fused for run in step._execution._frames.values())


@pytest.mark.parametrize("name", CASES)
def test_a_template_gives_what_the_operator_means(name):
    case = CASES[name]
    auto = session(case, "auto")
    kinds = [type(step).__name__ for step in auto.plan.fused.block.steps]
    assert kinds == ["Fused"] and not auto.plan.fused.refusals
    result, fused_ = run(auto)
    assert fused_
    meant = expected(case)
    bound = case.error * max(1.0, np.abs(meant).max())
    np.testing.assert_allclose(result, meant, rtol=0, atol=bound)
    library, _ = run(session(case, "off"))
    assert library.dtype == result.dtype and library.shape == result.shape
    np.testing.assert_allclose(result, library, rtol=0, atol=2 * bound)


def scattered() -> compiler.Program:
    """A write by TensorScatter."""

    @model
    def scattered(
        cache: Mutable[FLOAT[1, "m", WIDTH]], x: FLOAT[1, 1, WIDTH], position: INT64[1]
    ) -> Alias["cache"]:
        return op.TensorScatter(cache, op.MatMul(x, weight(WEIGHTS["matrix"], "matrix")), position)

    return scattered


def test_every_rule_has_a_template_and_every_template_a_rule():
    """All that cases and decoders contain is fused, and there is nothing else that could be."""
    cases = [program(c.nodes, expected(c).shape, element(c)) for c in CASES.values()]
    decoders = [
        decoder(Shape()),
        decoder(Shape(bits=0, activation="relu")),
        test_fused_paged.decoder(),
        scattered(),
        compiler.annotate(genai_form.decoder(genai_form.Form()).SerializeToString()).program,
    ]
    operations = set()
    for source in [*(case.SerializeToString() for case in cases), *decoders]:
        plan = compiler.plan(source)
        assert not plan.fused.refusals
        operations |= {(o.domain, o.op_type) for r in plan.fused.regions for o in r.operations}
    nodes = {(n.domain, n.op_type) for case in cases for n in case.graph.node}
    nodes.discard(("", "Constant"))  # there is nothing to do
    assert nodes | (operations & fusable.operators()) == fusable.operators()
    assert operations == templates.operators()


def test_what_has_no_template_splits_a_step_and_nothing_else():
    """A region ends at an operator without a template: the stretches beside it stay fused."""
    nodes = "a = MatMul (x, matrix) b = Sin (a) c = MatMul (b, matrix) y = Tanh (c)"
    case = Case(nodes, lambda x: np.tanh(np.sin(x @ W["matrix"]) @ W["matrix"]), 1e-4)
    auto = session(case, "auto")
    kinds = [type(step).__name__ for step in auto.plan.fused.block.steps]
    assert kinds == ["Fused", "SubSession", "Fused"]
    assert [str(r) for r in auto.plan.fused.refusals] == ["Sin `b`: no template"]
    result, fused_ = run(auto)
    assert fused_
    np.testing.assert_allclose(result, expected(case), rtol=0, atol=1e-4)


REFUSED = {
    "exponent": ("y = Pow (x, n5)", (1, 3, 48), "its exponent is none of 0.5, 1.0, 2.0, 3.0"),
    "backwards": ("y = Slice (x, i2, i0, i2, minus)", (1, 3, 2), "backwards"),
    "last": ("y = ArgMax <axis = 2, select_last_index = 1> (x)", (1, 3, 1), "select_last_index"),
    "axis": ("y = LayerNormalization <axis = 1> (x, matrix)", (1, 3, 48), "than the last axis"),
    "alpha": ("s = Squeeze (x, i0) y = Gemm <alpha = 2.0> (s, matrix)", (3, 48), "with alpha"),
    "double": ("y = Cast <to = 11> (x)", (1, 3, 48), "is DOUBLE, not a float of at most 32 bits"),
    "index": (
        "i = ArgMax <axis = 2, keepdims = 0> (x) y = Gather (matrix, i)",
        (1, 3, 48),
        "used as an index, which is checked before a run",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_template_cannot_do_is_said_in_the_plan(name):
    nodes, shape, reason = REFUSED[name]
    element = {"last": "int64", "double": "double"}.get(name, "float")
    plan = compiler.plan(program(nodes, shape, element).SerializeToString())
    assert any(reason in str(refusal) for refusal in plan.fused.refusals), plan.fused.refusals


@pytest.mark.parametrize("name", ["rotary by positions", "microsoft rotary from a position"])
def test_positions_without_angles_are_refused_before_a_run(name):
    case = CASES[name]
    bad = FEEDS | {"positions": np.array([[1, 20, 3]]), "first": np.array([18])}
    with pytest.raises(errors.OperatorError, match="20 positions"):
        run(session(case, "auto"), bad)


@pytest.mark.parametrize("skip", ["bias", "column"])
@pytest.mark.parametrize("fuse", ["auto", "off"])
def test_a_skip_of_another_shape_is_refused_as_by_the_library(skip, fuse):
    """It shares sequences of a batch, and nothing else."""
    name = "com.microsoft.SkipSimplifiedLayerNormalization"
    case = Case(f"y = {name} (x, {skip}, scale)", lambda x: x)
    with pytest.raises(errors.OperatorError, match="skip"):
        run(session(case, fuse))


def test_an_operator_has_one_rule_and_one_template():
    with pytest.raises(ValueError, match="has another rule already"):
        templates.register("", "Add", lambda node, context: None, lambda b, o: None)
