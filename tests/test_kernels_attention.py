"""Attention and GroupQueryAttention over caches, against float64 numpy and against onnxruntime."""

import dataclasses
import threading

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from onnx_inplace.compiler import errors, steps
from onnx_inplace.numba_kernels.cpu import Path
from onnx_inplace.runner import attend, registry, threads
from onnx_inplace.runner.actions import Settings

pytestmark = pytest.mark.kernel

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}
PATHS = [Settings(kernels=Path.PORTABLE), Settings(), Settings(threads=2)]
path = pytest.mark.parametrize("how", PATHS, ids=["portable", "default", "threads"])


@pytest.fixture(scope="module", autouse=True)
def several_threads_whenever_allowed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "PARALLEL", 0)
        patch.setattr(threads.Policy, "parallel", lambda policy: True)
        yield


def kernel(domain, op_type, inputs, outputs, attributes, roots=()):
    """A step that reads slots 0, 1... and writes the slots behind them."""
    count = len(inputs)
    values = {
        i: steps.Value(
            i, f"v{i}", ir.DataType.from_numpy(x.dtype), x.shape, None, steps.Storage.FRESH, True
        )
        for i, x in enumerate(inputs)
        if x is not None
    }
    step = steps.Kernel(
        domain,
        op_type,
        25,
        tuple(None if x is None else i for i, x in enumerate(inputs)),
        tuple(range(count, count + outputs)),
        attributes,
        (),
        dict(roots),
        values,
        None,
    )
    return step, [*inputs, *[None] * outputs, []]  # the last one is the journal of a run


def run(step, slots, how):
    registry.compile_step(step, how)(slots)
    return slots[len(step.inputs) : -1]


