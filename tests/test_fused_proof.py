"""Fused steps are proved like the steps that they stand for."""

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from decoders import Shape, decoder

from onnx_inplace import compiler, errors
from onnx_inplace.compiler import fused_proof, steps
from onnx_inplace.compiler.fused import Fused, FusedValue, Link, Operation
from onnx_inplace.dsl import FLOAT as Float
from onnx_inplace.dsl import INT64, Alias, Mutable, kv, model, op, weight

FLOAT = ir.DataType.FLOAT


def value(name, root=None):
    return FusedValue(name, FLOAT, (1, "m", 4), root=root)


def operation(op_type, inputs, output, root=None):
    roots = {} if root is None else {0: root}
    domain = "onnx_inplace" if op_type == "CacheUpdate" else ""
    return Operation(domain, op_type, 1, inputs, (output,), {}, roots)


CACHE, NEW, AT, UPDATED, VIEW, READ, AGAIN = range(7)
VALUES = (
    value("cache", "cache"),
    value("new"),
    value("at"),
    value("updated", "cache"),
    value("view", "cache"),
    value("read"),
    value("again", "cache"),
)
WRITE = operation("CacheUpdate", (CACHE, NEW, AT), UPDATED, "cache")
LOOK = operation("Identity", (UPDATED,), VIEW, "cache")
USE = operation("Attention", (NEW, VIEW), READ)
WRITE_AGAIN = operation("CacheUpdate", (VIEW, NEW, AT), AGAIN, "cache")


def followed(*operations):
    inputs = tuple(Link(k, k) for k in (CACHE, NEW, AT))
    step = Fused(VALUES, operations, inputs, (Link(READ, READ),), len(operations))
    return fused_proof.follow(step, {CACHE: "cache"})


def test_a_step_in_order_is_proved():
    found = followed(WRITE, LOOK, USE, WRITE_AGAIN)
    assert found.violations == []
    assert found.written == {"cache"} and found.live["cache"] == {AGAIN}


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ((LOOK, WRITE), "before it is made"),
        ((WRITE, LOOK, WRITE_AGAIN, USE), "old version"),
        ((WRITE, operation("Add", (CACHE, NEW), READ)), "old version"),
        (
            (WRITE, operation("CacheUpdate", (UPDATED, UPDATED, AT), AGAIN, "cache")),
            "another input",
        ),
        ((operation("CacheUpdate", (NEW, NEW, AT), UPDATED, "cache"),), "out of none"),
        ((operation("CacheUpdate", (CACHE, NEW, AT), READ, "cache"), USE), "before it is made"),
        ((operation("Relu", (CACHE,), UPDATED), operation("Relu", (UPDATED,), READ)), "said to be"),
    ],
)
def test_what_breaks_the_contract_is_found(operations, words):
    assert any(words in text for text in followed(*operations).violations)


# -- whole plans


@pytest.fixture(scope="module")
def plan():
    return compiler.plan(decoder(Shape()))


def mutated(plan, change):
    """The plan with its one fused step changed."""
    *before, step = plan.fused.block.steps
    block = dataclasses.replace(plan.fused.block, steps=(*before, change(step)))
    return dataclasses.replace(plan, fused=dataclasses.replace(plan.fused, block=block))


def test_a_decoder_with_a_fused_alternative_is_proved(plan):
    compiler.verify(plan, max_length=16, new_length=1)
    compiler.verify(mutated(plan, lambda step: step))


def without_a_cache(step):
    """A cache that is written leaves the step under no name."""
    return dataclasses.replace(step, outputs=step.outputs[:-1])


def backwards(step):
    return dataclasses.replace(step, operations=step.operations[::-1])


def without_an_input(step):
    return dataclasses.replace(step, inputs=step.inputs[1:])


@pytest.mark.parametrize("change", [without_a_cache, backwards, without_an_input])
def test_a_broken_alternative_is_found(change, plan):
    with pytest.raises(errors.PlanError):
        compiler.verify(mutated(plan, change))


def test_any_two_operations_that_change_places_are_found_or_independent(plan):
    (step,) = [s for s in plan.fused.block.steps if isinstance(s, Fused)]
    count = len(step.operations)
    for at in range(count - 1):
        order = list(step.operations)
        order[at], order[at + 1] = order[at + 1], order[at]
        first, second = order[at], order[at + 1]
        made = {v for v in second.outputs if v is not None}
        needs = made & {v for v in first.inputs if v is not None}
        changed = mutated(
            plan, lambda s, order=order: dataclasses.replace(s, operations=tuple(order))
        )
        if needs:
            with pytest.raises(errors.PlanError):
                compiler.verify(changed)
        else:
            compiler.verify(changed)


@pytest.fixture(scope="module")
def between():
    """A plan whose fused alternative has ordinary steps, and buffers that go between."""
    random = np.random.default_rng(0)
    matrix = random.standard_normal((64, 64)).astype(np.float32)

    @model
    def program(
        x: Float["rows", 64], cache: Mutable[Float["m", 64]], p: INT64[()]
    ) -> tuple[Float["rows", 64], Alias["cache"]]:
        first = op.MatMul(x, weight(matrix, "matrix"))
        early = op.Det(op.MatMul(first, op.Transpose(first)))  # no template
        second = op.MatMul(op.Add(first, early), weight(matrix.T.copy(), "other"))
        late = op.Det(op.MatMul(second, op.Transpose(second)))
        third = op.MatMul(second + late, weight(matrix, "matrix")) + early
        return third, kv.CacheUpdate(cache, third, p)

    return compiler.plan(program)


def fused_buffers(plan):
    lifetimes = plan.fused.block.lifetimes
    return [s for s in lifetimes if plan.values[s].storage is steps.Storage.BUFFER]


def test_buffers_between_fused_steps_are_proved(between):
    assert len(between.fused.regions) > 1 and len(fused_buffers(between)) > 1
    for rows in (1, 3):
        (layout,) = between.fused_layout(rows=rows, m=8)
        assert set(layout) == set(fused_buffers(between))
        compiler.verify(between, rows=rows, m=8)


def test_buffers_of_the_alternative_that_share_too_much_are_found(between, monkeypatch):
    (layout,) = between.fused_layout(rows=1, m=8)
    everything = dict.fromkeys(layout, (0, 256))
    monkeypatch.setattr(steps.ExecutionPlan, "fused_layout", lambda self, **dims: (everything,))
    with pytest.raises(errors.PlanError, match="share bytes"):
        compiler.verify(between, rows=1, m=8)
    monkeypatch.setattr(steps.ExecutionPlan, "fused_layout", lambda self, **dims: ({},))
    with pytest.raises(errors.PlanError, match="the arena has"):
        compiler.verify(between, rows=1, m=8)


def test_a_life_in_the_alternative_that_ends_too_soon_is_found(between):
    found = 0
    for slot in fused_buffers(between):
        first, last = between.fused.block.lifetimes[slot]
        if last == first:
            continue
        lives = {**between.fused.block.lifetimes, slot: (first, last - 1)}
        block = dataclasses.replace(between.fused.block, lifetimes=lives)
        fused = dataclasses.replace(between.fused, block=block)
        with pytest.raises(errors.PlanError, match="lives from"):
            compiler.verify(dataclasses.replace(between, fused=fused))
        found += 1
    assert found
