"""If, Loop and Scan in place: the caller's array comes out, results are those of the file."""

import numpy as np
import onnxruntime
import pytest
import textual

from onnx_inplace import Session, errors
from onnx_inplace.compiler import program
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, function, kv, model, op

SHAPES = {"cache": (2, 6, 4), "x": (2, 1, 4), "xs": (3, 2, 1, 4)}


def stock(compiled: program.Program, values: dict) -> list[np.ndarray]:
    """onnxruntime on the same bytes, out of place."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(compiled.serialized, options)
    return session.run(None, {i.name: values[i.name] for i in session.get_inputs()})


def agree(compiled: program.Program, cache: np.ndarray, *feeds: dict) -> list[np.ndarray]:
    """Run in place, several times on one binding, and compare with stock onnxruntime each time."""
    session = Session(compiled)
    storage = cache.copy()
    with session.bind(cache=storage) as step:
        for feed in feeds:
            wanted = stock(compiled, {"cache": storage.copy(), **feed})
            results = list(step.run(**feed))
            for got, expected in zip(results, wanted, strict=True):
                assert got.dtype == expected.dtype
                np.testing.assert_array_equal(got, expected)
            for output, got in zip(session.plan.outputs, results, strict=True):
                assert (got is storage) == (output.root == "cache")
    return results


def random(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).random(SHAPES[name], dtype=np.float32)


def feed(**values: object) -> dict:
    return {name: np.asarray(value) for name, value in values.items()}


BRANCHES = textual.build(
    """main (float[2,6,4] cache, float[2,1,4] x, int64 p, bool flag)
            => (float[2,6,4] out, float[2,1,4] y) {
        out, y = If (flag) <
            then_branch = t () => (float[2,6,4] a, float[2,1,4] b) {
                half = Constant <value = float {0.5}> ()
                b = Mul(x, half)
                a = onnx_inplace.CacheUpdate(cache, b, p)
            },
            else_branch = e () => (float[2,6,4] c, float[2,1,4] d) {
                c = Identity(cache)
                d = Neg(x)
            }>
    }""",
    ["cache"],
    ["cache", None],
)


def test_both_branches_return_the_callers_array() -> None:
    feeds = [feed(x=random("x") * k, p=k, flag=flag) for k, flag in enumerate([1 > 0, False, True])]
    agree(BRANCHES, random("cache"), *feeds)


def test_the_branch_that_does_not_write_changes_no_byte() -> None:
    cache = random("cache")
    out, _ = agree(BRANCHES, cache, feed(x=random("x"), p=0, flag=False))
    assert out.tobytes() == cache.tobytes()


LOOP = textual.build(
    """main (float[2,6,4] cache, float[2,1,4] x, int64 count, bool going, float limit)
            => (float[2,6,4] out, float[2,1,4] last, int64[n] numbers, float[n,2,1,4] all) {
        out, last, numbers, all = Loop (count, going, cache, x) <
            body = b (int64 i, bool c, float[2,6,4] k, float[2,1,4] v)
                    => (bool again, float[2,6,4] written, float[2,1,4] next, int64 number,
                        float[2,1,4] seen) {
                written = onnx_inplace.CacheUpdate(k, v, i)
                one = Constant <value = float {1.0}> ()
                next = Add(v, one)
                largest = ReduceMax <keepdims = 0> (next)
                again = Less(largest, limit)
                number = Identity(i)
                seen = Identity(next)
            }>
    }""",
    ["cache"],
    ["cache", None, None, None],
)


@pytest.mark.parametrize(
    ("count", "going", "limit", "rounds"),
    [(3, True, 100.0, 3), (0, True, 100.0, 0), (5, False, 100.0, 0), (6, True, 2.5, 2)],
)
def test_a_loop_counts_stops_carries_and_stacks(count, going, limit, rounds) -> None:
    given = feed(x=random("x"), count=count, going=going, limit=np.float32(limit))
    _, _, numbers, stacked = agree(LOOP, random("cache"), given, given, given)
    assert numbers.tolist() == list(range(rounds)) and numbers.dtype == np.int64
    assert stacked.shape == (rounds, 2, 1, 4)


def test_dimensions_change_from_run_to_run() -> None:
    """Each tuple of dimensions has its own buffers, and comes back to them."""
    compiled = textual.build(
        """main (float[2,6,4] cache, float[2,n,4] x, int64 count)
                => (float[2,6,4] out, float[2,n,4] last) {
            y = Exp(x)
            yes = Constant <value = bool {1}> ()
            out, last = Loop (count, yes, cache, y) <
                body = b (int64 i, bool c, float[2,6,4] k, float[2,n,4] v)
                        => (bool again, float[2,6,4] written, float[2,n,4] next) {
                    again = Identity(c)
                    written = onnx_inplace.CacheUpdate(k, v, i)
                    next = Add(v, y)
                }>
        }""",
        ["cache"],
        ["cache", None],
    )
    rng = np.random.default_rng(0)
    lengths = [1, 2, 1, 3, 2, 1, 1]
    feeds = [feed(x=rng.random((2, n, 4), np.float32), count=n) for n in lengths]
    agree(compiled, random("cache"), *feeds)


def test_the_initial_value_of_a_loop_survives_it() -> None:
    """It is an input of the model, and a result of it: neither is the other's memory."""
    compiled = textual.build(
        """main (float[2,6,4] cache, float[2,1,4] x, int64 count)
                => (float[2,6,4] out, float[2,1,4] last, float[2,1,4] first) {
            yes = Constant <value = bool {1}> ()
            first = Relu(x)
            out, last = Loop (count, yes, cache, first) <
                body = b (int64 i, bool c, float[2,6,4] k, float[2,1,4] v)
                        => (bool again, float[2,6,4] written, float[2,1,4] next) {
                    again = Identity(c)
                    written = onnx_inplace.CacheUpdate(k, v, i)
                    next = Add(v, v)
                }>
        }""",
        ["cache"],
        ["cache", None, None],
    )
    x = random("x")
    before = x.copy()
    for count in (0, 1, 4):
        _, last, first = agree(compiled, random("cache"), *[feed(x=x, count=count)] * 3)
        assert x.tobytes() == before.tobytes()
        assert not np.shares_memory(first, x) and not np.shares_memory(last, x)


