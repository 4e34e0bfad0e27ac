"""Faults that others had with If, Loop, Scan and functions (CASES, section C)."""

import numpy as np
import onnx
import pytest
import textual

from onnx_inplace import Session, compiler, errors
from onnx_inplace.dsl import BOOL, FLOAT, INT64, Alias, Mutable, function, kv, model, op

Cache, New = FLOAT["heads", "capacity", 2], FLOAT["heads", 1, 2]
NEW = np.arange(4, dtype=np.float32).reshape(2, 1, 2) + 1


def codes(error: errors.ContractError) -> set[str]:
    return {finding.code for finding in error.findings}


def refused(declare) -> set[str]:
    with pytest.raises(errors.ContractError) as caught:
        declare()
    return codes(caught.value)


def run(source, feeds, **dims):
    """Run once on fresh storage; results and the storage by name."""
    session = Session(source)
    storage = {i.name: session.allocate(i.name, **dims) for i in session.mutable_inputs}
    with session.bind(**storage) as step:
        return step.run(**feeds), storage


BRANCHES = """shadow (bool flag, float[2,4,2] cache, float[2,1,2] new, int64 p)
    => (float[2,4,2] out) {{
    {outer} = Add (p, p)
    out = If (flag) <
        then_branch = t () => (float[2,4,2] {first}) {{
            {first} = onnx_inplace.CacheUpdate (cache, new, p)
        }},
        else_branch = e () => (float[2,4,2] {second}) {{
            {second} = onnx_inplace.CacheUpdate (cache, new, {outer})
        }}>
}}"""


def test_siblings_may_use_one_name_and_nested_blocks_may_not() -> None:
    """Case 22. Both branches say `updated`; a block that hides an outer name is refused."""
    text = BRANCHES.format(outer="twice", first="updated", second="updated")
    source = textual.build(text, ["cache"], ["cache"])
    for flag, row in ((True, 1), (False, 2)):
        _, storage = run(source, dict(flag=flag, new=NEW, p=1))
        np.testing.assert_array_equal(storage["cache"][:, row], NEW[:, 0])
    text = BRANCHES.format(outer="twice", first="twice", second="updated")
    assert refused(lambda: textual.build(text, ["cache"], ["cache"])) == {"E114"}


def test_a_function_called_twice_writes_twice() -> None:
    """Case 23. Two calls of one function are two writes, in order, with names of their own."""

    @function
    def update(cache: Mutable[Cache], new: New, position: INT64[()]) -> Alias["cache"]:
        halfway = kv.CacheUpdate(cache, new, position)
        return kv.CacheUpdate(halfway, new + op.Gather(halfway, [0], axis=1), position + 1)

    @model
    def twice(cache: Mutable[Cache], new: New, position: INT64[()]) -> Alias["cache"]:
        return update(update(cache, new, position), new * 2.0, position + 1)

    out, storage = run(twice, dict(new=NEW, position=0), heads=2, capacity=4)
    assert out[0] is storage["cache"]
    wanted = np.stack([NEW, NEW * 2, NEW * 2 + NEW, NEW * 0], 1)[:, :, 0]
    np.testing.assert_array_equal(storage["cache"], wanted)


def test_a_call_deep_inside_is_still_the_callers_array() -> None:
    """Case 25. A call in a loop in a branch."""

    @function
    def update(cache: Mutable[Cache], new: New, position: INT64[()]) -> Alias["cache"]:
        return kv.CacheUpdate(cache, new, position)

    @model
    def deep(cache: Mutable[Cache], new: New, steps: INT64[()], flag: BOOL[()]) -> Alias["cache"]:
        if flag:
            for i in range(steps):
                cache = update(cache, new * op.Cast(i + 1, to=1), i)
        return cache

    out, storage = run(deep, dict(new=NEW, steps=3, flag=True), heads=2, capacity=4)
    assert out[0] is storage["cache"]
    for i in range(3):
        np.testing.assert_array_equal(storage["cache"][:, i], NEW[:, 0] * (i + 1))
    out, storage = run(deep, dict(new=NEW, steps=3, flag=False), heads=2, capacity=4)
    assert out[0] is storage["cache"] and not storage["cache"].any()


