"""Every aliased result is the caller's array itself: `is`, not equality, not only one address."""

import numpy as np
import pytest
import textual

from onnx_inplace import Session
from onnx_inplace.compiler import program
from onnx_inplace.dsl import BOOL, FLOAT, INT64, Alias, Mutable, function, kv, model, op

Cache, New = FLOAT["heads", "capacity", 2], FLOAT["heads", 1, 2]
HEADS, CAPACITY = 2, 4


@function
def append(cache: Mutable[Cache], new: New, position: INT64[()]) -> Alias["cache"]:
    return kv.CacheUpdate(cache, new, position)


@function
def append_if(
    cache: Mutable[Cache], new: New, position: INT64[()], flag: BOOL[()]
) -> Alias["cache"]:
    if flag:
        cache = append(cache, new, position)
    return cache


@model
def dense(
    cache: Mutable[Cache], new: New, steps: INT64[()], flag: BOOL[()]
) -> tuple[Alias["cache"], FLOAT[()], BOOL[()]]:
    updated = kv.CacheUpdate(cache, new, steps)
    return updated, op.ReduceSum(updated, keepdims=0), op.Not(flag)


@model
def branch(
    cache: Mutable[Cache], new: New, steps: INT64[()], flag: BOOL[()]
) -> tuple[Alias["cache"], FLOAT[()]]:
    if flag:
        cache = kv.CacheUpdate(cache, new, steps)
    return cache, op.ReduceSum(cache, keepdims=0)


@model
def both_branches(
    cache: Mutable[Cache], new: New, steps: INT64[()], flag: BOOL[()]
) -> Alias["cache"]:
    updated = cache
    if flag:
        updated = kv.CacheUpdate(cache, new, steps)
    else:
        updated = kv.CacheUpdate(cache, new * 2.0, steps)
    return updated


@model
def loop(
    cache: Mutable[Cache], new: New, steps: INT64[()], flag: BOOL[()]
) -> tuple[Alias["cache"], BOOL[()]]:
    for i in range(steps):
        cache = kv.CacheUpdate(cache, new, i)
    return cache, op.Not(flag)


@model
def nested(cache: Mutable[Cache], new: New, steps: INT64[()], flag: BOOL[()]) -> Alias["cache"]:
    for i in range(steps):
        if flag:
            for j in range(i):
                cache = kv.CacheUpdate(cache, new * op.Cast(i, to=1), j)
        else:
            cache = kv.CacheUpdate(cache, new, i)
    return cache


@model
def called(
    cache: Mutable[Cache], new: New, steps: INT64[()], flag: BOOL[()]
) -> tuple[Alias["cache"], BOOL[()]]:
    cache = append(cache, new, steps)
    return append(cache, new * 2.0, steps), op.Not(flag)


@model
def called_in_branch(
    cache: Mutable[Cache], new: New, steps: INT64[()], flag: BOOL[()]
) -> Alias["cache"]:
    if flag:
        cache = append_if(cache, new, steps, flag)
    return cache


@model
def called_in_loop(
    cache: Mutable[Cache], new: New, steps: INT64[()], flag: BOOL[()]
) -> Alias["cache"]:
    for i in range(steps):
        cache = append_if(cache, new, i, flag)
    return cache


@model
def viewed(
    cache: Mutable[Cache], new: New, steps: INT64[()], flag: BOOL[()]
) -> tuple[Alias["cache"], BOOL[()]]:
    wide = op.Unsqueeze(op.Identity(cache), [0])
    written = kv.CacheUpdate(wide, op.Unsqueeze(new, [0]), steps)
    return op.Squeeze(written, [0]), op.Not(flag)


SCAN = textual.build(
    """
    scan (float[2,4,2] cache, float[2,1,2] new, int64 steps, bool flag)
        => (float[2,4,2] out, int64[3] stack) {
        places = Constant <value = int64[3] {0, 2, 1}> ()
        out, stack = Scan <num_scan_inputs = 1, body = b (float[2,4,2] c, int64 p)
            => (float[2,4,2] d, int64 q) {
            d = onnx_inplace.CacheUpdate (c, new, p)
            q = Add (p, steps)
        }> (cache, places)
    }""",
    ["cache"],
    ["cache", None],
)

FORWARDING = textual.build(
    """
    forwarding (float[2,4,2] cache, float[2,1,2] new, int64 steps, bool flag)
        => (float[2,4,2] out, bool other) {
        first = Identity (cache)
        second = onnx_inplace.CacheUpdate (first, new, steps)
        out = Identity (second)
        other = Not (flag)
    }""",
    ["cache"],
    ["cache", None],
)

PROGRAMS = [dense, branch, both_branches, loop, nested, called, called_in_branch, called_in_loop,
            viewed, SCAN, FORWARDING]  # fmt: skip


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("source", PROGRAMS, ids=lambda source: source.name)
def test_an_aliased_result_is_the_callers_array(source: program.Program, flag: bool) -> None:
    """In every run, whichever branch is taken, also when nothing is written."""
    session = Session(source)
    sizes = dict(heads=HEADS, capacity=CAPACITY) if session.mutable_inputs[0].dims else {}
    cache = session.allocate("cache", **sizes)
    address, size = cache.ctypes.data, cache.nbytes
    new = np.ones((HEADS, 1, 2), np.float32)
    with session.bind(cache=cache) as step:
        for steps in (2, 0, 3):
            outputs = step.run(new=new, steps=steps, flag=flag)
            assert outputs[0] is cache
            assert (cache.ctypes.data, cache.nbytes) == (address, size)
            for other in list(outputs)[1:]:
                assert not np.shares_memory(other, cache)


def test_a_version_returned_twice_is_one_object() -> None:
    """One version returned twice is the same array twice."""

    @model
    def twice(cache: Mutable[Cache], new: New) -> tuple[Alias["cache"], Alias["cache"]]:
        updated = kv.CacheUpdate(cache, new, 0)
        return updated, updated

    session = Session(twice)
    cache = session.allocate("cache", heads=HEADS, capacity=CAPACITY)
    with session.bind(cache=cache) as step:
        first, second = step.run(new=np.ones((HEADS, 1, 2), np.float32))
        assert first is cache and second is cache
    assert cache[:, 0].all()


def test_each_cache_comes_back_as_itself() -> None:
    """Two caches of one shape and one content are never exchanged."""

    @model
    def pair(
        keys: Mutable[Cache], values: Mutable[Cache], new: New, steps: INT64[()]
    ) -> tuple[Alias["values"], Alias["keys"]]:
        for i in range(steps):
            keys = kv.CacheUpdate(keys, new, i)
            values = kv.CacheUpdate(values, new, i)
        return values, keys

    session = Session(pair)
    keys, values = (session.allocate(n, heads=HEADS, capacity=CAPACITY) for n in ("keys", "values"))
    with session.bind(keys=keys, values=values) as step:
        out = step.run(new=np.ones((HEADS, 1, 2), np.float32), steps=3)
    assert out[0] is values and out[1] is keys
    np.testing.assert_array_equal(keys, values)
