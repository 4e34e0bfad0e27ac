# ruff: noqa: F841, RUF059  (programs as authors write them, faulty ones among them)
"""@function, its Python arguments, its name; other domains; functions of onnxscript."""

import concurrent.futures

import numpy as np
import onnx
import onnx.reference
import onnxscript
from onnxscript import opset18
from recorded import one, operators, proto, reasons, refused, shapes, stock

from onnx_inplace import dsl
from onnx_inplace.dsl import (
    BOOL,
    FLOAT,
    FLOAT16,
    INT64,
    UINT8,
    Alias,
    Mutable,
    function,
    kv,
    model,
    op,
)

Cache, New = FLOAT["heads", "capacity", 4], FLOAT["heads", "n", 4]


def names(program: object) -> list[tuple[str, str]]:
    """Functions of the author in a file."""
    functions = proto(program).functions
    return [(f.domain, f.name) for f in functions if f.domain != "onnx_inplace"]


def test_a_function_becomes_a_function_of_the_file() -> None:
    @function
    def doubled(x: FLOAT["n"]) -> FLOAT["n"]:
        return x * 2.0

    @model
    def program(x: FLOAT["k"]) -> FLOAT["k"]:
        return doubled(doubled(x=x))

    assert names(program) == [("local", "doubled")]
    assert operators(program) == ["doubled", "doubled"]
    assert shapes(program) == [("k",)]  # in the names of the caller
    assert one(program, x=[1]) == [4]
    reference = onnx.reference.ReferenceEvaluator(proto(program))
    assert reference.run(None, {"x": np.array([1], np.float32)})[0] == [4]


def test_two_domains_hold_functions_of_one_name() -> None:
    @function(domain="a")
    def f(x: FLOAT["n"]) -> FLOAT["n"]:
        return x + 1.0

    first = f

    @function(domain="b")
    def f(x: FLOAT["n"]) -> FLOAT["n"]:
        return x * 10.0

    @model
    def program(x: FLOAT["n"]) -> FLOAT["n"]:
        return f(first(x))

    assert names(program) == [("a", "f"), ("b", "f")]
    assert one(program, x=[1]) == [20]


def scaled_by(scale: float, domain: str = "local") -> dsl.Tensor:
    @function(domain=domain)
    def scaled(x: FLOAT["n"]) -> FLOAT["n"]:
        return x * scale

    return scaled


def test_two_closures_of_one_name_are_told_apart() -> None:
    two, three = scaled_by(2.0), scaled_by(3.0)

    @model
    def program(x: FLOAT["n"]) -> FLOAT["n"]:
        return two(three(two(x)))

    assert names(program) == [("local", "scaled"), ("local", "scaled_2")]
    assert one(program, x=[1]) == [12]
    reference = onnx.reference.ReferenceEvaluator(proto(program))
    assert reference.run(None, {"x": np.array([1], np.float32)})[0] == [12]


def test_equal_closures_are_one_function() -> None:
    one_, same = scaled_by(2.0), scaled_by(2.0)

    @model
    def program(x: FLOAT["n"]) -> FLOAT["n"]:
        return one_(same(x))

    assert names(program) == [("local", "scaled")]
    assert one(program, x=[1]) == [4]


def test_a_conflict_inside_of_functions_is_refused() -> None:
    def outer(scale: float, name: str) -> dsl.Tensor:
        inner = scaled_by(scale)

        @function(domain=name)
        def twice(x: FLOAT["n"]) -> FLOAT["n"]:
            return inner(inner(x))

        return twice

    a, b = outer(2.0, "a"), outer(3.0, "b")

    def declare() -> None:
        @model
        def program(x: FLOAT["n"]) -> FLOAT["n"]:
            return a(b(x))

    assert refused(declare) == [("E100", 3)]
    assert "rename one" in reasons(declare)


def test_python_arguments_specialise_a_function() -> None:
    @function
    def reduced(x: FLOAT["a", "b"], axis: int, keep: bool = True) -> FLOAT[...]:
        if keep:
            return op.ReduceMax(x, [axis])
        return op.ReduceMax(x, [axis], keepdims=0)

    @model
    def program(x: FLOAT[2, 3]):
        return reduced(x, axis=0), reduced(x, 1, keep=False), reduced(x, 0)

    assert names(program) == [
        ("local", "reduced_axis_0_keep_True"),
        ("local", "reduced_axis_1_keep_False"),
    ]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    a, b, c = stock(program, x=x).values()
    np.testing.assert_array_equal(a, x.max(0, keepdims=True))
    np.testing.assert_array_equal(b, x.max(1))
    np.testing.assert_array_equal(c, a)


def test_any_python_value_specialises_a_function() -> None:
    @function
    def f(x: FLOAT["n"], table: np.ndarray, scales=(1.0, 2.0), kind=FLOAT, name="a") -> FLOAT["n"]:
        for scale in scales:
            x = x * scale
        return x + table

    tables = np.zeros(2, np.float32), np.ones(2, np.float32)

    @model
    def program(x: FLOAT["n"]) -> FLOAT["n"]:
        x = f(x, tables[0]) + f(x, tables[1])
        return f(x, tables[0]) + f(x, tables[1], scales=[3.0])

    assert names(program) == [
        ("local", "f_scales_1_0_2_0_name_a"),
        ("local", "f_scales_1_0_2_0_name_a_2"),
        ("local", "f_scales_3_0_name_a"),
    ]
    assert one(program, x=[1, 2]).tolist() == [26, 46]