def oracle(
    q, k, v, lengths=None, *, causal=False, left=-1, right=-1, mask=None, scale=None, softcap=0.0
):
    """float64 attention of (batch, heads, tokens, size); the contract of ONNX Attention-25."""
    batch, heads, tokens, size = q.shape
    group, total = heads // k.shape[1], k.shape[2]
    out = np.zeros((batch, heads, tokens, v.shape[3]))
    for b in range(batch):
        length = total if lengths is None else int(lengths[b])
        offset = 0 if lengths is None else length - tokens
        i, j = np.arange(tokens)[:, None] + offset, np.arange(length)[None]
        seen = np.ones((tokens, length), bool)
        if causal:
            seen &= j <= i
        if left >= 0:
            seen &= j >= i - left
        if right >= 0:
            seen &= j <= i + right
        for h in range(heads):
            keys, values = (x[b, h // group, :length].astype(np.float64) for x in (k, v))
            s = q[b, h].astype(np.float64) @ keys.T * (size**-0.5 if scale is None else scale)
            if softcap:
                s = softcap * np.tanh(s / softcap)
            s = np.where(seen, s, -np.inf)
            if mask is not None:
                m = np.broadcast_to(mask, (batch, heads, tokens, mask.shape[-1]))[b, h]
                fill = False if m.dtype == bool else -np.inf
                m = np.concatenate([m, np.full((tokens, total - m.shape[1]), fill)], 1)[:, :length]
                s = np.where(m, s, -np.inf) if m.dtype == bool else s + m.astype(np.float64)
            top = s.max(1, keepdims=True, initial=-np.inf)
            p = np.exp(s - np.where(np.isinf(top), 0, top))
            total_p = p.sum(1, keepdims=True)
            out[b, h] = p / np.where(total_p == 0, 1, total_p) @ values
    return out


def caches(rng, batch, heads, capacity, size, dtype, lengths, value_size=None):
    """K and V, NaN from the valid length on."""
    k = rng.standard_normal((batch, heads, capacity, size)).astype(dtype)
    v = rng.standard_normal((batch, heads, capacity, value_size or size)).astype(dtype)
    for b, length in enumerate(lengths):
        k[b, :, length:] = v[b, :, length:] = np.nan
    return k, v


def close(actual, expected, dtype):
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


# each (dtype, size, group) with vectors is some seconds of compilation: few of them
SHAPES = [
    *[(dtype, 3, 64) for dtype in DTYPES],
    *[("float32", group, size) for group, size in ((1, 64), (2, 32), (4, 128), (5, 80), (8, 96))],
    ("float32", 16, 32),
    ("float16", 7, 256),
    *[(dtype, 3, 7) for dtype in DTYPES],
    ("float32", 2, 1),
    ("float16", 17, 20),
]


@path
@pytest.mark.parametrize(("dtype", "group", "size"), SHAPES)
def test_decode(how, dtype, group, size):
    rng = np.random.default_rng(group * size)
    lengths = np.array([1, 77, 1030, 0])
    k, v = caches(rng, 4, 2, 1030, size, DTYPES[dtype], lengths)
    q = rng.standard_normal((4, 2 * group, 1, size)).astype(DTYPES[dtype])
    inputs = [q, k, v, None, None, None, lengths]
    (y,) = run(*kernel("", "Attention", inputs, 1, {"is_causal": 1}), how)
    assert y.dtype == q.dtype
    close(y, oracle(q, k, v, lengths, causal=True), dtype)
    assert not y[3].any()


@path
@pytest.mark.parametrize(("dtype", "group", "size"), SHAPES)
@pytest.mark.parametrize("tokens", [3, 100])
def test_prefill(how, dtype, group, size, tokens):
    rng = np.random.default_rng(tokens)
    lengths = np.array([tokens, tokens + 90, tokens - 2])
    k, v = caches(rng, 3, 2, 300, size, DTYPES[dtype], lengths)
    q = rng.standard_normal((3, 2 * group, tokens, size)).astype(DTYPES[dtype])
    inputs = [q, k, v, None, None, None, lengths]
    (y,) = run(*kernel("", "Attention", inputs, 1, {"is_causal": 1}), how)
    close(y, oracle(q, k, v, lengths, causal=True), dtype)
    assert not y[2, :, :2].any()  # rows before the first key


@path
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("left", [0, 5, 100])
def test_window(how, tokens, left):
    rng = np.random.default_rng(left)
    lengths = np.array([tokens + 200, tokens])
    k, v = caches(rng, 2, 1, 300, 64, np.float32, lengths)
    q = rng.standard_normal((2, 3, tokens, 64), dtype=np.float32)
    for b, length in enumerate(lengths):  # what the window has left behind does not matter
        k[b, :, : max(0, length - tokens - left)] = np.nan
    attributes = {"is_causal": 1, "left_window_size": left}
    (y,) = run(*kernel("", "Attention", [q, k, v, None, None, None, lengths], 1, attributes), how)
    expected = oracle(q, np.nan_to_num(k), v, lengths, causal=True, left=left)
    close(y, expected, "float32")


@path
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("cache", ["key", "value"])
def test_nan_among_valid_tokens_is_not_lost(how, tokens, cache):
    rng = np.random.default_rng(0)
    lengths = np.array([50])
    k, v = caches(rng, 1, 2, 60, 64, np.float32, lengths)
    {"key": k, "value": v}[cache][0, 1, 20] = np.nan  # the second kv head only
    q = rng.standard_normal((1, 6, tokens, 64), dtype=np.float32)
    inputs = [q, k, v, None, None, None, lengths]
    (y,) = run(*kernel("", "Attention", inputs, 1, {"is_causal": 1}), how)
    assert np.isfinite(y[0, :3]).all() and np.isnan(y[0, 3:]).all()


def test_two_threads_may_call_at_once():
    rng = np.random.default_rng(0)
    lengths = np.array([4000])
    k, v = caches(rng, 1, 3, 4096, 64, np.float32, lengths)
    queries = rng.standard_normal((8, 1, 9, 1, 64), dtype=np.float32)
    expected = [oracle(q, k, v, lengths, causal=True) for q in queries]
    inputs = [queries[0], k, v, None, None, None, lengths]
    step, _ = kernel("", "Attention", inputs, 1, {"is_causal": 1})
    action = registry.compile_step(step, Settings(threads=2))
    failures = []

    def work(number):
        for _ in range(20):
            slots = [queries[number], *inputs[1:], None, []]
            action(slots)
            if not np.allclose(slots[7], expected[number], atol=2e-5):
                failures.append(number)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


@st.composite
def problems(draw, dtypes, groups, sizes):
    """Sizes, lengths, masks and windows; small, so that many run."""
    batch, kv_heads, group = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from(groups)),
    )
    capacity, tokens = draw(st.integers(1, 150)), draw(st.sampled_from([1, 1, 2, 5, 19]))
    size = draw(st.sampled_from(sizes))
    value_size = draw(st.sampled_from([None, 3, 16])) if size < 64 else None
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = np.array([draw(st.integers(0, capacity)) for _ in range(batch)])
    options = {
        "causal": draw(st.booleans()),
        "left": draw(st.sampled_from([-1, -1, 0, 3, 40])),
        "right": draw(st.sampled_from([-1, -1, 0, 2])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 5.0])),
        "scale": draw(st.sampled_from([None, 0.3])),
    }
    if draw(st.booleans()):
        shape = [draw(st.sampled_from([1, n])) for n in (batch, kv_heads * group, tokens)]
        shape = [*shape[draw(st.integers(0, 3)) :], draw(st.integers(1, capacity))]
        bias = rng.standard_normal(shape).astype(np.float32)
        bias[rng.random(shape) < 0.2] = -np.inf
        options["mask"] = bias > 0 if draw(st.booleans()) else bias
    dtype = draw(st.sampled_from(dtypes))
    k, v = caches(rng, batch, kv_heads, capacity, size, DTYPES[dtype], lengths, value_size)
    q = rng.standard_normal((batch, kv_heads * group, tokens, size)).astype(DTYPES[dtype])
    return dtype, q, k, v, lengths, options


