"""Whether a write fits, as far as sizes tell: proved, refuted (E112), or open until a run."""

import numpy as np
import pytest

from onnx_inplace import Session, compiler, errors
from onnx_inplace.compiler import capacity, extents
from onnx_inplace.compiler.capacity import Verdict
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, function, kv, model, op

SCALAR = INT64[()]


def judged(program):
    """Verdicts, and the extreme positions, of a program."""
    loaded = compiler.load(program)
    known = extents.Extents(loaded.model.graph, loaded.aliases.source)
    found = capacity.judge(loaded.model.graph, loaded.aliases.root, loaded.mutable, known)
    return [(j.verdict, str(j.lowest), str(j.highest)) for j in found]


def refused(declare):
    with pytest.raises(errors.ContractError) as caught:
        declare()
    return [
        (f.code, f.location.line - declare.__code__.co_firstlineno) for f in caught.value.findings
    ]


def test_a_position_that_is_an_input_is_left_to_the_run():
    @model
    def program(c: Mutable[FLOAT["m", 4]], v: FLOAT["n", 4], p: SCALAR) -> Alias["c"]:
        return kv.CacheUpdate(c, v, p)

    assert judged(program) == [(Verdict.OPEN, "p", "p")]


@pytest.mark.parametrize("length", [0, 1, 8])
def test_a_constant_position_that_fits_is_proved(length):
    @model
    def program(c: Mutable[FLOAT[8, 4]], v: FLOAT[length, 4]) -> Alias["c"]:
        return kv.CacheUpdate(c, v, 8 - length)

    assert judged(program) == [(Verdict.PROVED, str(8 - length), str(8 - length))]


def test_the_end_of_a_cache_is_open_while_the_values_may_be_longer():
    @model
    def program(c: Mutable[FLOAT["m", 4]], v: FLOAT["n", 4]) -> Alias["c"]:
        end = op.Squeeze(op.Shape(c, start=0, end=1))
        return kv.CacheUpdate(c, v, end - op.Squeeze(op.Shape(v, start=0, end=1)))

    [(verdict, _, highest)] = judged(program)
    assert highest == "m - n" and verdict is Verdict.OPEN  # n may be larger than m


def test_the_whole_cache_from_the_beginning_is_proved():
    @model
    def program(c: Mutable[FLOAT["m", 4]], v: FLOAT["m", 4]) -> Alias["c"]:
        return kv.CacheUpdate(c, v, 0)

    assert judged(program) == [(Verdict.PROVED, "0", "0")]


def test_a_counter_stands_for_its_last_round():
    @model
    def program(c: Mutable[FLOAT["m", 4]], v: FLOAT[1, 4], p: SCALAR, n: SCALAR) -> Alias["c"]:
        for i in range(n):
            c = kv.CacheUpdate(c, v, p + i)
        return c

    assert judged(program) == [(Verdict.OPEN, "p", "n + p - 1")]


def test_a_counter_that_goes_over_the_capacity_exactly_is_proved():
    @model
    def program(c: Mutable[FLOAT["m", 4]], v: FLOAT[1, 4]) -> Alias["c"]:
        for i in range(op.Squeeze(op.Shape(c, start=0, end=1))):
            c = kv.CacheUpdate(c, v, i)
        return c

    assert judged(program) == [(Verdict.PROVED, "0", "m - 1")]


def test_a_round_that_may_never_come_is_left_to_the_run():
    @model
    def program(c: Mutable[FLOAT[8, 4]], v: FLOAT[1, 4], n: SCALAR) -> Alias["c"]:
        for i in range(op.Constant(value_int=9)):
            c = kv.CacheUpdate(c, v, i * n)
        return c

    assert [verdict for verdict, _, _ in judged(program)] == [Verdict.OPEN]


def test_more_than_the_capacity_fits_nowhere():
    def declare():
        @model
        def program(c: Mutable[FLOAT[8, 4]], v: FLOAT[9, 4], p: SCALAR) -> Alias["c"]:
            return kv.CacheUpdate(c, v, p)

    assert refused(declare) == [("E112", 3)]


@pytest.mark.parametrize("position", [-1, 7, 2**40])
def test_a_constant_position_outside_is_refused(position):
    def declare():
        @model
        def program(c: Mutable[FLOAT[8, 4]], v: FLOAT[2, 4]) -> Alias["c"]:
            return kv.CacheUpdate(c, v, position)

    assert refused(declare) == [("E112", 3)]


def test_one_token_behind_a_cache_of_any_size_is_refused():
    def declare():
        @model
        def program(c: Mutable[FLOAT["m", 4]], v: FLOAT[1, 4]) -> Alias["c"]:
            return kv.CacheUpdate(c, v, op.Squeeze(op.Shape(c, start=0, end=1)))

    assert refused(declare) == [("E112", 3)]


def test_a_circular_cache_takes_any_position_but_no_more_than_its_capacity():
    @model
    def program(c: Mutable[FLOAT[8, 4]], v: FLOAT[8, 4], p: SCALAR) -> Alias["c"]:
        return kv.CacheUpdate(c, v, p + 100, mode="circular")

    assert Verdict.REFUTED not in {verdict for verdict, _, _ in judged(program)}

    def declare():
        @model
        def program(c: Mutable[FLOAT[8, 4]], v: FLOAT[9, 4], p: SCALAR) -> Alias["c"]:
            return kv.CacheUpdate(c, v, p, mode="circular")

    assert refused(declare) == [("E112", 3)]


def test_in_a_function_and_in_a_branch():
    def declare():
        @function
        def put(c: Mutable[FLOAT[8, 4]], v: FLOAT[1, 4], p: SCALAR) -> Alias["c"]:
            if p > 3:
                c = kv.CacheUpdate(c, v, 8)
            return c

    assert refused(declare) == [("E112", 4)]


def test_what_a_call_makes_known_is_refused_when_it_is_loaded():
    @function
    def put(c: Mutable[FLOAT["m", 4]], v: FLOAT["n", 4], p: SCALAR) -> Alias["c"]:
        return kv.CacheUpdate(c, v, p)

    @model
    def program(c: Mutable[FLOAT[8, 4]], v: FLOAT[2, 4]) -> Alias["c"]:
        return put(c, v, 7)

    with pytest.raises(errors.ContractError) as caught:
        compiler.load(program)
    assert [f.code for f in caught.value.findings] == ["E112"]


def test_what_a_test_guards_is_left_to_the_run():
    """An argument makes a guarded write impossible: the branch is there to leave it out."""

    @function
    def push(c: Mutable[FLOAT[8, 4]], v: FLOAT[1, 4], p: SCALAR) -> Alias["c"]:
        if p > 0:
            c = kv.CacheUpdate(c, v, p - 1)
        return kv.CacheUpdate(c, v, p)

    @model
    def program(c: Mutable[FLOAT[8, 4]], v: FLOAT[1, 4]) -> Alias["c"]:
        return push(c, v, 0)

    session = Session(program)
    c = session.allocate("c")
    with session.bind(c=c) as step:
        assert step.run(v=np.ones((1, 4), np.float32))[0] is c
    assert c[0].all() and not c[1:].any()
