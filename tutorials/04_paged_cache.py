"""A cache in pages: memory that grows with the text, shared beginnings, and saved state.

Run me: python tutorials/04_paged_cache.py
"""

from pathlib import Path

import numpy as np

from onnx_inplace import SequencePool, Session, errors, formats
from onnx_inplace.dsl import FLOAT, FLOAT16, INT64, Alias, Mutable, Paged, kv, model

HEADS, KV_HEADS, PAGE, SIZE = 4, 2, 32, 64

# A page holds the keys (0) and values (1) of 32 tokens, in one of the formats that the type names.

Pages = Paged[FLOAT16[2, KV_HEADS, PAGE, SIZE], formats.FLOAT16, formats.INT8]


# A block table says which pages are a text, in order. `position` is the token's place in the text:
# one update may begin in the middle of a page and end in the next one.


@model
def decode(
    cache: Mutable[Pages],
    block_table: INT64["blocks"],
    query: FLOAT[1, HEADS, "n", SIZE],
    values: FLOAT16[2, KV_HEADS, "n", SIZE],
    position: INT64[()],
    length: INT64[()],
) -> tuple[FLOAT[1, HEADS, "n", SIZE], Alias["cache"]]:
    """Write the new tokens, then attend over all of them."""
    updated = kv.PagedCacheUpdate(cache, block_table, values, position)
    output = kv.PagedAttention(query, updated, block_table, length, is_causal=1)
    return output, updated


rng = np.random.default_rng(0)


def tokens(n: int) -> dict[str, np.ndarray]:
    """What a real decoder would compute for ``n`` new tokens."""
    query = rng.standard_normal((1, HEADS, n, SIZE), dtype=np.float32)
    return {"query": query, "values": rng.standard_normal((2, KV_HEADS, n, SIZE)).astype("f2")}


# A cache begins without a page and without a byte. A pool hands out pages to sequences: it makes
# those that the next tokens need, and no other.

session = Session(decode)
cache = session.allocate("cache")
pool = SequencePool(cache, format="FLOAT16", max_pages=8)
assert cache.nbytes == 0
text = pool.new()

with session.bind(cache=cache) as step:

    def run(sequence, n: int) -> np.ndarray:
        """Append ``n`` tokens to a sequence. If the run fails, it is as it was."""
        with sequence.writing(n) as place:
            outputs = step.run(
                block_table=place.block_table[0],
                position=place.position[0],
                length=place.length[0],
                **tokens(n),
            )
        assert outputs["updated"] is cache
        return outputs[0]

    run(text, 40)
    print(f"{text.length} tokens in pages {text.pages}: {cache.nbytes:,} bytes")

    # A fork shares all pages. Nothing is copied until one of the two writes into a page that is
    # shared, and then it is that page alone. What it will cost can be asked before.

    other = text.fork()
    print(f"a fork: {cache.nbytes:,} bytes; its first token costs {other.cost.reserve(1)}")
    untouched = bytes(cache.page(text.pages[1]).raw)
    run(other, 1)
    assert other.pages[0] == text.pages[0] and other.pages[1] != text.pages[1]
    assert bytes(cache.page(text.pages[1]).raw) == untouched

    # Whole pages in the middle are dropped by an edit of the table.

    run(text, 88)
    print(f"without tokens 32 to 96: {text.cost.drop(32, 96)}")
    text.drop(32, 96)
    run(text, 1)

    # A pool that is full says so before anything is written: not now...

    before = cache.snapshot()
    try:
        run(other, 200)
    except errors.PoolExhausted as error:
        print(f"refused: {error}")
    assert cache.snapshot() == before

    # ... or never.

    try:
        run(other, 1000)
    except errors.PoolTooSmall as error:
        print(f"refused: {error}")

# The state of all sequences is one file, with a checksum on every page. It describes its own
# formats, and is loaded whole or not at all.

pool.save("chat.state")
again = SequencePool.load("chat.state")
assert again.caches[0].snapshot() == cache.snapshot()
print(f"loaded: {', '.join(map(str, again.sequences))}")

damaged = bytearray(Path("chat.state").read_bytes())
damaged[len(damaged) // 2] ^= 1
Path("damaged.state").write_bytes(damaged)
try:
    SequencePool.load("damaged.state")
except errors.SavedStateError as error:
    print(f"refused: {error}")