def test_a_tensor_is_no_python_argument() -> None:
    @function
    def f(x: FLOAT["n"], axis: int) -> FLOAT["n"]:
        return x

    def declare() -> None:
        @model
        def program(x: FLOAT["n"], i: INT64[()]) -> FLOAT["n"]:
            return f(x, i)

    assert refused(declare) == [("E100", 3)]


def test_arguments_are_checked() -> None:
    @function
    def f(x: FLOAT["n", 4], y: FLOAT["n"]) -> FLOAT["n", 4]:
        return x + op.Unsqueeze(y, [1])

    def declare() -> None:
        @model
        def program(a: FLOAT16["n", 4], b: FLOAT[3], c: FLOAT[2, 4], d: FLOAT["n"]):
            p = f(a, b)
            q = f(d, b)
            r = f(c, b)
            return f(c)

    assert refused(declare) == [("E102", 3), ("E102", 4), ("E102", 5), ("E100", 6)]


def test_functions_call_functions_and_write() -> None:
    @function
    def push(cache: Mutable[Cache], x: New, p: INT64[()]) -> Alias["cache"]:
        return kv.CacheUpdate(cache, x, p)

    @function
    def twice(cache: Mutable[Cache], x: New, p: INT64[()]) -> tuple[Alias["cache"], INT64[()]]:
        cache = push(cache, x, p)
        return push(cache, x + 1.0, p + 1), p + 2

    @model
    def program(cache: Mutable[Cache], x: New, n: INT64[()]) -> tuple[Alias["cache"], INT64[()]]:
        p = 0
        for _ in range(n):
            cache, p = twice(cache, x, p)
        return cache, p

    assert names(program) == [("local", "push"), ("local", "twice")]
    cache, p = stock(program, cache=np.zeros((1, 5, 4)), x=np.ones((1, 1, 4)), n=2).values()
    assert cache[0, :, 0].tolist() == [1, 2, 1, 2, 0] and p == 4


def test_faults_of_a_function_come_where_it_stands() -> None:
    def declare() -> None:
        @function
        def f(cache: Mutable[Cache], x: New) -> FLOAT[()]:
            updated = kv.CacheUpdate(cache, x, 0)
            return op.ReduceSum(x, keepdims=0)

    assert refused(declare) == [("E109", 3)]


def test_a_function_is_called_while_recording() -> None:
    f = scaled_by(2.0)

    def declare() -> None:
        f(np.ones(3, np.float32))

    assert refused(declare) == [("E100", 1)]


# -- onnxscript


@onnxscript.script(onnxscript.values.Opset("scripts", 1))
def squared_sum(x, y):
    s = opset18.Add(x, y)
    return opset18.Mul(s, s)


@onnxscript.script(onnxscript.values.Opset("scripts", 1))
def quadrupled(x):
    return squared_sum(x, x)


def test_script_functions_are_called() -> None:
    @model(opset=18)
    def program(x: FLOAT["n"], k: BOOL[()]) -> FLOAT["n"]:
        if k:
            x = squared_sum(x, 1.0)
        return quadrupled(x)

    assert names(program) == [("scripts", "squared_sum"), ("scripts", "quadrupled")]
    assert one(program, x=[2], k=True) == [4 * 81]
    assert one(program, x=[2], k=False) == [16]


def test_operators_of_onnxscript_record() -> None:
    @model
    def program(x: FLOAT["n"]) -> FLOAT["n"]:
        return opset18.Relu(x)

    assert {i.domain: i.version for i in proto(program).opset_import}[""] == 18


# -- opsets and domains


def test_the_opset_is_25_unless_said_otherwise() -> None:
    @model
    def newest(x: FLOAT["n"]) -> FLOAT["n"]:
        return op.Relu(x)

    @model(opset=21)
    def declared(x: FLOAT["n"]) -> FLOAT["n"]:
        return op.Relu(x)

    @model
    def used(x: FLOAT["n"]) -> FLOAT["n"]:
        return dsl.opset(22).Relu(x)

    versions = [
        next(i.version for i in proto(p).opset_import if i.domain == "")
        for p in (newest, declared, used)
    ]
    assert versions == [25, 21, 22]
    assert [one(p, x=[-1]) for p in (newest, declared, used)] == [0, 0, 0]


def test_a_function_follows_the_opset_of_its_caller() -> None:
    @function
    def f(x: FLOAT["n"]) -> FLOAT["n"]:
        return op.Relu(x) * 2.0

    def make(opset: int):
        @model(opset=opset)
        def program(x: FLOAT["n"]) -> FLOAT["n"]:
            return f(x)

        return program

    for opset in (21, 24, 25):
        program = make(opset)
        [body] = proto(program).functions
        assert body.opset_import[0].version == opset and one(program, x=[1]) == [2]


