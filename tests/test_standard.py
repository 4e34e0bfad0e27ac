"""Sub-sessions: element types, buffers, weights in memory, threads. Against stock onnxruntime."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import textual

from onnx_inplace import Session, compiler, errors
from onnx_inplace.compiler import program, steps
from onnx_inplace.dsl import BFLOAT16, FLOAT, INT64, Alias, Mutable, kv, model, op, weight
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import execute, frames

RNG = np.random.default_rng(0)


def stock(compiled: program.Program, values: dict) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(compiled.serialized, options)
    return session.run(None, {i.name: values[i.name] for i in session.get_inputs()})


def chain(layers: int) -> program.Program:
    """Sub-sessions and writes in turns; four values of each layer cross between them."""

    @model
    def run(
        cache: Mutable[FLOAT["m", 8]], x: FLOAT["n", 8], position: INT64[()]
    ) -> tuple[Alias["cache"], FLOAT["n", 8]]:
        for layer in range(layers):
            a, b = op.Tanh(x), op.Neg(x)
            cache = kv.CacheUpdate(cache, a * b, position)
            x = op.ReduceMax(cache, [0], keepdims=1) + a - b * float(layer + 1)
        return cache, x

    return run


def random(*shape: int) -> np.ndarray:
    return RNG.random(shape, np.float32)


# -- element types


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16])
def test_values_of_small_types_cross_between_sub_sessions(dtype) -> None:
    """bfloat16 and float8 have no way through onnxruntime's own conversion to numpy."""
    name = {"bfloat16": "bfloat16", "float8_e4m3fn": "float8e4m3fn", "float16": "float16"}
    text = name[np.dtype(dtype).name]
    code = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    compiled = textual.build(
        f"""main (float[4,8] cache, float[2,8] x, int64 p)
                => (float[4,8] out, float[2,8] y, {text}[2,8] z) {{
            z = Cast <to = {code}> (x)
            plain = Relu(x)
            out = onnx_inplace.CacheUpdate(cache, plain, p)
            back = Cast <to = 1> (z)
            axes = Constant <value_ints = [0]> ()
            sum = ReduceMax(out, axes)
            y = Add(back, sum)
        }}""",
        ["cache"],
        ["cache", None, None],
    )
    cache = random(4, 8)
    with Session(compiled).bind(cache=cache) as step:
        for _ in range(3):
            x = random(2, 8) * 8
            out, y, z = step.run(x=x, p=1)
            assert out is cache and z.dtype == dtype
            np.testing.assert_array_equal(z.astype(np.float32), x.astype(dtype).astype(np.float32))
            np.testing.assert_array_equal(y, x.astype(dtype).astype(np.float32) + cache.max(0))


