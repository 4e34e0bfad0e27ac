"""Whole small decoders: fused steps give what ordinary steps give, in the same storage."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from decoders import Shape, decoder

from onnx_inplace import Session, compiler
from onnx_inplace.compiler import errors

pytestmark = pytest.mark.kernel

SHAPES = {
    "4 bits": Shape(),
    "8 bits": Shape(bits=8, interleaved=1),
    "apart": Shape(stacked=False, kv_heads=1, cache="float32"),
    "float32 weights": Shape(bits=0, cache="bfloat16"),
    "float16 weights": Shape(bits=0, weights="float16", stacked=False, activation="gelu"),
    "layer norm, gelu, bias": Shape(
        bits=0, norm="layer", activation="gelu", gated=False, bias=True, heads=4, kv_heads=4
    ),
    "tanh gelu, 4 bits, bias": Shape(activation="gelu_tanh", bias=True, size=32, interleaved=1),
    "relu, odd head": Shape(activation="relu", gated=False, size=24, heads=4),
}


def decode(program, shape, fuse, *, pieces=(5, 1, 1, 3, 1), threads=1):
    """Logits of pieces of a text, and the caches afterwards."""
    session = Session(program, threads=threads, fuse=fuse)
    names = [port.name for port in session.mutable_inputs]
    caches = {name: session.allocate(name, max_length=24) for name in names}
    random, position, logits = np.random.default_rng(1), 0, []
    with session.bind(**caches) as step:
        for count in pieces:
            tokens = random.integers(0, shape.vocabulary, (1, count))
            out = step.run(tokens=tokens, position=position)
            logits.append(out["logits"].copy())
            assert all(out[f"new_{name}"] is caches[name] for name in names)
            position += count
        fused = [run.frame.fused for run in step._execution._frames.values()]
    return np.concatenate(logits), caches, fused


@pytest.mark.parametrize("name", SHAPES)
def test_a_fused_decoder_agrees_with_the_library(name):
    shape = SHAPES[name]
    program = decoder(shape)
    plain, old, none = decode(program, shape, "off")
    fused, new, regions = decode(program, shape, "auto")
    assert not any(none)
    assert regions == [False, True, True], "pieces of 5, 1 and 3 tokens"
    scale = np.abs(plain).max()
    np.testing.assert_allclose(fused, plain, atol=2e-3 * scale, rtol=0)
    for key, array in old.items():
        difference = np.abs(array.astype(np.float32) - new[key].astype(np.float32))
        assert difference.max() <= 0.02 * max(1.0, np.abs(array.astype(np.float32)).max())


def test_all_of_a_decoder_is_one_step_behind_its_positions():
    plan = compiler.plan(decoder(Shape()))
    kinds = [type(step).__name__ for step in plan.fused.block.steps]
    assert kinds == ["SubSession", "Fused"]
    assert plan.fused.rows == (1, "new_length")
    assert not plan.fused.refusals


def test_threads_do_not_change_a_result():
    shape = dataclasses.replace(SHAPES["4 bits"], hidden=512)
    program = decoder(shape)
    one, _, _ = decode(program, shape, "auto", pieces=[1] * 20)
    two, _, _ = decode(program, shape, "auto", pieces=[1] * 20, threads=2)
    np.testing.assert_allclose(one, two, atol=1e-5 * np.abs(one).max(), rtol=0)


def test_what_a_fused_run_refuses_has_written_nothing():
    shape = Shape(layers=1)
    session = Session(decoder(shape), fuse="auto")
    caches = {p.name: session.allocate(p.name, max_length=8) for p in session.mutable_inputs}
    with session.bind(**caches) as step:
        step.run(tokens=[[1]], position=0)
        before = {name: cache.tobytes() for name, cache in caches.items()}
        with pytest.raises(errors.CapacityError):
            step.run(tokens=[[1]], position=8)
        with pytest.raises(errors.OperatorError, match="Gather: `tokens`") as caught:
            step.run(tokens=[[shape.vocabulary]], position=1)
        assert str(caught.value).startswith(f"{caught.value.location}: ")
        assert str(caught.value.location).startswith("decoders.py:")
        assert {name: cache.tobytes() for name, cache in caches.items()} == before
        step.run(tokens=[[2]], position=1)  # neither left the binding dirty
        assert all(run.frame.fused for run in step._execution._frames.values())
