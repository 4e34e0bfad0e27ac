"""If, loops and functions around memory that is updated in place.

Run me: python tutorials/02_control_flow.py
"""

import numpy as np

from onnx_inplace import Session, errors
from onnx_inplace.dsl import BOOL, FLOAT, INT64, Alias, Mutable, function, kv, model, op

Cache = FLOAT["heads", "max_length", 4]
Values = FLOAT["heads", "new_length", 4]

# One rule decides what `if` and `for` mean: Python values run, tensors record. Over a Python value,
# a number of layers or an option, they run while the graph is built. Over a tensor they become the
# If and Loop of ONNX, and the promises hold in there as well.
#
# A function has a promise of its own, which every call keeps.


@function
def append(cache: Mutable[Cache], values: Values, position: INT64[()]) -> Alias["cache"]:
    """Write ``values`` into the cache from token ``position`` on."""
    updated = kv.CacheUpdate(cache, values, position)
    return updated


# `keep` is a tensor, so this is an If: either branch returns the caller's memory, written or not.


@model
def branch(
    cache: Mutable[Cache], values: Values, position: INT64[()], keep: BOOL[()]
) -> Alias["cache"]:
    """Append, unless told otherwise."""
    if keep:
        cache = append(cache, values, position)
    return cache


values = np.ones((2, 1, 4), np.float32)
session = Session(branch)
cache = session.allocate("cache", heads=2, max_length=8)
with session.bind(cache=cache) as step:
    for keep in (False, True):
        outputs = step.run(values=values, position=0, keep=keep)
        assert outputs["updated_cache"] is cache and bool(cache.any()) is keep
print("a branch returns the caller's memory, whether it wrote or not")

# `steps` is a tensor, so this is a Loop. The cache travels from one iteration to the next and never
# moves.


@model
def repeat(cache: Mutable[Cache], values: Values, steps: INT64[()]) -> Alias["cache"]:
    """Append ``values``, scaled by 0, 1, 2, ..., every second token."""
    for i in range(steps):
        cache = append(cache, values * op.Cast(i, to=FLOAT.dtype), i * 2)
    return cache


session = Session(repeat)
cache = session.allocate("cache", heads=2, max_length=8)
with session.bind(cache=cache) as step:
    outputs = step.run(values=values, steps=3)
    assert outputs["updated_cache"] is cache
    print("tokens of the first head after a loop:", cache[0, :, 0])
    assert cache[0, :, 0].tolist() == [0, 0, 1, 0, 2, 0, 0, 0]

    # Five appends would need position 8 of 8. All positions of the loop are known before its first
    # write, so nothing is written at all.
    before = cache.copy()
    try:
        step.run(values=values + 1, steps=5)
    except errors.CapacityError as error:
        print("refused:", error)
        assert (error.position, error.length, error.capacity) == (8, 1, 8)
    assert np.array_equal(cache, before)

# `layers` is a Python number: this loop runs while the graph is built and leaves an update for each
# layer. A parameter can be a tuple; its members are the inputs `caches.0`, `caches.1`, ...


def stack(layers: int):
    """A model with a cache for each of ``layers``."""

    @model
    def decode(
        caches: tuple[(Mutable[Cache],) * layers], values: Values, position: INT64[()]
    ) -> Alias["caches"]:
        updated = []
        for layer, cache in enumerate(caches):
            updated.append(kv.CacheUpdate(cache, values + float(layer), position))
        return updated

    return decode


session = Session(stack(layers=3))
caches = [session.allocate(f"caches.{layer}", heads=2, max_length=8) for layer in range(3)]
with session.bind(caches=caches) as step:
    outputs = step.run(values=values, position=7)
for layer, cache in enumerate(caches):
    assert outputs[layer] is cache and cache[0, 7, 0] == 1 + layer
print("three caches, three updates, no copies")

# What a branch returns must be the same memory in both cases; here it would depend on `first`.

try:

    @model
    def fork(
        left: Mutable[Cache], right: Mutable[Cache], values: Values, first: BOOL[()]
    ) -> tuple[Alias["left"], Alias["right"]]:
        """Append to one of two caches, then call either of them `written`."""
        if first:
            written = append(left, values, 0)
        else:
            written = append(right, values, 0)
        return written, right

except errors.ContractError as error:
    print("refused:", error)
    assert "E107" in {finding.code for finding in error.findings}
