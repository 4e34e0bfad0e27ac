"""Programs whose files the tests of schema, emission, loading and restoring look at."""

from onnx_inplace.compiler.program import Program
from onnx_inplace.dsl import (
    BOOL,
    FLOAT,
    INT64,
    Alias,
    Mutable,
    function,
    kv,
    model,
    op,
    scan,
    stack,
)

Cache, New = FLOAT["heads", "capacity", 4], FLOAT["heads", "n", 4]


@function
def append(cache: Mutable[Cache], new: New, position: INT64[()]) -> Alias["cache"]:
    return kv.CacheUpdate(cache, new, position)


@function
def twice(
    first: Mutable[Cache], second: Mutable[Cache], new: New
) -> tuple[Alias["second"], Alias["first"]]:
    zero = op.Constant(value_int=0)
    return append(second, new, zero), append(first, new * 2.0, zero)


@model
def plain(cache: Mutable[Cache], new: New, position: INT64[()]) -> Alias["cache"]:
    return kv.CacheUpdate(cache, new, position)


@model
def chain(
    cache: Mutable[Cache], other: Mutable[Cache], new: New, position: INT64[()]
) -> tuple[Alias["other"], Alias["cache"]]:
    first = kv.CacheUpdate(cache, new, position)
    view = op.Identity(first)
    second = kv.CacheUpdate(view, new, position + 1)
    return kv.CacheUpdate(other, new, position), second


@model
def branches(
    cache: Mutable[Cache], new: New, position: INT64[()], keep: BOOL[()]
) -> Alias["cache"]:
    cache = kv.CacheUpdate(cache, new, position)
    if keep:
        cache = append(cache, new * 2.0, position)
    return kv.CacheUpdate(cache, new, position)


@model
def loop(
    cache: Mutable[Cache], other: Mutable[Cache], new: New, steps: INT64[()]
) -> tuple[Alias["cache"], Alias["other"], INT64[()]]:
    count = op.Constant(value_int=0)
    for i in range(steps):
        if i < 2:
            cache = append(cache, new, i)
            count += 1
        other = kv.CacheUpdate(other, new, i)
    return cache, other, count


@model
def calls(
    left: Mutable[Cache], right: Mutable[Cache], new: New
) -> tuple[Alias["left"], Alias["right"]]:
    left, right = twice(right, left, new)
    right, left = twice(left, right, new)
    return left, right


@model
def standard(
    cache: Mutable[FLOAT["batch", "heads", "capacity", 4]],
    new: FLOAT["batch", "heads", "n", 4],
    position: INT64["batch"],
) -> Alias["cache"]:
    return op.TensorScatter(cache, new, position)


@model
def recurrent(
    state: Mutable[FLOAT["batch", 4]],
    log: Mutable[FLOAT["t", "batch", 4]],
    xs: FLOAT["t", "batch", 4],
) -> tuple[Alias["state"], Alias["log"], FLOAT["t", "batch", 4]]:
    states = stack()
    for x in scan(xs):
        hidden = op.Tanh(x + kv.Copy(state))
        states.append(hidden)
        state = kv.Assign(state, hidden)
    return state, kv.Assign(log, xs), states


@model
def variants(
    cache: Mutable[FLOAT["batch", "m", 4]],
    new: FLOAT["batch", "n", 4],
    position: INT64[()],
    positions: INT64["batch"],
    beams: INT64["batch"],
    flag: BOOL[()],
) -> tuple[Alias["cache"], FLOAT[()]]:
    cache = kv.CacheUpdate(cache, new, position, axis=1)
    flat = op.Reshape(cache, op.Constant(value_ints=[-1]))
    total = op.ReduceSum(flat, keepdims=0)
    while total < 0.0:
        if flag:
            cache = kv.CacheUpdate(cache, new, positions, axis=1, batch_axis=0, mode="circular")
        else:
            cache = kv.CacheReorder(cache, beams)
        total += op.ReduceMax(cache, keepdims=0) + 1.0
    return kv.CacheReorder(cache, beams), total


def layers(count: int) -> Program:
    """A factory: a group of caches, and a nested loop over them."""

    @model
    def deep(
        caches: tuple[(Mutable[Cache],) * count], new: New, steps: INT64[()]
    ) -> tuple[Alias["caches"], FLOAT[()]]:
        first, *others = caches
        sum_ = op.Constant(value_float=0.0)
        for i in range(steps):
            for j in range(steps):
                first = append(first, new, i + j)
            sum_ += op.ReduceSum(first, keepdims=0)
        return [first, *(append(cache, new, steps) for cache in others)], sum_

    return deep


@model
def stateless(x: New) -> New:
    return op.Relu(x)


ALL: dict[str, Program] = {
    "plain": plain,
    "chain": chain,
    "branches": branches,
    "loop": loop,
    "calls": calls,
    "standard": standard,
    "recurrent": recurrent,
    "variants": variants,
    "layers": layers(3),
    "stateless": stateless,
}
STATEFUL = {name: program for name, program in ALL.items() if name != "stateless"}
