"""One number of threads, one result: the same bits in every run and session, busy or not."""

import itertools

import deciding
import numpy as np
import pytest
from decoders import Shape, decoder

from onnx_inplace import PagedCache, Session, formats
from onnx_inplace.dsl import FLOAT, FLOAT16, INT64, Alias, Mutable, Paged, kv, model, op
from onnx_inplace.runner import attend, operators_paged_attention, work

pytestmark = pytest.mark.kernel

COUNTS = pytest.mark.parametrize("count", [1, 2])
HEADS, PAGE, SIZE = 2, 16, 32
LENGTH = 1990  # [tokens]
FORMATS = (formats.FLOAT16, formats.INT8, formats.INT4)
Cache = Mutable[FLOAT16[1, HEADS, "capacity", SIZE]]
Pages = Paged[FLOAT16[2, HEADS, PAGE, SIZE], *FORMATS]
TURNS = itertools.cycle([True, False, False, True, True])
"""Whether several threads run a step: every second time, in another order in every session."""


@pytest.fixture
def decider(monkeypatch):
    """Says who runs a step; all calls are long enough for two threads."""
    for module in (attend, operators_paged_attention):
        monkeypatch.setattr(module, "PARALLEL", 0)
    monkeypatch.setattr(work, "SHORTEST_SPLIT", 16)
    return deciding.Decider(monkeypatch)


def decoded(program, shape: Shape, fuse: str, count: int, decider: deciding.Decider) -> bytes:
    """Logits of a prompt and five tokens behind caches that are full of numbers, and the caches."""
    session, rng = Session(program, threads=count, fuse=fuse), np.random.default_rng(3)
    names = [port.name for port in session.mutable_inputs]
    caches = {name: session.allocate(name, max_length=128) for name in names}
    for cache in caches.values():
        cache[...] = rng.standard_normal(cache.shape)
    found, position = b"", 100
    with session.bind(**caches) as step:
        for length in (9, 1, 1, 1, 1, 1):
            tokens = rng.integers(0, shape.vocabulary, (1, length))
            decider.next(next(TURNS))
            found += step.run(tokens=tokens, position=position)["logits"].tobytes()
            position += length
    return found + b"".join(cache.tobytes() for cache in caches.values())


@COUNTS
@pytest.mark.parametrize("fuse", ["off", "auto"])
def test_decoders(fuse, count, decider):
    shape = Shape(hidden=512, layers=1)
    program = decoder(shape)
    assert len({decoded(program, shape, fuse, count, decider) for _ in range(4)}) == 1


@model
def dense(
    keys: Cache,
    values: Cache,
    new: FLOAT16[1, HEADS, 1, SIZE],
    query: FLOAT16[1, 4, 1, SIZE],
    position: INT64[()],
    length: INT64[1],
) -> tuple[FLOAT16[1, 4, 1, SIZE], Alias["keys"], Alias["values"]]:
    keys = kv.CacheUpdate(keys, new, position)
    values = kv.CacheUpdate(values, new, position)
    return op.Attention(query, keys, values, nonpad_kv_seqlen=length), keys, values


@COUNTS
def test_dense_caches(count, decider):
    rng = np.random.default_rng(4)
    new, query = rng.standard_normal((1, HEADS, 1, SIZE)), rng.standard_normal((1, 4, 1, SIZE))
    stored = rng.standard_normal((2, 1, HEADS, 2048, SIZE)).astype(np.float16)
    given = {"new": new.astype(np.float16), "query": query.astype(np.float16)}
    found = set()
    for _ in range(3):
        keys, values = stored.copy()
        with Session(dense, threads=count).bind(keys=keys, values=values) as step:
            for _ in range(4):
                decider.next(next(TURNS))
                found.add(step.run(**given, position=LENGTH - 1, length=[LENGTH])[0].tobytes())
    assert len(found) == 1


@model
def paged(
    cache: Pages, table: INT64["blocks"], query: FLOAT[1, 4, "n", SIZE], length: INT64[()]
) -> FLOAT[1, 4, "n", SIZE]:
    return kv.PagedAttention(query, cache, table, length)


@COUNTS
@pytest.mark.parametrize("tokens", [1, 7])
def test_pages(tokens, count, decider):
    rng = np.random.default_rng(5)
    cache = PagedCache((2, HEADS, PAGE, SIZE), np.float16, allowed=FORMATS)
    for page in range(LENGTH // PAGE + 1):
        values = rng.standard_normal((2, HEADS, PAGE, SIZE)).astype(np.float16)
        cache.write(cache.allocate_page(FORMATS[page % 3].name), values, 0)
    query = rng.standard_normal((1, 4, tokens, SIZE), dtype=np.float32)
    given = {"cache": cache, "table": np.arange(len(cache)), "query": query, "length": LENGTH}
    found = set()
    for _ in range(3):
        with Session(paged, threads=count).bind() as step:
            for _ in range(4):
                decider.next(next(TURNS))
                found.add(step.run(**given)[0].tobytes())
    assert len(found) == 1
