# ruff: noqa: RUF015  (programs as authors write them, faulty ones among them)
"""Scan: for over tensors, carried variables, stacked results."""

import numpy as np
import pytest
from recorded import operators, proto, refused, shapes, stock

from onnx_inplace import Session, errors
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model, op, scan, stack

rng = np.random.default_rng(0)
XS = rng.random((5, 3), dtype=np.float32)


def test_scan_carries_variables_and_stacks_results() -> None:
    @model
    def program(xs: FLOAT["t", 3], h: FLOAT[3]) -> tuple[FLOAT[3], FLOAT["t", 3]]:
        states = stack()
        for x in scan(xs):
            h = op.Tanh(x + h)
            states.append(h)
        return h, states

    assert operators(program) == ["Scan"]
    h, expected = np.zeros(3, np.float32), []
    for x in XS:
        h = np.tanh(x + h)
        expected.append(h)
    last, states = stock(program, xs=XS, h=np.zeros(3)).values()
    np.testing.assert_allclose(states, expected, atol=1e-6)
    np.testing.assert_allclose(last, expected[-1], atol=1e-6)


def test_scan_goes_along_several_tensors_and_axes() -> None:
    @model
    def program(xs: FLOAT["t", 3], ys: FLOAT[3, "t"]) -> FLOAT["t", 3]:
        sums = stack()
        for x, y in scan(xs, ys, axis=(0, 1)):
            sums.append(x + y)
        return sums

    [sums] = stock(program, xs=XS, ys=2 * XS.T).values()
    np.testing.assert_allclose(sums, 3 * XS, atol=1e-6)
    assert shapes(program) == [("t", 3)]


def test_scan_goes_backwards_and_stacks_along_any_axis() -> None:
    @model
    def program(xs: FLOAT["t", 3]) -> tuple[FLOAT[3, "t"], FLOAT["t", 3]]:
        total = op.Constant(value_floats=[0.0, 0.0, 0.0])
        columns, rows = stack(axis=1), stack(reverse=True)
        for x in scan(xs, reverse=True):
            total = total + x
            columns.append(total)
            rows.append(total)
        return columns, rows

    columns, rows = stock(program, xs=XS).values()
    expected = np.cumsum(XS[::-1], 0)
    np.testing.assert_allclose(columns, expected.T, atol=1e-5)
    np.testing.assert_allclose(rows, expected[::-1], atol=1e-5)


def test_a_loop_stacks_as_well() -> None:
    @model
    def program(n: INT64[()]) -> INT64["n"]:
        squares = stack()
        for i in range(n):
            squares.append(i * i)
        return squares

    assert operators(program)[-1] == "Loop"
    assert stock(program, n=4)["squares"].tolist() == [0, 1, 4, 9]


def test_scan_carries_a_cache() -> None:
    @model
    def program(
        cache: Mutable[FLOAT["capacity", 3]], xs: FLOAT["t", 1, 3]
    ) -> tuple[Alias["cache"], INT64[()]]:
        position = 0
        for x in scan(xs):
            cache = kv.CacheUpdate(cache, x, position)
            position += 1
        return cache, position

    cache, position = stock(program, cache=np.zeros((7, 3)), xs=XS[:, None]).values()
    assert position == 5
    np.testing.assert_array_equal(cache[:5], XS)
    assert not cache[5:].any()


def test_stacks_that_nobody_reads_are_dropped() -> None:
    @model
    def program(xs: FLOAT["t", 3]) -> FLOAT["t", 3]:
        a, b, c = stack(), stack(axis=1), stack()
        for x in scan(xs):
            a.append(x)
            b.append(x * 2.0)
            c.append(x * 3.0)
        return c

    [node] = proto(program).graph.node
    assert len(node.output) == 1
    np.testing.assert_allclose(stock(program, xs=XS)["c"], 3 * XS, atol=1e-6)


def test_scan_needs_the_for_of_a_model() -> None:
    def declare() -> None:
        @model
        def program(xs: FLOAT["t", 3]) -> FLOAT["t", 3]:
            return [x for x in scan(xs)][0]

    assert refused(declare) == [("E100", 3)]


@pytest.mark.parametrize("where", ["branch", "twice", "outside", "early"])
def test_a_step_is_stacked_once(where: str) -> None:
    def declare() -> None:
        @model
        def program(xs: FLOAT["t", 3]) -> FLOAT["t", 3]:
            ys = stack()
            if where == "outside":
                ys.append(xs)
            for x in scan(xs):
                ys.append(x)
                if where == "twice":
                    ys.append(x)
                if where == "early":
                    x = ys + x
            return ys

    if where == "branch":

        def declare() -> None:
            @model
            def program(xs: FLOAT["t", 3], n: INT64[()]) -> FLOAT["t", 3]:
                ys = stack()
                for x in scan(xs):
                    if n > 0:
                        ys.append(x)
                return ys

    with pytest.raises(errors.ContractError) as caught:
        declare()
    assert {f.code for f in caught.value.findings} == {"E100"}


def test_variables_may_change_places_in_a_scan_within_a_loop() -> None:
    """Stock onnxruntime reads freed memory where a body of Scan returns a parameter as it is."""

    @model
    def program(a: INT64[2], n: INT64[()]) -> tuple[INT64[2], INT64[2]]:
        b = a
        for _ in range(n):
            sums = stack()
            for x in scan(a):
                a, b = b, a + b
                sums.append(x + n)
            b = sums + 0
        return a, b

    a, b = np.array([1, 2]), np.array([1, 2])
    for _ in range(3):
        given = a
        for _ in given:
            a, b = b, a + b
        b = given + 3
    first, second = stock(program, a=np.array([1, 2]), n=3).values()
    np.testing.assert_array_equal(first, a)
    np.testing.assert_array_equal(second, b)


def test_a_scan_in_a_loop_whose_writes_are_checked_before() -> None:
    """In the slice of the checks, too, the body of a Scan knows the ranks of what is carried."""

    @model
    def program(
        cache: Mutable[INT64[3, 2]], a: INT64[2, 2], n: INT64[()]
    ) -> tuple[Alias["cache"], INT64[2, 2]]:
        b = a
        for _ in range(n):
            rows = stack()
            for row in scan(a):
                a, b = b, a + b
                cache = kv.CacheUpdate(cache, op.Unsqueeze(row, [0]), n % 3)
                rows.append(row + n)
            b = rows + 0
        return cache, b

    cache, a = np.zeros((3, 2), np.int64), np.array([[1, 2], [3, 4]])
    with Session(program).bind(cache=cache) as step:
        step.run(a=a, n=1)
    assert cache.tolist() == [[0, 0], [3, 4], [0, 0]]