SCAN = """main (float[2,6,4] cache, float[2,1,4] state, float[3,2,1,4] xs)
        => (float[2,6,4] out, float[2,1,4] last, {shape} all) {{
    out, last, all = Scan <num_scan_inputs = 1, {axes} body = b
            (float[2,6,4] k, float[2,1,4] s, {element} x)
                => (float[2,6,4] written, float[2,1,4] next, float[2,1,4] seen) {{
            shape = Constant <value_ints = [2, 1, 4]> ()
            flat = Reshape(x, shape)
            next = Sub(flat, s)
            zero = Constant <value = int64 {{2}}> ()
            written = onnx_inplace.CacheUpdate(k, next, zero)
            seen = Neg(next)
        }}> (cache, state, xs)
}}"""


@pytest.mark.parametrize(
    ("axes", "shape", "element"),
    [
        ("", "float[3,2,1,4]", "float[2,1,4]"),
        ("scan_input_directions = [1],", "float[3,2,1,4]", "float[2,1,4]"),
        ("scan_output_directions = [1],", "float[3,2,1,4]", "float[2,1,4]"),
        ("scan_output_axes = [2],", "float[2,1,3,4]", "float[2,1,4]"),
        ("scan_output_axes = [-1],", "float[2,1,4,3]", "float[2,1,4]"),
    ],
)
def test_a_scan_takes_apart_and_puts_together(axes, shape, element) -> None:
    text = SCAN.format(axes=axes, shape=shape, element=element)
    compiled = textual.build(text, ["cache"], ["cache", None, None])
    given = feed(state=random("x"), xs=random("xs"))
    agree(compiled, random("cache"), given, given, feed(state=random("x"), xs=random("xs") + 1))


def test_a_scan_along_an_inner_axis() -> None:
    text = SCAN.format(
        axes="scan_input_axes = [3],", shape="float[4,2,1,4]", element="float[3,2,1]"
    )
    text = text.replace("shape = Constant <value_ints = [2, 1, 4]> ()", "").replace(
        "flat = Reshape(x, shape)", "flat = ReduceMax <keepdims = 0> (x)"
    )
    compiled = textual.build(text, ["cache"], ["cache", None, None])
    given = feed(state=random("x"), xs=random("xs"))
    agree(compiled, random("cache"), given, given)


