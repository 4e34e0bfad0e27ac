"""Instructions by kv heads: fewer and without barriers, with the same results to the bit."""

import dataclasses

import numpy as np
import pytest
from decoders import Shape, decoder

from onnx_inplace import Session
from onnx_inplace.runner.fused import heads, region
from onnx_inplace.runner.fused.region import Region

pytestmark = pytest.mark.kernel

SHAPES = {
    "stacked": Shape(),
    "neighbours": Shape(bits=8, interleaved=1),
    "apart": Shape(stacked=False),
    "one kv head": Shape(kv_heads=1),
    "a kv head for each head": Shape(kv_heads=4),
    "float32 caches": Shape(cache="float32"),
    "bfloat16 caches": Shape(cache="bfloat16", stacked=False),
    "odd head": Shape(size=24),
    "float weights": Shape(bits=0, weights="float16"),
}


@pytest.fixture
def built(monkeypatch):
    """The fused steps that are made."""
    found = []
    init = Region.__init__

    def begin(made, *arguments):
        init(made, *arguments)
        found.append(made)

    monkeypatch.setattr(Region, "__init__", begin)
    return found


def decode(program, threads=1, pieces=(1,) * 6, length=120):
    """Logits and caches, from ``length`` - 6 tokens on: two splits of the keys."""
    session = Session(program, threads=threads, fuse="auto")
    caches = {
        port.name: session.allocate(port.name, max_length=256) for port in session.mutable_inputs
    }
    random = np.random.default_rng(3)
    for cache in caches.values():
        cache[:] = random.standard_normal(cache.shape, np.float32)
    position, logits = length - sum(pieces), []
    with session.bind(**caches) as step:
        for count in pieces:
            tokens = random.integers(0, 50, (1, count))
            logits.append(step.run(tokens=tokens, position=position)["logits"].copy())
            position += count
    return np.concatenate(logits), caches


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("length", [20, 120])
def test_results_are_the_same_to_the_bit(name, length, monkeypatch):
    program = decoder(SHAPES[name])
    found, caches = decode(program, length=length)
    monkeypatch.setattr(region.heads, "share", lambda instructions, kept: instructions)
    expected, plain = decode(program, length=length)
    np.testing.assert_array_equal(found, expected)
    for key, cache in plain.items():
        assert caches[key].tobytes() == cache.tobytes()


@pytest.mark.parametrize("length", [20, 120])
def test_threads_share_heads_and_change_nothing(length):
    program = decoder(dataclasses.replace(SHAPES["stacked"], kv_heads=4, hidden=512))
    one, caches = decode(program, 1, (1,) * 12, length)
    two, others = decode(program, 2, (1,) * 12, length)
    np.testing.assert_array_equal(one, two)
    for key, cache in caches.items():
        assert others[key].tobytes() == cache.tobytes()


@pytest.mark.parametrize("name", ["stacked", "neighbours"])
def test_no_thread_waits_from_a_product_to_the_product_behind_attention(name, built):
    """But in the last layer, where the memory of angles is used again."""
    shape = dataclasses.replace(SHAPES[name], layers=4)
    decode(decoder(shape))
    (made,) = built
    instructions = made._keep.instructions
    kinds = [type(i.block).__name__ for i in instructions]
    assert "Tokens" not in kinds
    assert kinds.count("Widen") == shape.layers
    assert sum(i.units == shape.kv_heads for i in instructions) == 5 * shape.layers
    assert made._table.barriers <= 5 * shape.layers + 4


def test_several_tokens_stay_as_they_are(built):
    decode(decoder(Shape()), pieces=(3, 2))
    for made in built:
        kinds = [type(i.block).__name__ for i in made._keep.instructions]
        assert "Tokens" in kinds and "Widen" not in kinds


def test_what_is_looked_at_after_a_run_is_still_written(monkeypatch):
    """Who writes bytes last that are kept is not left out."""
    given, share = [], heads.share
    monkeypatch.setattr(region.heads, "share", lambda i, kept: given.append(i) or i)
    decode(decoder(Shape()))
    (instructions,) = given
    written = [w for i in instructions for w in i.writes]
    kept = share(instructions, written)
    assert {w for i in kept for w in i.writes} == set(written)
    assert len(kept) > len(share(instructions, []))
