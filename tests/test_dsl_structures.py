# ruff: noqa: F722  (programs as authors write them, faulty ones among them)
"""Structures of parameters, and what results are called."""

import dataclasses
from typing import NamedTuple, TypedDict

import numpy as np
import pytest
from recorded import inputs, outputs, proto, refused, shapes, stock

from onnx_inplace import Session
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, function, kv, model, op

Cache, New = FLOAT["heads", "capacity", 4], FLOAT["heads", "n", 4]


class Pair(NamedTuple):
    k: Mutable[Cache]
    v: Mutable[Cache]


@dataclasses.dataclass
class State:
    k: Cache
    v: Cache


class Named(TypedDict):
    k: Mutable[Cache]
    v: Mutable[Cache]


HINTS = {
    "tuple": (tuple[Mutable[Cache], Mutable[Cache]], "0", "1", lambda c: c),
    "list": ([Mutable[Cache]] * 2, "0", "1", lambda c: c),
    "mutable tuple": (Mutable[tuple[Cache, Cache]], "0", "1", lambda c: c),
    "NamedTuple": (Pair, "k", "v", lambda c: (c.k, c.v)),
    "dataclass": (Mutable[State], "k", "v", lambda c: (c.k, c.v)),
    "TypedDict": (Named, "k", "v", lambda c: (c["k"], c["v"])),
    "mapping": ({"k": Mutable[Cache], "v": Mutable[Cache]}, "k", "v", lambda c: (c["k"], c["v"])),
}


@pytest.mark.parametrize(("hint", "first", "second", "parts"), HINTS.values(), ids=HINTS)
def test_structures_of_parameters(hint: object, first: str, second: str, parts: object) -> None:
    @model
    def program(c: hint, x: New, p: INT64[()]) -> Alias["c"]:
        k, v = parts(c)
        return [kv.CacheUpdate(k, x, p), kv.CacheUpdate(v, x * 2.0, p)]

    assert inputs(program) == [f"c.{first}", f"c.{second}", "x", "p"]
    assert outputs(program) == [f"updated_c.{first}", f"updated_c.{second}"]
    session = Session(program)
    assert [i.name for i in session.mutable_inputs] == inputs(program)[:2]


def test_structures_nest() -> None:
    @model
    def program(layers: tuple[(Pair,) * 2], x: New, p: INT64[()]) -> Alias["layers"]:
        new = [Pair(*(kv.CacheUpdate(c, x, p) for c in layer)) for layer in layers]
        return new

    assert inputs(program)[:4] == ["layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v"]
    assert outputs(program) == ["new.0.k", "new.0.v", "new.1.k", "new.1.v"]


def test_an_alias_may_name_one_of_a_structure() -> None:
    @model
    def program(c: tuple[Mutable[Cache], Cache], x: New, p: INT64[()]) -> Alias["c.0"]:
        return kv.CacheUpdate(c[0], x, p)

    assert outputs(program) == ["updated_c.0"]


def test_a_function_gives_back_its_structure() -> None:
    @function
    def push(c: Pair, x: New, p: INT64[()]) -> tuple[Alias["c"], INT64[()]]:
        return Pair(kv.CacheUpdate(c.k, x, p), kv.CacheUpdate(c.v, x, p)), p + 1

    @model
    def program(c: Pair, x: New, p: INT64[()]) -> tuple[Alias["c"], INT64[()]]:
        c, p = push(c, x, p)
        assert isinstance(c, Pair)
        c, p = push(c, x, p)
        return c, p

    got = stock(
        program,
        **{"c.k": np.zeros((1, 3, 4)), "c.v": np.zeros((1, 3, 4))},
        x=np.ones((1, 1, 4)),
        p=0,
    )
    assert list(got) == ["updated_c.k", "updated_c.v", "output_2"]
    assert got["updated_c.v"][0, :, 0].tolist() == [1, 1, 0]


# -- names of outputs


def test_results_are_named_after_variables() -> None:
    @model
    def program(x: FLOAT["n"]) -> tuple[FLOAT["n"], FLOAT["n"], FLOAT["n"]]:
        y = x + 1.0
        z = y * 2.0
        return z, y - 1.0, y

    assert outputs(program) == ["z", "output_1", "y"]


