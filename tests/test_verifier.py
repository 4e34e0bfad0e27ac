"""The verifier accepts what the planner makes, and finds plans that are broken at random.

A mutant must break a promise by construction, which every mutation's docstring argues; what might
be the same plan in other words (two independent steps in another order) is not made. So every
mutant counts, and the score is what the verifier finds.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import strategies

from onnx_inplace import compiler, errors
from onnx_inplace.compiler.steps import (
    Block,
    Branch,
    ExecutionPlan,
    Kernel,
    MustAlias,
    Repeat,
    ScanStep,
    Storage,
    SubSession,
    View,
)
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model, op

SEEDS = range(120)
Mutation = Callable[[ExecutionPlan, np.random.Generator], ExecutionPlan | None]


@model
def busy(
    cache: Mutable[FLOAT["b", "m", 4]], x: FLOAT["b", 1, 4], n: INT64[()]
) -> tuple[Alias["cache"], FLOAT["b", "m", 4]]:
    old = op.ReduceSum(cache, keepdims=0)
    for i in range(n):
        x = op.Add(x, old)
        cache = kv.CacheUpdate(cache, x, i)
        if op.ReduceSum(cache, keepdims=0) > 3.0:
            cache = kv.CacheUpdate(cache, op.Relu(x), i)
    y = op.Tanh(op.Relu(x))
    cache = kv.CacheUpdate(cache, y, n)
    z = op.Exp(y)
    cache = kv.CacheUpdate(cache, z, n)
    return cache, op.Relu(cache)


@model
def observed(
    cache: Mutable[FLOAT["m", 4]], x: FLOAT["n", 4], p: INT64[()]
) -> tuple[Alias["cache"], FLOAT["m", 4], FLOAT["m", 4]]:
    before = op.Relu(cache)
    cache = kv.CacheUpdate(cache, x, p)
    between = op.Tanh(cache)
    cache = kv.CacheUpdate(cache, x, p + 1)
    return cache, before, between


def plans() -> Iterator[ExecutionPlan]:
    """Plans of programs with every kind of step."""
    yield compiler.plan(busy)
    yield compiler.plan(observed)
    for seed in SEEDS:
        try:
            yield compiler.plan(compiler.build(strategies.seeded(seed).declaration))
        except errors.ContractError:
            continue


@pytest.fixture(scope="module")
def valid() -> list[ExecutionPlan]:
    return list(plans())


def test_plans_of_the_planner_pass(valid: list[ExecutionPlan]) -> None:
    kinds: Counter[str] = Counter()
    for plan in valid:
        compiler.verify(plan)
        compiler.verify(plan, **dict.fromkeys(plan.footprint.dims, 9))
        kinds.update(type(step).__name__ for block in blocks(plan.block) for step in block.steps)
    assert len(valid) > 50
    assert set(kinds) == {"SubSession", "Kernel", "View", "Branch", "Repeat", "ScanStep"}


# -- plans as trees


def blocks(block: Block) -> Iterator[Block]:
    yield block
    for step in block.steps:
        for inner in inner_blocks(step):
            yield from blocks(inner)


def inner_blocks(step: Any) -> tuple[Block, ...]:
    if isinstance(step, Branch):
        return step.then, step.otherwise
    return (step.body,) if isinstance(step, Repeat | ScanStep) else ()


def with_block(plan: ExecutionPlan, old: Block, new: Block) -> ExecutionPlan:
    """The plan with one block replaced, wherever it stands."""

    def rebuilt(block: Block) -> Block:
        if block is old:
            return new
        steps = []
        for step in block.steps:
            if isinstance(step, Branch):
                then, otherwise = rebuilt(step.then), rebuilt(step.otherwise)
                step = dataclasses.replace(step, then=then, otherwise=otherwise)
            elif isinstance(step, Repeat | ScanStep):
                step = dataclasses.replace(step, body=rebuilt(step.body))
            steps.append(step)
        return dataclasses.replace(block, steps=tuple(steps))

    return dataclasses.replace(plan, block=rebuilt(plan.block))


def with_step(plan: ExecutionPlan, block: Block, index: int, step: Any) -> ExecutionPlan:
    steps = (*block.steps[:index], step, *block.steps[index + 1 :])
    return with_block(plan, block, dataclasses.replace(block, steps=steps))


def with_value(plan: ExecutionPlan, slot: int, **changes: Any) -> ExecutionPlan:
    """One value described otherwise, to kernels too: the description stays of one mind."""
    value = dataclasses.replace(plan.values[slot], **changes)
    plan = dataclasses.replace(plan, values=(*plan.values[:slot], value, *plan.values[slot + 1 :]))
    for block in list(blocks(plan.block)):
        for index, step in enumerate(block.steps):
            if isinstance(step, Kernel) and slot in step.values:
                told = MappingProxyType({**step.values, slot: value})
                step = dataclasses.replace(step, values=told)
                return with_value_told(plan, block, index, step, slot, value)
    return plan


def with_value_told(
    plan: ExecutionPlan, block: Block, index: int, step: Kernel, slot: int, value: Any
) -> ExecutionPlan:
    plan = with_step(plan, block, index, step)
    for other in list(blocks(plan.block)):
        for place, told in enumerate(other.steps):
            if isinstance(told, Kernel) and told.values.get(slot, value) != value:
                values = MappingProxyType({**told.values, slot: value})
                changed = dataclasses.replace(told, values=values)
                return with_value_told(plan, other, place, changed, slot, value)
    return plan


def read_by(step: Any) -> set[int]:
    """Slots that a step reads, inside of its blocks too."""
    if isinstance(step, SubSession):
        return {port.slot for port in step.inputs}
    if isinstance(step, Kernel):
        return {slot for slot in step.inputs if slot is not None}
    if isinstance(step, View):
        return {step.source} | ({step.parameter} if step.parameter is not None else set())
    found: set[int] = set()
    if isinstance(step, Branch):
        found.add(step.condition)
    else:
        found.update(step.initial)
        if isinstance(step, ScanStep):
            found.update(whole.slot for whole in step.scanned)
        else:
            found.update(s for s in (step.count, step.condition) if s is not None)
    for block in inner_blocks(step):
        found.update(block.outputs)
        for inner in block.steps:
            found |= read_by(inner)
    return found


def filled_by(step: Any) -> set[int]:
    if isinstance(step, SubSession):
        return {port.slot for port in step.outputs}
    if isinstance(step, View):
        return {step.output}
    found = {slot for slot in step.outputs if slot is not None}
    if isinstance(step, Repeat | ScanStep):
        found |= {whole.slot for whole in step.stacked}
    return found


def pick(generator: np.random.Generator, found: list[Any]) -> Any:
    return found[generator.integers(len(found))] if found else None


# -- mutations


def swap_steps(plan: ExecutionPlan, generator: np.random.Generator) -> ExecutionPlan | None:
    """A step comes before one that fills what it reads: it reads an empty slot."""
    found = [
        (block, i, j)
        for block in blocks(plan.block)
        for j, late in enumerate(block.steps)
        for i, early in enumerate(block.steps[:j])
        if filled_by(early) & read_by(late)
    ]
    chosen = pick(generator, found)
    if chosen is None:
        return None
    block, i, j = chosen
    steps = list(block.steps)
    steps[i], steps[j] = steps[j], steps[i]
    return with_block(plan, block, dataclasses.replace(block, steps=tuple(steps)))


def read_after_write(plan: ExecutionPlan, generator: np.random.Generator) -> ExecutionPlan | None:
    """A reader of a root moves behind a write of it: it sees other bytes than it names.

    Nothing up to the write needs what it fills, so that no other rule is broken.
    """
    found = []
    for block in blocks(plan.block):
        for i, reader in enumerate(block.steps):
            read = {plan.values[s].root for s in read_by(reader)} - {None}
            for j, writer in enumerate(block.steps[i + 1 :], i + 1):
                if filled_by(reader) & read_by(writer):
                    break
                if isinstance(writer, Kernel) and read & set(writer.roots.values()):
                    found.append((block, i, j))
    chosen = pick(generator, found)
    if chosen is None:
        return None
    block, i, j = chosen
    steps = list(block.steps)
    steps.insert(j, steps.pop(i))
    return with_block(plan, block, dataclasses.replace(block, steps=tuple(steps)))


def drop_step(plan: ExecutionPlan, generator: np.random.Generator) -> ExecutionPlan | None:
    """The slots of the step are never filled."""
    found = [(b, i) for b in blocks(plan.block) for i, s in enumerate(b.steps) if filled_by(s)]
    chosen = pick(generator, found)
    if chosen is None:
        return None
    block, i = chosen
    steps = block.steps[:i] + block.steps[i + 1 :]
    return with_block(plan, block, dataclasses.replace(block, steps=steps))


def fill_another(plan: ExecutionPlan, generator: np.random.Generator) -> ExecutionPlan | None:
    """A sub-session fills a slot that belongs to another value, and leaves its own empty."""
    found = [
        (b, i, k)
        for b in blocks(plan.block)
        for i, s in enumerate(b.steps)
        if isinstance(s, SubSession)
        for k in range(len(s.outputs))
    ]
    chosen = pick(generator, found)
    if chosen is None:
        return None
    block, i, k = chosen
    step = block.steps[i]
    old = step.outputs[k].slot
    new = pick(generator, [s for s in range(plan.slots) if s != old])
    ports = list(step.outputs)
    ports[k] = dataclasses.replace(ports[k], slot=new)
    return with_step(plan, block, i, dataclasses.replace(step, outputs=tuple(ports)))


def read_stale(plan: ExecutionPlan, generator: np.random.Generator) -> ExecutionPlan | None:
    """A write starts from a name of its root whose version the write before it has ended."""
    found = []
    for block in blocks(plan.block):
        for i, step in enumerate(block.steps):
            if isinstance(step, Kernel) and step.aliases:
                port = step.aliases[0].input_index
                mine = plan.values[step.inputs[port]]
                found += [
                    (block, i, port, v.slot)
                    for v in plan.values
                    if v.root == mine.root and v.version != mine.version
                ]
    chosen = pick(generator, found)
    if chosen is None:
        return None
    block, i, port, slot = chosen
    step = block.steps[i]
    inputs = (*step.inputs[:port], slot, *step.inputs[port + 1 :])
    values = MappingProxyType({**step.values, slot: plan.values[slot]})
    return with_step(plan, block, i, dataclasses.replace(step, inputs=inputs, values=values))


def drop_alias(plan: ExecutionPlan, generator: np.random.Generator) -> ExecutionPlan | None:
    """A kernel no longer promises that its output is the storage; the value still says so."""
    found = [
        (b, i)
        for b in blocks(plan.block)
        for i, s in enumerate(b.steps)
        if isinstance(s, Kernel) and s.aliases
    ]
    chosen = pick(generator, found)
    if chosen is None:
        return None
    block, i = chosen
    step = dataclasses.replace(block.steps[i], aliases=(), roots=MappingProxyType({}))
    return with_step(plan, block, i, step)


def drop_must_alias(plan: ExecutionPlan, generator: np.random.Generator) -> ExecutionPlan | None:
    """A required alias is not listed."""
    if not plan.must_alias:
        return None
    k = int(generator.integers(len(plan.must_alias)))
    left = plan.must_alias[:k] + plan.must_alias[k + 1 :]
    return dataclasses.replace(plan, must_alias=left)


def become_own(plan: ExecutionPlan, generator: np.random.Generator) -> ExecutionPlan | None:
    """A name of a root is described as storage of its own: the runner would release it."""
    slots = [alias.slot for alias in plan.must_alias]
    slot = pick(generator, slots)
    if slot is None:
        return None
    storage = pick(generator, [Storage.FRESH, Storage.BUFFER])
    plan = with_value(plan, slot, root=None, version=None, storage=storage)
    reuse = plan.inplace_reuse | ({slot} if storage is Storage.BUFFER else set())
    rest = tuple(alias for alias in plan.must_alias if alias.slot != slot)
    return dataclasses.replace(plan, must_alias=rest, inplace_reuse=reuse)


def reuse_root(plan: ExecutionPlan, generator: np.random.Generator) -> ExecutionPlan | None:
    """The storage of a root may serve another value."""
    slot = pick(generator, [alias.slot for alias in plan.must_alias])
    if slot is None:
        return None
    return dataclasses.replace(plan, inplace_reuse=plan.inplace_reuse | {slot})


def become_root(plan: ExecutionPlan, generator: np.random.Generator) -> ExecutionPlan | None:
    """A value of its own is described as storage of a root, everywhere."""
    slots = [v.slot for v in plan.values if v.storage in (Storage.FRESH, Storage.BUFFER)]
    slot, root = pick(generator, slots), pick(generator, list(plan.mutable))
    if slot is None or root is None:
        return None
    plan = with_value(plan, slot, root=root, version=0, storage=Storage.CALLER)
    return dataclasses.replace(
        plan,
        must_alias=(*plan.must_alias, MustAlias(slot, root)),
        inplace_reuse=plan.inplace_reuse - {slot},
    )


def change_version(plan: ExecutionPlan, generator: np.random.Generator) -> ExecutionPlan | None:
    """A name stands for the version of an older name of its root: two contents have one number.

    Numbers that no name of the root has are not taken: numbers are labels, and with another one
    in the same order the plan is the same.
    """
    found = [
        (v.slot, older.version)
        for v in plan.values
        for older in plan.values
        if v.root is not None and older.root == v.root and older.version < v.version
    ]
    chosen = pick(generator, found)
    if chosen is None:
        return None
    slot, version = chosen
    return with_value(plan, slot, version=version)


def shorten_life(plan: ExecutionPlan, generator: np.random.Generator) -> ExecutionPlan | None:
    """A value is released, or its buffer given away, before the last step that reads it."""
    found = [(b, slot) for b in blocks(plan.block) for slot, (a, z) in b.lifetimes.items() if z > a]
    chosen = pick(generator, found)
    if chosen is None:
        return None
    block, slot = chosen
    first, last = block.lifetimes[slot]
    life = first, int(generator.integers(first, last))
    lives = MappingProxyType({**block.lifetimes, slot: life})
    return with_block(plan, block, dataclasses.replace(block, lifetimes=lives))


def forget_life(plan: ExecutionPlan, generator: np.random.Generator) -> ExecutionPlan | None:
    """Nothing is said of when a value lives."""
    chosen = pick(generator, [(b, slot) for b in blocks(plan.block) for slot in b.lifetimes])
    if chosen is None:
        return None
    block, slot = chosen
    lives = MappingProxyType({s: life for s, life in block.lifetimes.items() if s != slot})
    return with_block(plan, block, dataclasses.replace(block, lifetimes=lives))


def keep_no_result(plan: ExecutionPlan, generator: np.random.Generator) -> ExecutionPlan | None:
    """A result of the model has a buffer, which the next run overwrites."""
    results = {o.slot for o in plan.outputs}
    slot = pick(
        generator,
        [v.slot for v in plan.values if v.storage is Storage.FRESH and v.slot in results],
    )
    if slot is None:
        return None
    plan = with_value(plan, slot, storage=Storage.BUFFER)
    return dataclasses.replace(plan, inplace_reuse=plan.inplace_reuse | {slot})


def return_another(plan: ExecutionPlan, generator: np.random.Generator) -> ExecutionPlan | None:
    """An aliased result of a block is an older name of its root: the last write is lost."""
    found = [
        (b, k, v.slot)
        for b in blocks(plan.block)
        for k, slot in enumerate(b.outputs)
        if plan.values[slot].root is not None
        for v in plan.values
        if v.root == plan.values[slot].root and v.version != plan.values[slot].version
    ]
    chosen = pick(generator, found)
    if chosen is None:
        return None
    block, k, slot = chosen
    outputs = (*block.outputs[:k], slot, *block.outputs[k + 1 :])
    return with_block(plan, block, dataclasses.replace(block, outputs=outputs))


MUTATIONS: dict[Mutation, str] = {
    swap_steps: "is read before it is filled",
    read_after_write: "names version",
    drop_step: "never filled",
    fill_another: "is filled twice",
    read_stale: "",
    drop_alias: "the plan says",
    drop_must_alias: "must_alias and the roots",
    become_own: "is the storage of",
    reuse_root: "reused",
    become_root: "is the storage of",
    change_version: "",
    shorten_life: "lives from",
    forget_life: "has no lifetime",
    keep_no_result: "buffer",
    return_another: "",
}
"""What one of the violations says: the fault itself is found, not only what follows from it."""


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
def test_broken_plans_are_found(mutate: Mutation, valid: list[ExecutionPlan]) -> None:
    made, missed = 0, []
    for seed, plan in enumerate(valid):
        for attempt in range(4):
            generator = np.random.default_rng((seed, attempt))
            mutant = mutate(plan, generator)
            if mutant is None:
                continue
            made += 1
            try:
                compiler.verify(mutant)
            except errors.PlanError as error:
                if any(MUTATIONS[mutate] in text for text in error.violations):
                    continue
            missed.append((seed, attempt))
    print(f"{mutate.__name__}: {made - len(missed)} of {made} found")
    assert made >= 15
    assert not missed


def test_a_layout_that_shares_too_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two values that are read by one step, and of two that are never alive together."""

    @model
    def program(cache: Mutable[FLOAT["m", 4]], x: FLOAT["n", 4], p: INT64[()]) -> Alias["cache"]:
        first = op.Relu(x)
        cache = kv.CacheUpdate(cache, first, p)
        second = op.Add(op.ReduceSum(cache, keepdims=0), first)
        cache = kv.CacheUpdate(cache, second, p)
        third = op.Mul(second, op.ReduceMax(cache, keepdims=0))
        return kv.CacheUpdate(cache, third, p)

    plan = compiler.plan(program)
    (layout,) = plan.layout(m=8, n=3)
    first, second, third = (v.slot for v in plan.values if v.storage is Storage.BUFFER)
    compiler.verify(plan, m=8, n=3)
    assert layout[first] == layout[third] != layout[second]  # what may share bytes does
    shared = {first: (0, 48), second: (47, 95), third: (128, 176)}
    monkeypatch.setattr(ExecutionPlan, "layout", lambda self, **dims: (shared,))
    with pytest.raises(errors.PlanError, match="share bytes") as caught:
        compiler.verify(plan, m=8, n=3)
    assert len(caught.value.violations) == 1


def test_all_violations_are_reported() -> None:
    plan = compiler.plan(busy)
    broken = dataclasses.replace(plan, must_alias=(), inplace_reuse=frozenset())
    with pytest.raises(errors.PlanError) as caught:
        compiler.verify(broken)
    assert len(caught.value.violations) == 2