def check_problem(how, problem):
    dtype, q, k, v, lengths, options = problem
    attributes = {
        "is_causal": int(options["causal"]),
        "left_window_size": options["left"],
        "right_window_size": options["right"],
        "softcap": options["softcap"],
    }
    if options["scale"] is not None:
        attributes["scale"] = options["scale"]
    before = k.tobytes(), v.tobytes()
    inputs = [q, k, v, options.get("mask"), None, None, lengths]
    (y,) = run(*kernel("", "Attention", inputs, 1, attributes), how)
    close(y, oracle(q, k, v, lengths, **options), dtype)
    assert (k.tobytes(), v.tobytes()) == before


@path
@settings(max_examples=60, deadline=None)
@given(problem=problems(list(DTYPES), [1, 2, 3, 5], [1, 8, 20]))
def test_any_problem(how, problem):
    check_problem(how, problem)


@path
@settings(max_examples=60, deadline=None)
@given(problem=problems(["float32"], [3], [64]))
def test_any_problem_in_vectors(how, problem):
    check_problem(how, problem)


@pytest.mark.parametrize("causal", [0, 1])
def test_packed_heads_equal_separate_heads(causal):
    rng = np.random.default_rng(0)
    lengths = np.array([9, 20])
    k, v = caches(rng, 2, 3, 20, 16, np.float32, lengths, value_size=5)
    q = rng.standard_normal((2, 6, 4, 16), dtype=np.float32)
    packed = [x.transpose(0, 2, 1, 3).reshape(2, x.shape[2], -1) for x in (q, k, v)]
    attributes = {"is_causal": causal, "q_num_heads": 6, "kv_num_heads": 3}
    (y,) = run(
        *kernel("", "Attention", [*packed, None, None, None, lengths], 1, attributes), Settings()
    )
    expected = oracle(q, k, v, lengths, causal=bool(causal)).transpose(0, 2, 1, 3).reshape(2, 4, -1)
    close(y, expected, "float32")


@pytest.mark.parametrize(
    "attributes", [{}, {"is_causal": 1}, {"left_window_size": 2}, {"softcap": 2.0}]
)
@pytest.mark.parametrize("with_lengths", [False, True])
def test_agrees_with_onnx_reference(attributes, with_lengths):
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.standard_normal((2, h, n, 16), dtype=np.float32) for h, n in ((6, 3), (2, 11), (2, 11))
    )
    lengths = np.array([5, 11]) if with_lengths else None
    node = onnx.helper.make_node(
        "Attention",
        ["q", "k", "v", "", "", "", "n"][: 7 if with_lengths else 3],
        ["y"],
        **attributes,
    )
    names = ["q", "k", "v"] + ["n"] * with_lengths
    infos = [onnx.helper.make_tensor_value_info(n, 7 if n == "n" else 1, None) for n in names]
    graph = onnx.helper.make_graph(
        [node], "g", infos, [onnx.helper.make_tensor_value_info("y", 1, None)]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 25)])
    feeds = {"q": q, "k": k, "v": v} | ({"n": lengths} if with_lengths else {})
    (expected,) = ReferenceEvaluator(model).run(None, feeds)
    (y,) = run(
        *kernel("", "Attention", [q, k, v, None, None, None, lengths], 1, attributes), Settings()
    )
    close(y, expected, "float32")


@pytest.mark.parametrize(("length", "row"), [([3, 9], 1), ([-1, 2], 0)])
def test_a_length_outside_of_the_cache_is_refused(length, row):
    x = np.ones((2, 1, 8, 4), np.float32)
    step, slots = kernel(
        "", "Attention", [x[:, :, :1], x, x, None, None, None, np.array(length)], 1, {}
    )
    with pytest.raises(errors.CapacityError) as caught:
        run(step, slots, Settings())
    assert (caught.value.length, caught.value.capacity, caught.value.batch) == (length[row], 8, row)