def test_a_bfloat16_cache() -> None:
    compiled = textual.build(
        """main (bfloat16[4,8] cache, float[2,8] x, int64 p) => (bfloat16[4,8] out, float[4,8] y) {
            new = Cast <to = 16> (x)
            out = onnx_inplace.CacheUpdate(cache, new, p)
            y = Cast <to = 1> (out)
        }""",
        ["cache"],
        ["cache", None],
    )
    cache, x = np.zeros((4, 8), ml_dtypes.bfloat16), random(2, 8)
    with Session(compiled).bind(cache=cache) as step:
        for _ in range(3):
            out, y = step.run(x=x, p=2)
    assert out is cache
    np.testing.assert_array_equal(y[2:], x.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_strings_and_sequences_cross_between_sub_sessions() -> None:
    compiled = textual.build(
        """main (float[4,8] cache, float[2,8] x, string[2] words, int64 p)
                => (float[4,8] out, string[2] same, float[4,8] y) {
            empty = SequenceConstruct(x, x)
            plain = Relu(x)
            out = onnx_inplace.CacheUpdate(cache, plain, p)
            both = ConcatFromSequence <axis = 0> (empty)
            y = Add(both, out)
            same = Identity(words)
        }""",
        ["cache"],
        ["cache", None, None],
    )
    words = np.array(["in", "place"], object)
    cache = random(4, 8)
    with Session(compiled).bind(cache=cache) as step:
        for _ in range(3):
            x = random(2, 8)
            out, same, y = step.run(x=x, words=words, p=0)
            assert out is cache and same.tolist() == ["in", "place"]
            np.testing.assert_array_equal(y, np.concatenate([x, x]) + cache)


def test_empty_tensors() -> None:
    compiled = chain(2)
    cache = random(4, 8)
    with Session(compiled).bind(cache=cache) as step:
        for n in (0, 1, 0, 0, 2):
            x = random(n, 8)
            wanted = stock(compiled, {"cache": cache.copy(), "x": x, "position": np.asarray(1)})
            np.testing.assert_array_equal(step.run(x=x, position=1)[1], wanted[1])


# -- buffers


def test_results_are_the_callers_own() -> None:
    """What one run returned is not touched by the next, and is no buffer of the runner."""
    compiled = chain(3)
    cache = random(16, 8)
    with Session(compiled).bind(cache=cache) as step:
        kept, copies = [], []
        for _ in range(5):
            y = step.run(x=random(1, 8), position=2)[1]
            assert not any(np.shares_memory(y, other) for other in kept)
            kept.append(y)
            copies.append(y.copy())
        for y, copy in zip(kept, copies, strict=True):
            np.testing.assert_array_equal(y, copy)
            y[:] = np.nan  # the caller may write what it got
        x = random(1, 8)
        wanted = stock(compiled, {"cache": cache.copy(), "x": x, "position": np.asarray(2)})
        np.testing.assert_array_equal(step.run(x=x, position=2)[1], wanted[1])


def test_shapes_that_depend_on_data_change_freely() -> None:
    compiled = textual.build(
        """main (float[4,8] cache, float[1,8] x, int64 p)
                => (float[4,8] out, int64[2,k] places, float[k,2] y) {
            half = Constant <value = float {0.5}> ()
            large = Greater(x, half)
            places = NonZero(large)
            out = onnx_inplace.CacheUpdate(cache, x, p)
            axes = Constant <value_ints = [1]> ()
            sums = ReduceSum(out, axes)
            first = ReduceMax <keepdims = 0> (sums)
            turned = Transpose <perm = [1, 0]> (places)
            numbers = Cast <to = 1> (turned)
            y = Mul(numbers, first)
        }""",
        ["cache"],
        ["cache", None, None],
    )
    cache = random(4, 8)
    kept = []
    with Session(compiled).bind(cache=cache) as step:
        for k in range(6):
            x = random(1, 8) * (k % 3)
            wanted = stock(compiled, {"cache": cache.copy(), "x": x, "p": np.asarray(0)})
            results = step.run(x=x, p=0)
            kept.append((results[1], wanted[1]))
            for got, expected in zip(results, wanted, strict=True):
                np.testing.assert_array_equal(got, expected)
    for got, expected in kept:
        np.testing.assert_array_equal(got, expected)


def test_buffers_serve_values_that_are_never_alive_together() -> None:
    """Twelve layers need as many buffers as one boundary between sub-sessions, not twelve times."""

    def held(layers: int) -> int:
        session = Session(chain(layers))
        execution = session.open({"cache": np.zeros((16, 8), np.float32)})
        run = execution.run(((4, 8), ()))
        for _ in range(3):
            slots = run.slots()
            slots.append([])
            for (slot, _), array in zip(
                session.feeds, (np.ones((4, 8), np.float32), np.asarray(1)), strict=True
            ):
                slots[slot] = array
            run(slots)
        return run.frame.nbytes

    assert 0 < held(12) == held(3)


def test_lives_that_touch_do_not_share() -> None:
    """A step reads one value while it makes the other."""
    dtype = np.dtype(np.float32)
    lives = ((0, 2), (2, 3), (3, 3))
    (first, second, third), size = frames.carve([((4,), dtype, life) for life in lives])
    assert size == 128
    assert not np.shares_memory(first, second) and not np.shares_memory(second, third)
    assert np.shares_memory(first, third) and address(first) % 64 == 0


def test_frames_are_given_up() -> None:
    session = Session(chain(2))
    cache = session.allocate("cache", m=64)
    with session.bind(cache=cache) as step:
        for n in (*range(1, 40), 1, 1, 39, 39):
            step.run(x=random(n, 8), position=0)
        assert len(step._execution._frames) <= execute._FRAMES


def test_a_run_keeps_no_input_alive() -> None:
    session = Session(chain(2))
    with session.bind(cache=session.allocate("cache", m=8)) as step:
        for _ in range(3):
            x = random(2, 8)
            gone = weakref.ref(x)
            step.run(x=x, position=0)
            del x
            gc.collect()
            assert gone() is None


# -- weights


def shared_weight(transposed: bool) -> program.Program:
    """One weight in two sub-sessions, once in a product, which onnxruntime would repack."""
    table = np.random.default_rng(1).random((4096, 8), np.float32)

    @model
    def tied(
        cache: Mutable[FLOAT["m", 8]], token: INT64[1], position: INT64[()]
    ) -> tuple[Alias["cache"], FLOAT[1, 4096]]:
        x = op.Gather(weight(table, "table"), token)
        if transposed:
            x = x + op.ReduceMax(op.Transpose(weight(table, "table"), perm=[1, 0]), [1], keepdims=0)
        cache = kv.CacheUpdate(cache, op.Relu(x), position)
        hidden = op.ReduceSum(cache, [0], keepdims=1)
        return cache, op.Gemm(hidden, weight(table, "table"), transB=1)

    return tied


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_a_shared_weight_gives_the_right_results(transposed, saved, tmp_path: Path) -> None:
    """Also where an optimizer wants its content, which no file may hold."""
    compiled = shared_weight(transposed)
    source: program.Program | Path = compiled
    if saved:
        source = tmp_path / "tied.onnx"
        compiled.save(source)
    session = Session(source)
    weights = [
        w for s in session.plan.block.steps if isinstance(s, steps.SubSession) for w in s.weights
    ]
    assert [w.shared for w in weights] == [True, True]
    cache = random(6, 8)
    token = np.array([17])
    wanted = stock(compiled, {"cache": cache.copy(), "token": token, "position": np.asarray(3)})
    with session.bind(cache=cache) as step:
        for _ in range(3):
            out, logits = step.run(token=token, position=3)
            assert out is cache
            np.testing.assert_allclose(logits, wanted[1], rtol=1e-5)


def test_a_shared_weight_is_in_memory_once() -> None:
    plan = compiler.plan(shared_weight(transposed=False))
    engine = execute.Engine(plan, execute.Settings(fuse=execute.Fuse.OFF))
    ((tensor, value),) = engine._library._values.values()
    assert value.data_ptr() == address(tensor.numpy())


# -- threads


@pytest.mark.parametrize("threads", [1, 2])
def test_two_bindings_run_in_two_threads(threads) -> None:
    compiled = chain(4)
    session = Session(compiled, threads=threads)
    inputs = [[random(1 + (k + t) % 2, 8) for k in range(60)] for t in range(2)]

    def decode(worker: int) -> tuple[np.ndarray, list[np.ndarray]]:
        cache = session.allocate("cache", m=64)
        with session.bind(cache=cache) as step:
            return cache, [step.run(x=x, position=k)[1] for k, x in enumerate(inputs[worker])]

    one_by_one = [decode(worker) for worker in range(2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(decode, range(2)))
    for (cache, results), (other, others) in zip(one_by_one, together, strict=True):
        np.testing.assert_array_equal(cache, other)
        for a, b in zip(results, others, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_failing_sub_session_leaves_the_binding_usable() -> None:
    @model
    def lookup(
        cache: Mutable[FLOAT["m", 8]], token: INT64[1], position: INT64[()]
    ) -> tuple[Alias["cache"], FLOAT["m", 8]]:
        table = op.Constant(value=np.ones((4, 8), np.float32))
        cache = kv.CacheUpdate(cache, op.Gather(table, token), position)
        return cache, op.Relu(cache)

    session = Session(lookup)
    cache = random(4, 8)
    before = cache.copy()
    with session.bind(cache=cache) as step:
        for _ in range(3):
            with pytest.raises(Exception, match="indices"):
                step.run(token=np.array([9]), position=0)
            np.testing.assert_array_equal(cache, before)
        for k in range(3):
            step.run(token=np.array([k]), position=k)
            np.testing.assert_array_equal(cache[k], 1)


def test_what_onnxruntime_does_not_know_is_refused_at_load_by_name() -> None:
    """It has no product of bfloat16 on CPUs."""

    @model
    def product(
        cache: Mutable[BFLOAT16["m", 2]], x: BFLOAT16[2, 2], position: INT64[()]
    ) -> tuple[Alias["cache"], BFLOAT16[2, 2]]:
        y = op.MatMul(x, x)
        return kv.CacheUpdate(cache, y, position), y

    with pytest.raises(errors.UnsupportedOperator) as caught:
        Session(product)
    assert (caught.value.domain, caught.value.op_type) == ("", "MatMul")
    assert "`y` (test_standard.py:" in str(caught.value)


def test_a_failing_node_is_named_with_its_line() -> None:
    @model
    def lookup(
        cache: Mutable[FLOAT["m", 8]], token: INT64[1], position: INT64[()]
    ) -> tuple[Alias["cache"], FLOAT[1, 8]]:
        row = op.Gather(op.Constant(value=np.ones((4, 8), np.float32)), token)
        return kv.CacheUpdate(cache, row, position), row

    session = Session(lookup)
    with (
        session.bind(cache=random(4, 8)) as step,
        pytest.raises(Exception, match=r"`row` \(test_standard.py:\d+\)"),
    ):
        step.run(token=np.array([9]), position=0)


def test_elements_of_less_than_a_byte_do_not_cross() -> None:
    """Within a sub-session they are fine; between two there is no array for them."""
    text = """main (float[4,8] cache, float[2,8] x, int64 p) => (float[4,8] out, float[2,8] y) {{
        scale = Constant <value = float {{0.25}}> ()
        zero = Constant <value = int4 {{0}}> ()
        whole = QuantizeLinear(x, scale, zero)
        plain = Relu(x)
        out = onnx_inplace.CacheUpdate(cache, plain, p)
        axes = Constant <value_ints = [0, 1]> ()
        largest = ReduceMax <keepdims = 0> (out, axes)
        y = DequantizeLinear(whole, {scale}, zero)
    }}"""
    inside = textual.build(text.format(scale="scale"), ["cache"], ["cache", None])
    cache, x = random(4, 8), random(2, 8)
    with Session(inside).bind(cache=cache) as step:
        for _ in range(2):
            np.testing.assert_array_equal(step.run(x=x, p=0)[1], np.rint(x * 4) / 4)
    crossing = textual.build(text.format(scale="largest"), ["cache"], ["cache", None])
    with pytest.raises(errors.UnsupportedOperator, match="whole"):
        Session(crossing)
