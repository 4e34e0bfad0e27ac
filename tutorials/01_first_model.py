"""A first model: write it, compile it, run it in place.

Run me: python tutorials/01_first_model.py
"""

import numpy as np
import onnxruntime

from onnx_inplace import Session, errors
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model, op

# A language model keeps the keys and values of all tokens that it has read: the KV cache. Each step
# appends a few tokens. An ONNX graph can only say "a new cache, like the old one but for these
# tokens", and whether a runtime copies everything for that is a matter of luck.
#
# Here the model says that it must not. `Mutable` lends the cache to the model for writing, and
# `Alias["cache"]` promises that this result *is* the memory of `cache`. Everything else in the
# function is ONNX: `op` has its operators, `kv` has those of caches.


@model
def append(
    cache: Mutable[FLOAT["heads", "max_length", 4]],
    values: FLOAT["heads", "new_length", 4],
    position: INT64[()],
) -> tuple[Alias["cache"], FLOAT["heads", 4]]:
    """Write ``values`` into the cache from token ``position`` on; the sum over all tokens."""
    updated = kv.CacheUpdate(cache, values, position)
    total = op.ReduceSum(updated, [1], keepdims=0)
    return updated, total


# The function was compiled when Python reached it: `append` is a program now. Its file is an
# ordinary .onnx that carries the promise along.

append.save("append.onnx")

# A session runs the file. The memory is yours: allocate it through the session, or bring any array
# of the right type and shape.

session = Session("append.onnx")
cache = session.allocate("cache", heads=2, max_length=8)
values = np.ones((2, 1, 4), np.float32)

with session.bind(cache=cache) as step:  # from here on the session may write into `cache`
    for position in range(3):
        outputs = step.run(values=values, position=position)
        assert outputs["updated"] is cache  # no copy: the same array, not an equal one

print("after three steps the sums are", outputs["total"][0])
assert outputs["total"].tolist() == [[3.0] * 4] * 2

# Tokens that do not fit are refused before anything is written.

before = cache.copy()
with session.bind(cache=cache) as step:
    try:
        step.run(values=values, position=8)
    except errors.CapacityError as error:
        print("refused:", error)
assert np.array_equal(cache, before)

# Reading the cache under its old name after the update would see the new content, which is not
# what the graph says. Such a model is not compiled; the error names the line.

try:

    @model
    def stale(
        cache: Mutable[FLOAT["heads", "max_length", 4]],
        values: FLOAT["heads", "new_length", 4],
        position: INT64[()],
    ) -> tuple[Alias["cache"], FLOAT["heads", 4]]:
        """Read a cache after it was overwritten."""
        updated = kv.CacheUpdate(cache, values, position)
        total = op.ReduceSum(cache, [1], keepdims=0)  # `cache` is `updated` by now
        return updated, total

except errors.ContractError as error:
    print("refused:", error)
    assert [finding.code for finding in error.findings] == ["E104"]

# Any ONNX runtime can run the same file, without the promise: it copies (onnxruntime warns that it
# does), and computes the same.

stock = onnxruntime.InferenceSession("append.onnx", providers=["CPUExecutionProvider"])
feeds = {"cache": cache, "values": values, "position": np.array(3)}
copied, total = stock.run(["updated", "total"], feeds)
assert np.array_equal(cache, before)  # a copy was made, our array is as it was

with session.bind(cache=cache) as step:
    outputs = step.run(values=values, position=3)
assert np.array_equal(cache, copied) and np.array_equal(outputs["total"], total)
print("onnxruntime computes the same, in new memory")
