"""The work of the compiler grows with the model, and no faster: counted, not timed."""

import functools
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_inplace import compiler
from onnx_inplace.compiler import arena, positions
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model, op

FEW, MANY = 16, 128


def calls(work: Callable[[], object]) -> int:
    """Calls of Python's and of C's functions while ``work`` runs."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def growth(work: Callable[[int], object]) -> float:
    """Calls for one of many layers, over those for one of a few."""
    few, many = (calls(functools.partial(work, n)) / n for n in (FEW, MANY))
    return many / few


def decoder(layers: int) -> compiler.Program:
    """Caches, what is computed from them, and buffers that live long and shortly."""

    @model
    def program(
        x: FLOAT[1, 1, "n", 4],
        caches: tuple[(Mutable[FLOAT[1, 1, "capacity", 4]],) * layers],
        position: INT64[()],
    ) -> tuple[FLOAT[1, 1, "n", 4], Alias["caches"]]:
        length, updated, first = op.Reshape(position + 1, [1]), [], op.Tanh(x)
        for cache in caches:
            new = kv.CacheUpdate(cache, x, position)
            x = first + op.Attention(x * 2.0, new, new, nonpad_kv_seqlen=length)
            updated.append(new)
        return x, updated

    return program


STAGES: dict[str, Callable[[compiler.Loaded], object]] = {
    "load": lambda loaded: compiler.load(loaded.program),
    "plan": compiler.plan,
    "verify": lambda loaded: compiler.verify(compiler.plan(loaded), capacity=4, n=1),
    "memory": lambda loaded: compiler.plan(loaded).memory(),
    "checks": positions.build,
    "shapes": lambda loaded: compiler.ShapesContext().compute(loaded),
}


@pytest.fixture(scope="module")
def loaded() -> dict[int, compiler.Loaded]:
    decoder(2)  # what is done once
    return {n: compiler.load(decoder(n)) for n in (FEW, MANY)}


@pytest.mark.parametrize("stage", STAGES)
def test_each_layer_costs_the_same(stage: str, loaded: dict[int, compiler.Loaded]) -> None:
    assert growth(lambda n: STAGES[stage](loaded[n])) <= 1.2


def test_recording_a_layer_costs_the_same() -> None:
    assert growth(decoder) <= 1.2


def test_the_counter_would_see_it() -> None:
    def quadratic(n: int) -> None:
        for k in range(n):
            for _ in range(k):
                len("")

    assert growth(quadratic) > 4


spans = st.tuples(st.integers(-1, 12), st.integers(0, 6)).map(lambda p: (p[0], p[0] + p[1]))


@given(st.lists(st.tuples(st.sampled_from([0, 1, 64, 65, 300]), spans), max_size=24))
@settings(max_examples=200, deadline=None)
def test_buffers_stand_at_the_lowest_offset_that_is_free(
    wanted: list[tuple[int, tuple[int, int]]],
) -> None:
    """Against bytes marked one by one, the largest value first."""
    offsets, total = arena.place(wanted)
    held = np.zeros((20, 64 * 24 * 5 // 64 + 64), bool)  # by step, blocks of 64 bytes
    for index in sorted(range(len(wanted)), key=lambda k: (-wanted[k][0], wanted[k][1], k)):
        size, (first, last) = wanted[index]
        blocks, steps = -(-size // 64), slice(first + 1, last + 2)
        if not blocks:
            continue
        free = [at for at in range(150) if not held[steps, at : at + blocks].any()]
        assert offsets[index] == 64 * free[0]
        held[steps, free[0] : free[0] + blocks] = True
    used = np.flatnonzero(held.any(axis=0))
    assert total == 64 * (used.max() + 1 if used.size else 0)
