"""Judging a model before anything is allocated: shapes, plan, memory, and what a run must check.

Run me: python tutorials/03_proofs_and_plans.py
"""

from onnx_inplace import compiler, errors
from onnx_inplace.dsl import FLOAT16, INT64, Alias, Mutable, kv, model, op

HEADS, SIZE = 8, 64
Cache = FLOAT16[2, "batch", HEADS, "max_length", SIZE]
Values = FLOAT16[2, "batch", HEADS, "new_length", SIZE]


@model
def decode(
    cache: Mutable[Cache], values: Values, position: INT64[()], steps: INT64[()]
) -> tuple[Alias["cache"], Values]:
    """Write ``values`` at ``steps`` places, one behind the other."""
    for i in range(steps):
        cache = kv.CacheUpdate(cache, values, position + i)
    return cache, op.Relu(values)


# What is known of every value. All names of one storage have one shape, with the same symbols, on
# both sides of the Loop and inside of it.

shapes = compiler.ShapesContext()
shapes.compute(decode)
for name in shapes.alias_class("cache"):
    assert str(shapes.get(name).shape) == str(shapes.get("cache").shape)
print(f"{', '.join(shapes.alias_class('cache'))}: {shapes.get('cache').shape}")

# What a run does. What must hold of its inputs and cannot be known before is listed: the counter of
# the loop stands at its last round. The runner checks it before the first write.

plan = compiler.plan(decode)
assert not plan.copies
for condition in plan.conditions:
    print(f"a run checks: {condition}")

# What a run needs, as formulas, or in bytes as soon as the dimensions are known. An update in place
# needs nothing. Nothing has been allocated to find this out.

print(f"caches: {plan.memory().caches} bytes")
memory = plan.memory(batch=4, max_length=32_768, new_length=1)
assert memory.caches == 2 * 4 * HEADS * 32_768 * SIZE * 2 and memory.extra_cache_bytes == 0
print(f"of 32,768 tokens: {memory.caches / 2**20:,.0f} MiB, and {memory.values:,} bytes of values")

# You need not trust the planner: the verifier is a program of its own. It proves that no two
# storages overlap but those that are declared to, and that every read sees the version it names.

compiler.verify(plan)

# What can fit in no run is refused: with dimensions that are asked for...


@model
def append(cache: Mutable[Cache], values: Values, position: INT64[()]) -> Alias["cache"]:
    """Write ``values`` once."""
    return kv.CacheUpdate(cache, values, position)


try:
    compiler.plan(append).memory(batch=1, max_length=4, new_length=8)
except errors.ContractError as error:
    print(f"refused: {error.findings[0].message}")
else:
    raise AssertionError("8 new tokens fitted into 4")

# ... and already where the model is written, if its own numbers say so.

try:

    @model
    def full(cache: Mutable[FLOAT16[4, SIZE]], values: FLOAT16[1, SIZE]) -> Alias["cache"]:
        """One token behind the last place."""
        return kv.CacheUpdate(cache, values, 4)

except errors.ContractError as error:
    print(f"refused: {error}")
else:
    raise AssertionError("a token fitted behind the last place")
