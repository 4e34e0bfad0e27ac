"""The history of every storage: which name holds which version, and which step made it.

A lane is what happens to one root from the beginning of a block to its end. Control flow that
touches the root holds a lane for each branch or body.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator
from typing import TypeAlias

from onnx_inplace.compiler import steps
from onnx_inplace.page import folding
from onnx_inplace.page.facts import Group, Kind, Part, Ref, Row, rows


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    """A name of a version.

    Attributes:
        name: of the value.
        shape: where it is not that of the root.
        view: the operator that made it of another name of the version.
    """

    name: str
    shape: str
    view: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """One version of the content: its names, and the steps that read it."""

    version: int
    names: tuple[Name, ...]
    readers: tuple[tuple[str, str], ...]  # number and operator


@dataclasses.dataclass(frozen=True, slots=True)
class Write:
    """The step that makes the next version, in the same bytes."""

    number: str
    operator: str
    calls: tuple[str, ...]
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class Nested:
    """Control flow that touches the storage; ``parts``: title and lane."""

    number: str
    operator: str
    calls: tuple[str, ...]
    source: str
    parts: tuple[tuple[str, Lane], ...]


Item: TypeAlias = "State | Write | Nested"
Lane: TypeAlias = "tuple[Item, ...]"


@dataclasses.dataclass(frozen=True, slots=True)
class Storage:
    """One root.

    Attributes:
        root: the graph input that owns the storage.
        type: element type and shape.
        outputs: results of the model that are this storage.
        lane: what happens to it.
    """

    root: str
    type: str
    outputs: tuple[str, ...]
    lane: Lane


def storages(plan: steps.ExecutionPlan, program: Part) -> tuple[Storage, ...]:
    """The mutable inputs of a plan, in their order."""
    shapes = {value.name: _shape(value) for value in plan.values}
    outputs: dict[str, list[str]] = {}
    for output in plan.outputs:
        if output.root is not None:
            outputs.setdefault(output.root, []).append(output.name)
    touching = _touching(program)
    found = []
    for port in plan.inputs:
        if port.mutable:
            value = plan.values[port.slot]
            dtype = "" if value.dtype is None else value.dtype.name
            walk = _Walk(port.name, shapes, touching.get(port.name, frozenset()))
            lane = walk.part(program, 0)
            results = tuple(outputs.get(port.name, ()))
            kind = f"{dtype}{_shape(value)}" if value.pages is None else str(value.pages)
            found.append(Storage(port.name, kind, results, lane))
    return tuple(found)


def signature(storage: Storage) -> Hashable:
    """What two storages have in common that differ in numbers only."""
    return folding.anonymous(storage.root), storage.type, len(storage.outputs), _sign(storage.lane)


def _sign(lane: Lane) -> Hashable:
    def one(item: Item) -> Hashable:
        match item:
            case State():
                views = tuple(name.view for name in item.names)
                return "state", views, tuple(operator for _, operator in item.readers)
            case Write():
                return "write", item.operator, item.calls
            case Nested():
                parts = tuple((title, _sign(inner)) for title, inner in item.parts)
                return "nested", item.operator, item.calls, parts

    return tuple(map(one, lane))


def _touching(program: Part) -> dict[str, frozenset[str]]:
    """Numbers of the steps that name a root, or hold one that does, by root."""
    found: dict[str, set[str]] = {}
    for row in rows(program.entries):
        returned = (ref for part in row.parts for ref in part.returns)
        for ref in (*row.makes, *row.reads, *returned):
            if ref.root is not None:
                names = found.setdefault(ref.root, set())
                words = row.number.split(".")
                names.update(".".join(words[: k + 1]) for k in range(len(words)))
    return {root: frozenset(numbers) for root, numbers in found.items()}


def _called(
    entries: Iterable[object], calls: tuple[str, ...]
) -> Iterator[tuple[Row, tuple[str, ...]]]:
    """The steps of a block, each with the functions that it stands in."""
    for entry in entries:
        if isinstance(entry, Group):
            yield from _called(entry.entries, (*calls, entry.function))
        elif isinstance(entry, Row):
            yield entry, calls


class _Walk:
    def __init__(self, root: str, shapes: dict[str, str], touching: frozenset[str]):
        self.root, self.shapes, self.touching = root, shapes, touching

    def names(self, refs: Iterable[Ref], view: str = "") -> list[Name]:
        return [Name(ref.name, self.shape(ref.name), view) for ref in refs if ref.root == self.root]

    def shape(self, name: str) -> str:
        found = self.shapes.get(name, "")
        return "" if found == self.shapes.get(self.root) else found

    def lane(self, part: Part, opening: Iterable[Ref], version: int) -> Lane:
        items: list[Item] = [State(version, tuple(self.names(opening)), ())]
        for row, calls in _called(part.entries, ()):
            if row.number in self.touching:
                self.step(row, calls, items)
        return tuple(items)

    def step(self, row: Row, calls: tuple[str, ...], items: list[Item]) -> None:
        made = [ref for ref in row.makes if ref.root == self.root]
        if row.kind is Kind.CONTROL:
            self.nested(row, calls, made, items)
        elif row.kind is Kind.WRITE and self.root in row.writes:
            items.append(Write(row.number, row.operator, calls, row.source))
            items.append(State(made[0].version or 0, tuple(self.names(made)), ()))
        elif row.kind is Kind.VIEW and made:
            self.extend(items, self.names(made, row.operator), ())
        else:
            self.extend(items, [], ((row.number, row.operator),))

    def nested(self, row: Row, calls: tuple[str, ...], made: list[Ref], items: list[Item]) -> None:
        live = self.version(items)
        parts = tuple((part.title, self.part(part, live)) for part in row.parts)
        items.append(Nested(row.number, row.operator, calls, row.source, parts))
        if made:
            items.append(State(made[0].version or 0, tuple(self.names(made)), ()))

    def part(self, part: Part, live: int) -> Lane:
        """A branch sees the version around it; a body has one of its own, which it carries."""
        formals = [ref for ref in part.takes if ref.root == self.root]
        version = formals[0].version if formals else None
        return self.lane(part, formals, live if version is None else version)

    def version(self, items: list[Item]) -> int:
        return next(item.version for item in reversed(items) if isinstance(item, State))

    def extend(
        self, items: list[Item], names: list[Name], readers: tuple[tuple[str, str], ...]
    ) -> None:
        """More of the version that is live."""
        at = max(k for k, item in enumerate(items) if isinstance(item, State))
        state = items[at]
        assert isinstance(state, State)
        items[at] = State(state.version, (*state.names, *names), (*state.readers, *readers))


def _shape(value: steps.Value) -> str:
    if value.shape is None or not any(value.shape):
        return ""
    return f"[{', '.join('?' if d is None else str(d) for d in value.shape)}]"
