"""Pages of several formats in one cache: what it saves, and what it costs in error.

Run me: python tutorials/05_mixed_precision.py

With matplotlib it draws mixed_precision.svg: memory and error against context length.
"""

import importlib.util

import numpy as np

from onnx_inplace import PagedCache, Session, errors, formats, policy
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, Paged, kv, model

HEADS, KV_HEADS, PAGE, SIZE = 4, 2, 64, 64
DIMS = 2, KV_HEADS, PAGE, SIZE

# The formats that ship. The size of a page is known to the byte, scales included.

for format in (formats.FLOAT16, formats.INT8, formats.INT4, formats.INT2):
    bits = format.bits_per_element(DIMS)
    print(f"{format}: {format.page_bytes(DIMS):,} bytes a page, {bits} bits an element")

Pages = Paged[FLOAT[DIMS], formats.FLOAT16, formats.INT8, formats.INT4, formats.INT2]


@model
def decode(
    cache: Mutable[Pages],
    block_table: INT64["blocks"],
    query: FLOAT[1, HEADS, "n", SIZE],
    values: FLOAT[2, KV_HEADS, "n", SIZE],
    position: INT64[()],
    length: INT64[()],
) -> tuple[FLOAT[1, HEADS, "n", SIZE], Alias["cache"]]:
    """Write the new tokens; pages that are missing are made in 16 bits."""
    updated = kv.PagedCacheUpdate(cache, block_table, values, position, quantized_type="FLOAT16")
    output = kv.PagedAttention(query, updated, block_table, length, is_causal=1)
    return output, updated


# Keys and values of a language model are not white noise: most of a channel is its mean, and a few
# channels of the keys are large.

rng = np.random.default_rng(0)
mean = rng.standard_normal((KV_HEADS, 1, SIZE)) * np.where(rng.random(SIZE) < 0.1, 4, 1)
LENGTHS = [256 * k for k in range(1, 9)]
keys = mean + rng.standard_normal((KV_HEADS, LENGTHS[-1], SIZE))
values = rng.standard_normal((KV_HEADS, 1, SIZE)) + rng.standard_normal(keys.shape)
all_values = np.stack([keys, values]).astype(np.float32)
query = 0.5 * rng.standard_normal((1, HEADS, 1, SIZE), dtype=np.float32)

# A policy decides which page has which format, and is applied between runs. Pages only become
# smaller; a page that is not full keeps a format that tokens are appended to. The first page of a
# text is worth its bits: all later tokens look at it.

POLICIES = {
    "FLOAT16": None,
    "INT8": policy.ByAge([("FLOAT16", 1), ("INT8", None)], first=1),
    "FLOAT16, INT8, INT4": policy.ByAge([("FLOAT16", 2), ("INT8", 4), ("INT4", None)], first=1),
    "down to INT2": policy.ByAge([("FLOAT16", 2), ("INT4", 4), ("INT2", None)], first=1),
    "within 400 KiB": policy.Within(400 << 10, ["INT8", "INT4", "INT2"]),
}


def attention(values: np.ndarray) -> np.ndarray:
    """The same in float64, on the values that were written."""
    k, v = np.repeat(values.astype(np.float64), HEADS // KV_HEADS, axis=1)
    scores = query[0].astype(np.float64) @ k.transpose(0, 2, 1) / np.sqrt(SIZE)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def measure(chosen: policy.Policy | None) -> tuple[list[int], list[float], PagedCache]:
    """Bytes and relative error of attention at each length."""
    session = Session(decode)
    cache = session.allocate("cache")
    sizes, faults = [], []
    with session.bind(cache=cache) as step:
        for start in range(0, LENGTHS[-1], PAGE):
            end = start + PAGE
            output = step.run(
                block_table=np.arange(end // PAGE),
                query=np.repeat(query, PAGE, axis=2),
                values=all_values[:, :, start:end],
                position=start,
                length=end,
            )["output"]
            if chosen is not None:
                policy.apply(chosen, cache)
            if end in LENGTHS:
                exact = attention(all_values[:, :, :end])
                fault = np.abs(output[0, :, -1:] - exact).max() / np.abs(exact).max()
                sizes.append(cache.nbytes)
                faults.append(float(fault))
    return sizes, faults, cache


measured = {name: measure(chosen) for name, chosen in POLICIES.items()}
for name, (sizes, faults, cache) in measured.items():
    names = [cache.page(page).quantized_type for page in cache]
    counts = ", ".join(f"{names.count(n)} {n}" for n in sorted(set(names)))
    print(f"{name}: {sizes[-1]:,} bytes, error {faults[-1]:.5f} ({counts})")

full = measured["FLOAT16"][0][-1]
assert measured["INT8"][0][-1] < 0.6 * full
assert measured["FLOAT16, INT8, INT4"][0][-1] < 0.5 * full
assert measured["down to INT2"][0][-1] < 0.4 * full

# A page of another format is converted alone: the others keep their address and their bytes.

cache = measured["FLOAT16"][2]
neighbour = cache.page(3).address, bytes(cache.page(3).raw)
cache.convert(2, "INT4")
assert (cache.page(3).address, bytes(cache.page(3).raw)) == neighbour
assert cache.nbytes == full - formats.FLOAT16.page_bytes(DIMS) + formats.INT4.page_bytes(DIMS)

# A format that the model did not allow is refused.

try:
    cache.convert(2, "FP8_E4M3")
except errors.PageError as error:
    print(f"refused: {error}")

if importlib.util.find_spec("matplotlib") is None:
    print("no picture: matplotlib is not installed")
else:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, (sizes, faults, _) in measured.items():
        left.plot(LENGTHS, [size / 2**10 for size in sizes], marker="o", label=name)
        right.semilogy(LENGTHS, faults, marker="o", label=name)
    left.set(xlabel="context [tokens]", ylabel="cache [KiB]", ylim=(0, None))
    right.set(xlabel="context [tokens]", ylabel="largest error of attention, relative")
    left.legend()
    figure.savefig("mixed_precision.svg")
    print("mixed_precision.svg: memory and error against context length")