def test_a_branch_may_return_the_cache_untouched() -> None:
    """Case 26. One branch writes, the other returns the outer value itself."""

    @model
    def either(cache: Mutable[Cache], new: New, flag: BOOL[()]) -> Alias["cache"]:
        if flag:
            out = kv.CacheUpdate(cache, new, 0)
        else:
            out = cache
        return out

    for flag in (True, False):
        out, storage = run(either, dict(new=NEW, flag=flag), heads=2, capacity=4)
        assert out[0] is storage["cache"]
        assert bool(storage["cache"].any()) is flag


def test_the_counter_of_a_loop_is_not_one_buffer() -> None:
    """Case 28. The counter is a position and a stacked result: each round has its own."""
    text = """counted (float[2,8,2] cache, float[2,1,2] new, int64 n)
        => (float[2,8,2] out, int64[k] seen) {
        yes = Constant <value = bool {1}> ()
        out, seen = Loop (n, yes, cache) <body = b (int64 i, bool go, float[2,8,2] c)
            => (bool again, float[2,8,2] d, int64 j) {
            again = Identity (go)
            d = onnx_inplace.CacheUpdate (c, new, i)
            j = Identity (i)
        }>
    }"""
    source = textual.build(text, ["cache"], ["cache", None])
    out, storage = run(source, dict(new=NEW, n=5))
    np.testing.assert_array_equal(out["seen"], np.arange(5))
    assert storage["cache"][:, :5].all() and not storage["cache"][:, 5:].any()


def test_a_value_of_a_branch_does_not_leak() -> None:
    """Case 29. A closure carries a tensor out of its branch: refused at build time, by name."""

    def leak():
        @model
        def program(cache: Mutable[Cache], new: New, flag: BOOL[()]) -> tuple[Alias["cache"], New]:
            kept = []
            if flag:
                inner = new * 2.0
                kept.append(inner)
                cache = kv.CacheUpdate(cache, inner, 0)
            return cache, kept[0]

    assert refused(leak) == {"E100"}


def test_two_functions_of_one_name_stay_two() -> None:
    """Case 29. Helpers that share a Python name for different tensors stay distinct."""

    def helper(factor: float):
        def scale(x):
            y = x * factor
            return y

        return scale

    two, three = helper(2.0), helper(3.0)

    @model
    def both(cache: Mutable[Cache], new: New) -> Alias["cache"]:
        y = two(new)
        cache = kv.CacheUpdate(cache, y, 0)
        return kv.CacheUpdate(cache, three(new), 1)

    _, storage = run(both, dict(new=NEW), heads=2, capacity=4)
    np.testing.assert_array_equal(storage["cache"][:, 0], NEW[:, 0] * 2)
    np.testing.assert_array_equal(storage["cache"][:, 1], NEW[:, 0] * 3)


def test_branches_that_return_different_caches_are_refused() -> None:
    """Case 31. Which array would come back? Both names are said."""
    with pytest.raises(errors.ContractError) as caught:

        @model
        def mixed(
            first: Mutable[Cache], second: Mutable[Cache], new: New, flag: BOOL[()]
        ) -> tuple[Alias["first"], Alias["second"]]:
            if flag:
                out = kv.CacheUpdate(first, new, 0)
                first = out
            else:
                out = kv.CacheUpdate(second, new, 0)
                second = out
            return out, second

    assert "E107" in codes(caught.value)
    assert "first" in str(caught.value) and "second" in str(caught.value)


def test_branches_may_write_different_caches() -> None:
    """Case 31. One writes the keys, the other the values: each comes back as itself."""

    @model
    def either(
        keys: Mutable[Cache], values: Mutable[Cache], new: New, flag: BOOL[()]
    ) -> tuple[Alias["keys"], Alias["values"]]:
        if flag:
            keys = kv.CacheUpdate(keys, new, 0)
        else:
            values = kv.CacheUpdate(values, new, 0)
        return keys, values

    for flag in (True, False):
        out, storage = run(either, dict(new=NEW, flag=flag), heads=2, capacity=4)
        assert out[0] is storage["keys"] and out[1] is storage["values"]
        assert bool(storage["keys"].any()) is flag and bool(storage["values"].any()) is not flag


