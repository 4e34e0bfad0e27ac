# ruff: noqa: F841, SIM300  (programs as authors write them, faulty ones among them)
"""Python numbers, lists and arrays beside tensors; what Python's operators mean."""

import ml_dtypes
import numpy as np
import onnx
import onnx_ir
import pytest
from recorded import one, operators, proto, reasons, refused, shapes, stock

from onnx_inplace.dsl import (
    BFLOAT16,
    BOOL,
    DOUBLE,
    FLOAT,
    FLOAT16,
    INT8,
    INT64,
    UINT8,
    function,
    model,
    op,
)


@pytest.mark.parametrize("type_", [FLOAT, FLOAT16, BFLOAT16, DOUBLE, INT8, INT64, UINT8])
def test_a_number_takes_the_type_of_the_tensor(type_: type) -> None:
    @model
    def program(x: type_["n"]):
        return x + 3, 3 - x

    assert {o.type.tensor_type.elem_type for o in proto(program).graph.output} == {type_.dtype}


def test_a_number_that_survives_as_another_kind_is_taken() -> None:
    @model
    def program(i: INT64["n"], x: FLOAT["n"]):
        return i * 2.0, x * 2, x * np.float64(0.1), i + np.int8(1)

    got = list(stock(program, i=[3], x=[3]).values())
    assert [v.dtype.kind for v in got] == ["i", "f", "f", "i"]
    assert got[2] == np.float32(3) * np.float32(0.1)


def test_numbers_that_do_not_survive_are_refused() -> None:
    def declare() -> None:
        @model
        def program(i: INT64["n"], h: FLOAT16["n"], u: UINT8["n"], f: FLOAT["n"], b: BOOL["n"]):
            a = i + 1.5
            c = h + 1e6
            d = h * 1e-10
            e = u + 256
            g = u - -1
            j = f + (2**24 + 1)
            k = h + 2049
            m = b & 1
            n = i + True
            o = i * float("inf")
            return f

    assert refused(declare) == [("E102", line) for line in range(3, 13)]


def test_fractions_may_be_rounded_and_infinity_kept() -> None:
    @model
    def program(h: FLOAT16["n"]):
        return h * 0.1, h + float("inf"), h + float("nan")

    a, b, c = stock(program, h=[1]).values()
    assert a == np.float16(0.1) and np.isinf(b) and np.isnan(c)


def test_types_are_not_mixed_silently() -> None:
    def declare() -> None:
        @model
        def program(i: INT64["n"], f: FLOAT["n"], h: FLOAT16["n"]):
            a = i + f
            b = h * f
            c = op.Where(f > 0, f, h)
            d = f * np.ones(3)
            e = op.Concat(i, f, axis=0)
            return f

    assert refused(declare) == [("E102", line) for line in range(3, 8)]
    assert "`i` is INT64, `f` is FLOAT" in reasons(declare)


def test_an_operator_that_is_not_defined_for_a_type_is_refused() -> None:
    def declare() -> None:
        @model
        def program(b: BOOL["n"], i: INT64["n"]):
            return b + b, op.Sin(i)

    assert refused(declare) == [("E102", 3), ("E102", 3)]


def test_shapes_that_do_not_fit_are_refused() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT[2, 3], y: FLOAT[4, 5]):
            a = x @ y
            b = x + y
            c = op.Concat(x, y, axis=0)
            return x

    assert refused(declare) == [("E102", 3), ("E102", 4), ("E102", 5)]