def test_an_aliased_expression_is_an_updated_parameter() -> None:
    @model
    def program(a: Mutable[Cache], b: Mutable[Cache], x: New) -> tuple[Alias["a"], Alias["b"]]:
        b = kv.CacheUpdate(b, x, 0)
        return kv.CacheUpdate(a, x, 0), b

    assert outputs(program) == ["updated_a", "updated_b"]


def test_a_result_never_takes_the_name_of_an_input() -> None:
    @model
    def program(x: FLOAT["n"]) -> tuple[FLOAT["n"], FLOAT["n"]]:
        y = x
        x = x * 2.0
        return x, y

    assert outputs(program) == ["output_0", "y"]
    assert [v.item() for v in stock(program, x=[3]).values()] == [6, 3]


def test_one_variable_returned_twice_has_two_names() -> None:
    @model
    def program(c: Mutable[Cache], x: New) -> tuple[Alias["c"], Alias["c"], New, New]:
        u = kv.CacheUpdate(c, x, 0)
        y = x + 1.0
        return u, u, y, y

    assert outputs(program) == ["u", "updated_c", "y", "output_3"]


def test_the_result_wins_over_other_variables_of_its_name() -> None:
    @model
    def program(x: FLOAT["n"], k: INT64[()]) -> FLOAT["n"]:
        y = x + 1.0
        for _ in range(k):
            y = y * 2.0
        y = y - 1.0
        return y

    assert outputs(program) == ["y"]
    names = [v for n in proto(program).graph.node for v in n.output]
    assert len(set(names)) == len(names)


def test_sequences_add_their_index() -> None:
    @model
    def program(x: FLOAT["n"]) -> tuple[FLOAT["n"], tuple[FLOAT["n"], FLOAT["n"]]]:
        parts = [x + 1.0, x + 2.0]
        return x * 2.0, parts

    assert outputs(program) == ["output_0", "parts.0", "parts.1"]


def test_a_tuple_variable_is_several_results() -> None:
    @model
    def program(x: FLOAT["n"]) -> tuple[FLOAT["n"], FLOAT["n"]]:
        pair = x + 1.0, x + 2.0
        return pair

    assert outputs(program) == ["pair.0", "pair.1"]


def test_python_numbers_are_results() -> None:
    @model
    def program(x: FLOAT["n"]) -> tuple[FLOAT["n"], INT64[()]]:
        count = 3
        return x, count

    assert stock(program, x=[1])["count"] == 3


# -- types of outputs


def test_declared_dimensions_are_merged_with_inferred_ones() -> None:
    @model
    def program(x: FLOAT["batch", "n", 4]) -> tuple[FLOAT["b", 1, "k"], FLOAT["m"]]:
        return op.ReduceSum(x, [1]), op.Reshape(x, [-1])

    assert shapes(program) == [("batch", 1, 4), ("m",)]


def test_declared_types_that_differ_are_refused() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["n", 4]) -> tuple[INT64["n", 4], FLOAT["n"], FLOAT["n", 5]]:
            return x, x, x

    assert refused(declare) == [("E102", 3)] * 3


def test_the_number_of_results_is_checked() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["n"]) -> tuple[FLOAT["n"], FLOAT["n"]]:
            return x

    assert refused(declare) == [("E100", 3)]


def test_aliases_name_mutable_parameters() -> None:
    def declare() -> None:
        @model
        def program(c: Mutable[Cache], x: Cache) -> tuple[Alias["x"], Alias["d"], Alias["c.0"]]:
            return c, c, c

    assert refused(declare) == [("E117", 3)] * 3


def test_results_need_no_annotation() -> None:
    @model
    def program(x: FLOAT["n", 4]):
        return op.ReduceSum(x, [1], keepdims=0), x

    assert shapes(program) == [("n",), ("n", 4)]


def test_members_that_are_written_out_with_names_keep_them() -> None:
    @model
    def program(x: FLOAT["n"], c: Mutable[Cache]):
        return {"sum": op.ReduceSum(x), "twice": x * 2.0, "pair": (x + 1.0, x)}

    assert outputs(program) == ["sum", "twice", "pair.0", "pair.1"]