def test_one_model_has_one_opset() -> None:
    @function(opset=22)
    def f(x: FLOAT["n"]) -> FLOAT["n"]:
        return x * 2.0

    def declare() -> None:
        @model(opset=24)
        def program(x: FLOAT["n"]) -> FLOAT["n"]:
            a = dsl.opset(23).Relu(x)
            b = f(x)
            return squared_sum(a, b)

    assert refused(declare) == [("E100", 3), ("E100", 4), ("E100", 5)]

    def late() -> None:
        @model
        def program(x: FLOAT["n"]) -> FLOAT["n"]:
            return dsl.opset(23).Relu(op.Abs(x))

    assert refused(late) == [("E100", 3)]


def test_operators_of_other_domains() -> None:
    microsoft = dsl.domain("com.microsoft")

    @model
    def program(x: FLOAT["n", 32], b: UINT8[8, 1, 16], s: FLOAT[8]):
        y = microsoft.MatMulNBits(x, b, s, K=32, N=8, bits=4, block_size=32)
        return y * 2.0, microsoft.QuickGelu(y)

    assert shapes(program) == [("n", 8), ("n", 8)]
    feeds = {"x": np.ones((1, 32)), "b": np.full((8, 1, 16), 0x99), "s": np.ones(8)}
    assert stock(program, **feeds)["output_0"].tolist() == [[64.0] * 8]


def test_outputs_and_their_types_can_be_said() -> None:
    microsoft = dsl.domain("com.microsoft")

    @model
    def program(x: FLOAT[2, 3, 8], skip: FLOAT[2, 3, 8], gamma: FLOAT[8]):
        y, _, _, total = microsoft.SkipSimplifiedLayerNormalization(x, skip, gamma, _outputs=4)
        z = microsoft.BiasGelu(y, gamma, _outputs=[FLOAT[2, 3, 8]])
        values, indices = op.TopK(z, [1])
        a, b, c = op.Split(x, axis=1, num_outputs=3)
        y_only = op.LSTM
        del y_only
        return total, z, indices, b

    assert shapes(program) == [(2, 3, 8), (2, 3, 8), (2, 3, 1), (2, 1, 8)]


def test_what_an_operator_lacks_is_said() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["n", 4]):
            a = op.Softmax(x, axes=1)
            b = op.Concat(x, x)
            c = op.Gemm(x)
            d = op.Relu(x, x)
            e = op.Softmax(x, axis="last")
            f = op.Relu(x, _outputs=2)
            return x

    assert refused(declare) == [("E100", line) for line in range(3, 9)]
    assert "it has `axis`" in reasons(declare)


def test_an_operator_that_does_not_exist_is_said() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["n"]):
            return op.Rellu(x)

    assert refused(declare) == [("E100", 3)]


def test_control_operators_are_written_in_python() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["n"]):
            return op.Loop(x)

    assert refused(declare) == [("E100", 3)]


def test_the_same_source_gives_the_same_bytes() -> None:
    def make():
        two, three = scaled_by(2.0), scaled_by(3.0)

        @function
        def reduced(x: FLOAT["n"], axis: int) -> FLOAT[1]:
            return op.ReduceMax(x, [axis])

        @model
        def program(x: FLOAT["n"], n: INT64[()], k: BOOL[()]):
            total = 0.0
            for _ in range(n):
                x, total = two(x), total + reduced(x, axis=0)
                if k:
                    x = three(x)
            return x, total

        return program.serialized

    assert make() == make()


def test_a_model_may_be_made_while_another_is_recorded() -> None:
    made = []

    @model
    def outer(x: FLOAT["n"]) -> FLOAT["n"]:
        y = x + 1.0

        @model
        def inner(x: FLOAT["n"]) -> FLOAT["n"]:
            return x * 3.0

        made.append(inner)
        return y * 2.0

    assert one(outer, x=[1]) == [4] and one(made[0], x=[1]) == [3]


def test_models_are_recorded_in_any_thread() -> None:
    def make(k: int) -> bytes:
        @model(opset=18)
        def program(x: FLOAT["n"]) -> FLOAT["n"]:
            for _ in range(20):
                x = opset18.Relu(x * float(k))
            return x

        return program.serialized

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(make, range(8))) == list(map(make, range(8)))


def test_a_function_is_recorded_once_for_all_callers_of_its_opset():
    recorded = []

    @function
    def double(x: FLOAT["n"]) -> FLOAT["n"]:
        recorded.append(op)
        return x + x

    def caller():
        @model
        def program(x: FLOAT["n"]) -> FLOAT["n"]:
            return double(double(op.Relu(x)))

        return program

    assert len(caller().proto.functions) == len(caller().proto.functions) == 1
    assert len(recorded) == 1

    @model(opset=23)
    def older(x: FLOAT["n"]) -> FLOAT["n"]:
        return double(op.Relu(x))

    assert len(recorded) == 2
    assert [o.version for o in older.proto.functions[0].opset_import if not o.domain] == [23]