def test_lists_and_arrays_are_arguments() -> None:
    @model
    def program(x: FLOAT[2, 3], n: INT64[()]):
        weights = np.array([1, 2, 3], np.float32)
        return (
            op.Reshape(x, [-1]),
            op.Reshape(x, [n, -1]),
            op.Concat(x, [[7, 8, 9]], axis=0),
            x * weights,
            weights * x,
            op.Concat([x, x], axis=0),
            op.Reshape(x, np.array([3, 2])),
        )

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    w = np.array([1, 2, 3], np.float32)
    expected = (
        x.ravel(), x.reshape(3, 2), np.vstack([x, [[7, 8, 9]]]), x * w, x * w, np.vstack([x, x]),
        x.reshape(3, 2),
    )  # fmt: skip
    for a, b in zip(stock(program, x=x, n=3).values(), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_number_stands_for_a_vector_where_onnx_wants_one() -> None:
    @model
    def program(x: FLOAT[1, 3]):
        return op.Squeeze(x, 0), op.Unsqueeze(x, -1), op.ReduceMax(x, 1), op.TopK(x, 2)[0]

    assert shapes(program) == [(3,), (1, 3, 1), (1, 1), (1, 2)]


def test_equal_constants_of_a_block_are_one() -> None:
    @model
    def program(x: FLOAT["n"]):
        return (x + 1.0) * (x - 1.0) + 1

    assert operators(program).count("Constant") == 1


def test_large_arrays_become_initializers_once() -> None:
    table = np.arange(1000, dtype=np.float32)

    @model
    def program(x: FLOAT[1000], k: BOOL[()]):
        if k:
            x = x + table
        return x * table

    assert len(proto(program).graph.initializer) == 1
    np.testing.assert_array_equal(one(program, x=table, k=True), (table + table) * table)


def test_arrays_of_other_libraries_are_taken() -> None:
    bits = np.array([1.5, 2], ml_dtypes.bfloat16)

    @model
    def program(x: FLOAT[2], y: FLOAT[2]):
        return (
            op.Cast(op.Concat(op.Cast(x, to=BFLOAT16), bits, axis=0), to=FLOAT),
            y * onnx_ir.tensor([1.0, 2.0]),
            y + onnx.numpy_helper.from_array(np.ones(2, np.float32)),
        )

    a, b, c = stock(program, x=np.ones(2), y=[3, 4]).values()
    assert a.tolist() == [1, 1, 1.5, 2] and b.tolist() == [3, 8] and c.tolist() == [4, 5]


@pytest.mark.parametrize("a", [-7, -6, 0, 6, 7])
@pytest.mark.parametrize("b", [-3, 3])
def test_division_means_what_python_means(a: int, b: int) -> None:
    @model
    def program(i: INT64[()], j: INT64[()], x: FLOAT[()], y: FLOAT[()]):
        return i // j, i % j, x // y, x % y, x / y, i // 4, -i

    got = list(stock(program, i=a, j=b, x=a, y=b).values())
    assert got[:4] == [a // b, a % b, a // b, a % b]
    assert got[4] == np.float32(a / b) and got[5] == a // 4 and got[6] == -a


def test_division_of_whole_numbers_has_fractions() -> None:
    def declare() -> None:
        @model
        def program(i: INT64["n"]):
            return i / 2

    assert refused(declare) == [("E102", 3)]


def test_operators_of_python() -> None:
    @model
    def program(x: FLOAT["n"], i: INT64["n"], b: BOOL["n"]):
        return x**2, 2**x, abs(x), +x, ~b, b ^ True, i & 3, i | 8, ~i, x != 1, 1 < x, i == 2

    x, i, b = np.array([-1.5, 2], np.float32), np.array([2, 7]), np.array([True, False])
    expected = [
        x**2, 2**x, abs(x), x, ~b, ~b, i & 3, i | 8, ~i, x != 1, x > 1, i == 2
    ]  # fmt: skip
    for a, e in zip(stock(program, x=x, i=i, b=b).values(), expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6)


def test_numbers_are_arguments_of_functions() -> None:
    @function
    def scaled(x: FLOAT16["n"], scale: FLOAT16[()], times: INT64[()]) -> FLOAT16["n"]:
        return x * scale + op.Cast(times, to=FLOAT16)

    @model
    def program(x: FLOAT16["n"]):
        return scaled(x, 2, times=3)

    assert one(program, x=[1]) == 5

    def declare() -> None:
        @model
        def program(x: FLOAT16["n"]):
            return scaled(x, 1e6, 1.5)

    assert refused(declare) == [("E102", 3), ("E102", 3)]


def test_numpy_cannot_compute_on_tensors() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["n"]):
            return np.concatenate([x, x])

    assert refused(declare) == [("E100", 3)]
