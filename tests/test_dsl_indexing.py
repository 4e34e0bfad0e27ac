# ruff: noqa: F841  (programs as authors write them, faulty ones among them)
"""``x[...]`` means what it means in numpy."""

import numpy as np
import pytest
from recorded import one, operators, refused, stock

from onnx_inplace.dsl import BOOL, FLOAT, INT32, INT64, model

X = np.arange(2 * 5 * 4, dtype=np.float32).reshape(2, 5, 4)
KEYS = {
    "int": 1,
    "negative": -1,
    "ints": (0, -2, 3),
    "slice": slice(1, 2),
    "open": (slice(None), slice(2, None)),
    "negative bounds": (slice(None), slice(-3, -1)),
    "clamped": (slice(-9, 9), slice(3, 99)),
    "step": (Ellipsis, slice(None, None, 2)),
    "bounds and step": (0, slice(1, 5, 3)),
    "backwards": (slice(None), slice(None, None, -1)),
    "backwards from": (slice(None), slice(3, 0, -2)),
    "backwards to the first": (slice(None), slice(2, None, -1)),
    "none": (None, 0, None, slice(1, 3), None),
    "ellipsis": (1, Ellipsis, -1),
    "trailing ellipsis": (0, Ellipsis),
    "only ellipsis": Ellipsis,
    "ellipsis and none": (Ellipsis, None, 2),
    "whole": slice(None),
    "list": [1, 0, 1],
    "list of an axis": (slice(None), [4, 0]),
    "int and list": (1, [0, 2]),
    "array": np.array([1, 1]),
    "numpy int": np.int64(1),
    "empty": (slice(None), slice(3, 1)),
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_python_keys(key: object) -> None:
    @model
    def program(x: FLOAT["a", 5, 4]):
        return x[key] + 0.0

    np.testing.assert_array_equal(one(program, x=X), X[key])


def test_tensor_keys() -> None:
    @model
    def program(x: FLOAT["a", "b", 4], i: INT64[()], n: INT64[1], s: INT32[()], v: INT64["k"]):
        return x[i], x[:, i:n], x[-1, 0:9:s, None], x[:, i : i + 2, 1], x[:, v], x[i, v]

    i, n, s, v = 1, 4, 2, np.array([3, 0, 3])
    expected = X[i], X[:, i:n], X[-1, 0:9:s, None], X[:, i : i + 2, 1], X[:, v], X[i, v]
    got = stock(program, x=X, i=i, n=[n], s=s, v=v).values()
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_negative_tensor_keys() -> None:
    @model
    def program(x: FLOAT["a", 5, 4], i: INT64[()]):
        return x[0, i], x[0, i:], x[0, :i]

    for a, b in zip(
        stock(program, x=X, i=-2).values(), (X[0, -2], X[0, -2:], X[0, :-2]), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_a_full_slice_records_nothing() -> None:
    @model
    def program(x: FLOAT["a", 5, 4]):
        return x[:, ...][:] * 2.0

    assert operators(program) == ["Constant", "Mul"]


def test_all_slices_of_an_index_are_one_operator() -> None:
    @model
    def program(x: FLOAT["a", 5, 4]):
        return x[1:, :3, ::2]

    assert operators(program).count("Slice") == 1


def test_what_is_no_index_is_refused() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["a", 5], y: FLOAT["k"], m: BOOL["k"], s: INT64[()]):
            a = x[0.5]
            b = x[True]
            c = x[y]
            d = x[m]
            e = x[0, 0, 0]
            f = x[::0]
            g = x[::s]
            h = x[[0], [1]]
            i = x[..., ...]
            j = x[0.0:]
            return x

    codes = ["E100", "E100", "E102", "E100", "E102", "E100", "E100", "E100", "E100", "E100"]
    assert refused(declare) == [(c, 3 + k) for k, c in enumerate(codes)]


def test_items_cannot_be_assigned() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["a", 5], y: FLOAT[5]):
            x[0] = y
            x[1] += y
            return x

    assert refused(declare) == [("E100", 3), ("E100", 4)]