def test_nested_with_captured_values() -> None:
    """A branch in a loop reads a value of the graph, one of the body, and the body's own cache."""
    compiled = textual.build(
        """main (float[2,6,4] cache, float[2,1,4] x, int64 count) => (float[2,6,4] out) {
            yes = Constant <value = bool {1}> ()
            outer = Exp(x)
            out = Loop (count, yes, cache) <
                body = b (int64 i, bool c, float[2,6,4] k) => (bool again, float[2,6,4] r) {
                    again = Identity(c)
                    two = Constant <value = int64 {2}> ()
                    rest = Mod(i, two)
                    odd = Cast <to = 9> (rest)
                    inner = Mul(outer, outer)
                    r = If (odd) <
                        then_branch = t () => (float[2,6,4] w) {
                            axes = Constant <value_ints = [1]> ()
                            sum = ReduceSum(k, axes)
                            both = Add(sum, inner)
                            all = Add(both, outer)
                            w = onnx_inplace.CacheUpdate(k, all, i)
                        },
                        else_branch = e () => (float[2,6,4] same) { same = Identity(k) }>
                }>
        }""",
        ["cache"],
        ["cache"],
    )
    feeds = [feed(x=random("x") * k, count=n) for k, n in enumerate([6, 0, 3, 6])]
    agree(compiled, random("cache"), *feeds)


def test_a_function_in_a_branch_in_a_loop() -> None:
    @function
    def write(
        cache: Mutable[FLOAT[2, 6, 4]], values: FLOAT[2, 1, 4], at: INT64[()]
    ) -> Alias["cache"]:
        return kv.CacheUpdate(cache, op.Exp(values), at)

    @model
    def main(cache: Mutable[FLOAT[2, 6, 4]], x: FLOAT[2, 1, 4], count: INT64[()]) -> Alias["cache"]:
        for i in range(count):
            if i < 1:
                cache = write(cache, x, i)
            else:
                cache = write(cache, op.Neg(x), i)
        return cache

    agree(main, random("cache"), *[feed(x=random("x"), count=n) for n in (1, 4, 0, 2)])


def test_scanned_inputs_of_different_lengths_are_refused() -> None:
    compiled = textual.build(
        """main (float[2,6,4] cache, float[n,2,1,4] xs, float[m,2,1,4] ys)
                => (float[2,6,4] out) {
            out = Scan <num_scan_inputs = 2, body = b
                    (float[2,6,4] k, float[2,1,4] x, float[2,1,4] y) => (float[2,6,4] w) {
                    z = Add(x, y)
                    zero = Constant <value = int64 {0}> ()
                    w = onnx_inplace.CacheUpdate(k, z, zero)
                }> (cache, xs, ys)
        }""",
        ["cache"],
        ["cache"],
    )
    xs = random("xs")
    agree(compiled, random("cache"), {"xs": xs, "ys": xs})
    cache = random("cache")
    with Session(compiled).bind(cache=cache) as step, pytest.raises(errors.StorageMismatch):
        step.run(xs=xs, ys=xs[:2])
    assert cache.tobytes() == random("cache").tobytes()


def test_what_a_loop_hands_on_unchanged_is_no_reused_buffer() -> None:
    """Without a round, ``last`` is ``start``; ``later`` has its size and lives after the loop."""
    compiled = textual.build(
        """main (float[2,6,4] cache, float[2,1,4] x, int64 count, int64 p)
                => (float[2,6,4] out, float[2,1,4] y) {
            yes = Constant <value = bool {1}> ()
            start = Exp(x)
            looped, last = Loop (count, yes, cache, start) <
                body = b (int64 i, bool c, float[2,6,4] k, float[2,1,4] v)
                        => (bool again, float[2,6,4] written, float[2,1,4] next) {
                    again = Identity(c)
                    written = onnx_inplace.CacheUpdate(k, v, i)
                    next = Identity(v)
                }>
            axes = Constant <value_ints = [1]> ()
            largest = ReduceMax(looped, axes)
            later = Neg(largest)
            out = onnx_inplace.CacheUpdate(looped, later, p)
            smallest = ReduceMin(out, axes)
            y = Add(last, smallest)
        }""",
        ["cache"],
        ["cache", None],
    )
    for count in (0, 2):
        agree(compiled, random("cache"), *[feed(x=random("x"), count=count, p=5)] * 4)