@pytest.mark.parametrize("position", [3, np.array([1, 3]), np.array([3, 0]), np.array([0, -1])])
def test_one_position_and_many_refuse_alike(position) -> None:
    """Case 32. Never clamped, never dropped: no row is written at all."""
    many = np.ndim(position) > 0

    @model
    def update(
        cache: Mutable[FLOAT["batch", "capacity", 2]],
        new: FLOAT["batch", "n", 2],
        position: INT64["batch"] if many else INT64[()],
    ) -> Alias["cache"]:
        return kv.CacheUpdate(cache, new, position, axis=1, **({"batch_axis": 0} if many else {}))

    session = Session(update)
    cache = session.allocate("cache", batch=2, capacity=5)
    cache[:] = 7
    with session.bind(cache=cache) as step:
        with pytest.raises(errors.CapacityError) as caught:
            step.run(new=np.ones((2, 3, 2), np.float32), position=position)
        assert (cache == 7).all()
        assert (caught.value.length, caught.value.capacity) == (3, 5)
        assert caught.value.batch == (
            int(np.argmax((position > 2) | (position < 0))) if many else None
        )
        step.run(new=np.ones((2, 3, 2), np.float32), position=position * 0 + 2)
    assert (cache[:, 2:] == 1).all() and (cache[:, :2] == 7).all()


def test_rows_that_stop_keep_their_content() -> None:
    """Case 32. Each row stops at its own step; none is copied, none touched after that."""

    @model
    def stopping(
        cache: Mutable[FLOAT["batch", 6, 2]], new: FLOAT["batch", 1, 2], limit: INT64["batch"]
    ) -> tuple[Alias["cache"], INT64["batch"]]:
        position = limit * 0
        going = op.ReduceMax(op.Cast(position < limit, to=7), keepdims=0) > 0
        while going:
            place = op.Min(position, limit - 1)  # a row that has stopped writes what stands there
            rows = op.Reshape(op.Cast(position < limit, to=1), [-1, 1, 1])
            old = op.GatherND(cache, op.Unsqueeze(place, [1]), batch_dims=1)
            old = op.Unsqueeze(old, [1])
            cache = op.TensorScatter(cache, new * rows + old * (1.0 - rows), place)
            position = position + 1
            going = op.ReduceMax(op.Cast(position < limit, to=7), keepdims=0) > 0
        return cache, position

    session = Session(stopping)
    cache = session.allocate("cache", batch=3)
    address = cache.ctypes.data
    with session.bind(cache=cache) as step:
        out = step.run(new=np.ones((3, 1, 2), np.float32), limit=np.array([1, 5, 3]))
        assert out[0] is cache and cache.ctypes.data == address
    for row, limit in enumerate((1, 5, 3)):
        assert (cache[row, :limit] == 1).all() and not cache[row, limit:].any()


def test_a_slice_of_a_cache_is_not_written_behind_its_back() -> None:
    """Case 32. A slice of a stacked cache is new storage: a write into it is refused."""
    text = """layers (float[3,2,4,2] cache, float[2,1,2] new, int64 p)
        => (float[3,2,4,2] out) {
        out = Scan <num_scan_inputs = 1, body = b (float[2,4,2] c) => (float[2,4,2] d) {
            d = onnx_inplace.CacheUpdate (c, new, p)
        }> (cache)
    }"""
    assert refused(lambda: textual.build(text, ["cache"], ["cache"])) & {"E106", "E108", "E110"}


def test_all_names_of_a_cache_share_its_shape() -> None:
    """Case 34. Through Loop, If and a function the capacity keeps its one symbol."""

    @function
    def update(
        c: Mutable[FLOAT["h", "room", 2]], new: FLOAT["h", 1, 2], position: INT64[()]
    ) -> Alias["c"]:
        return kv.CacheUpdate(c, new, position)

    @model
    def carried(
        cache: Mutable[Cache], new: New, steps: INT64[()], flag: BOOL[()]
    ) -> Alias["cache"]:
        for i in range(steps):
            if flag:
                cache = update(cache, new, i)
        return cache

    loaded = onnx.ModelProto.FromString(carried.serialized)
    shape = loaded.graph.output[0].type.tensor_type.shape
    assert [d.dim_param or d.dim_value for d in shape.dim] == ["heads", "capacity", 2]
    if hasattr(compiler, "ShapesContext"):
        context = compiler.ShapesContext()
        context.compute(compiler.load(carried))
        assert {str(context.get(n).shape) for n in context.alias_class("cache")} == {
            str(context.get("cache").shape)
        }


def test_a_body_that_grows_the_cache_is_refused() -> None:
    """Case 34. Concat makes a longer array: it is another storage, not the cache."""

    def grow():
        @model
        def grown(cache: Mutable[Cache], new: New, steps: INT64[()]) -> Alias["cache"]:
            for _ in range(steps):
                cache = op.Concat(cache, new, axis=1)
            return cache

    assert refused(grow) & {"E108", "E110"}