@pytest.mark.parametrize(
    ("attributes", "inputs", "outputs"),
    [
        ({"softmax_precision": 11}, 3, 1),
        ({}, 6, 1),
        ({}, 3, 2),
        ({"left_window_size": -2}, 3, 1),
    ],
)
def test_attention_without_a_kernel_is_refused_at_load(attributes, inputs, outputs):
    step, _ = kernel("", "Attention", [np.zeros(1)] * inputs, outputs, attributes)
    with pytest.raises(errors.UnsupportedOperator) as caught:
        registry.compile_step(step, Settings())
    assert (caught.value.domain, caught.value.op_type) == ("", "Attention")


@dataclasses.dataclass
class Gqa:
    """A GroupQueryAttention node, for onnxruntime (out of place) and the kernel (in place)."""

    heads: int
    kv_heads: int
    size: int
    attributes: dict
    packed: bool = False
    rotary: int = 0  # rotated elements of a head
    bias: bool = False
    sink: bool = False
    dtype: str = "float32"

    def inputs(self, rng, k, v, tokens, starts):
        batch, total = len(starts), int(max(starts)) + tokens
        make = lambda *shape: rng.standard_normal(shape).astype(DTYPES[self.dtype])  # noqa: E731
        query = make(batch, tokens, (self.heads + 2 * self.kv_heads * self.packed) * self.size)
        new = [
            None if self.packed else make(batch, tokens, self.kv_heads * self.size) for _ in "kv"
        ]
        angles = rng.random((k.shape[2], self.rotary // 2)) * 6
        tables = [
            f(angles).astype(DTYPES[self.dtype]) if self.rotary else None for f in (np.cos, np.sin)
        ]
        bias = make(1, self.heads, tokens, total) if self.bias else None
        sink = make(self.heads) if self.sink else None
        lengths = (np.array(starts) + tokens - 1).astype(np.int32)
        return [query, *new, k, v, lengths, np.array(total, np.int32), *tables, None, bias, sink]

    def all_attributes(self):
        return {
            "num_heads": self.heads,
            "kv_num_heads": self.kv_heads,
            "do_rotary": int(self.rotary > 0),
        } | self.attributes

    def session(self, inputs):
        names = [f"i{k}" if x is not None else "" for k, x in enumerate(inputs)]
        node = onnx.helper.make_node(
            "GroupQueryAttention",
            names,
            ["y", "k", "v"],
            domain="com.microsoft",
            **self.all_attributes(),
        )
        element = onnx.helper.np_dtype_to_tensor_dtype
        infos = [
            onnx.helper.make_tensor_value_info(n, element(x.dtype), x.shape)
            for n, x in zip(names, inputs, strict=True)
            if n
        ]
        outs = [
            onnx.helper.make_tensor_value_info(n, element(inputs[0].dtype), None) for n in "ykv"
        ]
        graph = onnx.helper.make_graph([node], "g", infos, outs)
        model = onnx.helper.make_model(
            graph,
            opset_imports=[
                onnx.helper.make_opsetid("", 21),
                onnx.helper.make_opsetid("com.microsoft", 1),
            ],
            ir_version=10,
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return session.run(None, {n: x for n, x in zip(names, inputs, strict=True) if n})


GQAS = {
    "plain": Gqa(6, 2, 64, {}),
    "packed": Gqa(9, 3, 64, {}, packed=True),
    "rotary": Gqa(9, 3, 64, {}, rotary=64),
    "rotary_packed": Gqa(9, 3, 64, {}, packed=True, rotary=64),
    "interleaved": Gqa(6, 2, 64, {"rotary_interleaved": 1}, rotary=64),
    "partly_rotated": Gqa(3, 1, 64, {}, rotary=32),
    "window": Gqa(6, 2, 64, {"local_window_size": 5}),
    "softcap": Gqa(6, 2, 64, {"softcap": 3.0, "scale": 0.5}),
    "smooth": Gqa(6, 2, 64, {"smooth_softmax": 1}),
    "sink": Gqa(6, 2, 64, {}, sink=True),
    "sink_portable": Gqa(4, 2, 8, {"local_window_size": 3}, sink=True),
    "odd_size": Gqa(6, 2, 24, {}),
    "bias": Gqa(6, 2, 64, {}, bias=True),
    "float16": Gqa(3, 1, 64, {}, rotary=64, dtype="float16"),
}


@path
@pytest.mark.parametrize("name", GQAS)
@pytest.mark.parametrize(
    ("tokens", "starts"), [(7, [0]), (1, [7]), (1, [3, 12]), (4, [7]), (5, [0, 0])]
)
def test_group_query_attention_agrees_with_onnxruntime(how, name, tokens, starts):
    gqa, rng = GQAS[name], np.random.default_rng(5)
    shape = len(starts), gqa.kv_heads, 24, gqa.size
    k, v = (rng.standard_normal(shape).astype(DTYPES[gqa.dtype]) for _ in "kv")
    inputs = gqa.inputs(rng, k, v, tokens, starts)
    expected, keys, values = gqa.session(inputs)
    step, slots = kernel(
        "com.microsoft", "GroupQueryAttention", inputs, 3, gqa.all_attributes(), {1: "k", 2: "v"}
    )
    for b, start in enumerate(starts):  # what was never written does not matter
        k[b, :, start + tokens :] = v[b, :, start + tokens :] = np.nan
    y, present_k, present_v = run(step, slots, how)
    assert present_k is k and present_v is v
    close(y, expected.astype(np.float64), gqa.dtype)
    for b, start in enumerate(starts):
        valid = np.s_[b, :, : start + tokens]
        close(k[valid], keys[valid].astype(np.float64), gqa.dtype)
        close(v[valid], values[valid].astype(np.float64), gqa.dtype)
        assert np.isnan(k[b, :, start + tokens :].astype(np.float32)).all()


def test_group_query_attention_beyond_the_capacity_writes_nothing():
    gqa, rng = GQAS["plain"], np.random.default_rng(5)
    k, v = (rng.standard_normal((2, 2, 8, 64), dtype=np.float32) for _ in "kv")
    before = k.copy(), v.copy()
    inputs = gqa.inputs(rng, k, v, 1, [3, 8])
    step, slots = kernel(
        "com.microsoft",
        "GroupQueryAttention",
        inputs,
        3,
        gqa.all_attributes(),
        {1: "keys", 2: "values"},
    )
    with pytest.raises(errors.CapacityError) as caught:
        run(step, slots, Settings())
    e = caught.value
    assert (e.cache, e.position, e.length, e.capacity, e.batch) == ("keys", 8, 1, 8, 1)
    np.testing.assert_array_equal((k, v), before)


def test_group_query_attention_refuses_what_does_not_fit_and_writes_nothing():
    gqa, rng = GQAS["rotary"], np.random.default_rng(5)
    k, v = (rng.standard_normal((1, 3, 8, 64), dtype=np.float32) for _ in "kv")
    before = k.copy(), v.copy()
    good = gqa.inputs(rng, k, v, 1, [3])
    wrong = {
        1: good[1][:, :, :64],
        4: v[:, :2].copy(),
        5: np.array([3, 3], np.int32),
        8: good[8][:4],
    }
    for place, array in wrong.items():
        inputs = [array if i == place else x for i, x in enumerate(good)]
        attributes = gqa.all_attributes()
        node = "com.microsoft", "GroupQueryAttention", inputs, 3, attributes, {1: "k", 2: "v"}
        with pytest.raises(errors.StorageMismatch):
            run(*kernel(*node), Settings())
    short = [x[:3] if i in (7, 8) else x for i, x in enumerate(good)]  # no angles for position 3
    with pytest.raises(errors.CapacityError) as caught:
        run(
            *kernel("com.microsoft", "GroupQueryAttention", short, 3, attributes, {1: "k"}),
            Settings(),
        )
    assert (caught.value.position, caught.value.capacity) == (3, 3)
    np.testing.assert_array_equal((k, v), before)


@pytest.mark.parametrize(
    ("attributes", "extra"),
    [({"kv_cache_bit_width": 8}, 0), ({"sliding_window_cache": 1}, 0), ({}, 12), ({}, 14)],
)
def test_group_query_attention_without_a_kernel_is_refused_at_load(attributes, extra):
    inputs = [np.zeros(1)] * 7 + [None] * 10
    if extra:
        inputs[extra] = np.zeros(1)
    step, _ = kernel(
        "com.microsoft",
        "GroupQueryAttention",
        inputs,
        3,
        {"num_heads": 1, "kv_num_heads": 1, **attributes},
    )
    with pytest.raises(errors.UnsupportedOperator):
        registry.compile_step(step, Settings())
