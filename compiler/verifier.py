"""Proves that a plan keeps its promises about storage, by following it step by step.

Its own code: it knows the plan's facts and nothing of how they were found, so a fault of the
planner does not repeat itself here. For every slot it tracks whose bytes the value can be, for
every root which version its storage holds, and for every block how long values are read.

A plan that passes has these properties: a slot is filled once, before it is read; a value is the
storage of a root if and only if the plan says so; every read of a root sees the version that the
name stands for; storage of roots is neither released nor reused; a value is not released, and its
buffer not given away, before its last read; buffers that share bytes are never alive together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from onnx_inplace.compiler import agreement, arena_proof, fused_proof
from onnx_inplace.compiler.arena_proof import Frame
from onnx_inplace.compiler.errors import PlanError
from onnx_inplace.compiler.fused import Fused
from onnx_inplace.compiler.steps import (
    Block,
    Branch,
    ExecutionPlan,
    Kernel,
    Repeat,
    ScanStep,
    Step,
    Storage,
    SubSession,
    View,
)

_Owner = tuple[str, str | int]
"""Whose bytes: ("root", name), ("buffer", slot), or ("new", slot) for any other storage."""


def verify(plan: ExecutionPlan, **dims: int) -> None:
    """Prove the plan; with all dimensions, the layout of its buffers for these too.

    Both are proved of what a run with few rows does instead, where there is such.

    Raises:
        errors.PlanError: with all violations.
    """
    violations = [*agreement.violations(plan)]
    filled: set[int] = set()
    for block, layout in ((plan.block, plan.layout), (plan.fused.block, plan.fused_layout)):
        if block is None:
            continue
        proof = _Proof(plan, block)
        proof.run()
        violations += proof.violations
        if dims:
            violations += arena_proof.shared(plan.values, proof.frames, layout(**dims))
        filled |= proof.seen
    if len(filled) < len(plan.values):
        violations.append(f"{len(plan.values) - len(filled)} slots are never filled")
    if violations:
        raise PlanError(violations)


@dataclasses.dataclass
class _State:
    """What holds at one point of a run.

    Attributes:
        owners: of each slot that is filled here: whose bytes its value can be.
        live: version of each root's content.
    """

    owners: dict[int, frozenset[_Owner]]
    live: dict[str, int]

    def copy(self) -> _State:
        return _State(dict(self.owners), dict(self.live))


class _Proof:
    def __init__(self, plan: ExecutionPlan, block: Block):
        self.plan, self.values, self.main = plan, plan.values, block
        self.violations: list[str] = []
        self.stack: list[Frame] = []
        self.home: dict[int, Frame] = {}  # the block that fills a slot
        self.seen: set[int] = set()  # slots that have been filled, anywhere
        self.frames: list[Frame] = []  # all blocks, in order of the program
        self.newest: dict[str, int] = {}

    def wrong(self, text: str) -> None:
        self.violations.append(text)

    def name(self, slot: int) -> str:
        return f"`{self.values[slot].name}` (slot {slot})"

    # -- following a run

    def run(self) -> None:
        """The whole plan."""
        state = _State({}, {})
        for slot in self.plan.constants:
            state.owners[slot] = frozenset({("new", slot)})
        for i in self.plan.inputs:
            state.owners[i.slot] = frozenset({("root", i.name)} if i.mutable else {("new", i.slot)})
            version = self.values[i.slot].version
            if i.mutable and version is not None:
                state.live[i.name] = self.newest[i.name] = version
        self.seen.update(state.owners)
        self.block(self.main, state, {})
        for output in self.plan.outputs:
            if any(kind == "buffer" for kind, _ in state.owners.get(output.slot, ())):
                self.wrong(f"output `{output.name}` is a buffer that the next run overwrites")

    def block(self, block: Block, state: _State, formals: Mapping[int, frozenset[_Owner]]) -> None:
        """Follow a block; ``formals`` are filled by the step around it in every round."""
        frame = Frame(block)
        self.stack.append(frame)
        self.frames.append(frame)
        for slot, owners in formals.items():
            self.fill(slot, owners, state)
        for index, step in enumerate(block.steps):
            frame.index = index
            self.step(step, state)
        frame.index = len(block.steps)
        for slot in block.outputs:
            self.read(slot, state)
        self.stack.pop()
        self.violations += arena_proof.short_lives(self.values, frame)

    def step(self, step: Step, state: _State) -> None:
        match step:
            case SubSession():
                for port in step.inputs:
                    self.read(port.slot, state)
                for port in step.outputs:
                    buffer = self.values[port.slot].storage is Storage.BUFFER
                    owner: _Owner = ("buffer" if buffer else "new", port.slot)
                    self.fill(port.slot, frozenset({owner}), state)
            case Kernel():
                self.kernel(step, state)
            case Fused():
                self.fused(step, state)
            case View():
                owners = self.read(step.source, state)
                if step.parameter is not None:
                    self.read(step.parameter, state)
                self.fill(step.output, owners, state)
                self.promise(step.output, step.root)
                if self.values[step.output].version != self.values[step.source].version:
                    self.wrong(f"{self.name(step.output)}, a view, is of another version")
            case Branch():
                self.branch(step, state)
            case Repeat() | ScanStep():
                self.repeat(step, state)

    def kernel(self, step: Kernel, state: _State) -> None:
        read = [None if slot is None else self.read(slot, state) for slot in step.inputs]
        aliased = {a.output_index: a.input_index for a in step.aliases}
        if len(aliased) != len(step.aliases) or set(aliased) != set(step.roots):
            self.wrong(f"{step.op_type}: aliases {sorted(aliased)}, roots {sorted(step.roots)}")
        for place, value in step.values.items():
            if self.values[place] != value:
                self.wrong(f"{step.op_type} is told something else of {self.name(place)}")
        written: list[str] = []
        for index, slot in enumerate(step.outputs):
            if index not in aliased:
                if slot is not None:
                    self.fill(slot, frozenset({("new", slot)}), state)
                continue
            port = aliased[index]
            owners = read[port] if 0 <= port < len(read) else None
            if slot is None or owners is None:
                self.wrong(f"{step.op_type}: output {index} cannot alias input {port}")
                continue
            root = step.roots.get(index)
            for other, theirs in enumerate(read):
                if other != port and theirs is not None and theirs & owners:
                    self.wrong(f"{step.op_type} writes what its input {other} reads")
            self.fill(slot, owners, state)
            self.promise(slot, root)
            if root in written:
                self.wrong(f"{step.op_type} writes `{root}` twice")
            if root is not None:
                written.append(root)
                self.advance(root, slot, state)

    def fused(self, step: Fused, state: _State) -> None:
        entering = {}
        for link in step.inputs:
            self.read(link.slot, state)
            root = self.values[link.slot].root
            if root is not None:
                entering[link.value] = root
        found = fused_proof.follow(step, entering)
        self.violations += found.violations
        left = set()
        for link in step.outputs:
            root = found.root.get(link.value)
            owner: _Owner = ("new", link.slot) if root is None else ("root", root)
            if root is None and self.values[link.slot].storage is Storage.BUFFER:
                owner = ("buffer", link.slot)
            self.fill(link.slot, frozenset({owner}), state)
            self.promise(link.slot, root)
            if root in found.written and link.value in found.live[root]:
                left.add(root)
                self.advance(root, link.slot, state)
        for root in sorted(found.written - left):
            self.wrong(f"`{root}` is written in a fused step and leaves it under no name")

    def branch(self, step: Branch, state: _State) -> None:
        self.read(step.condition, state)
        sides = []
        for block in (step.then, step.otherwise):
            side = state.copy()
            self.block(block, side, {})
            sides.append((block, side))
        changed: set[str] = set()
        for _, side in sides:
            changed |= {r for r, version in side.live.items() if version != state.live.get(r)}
        for k, slot in enumerate(step.outputs):
            owners: frozenset[_Owner] = frozenset()
            for block, side in sides:
                if k < len(block.outputs):
                    result = block.outputs[k]
                    owners |= side.owners.get(result, frozenset())
                    self.same_root(slot, result)
            self.leave(slot, owners, state)
        self.results(step.outputs, step.roots, changed, state)

    def repeat(self, step: Repeat | ScanStep, state: _State) -> None:
        formals: dict[int, frozenset[_Owner]] = {}
        first = 0
        if isinstance(step, Repeat):
            for slot in (step.count, step.condition):
                if slot is not None:
                    self.read(slot, state)
            formals = {s: frozenset({("new", s)}) for s in (step.number, step.going)}
            first = 1
        initial = [self.read(slot, state) for slot in step.initial]
        if isinstance(step, ScanStep):
            for whole in step.scanned:
                self.read(whole.slot, state)
            formals = {s: frozenset({("new", s)}) for s in step.elements}
        inside = state.copy()
        entry: dict[str, int] = {}
        for slot, source, owners in zip(step.carried, step.initial, initial, strict=True):
            formals[slot] = owners
            self.same_root(slot, source)
            value = self.values[slot]
            if value.root is None or value.version is None:
                continue
            if entry.setdefault(value.root, value.version) != value.version:
                self.wrong(f"{self.name(slot)} enters with a version of its own")
        for root, version in entry.items():
            if version != state.live.get(root):
                self.newer(root, version)
                inside.live[root] = version
        before = dict(inside.live)
        self.block(step.body, inside, formals)
        results = step.body.outputs[first : first + len(step.carried)]
        changed = {r for r, version in inside.live.items() if version != before.get(r)}
        for root in changed:
            if before.get(root) == state.live.get(root):
                self.wrong(f"a body writes `{root}`, which it does not carry")
        changed |= {root for root in entry if before[root] != state.live.get(root)}
        for k, (slot, result) in enumerate(zip(step.outputs, results, strict=False)):
            self.same_root(slot, result)
            self.same_root(step.carried[k], result)
            owners = inside.owners.get(result, frozenset())
            self.leave(slot, owners | initial[k], state)
        stacked = step.body.outputs[first + len(step.carried) :]
        for stack, result in zip(step.stacked, stacked, strict=False):
            self.kept_for_later(result, inside)
            self.fill(stack.slot, frozenset({("new", stack.slot)}), state)
        self.results(step.outputs, step.roots, changed, state)

    # -- the rules

    def read(self, slot: int, state: _State) -> frozenset[_Owner]:
        """A step reads a value: it is there, is what it is called, and is alive."""
        owners = state.owners.get(slot)
        if owners is None:
            self.wrong(f"{self.name(slot)} is read before it is filled")
            return frozenset()
        value = self.values[slot]
        if value.root is not None and value.version != state.live.get(value.root):
            self.wrong(
                f"{self.name(slot)} names version {value.version} of `{value.root}`, "
                f"which holds version {state.live.get(value.root)}"
            )
        self.touch(slot)
        for kind, owner in owners:
            if kind == "buffer" and isinstance(owner, int):
                self.touch(owner)
        return owners

    def touch(self, slot: int) -> None:
        """The value of ``slot``, or its buffer, is needed where the run stands."""
        home = self.home.get(slot)
        if home is None:
            return
        if home not in self.stack:
            self.wrong(f"the buffer of {self.name(slot)} is read outside of its block")
        home.reads[slot] = max(home.reads.get(slot, -1), home.index)

    def fill(self, slot: int, owners: frozenset[_Owner], state: _State) -> None:
        """A step fills a slot."""
        if slot in self.seen:
            self.wrong(f"{self.name(slot)} is filled twice")
        self.seen.add(slot)
        frame = self.stack[-1]
        if frame.index >= 0:
            frame.fills[slot] = frame.index
            self.home[slot] = frame
        state.owners[slot] = owners
        value = self.values[slot]
        roots = {name for kind, name in owners if kind == "root"}
        if roots != ({value.root} - {None}) or (roots and len(owners) > 1):
            self.wrong(
                f"{self.name(slot)} is the storage of {sorted(map(str, roots))}, "
                f"the plan says {value.root}"
            )
        if value.storage is Storage.BUFFER and ("buffer", slot) not in owners:
            self.wrong(f"{self.name(slot)} has a buffer that nothing fills")

    def leave(self, slot: int, owners: frozenset[_Owner], state: _State) -> None:
        """A result leaves a block under the name ``slot``."""
        for kind, owner in owners:
            if kind == "buffer" and isinstance(owner, int) and owner not in state.owners:
                self.wrong(f"{self.name(slot)} is a buffer of a block that has ended")
        self.fill(slot, owners, state)

    def kept_for_later(self, slot: int, state: _State) -> None:
        """Elements of all rounds are held until the last: none may be written again."""
        for kind, owner in state.owners.get(slot, ()):
            if kind == "buffer":
                self.wrong(f"{self.name(slot)} is stacked, but its buffer is written every round")
            if kind == "root":
                self.wrong(f"{self.name(slot)}, storage of `{owner}`, is stacked")

    def promise(self, slot: int, root: str | None) -> None:
        if self.values[slot].root != root:
            self.wrong(f"a step promises {self.name(slot)} as {root}, not {self.values[slot].root}")

    def same_root(self, slot: int, other: int) -> None:
        if self.values[slot].root != self.values[other].root:
            self.wrong(f"{self.name(slot)} and {self.name(other)} are of different roots")

    def results(
        self,
        outputs: Sequence[int],
        roots: Mapping[int, str],
        changed: Iterable[str],
        state: _State,
    ) -> None:
        """The outputs of a control step: what was written leaves as a new version."""
        if {k: self.values[slot].root for k, slot in enumerate(outputs)} != {
            k: roots.get(k) for k in range(len(outputs))
        }:
            self.wrong(f"a step promises the roots {dict(roots)}, its values have others")
        written = set(changed)
        named: dict[str, int] = {}
        for slot in outputs:
            value = self.values[slot]
            if value.root is None:
                continue
            before = named.setdefault(value.root, slot)
            if self.values[before].version != value.version:
                self.wrong(f"{self.name(slot)} and {self.name(before)} differ in version")
        for root, slot in named.items():
            if root in written:
                self.advance(root, slot, state)
            elif self.values[slot].version != state.live.get(root):
                self.advance(root, slot, state)  # a new name for what nobody has written
        for root in sorted(written - set(named)):
            self.wrong(f"`{root}` is written in a block and leaves it under no name")

    def advance(self, root: str, slot: int, state: _State) -> None:
        version = self.values[slot].version
        if version is None:
            return
        self.newer(root, version)
        state.live[root] = version

    def newer(self, root: str, version: int) -> None:
        """Versions of one root grow in the order of the program: no two contents share one."""
        if version <= self.newest.get(root, -1):
            self.wrong(f"version {version} of `{root}` comes after {self.newest[root]}")
        self.newest[root] = max(version, self.newest.get(root, -1))
