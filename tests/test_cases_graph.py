"""Faults that others had with names, outputs and inputs of graphs (CASES, section A)."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import textual

from onnx_inplace import Session, errors
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model, op

Cache, New = FLOAT["heads", "capacity", 2], FLOAT["heads", 1, 2]
SHAPE, TOKEN = (2, 4, 2), (2, 1, 2)
NEW = np.arange(4, dtype=np.float32).reshape(TOKEN) + 1


def codes(error: errors.ContractError) -> set[str]:
    return {finding.code for finding in error.findings}


@pytest.mark.parametrize("results", ["y, x", "x"])
def test_a_lent_input_is_returned_only_as_what_it_is(results: str) -> None:
    """Case 1. An output with an input's name: declared it is the caller's array, else refused."""
    wanted = [name.strip() for name in results.split(",")]
    outputs = ", ".join(f"float[2] {name}_out" for name in wanted)
    ends = "\n".join(f"{name}_out = Identity({name})" for name in wanted)
    text = f"""returned (float[2] x) => ({outputs}) {{
        one = Constant <value = float {{1.0}}> ()
        y = Add (x, one)
        {ends}
    }}"""
    declared = ["x" if name == "x" else None for name in wanted]
    session = Session(textual.build(text, ["x"], declared))
    x = session.allocate("x")
    with session.bind(x=x) as step:
        out = step.run()
        assert out["x_out"] is x
    with pytest.raises(errors.ContractError) as caught:
        textual.build(text, ["x"], [None for _ in wanted])
    assert codes(caught.value) == {"E111"}


def test_an_input_that_is_only_read_comes_back_as_a_copy() -> None:
    """Case 1. The caller may overwrite what it gave and keep what it got."""

    @model
    def same(x: FLOAT[3], cache: Mutable[FLOAT[3]]) -> tuple[FLOAT[3], Alias["cache"]]:
        return x, kv.Assign(cache, x + 1.0)

    session = Session(same)
    cache, x = session.allocate("cache"), np.arange(3, dtype=np.float32)
    with session.bind(cache=cache) as step:
        out = step.run(x=x)
        assert out[0] is not x and not np.shares_memory(out[0], x)
        x[:] = 9
        np.testing.assert_array_equal(out[0], [0, 1, 2])


def test_results_survive_many_runs() -> None:
    """Case 2. A result is never a buffer that a later run uses again."""

    @model
    def read_before(
        cache: Mutable[Cache], new: New, position: INT64[()]
    ) -> tuple[Alias["cache"], Cache]:
        doubled = cache + cache
        return kv.CacheUpdate(cache, new, position), doubled

    session = Session(read_before)
    cache, expected = session.allocate("cache", heads=2, capacity=4), np.zeros(SHAPE, np.float32)
    kept = []
    with session.bind(cache=cache) as step:
        for k in range(200):
            noise = [np.full(SHAPE, np.nan, np.float32) for _ in range(3)]
            doubled = expected * 2
            out = step.run(new=NEW + k, position=k % 4)
            expected[:, k % 4] = (NEW + k)[:, 0]
            del noise
            np.testing.assert_array_equal(cache, expected)
            kept.append((out[1], doubled))
    for got, wanted in kept:
        np.testing.assert_array_equal(got, wanted)


def test_a_carried_value_never_writes_what_it_began_with() -> None:
    """Case 4. A loop carries an ordinary array whose first value is returned later."""

    @model
    def carry(
        start: FLOAT[3], cache: Mutable[FLOAT[3]], steps: INT64[()]
    ) -> tuple[FLOAT[3], FLOAT[3], Alias["cache"]]:
        c = start
        for _ in range(steps):
            c = c + 1.0
            cache = kv.Assign(cache, c)
        return c, start, cache

    session = Session(carry)
    start, cache = np.arange(3, dtype=np.float32), session.allocate("cache")
    with session.bind(cache=cache) as step:
        for steps in (0, 3):
            out = step.run(start=start, steps=steps)
            np.testing.assert_array_equal(start, [0, 1, 2])
            np.testing.assert_array_equal(out[0], start + steps)
            np.testing.assert_array_equal(out[1], start)
            assert not np.shares_memory(out[0], start) and not np.shares_memory(out[1], start)
    np.testing.assert_array_equal(cache, start + 3)


def test_an_identity_before_the_result_keeps_the_root() -> None:
    """Case 5. Nothing that removes or keeps an Identity may lose whose storage leaves the graph."""
    text = """kept (float[2,4,2] cache, float[2,1,2] new, int64 p) => (float[2,4,2] out) {
        a = Identity (cache)
        b = onnx_inplace.CacheUpdate (a, new, p)
        c = Identity (b)
        out = Identity (c)
    }"""
    session = Session(textual.build(text, ["cache"], ["cache"]))
    cache = session.allocate("cache")
    with session.bind(cache=cache) as step:
        assert step.run(new=NEW, p=1)["out"] is cache
    np.testing.assert_array_equal(cache[:, 1], NEW[:, 0])


def test_the_name_of_the_parameter_may_be_used_again() -> None:
    """Case 7. ``cache = CacheUpdate(cache, ...)`` is how people write it."""

    @model
    def again(cache: Mutable[Cache], new: New, position: INT64[()]) -> Alias["cache"]:
        cache = kv.CacheUpdate(cache, new, position)
        return cache

    session = Session(again)
    cache = session.allocate("cache", heads=2, capacity=4)
    with session.bind(cache=cache) as step:
        assert step.run(new=NEW, position=0)["updated_cache"] is cache


def test_a_write_that_is_not_returned_is_refused_not_dropped() -> None:
    """Case 7. It would be dead code to any optimizer."""
    with pytest.raises(errors.ContractError) as caught:

        @model
        def forgotten(cache: Mutable[Cache], new: New, position: INT64[()]) -> FLOAT[()]:
            cache = kv.CacheUpdate(cache, new, position)
            return op.ReduceSum(new, keepdims=0)

    assert codes(caught.value) == {"E109"}
    assert "return" in str(caught.value)


def test_an_input_does_not_become_the_cache() -> None:
    """Case 8. Whole replacement by an input is a write, and has to be said."""
    with pytest.raises(errors.ContractError) as caught:

        @model
        def replaced(cache: Mutable[Cache], new: Cache) -> Alias["cache"]:
            return new

    assert codes(caught.value) == {"E110"}

    @model
    def assigned(cache: Mutable[Cache], new: Cache) -> Alias["cache"]:
        return kv.Assign(cache, new)

    session = Session(assigned)
    cache = session.allocate("cache", heads=2, capacity=4)
    new = np.random.default_rng(0).random(SHAPE, np.float32)
    with session.bind(cache=cache) as step:
        assert step.run(new=new)[0] is cache
    np.testing.assert_array_equal(cache, new)
    assert not np.shares_memory(cache, new)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_transposed_value_is_written_as_it_reads(length: int) -> None:
    """Case 10. A transposition before the write, and an input that is a strided view."""

    @model
    def transposed(
        cache: Mutable[FLOAT["batch", "heads", "capacity", 2]],
        values: FLOAT["batch", "length", "heads", 2],
        position: INT64[()],
    ) -> Alias["cache"]:
        return kv.CacheUpdate(cache, op.Transpose(values, perm=[0, 2, 1, 3]), position)

    session = Session(transposed)
    generator = np.random.default_rng(length)
    base = generator.random((length, 2, 6, 2), np.float32)
    strided = base[:, :, ::2].transpose(1, 0, 2, 3)
    assert not strided.flags.c_contiguous
    results = []
    for values in (strided, np.ascontiguousarray(strided)):
        cache = session.allocate("cache", batch=2, heads=3, capacity=4)
        with session.bind(cache=cache) as step:
            step.run(values=values, position=1)
        results.append(cache)
    np.testing.assert_array_equal(*results)
    np.testing.assert_array_equal(results[0][:, :, 1 : 1 + length], strided.transpose(0, 2, 1, 3))


class Pair(NamedTuple):
    k: Mutable[Cache]
    v: Mutable[Cache]


@dataclasses.dataclass(frozen=True)
class State:
    k: Mutable[Cache]
    v: Mutable[Cache]


@pytest.mark.parametrize("structure", [Pair, State])
def test_a_structure_of_caches_keeps_its_names(structure: type) -> None:
    """Case 11. A structure is flattened by its own names, in its own order, and comes back so."""

    @model
    def update(cache: structure, new: New, position: INT64[()]) -> Alias["cache"]:
        return structure(
            k=kv.CacheUpdate(cache.k, new, position),
            v=kv.CacheUpdate(cache.v, new * 2.0, position),
        )

    session = Session(update)
    assert [i.name for i in session.mutable_inputs] == ["cache.k", "cache.v"]
    k, v = (session.allocate(n, heads=2, capacity=4) for n in ("cache.k", "cache.v"))
    with session.bind(cache=structure(k, v)) as step:
        out = step.run(new=NEW, position=0)
    assert out[0] is k and out[1] is v
    np.testing.assert_array_equal(v, k * 2)
