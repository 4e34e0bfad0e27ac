"""The steps of a plan as a reader sees them: numbered, named, grouped by the calls of the author.

Knows plans and nothing of how they are drawn.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias, assert_never

import onnx

from onnx_inplace.compiler import steps
from onnx_inplace.compiler.calls import Call
from onnx_inplace.compiler.fused import Fused


class Kind(enum.Enum):
    """What a step is, in one word."""

    LIBRARY = "library"  # standard operators, for onnxruntime
    WRITE = "write"  # a kernel that writes storage of the caller
    KERNEL = "kernel"  # a kernel that writes none
    VIEW = "view"
    CONTROL = "control"


@dataclasses.dataclass(frozen=True, slots=True)
class Ref:
    """A value, and whose storage in which version it is; versions of one root count from 0."""

    name: str
    root: str | None
    version: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One step.

    Attributes:
        number: of the step, unique in the plan: ``7``, in a body ``7.2``.
        kind: what it is.
        operator: what it does, in the words of ONNX.
        detail: what more there is to say of it.
        makes: values that it fills.
        reads: values that it reads, each once.
        writes: roots that it writes.
        source: the author's line, or nothing.
        place: its block, counted in the order of the program, and its index there.
        parts: branches or body.
    """

    number: str
    kind: Kind
    operator: str
    detail: str
    makes: tuple[Ref, ...]
    reads: tuple[Ref, ...]
    writes: tuple[str, ...]
    source: str
    place: tuple[int, int]
    parts: tuple[Part, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Steps that come from one call of a function of the author's."""

    function: str
    source: str
    entries: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A branch or a body.

    Attributes:
        title: which one.
        block: as ``Row.place`` counts.
        takes: parameters of the body.
        entries: what stands in it.
        returns: its results.
    """

    title: str
    block: int
    takes: tuple[Ref, ...]
    entries: tuple[Entry, ...]
    returns: tuple[Ref, ...]


Entry: TypeAlias = "Row | Group"


def program(plan: steps.ExecutionPlan) -> Part:
    """All steps of a plan."""
    return _Reader(plan).part("", plan.block, "", [port.slot for port in plan.inputs])


def rows(entries: Iterable[Entry]) -> Iterator[Row]:
    """All steps among entries, those of their parts behind each."""
    for entry in entries:
        if isinstance(entry, Group):
            yield from rows(entry.entries)
        else:
            yield entry
            for part in entry.parts:
                yield from rows(part.entries)


class _Reader:
    def __init__(self, plan: steps.ExecutionPlan):
        self.values = plan.values
        self.versions = _versions(plan.values)
        self.blocks = itertools.count()

    def part(
        self,
        title: str,
        block: steps.Block,
        prefix: str,
        takes: Iterable[int] = (),
        first: int = 1,
    ) -> Part:
        number = next(self.blocks)
        found = [
            self.row(step, f"{prefix}{first + index}", (number, index))
            for index, step in enumerate(block.steps)
        ]
        entries = tuple(_grouped(found, block.calls, 0))
        return Part(title, number, self.refs(takes), entries, self.refs(block.outputs))

    def refs(self, slots: Iterable[int | None]) -> tuple[Ref, ...]:
        found = dict.fromkeys(slot for slot in slots if slot is not None)
        values = (self.values[slot] for slot in found)
        return tuple(Ref(v.name, v.root, self.versions.get((v.root, v.version))) for v in values)

    def row(self, step: steps.Step, number: str, place: tuple[int, int]) -> Row:
        match step:
            case steps.SubSession():
                nodes = onnx.ModelProto.FromString(step.model).graph.node
                types = sorted({node.op_type for node in nodes})
                count = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
                makes, reads = (
                    self.refs(port.slot for port in ports) for ports in (step.outputs, step.inputs)
                )
                detail = f"{count}: {', '.join(types)}"
                return Row(number, Kind.LIBRARY, "onnxruntime", detail, makes, reads, (), "", place)
            case steps.Kernel():
                roots = tuple(dict.fromkeys(step.roots.values()))
                return Row(
                    number,
                    Kind.WRITE if roots else Kind.KERNEL,
                    step.op_type,
                    step.domain or "ai.onnx",
                    self.refs(step.outputs),
                    self.refs(step.inputs),
                    roots,
                    _source(step.location),
                    place,
                )
            case steps.View():
                makes, reads = self.refs([step.output]), self.refs([step.source, step.parameter])
                source = _source(step.location)
                return Row(number, Kind.VIEW, step.op_type, "", makes, reads, (), source, place)
            case steps.Branch():
                then = self.part("then", step.then, f"{number}.")
                otherwise = self.part(
                    "else", step.otherwise, f"{number}.", (), 1 + len(step.then.steps)
                )
                return self.control(
                    step, "If", number, place, step.outputs, [step.condition], (then, otherwise)
                )
            case steps.Repeat():
                reads_ = (step.count, step.condition, *step.initial)
                makes_ = (*step.outputs, *(s.slot for s in step.stacked))
                takes = (step.number, step.going, *step.carried)
                body = self.part("body", step.body, f"{number}.", takes)
                return self.control(step, "Loop", number, place, makes_, reads_, (body,))
            case steps.ScanStep():
                reads_ = (*step.initial, *(s.slot for s in step.scanned))
                makes_ = (*step.outputs, *(s.slot for s in step.stacked))
                takes = (*step.carried, *step.elements)
                body = self.part("body", step.body, f"{number}.", takes)
                return self.control(step, "Scan", number, place, makes_, reads_, (body,))
            case Fused():
                makes, reads = (
                    self.refs(link.slot for link in links) for links in (step.outputs, step.inputs)
                )
                return Row(
                    number, Kind.KERNEL, "fused", f"{step.nodes} nodes", makes, reads, (), "", place
                )
            case _:
                assert_never(step)

    def control(
        self,
        step: steps.Branch | steps.Repeat | steps.ScanStep,
        operator: str,
        number: str,
        place: tuple[int, int],
        makes: Iterable[int | None],
        reads: Iterable[int | None],
        parts: tuple[Part, ...],
    ) -> Row:
        inner = (row for part in parts for row in rows(part.entries))
        written = tuple(dict.fromkeys(root for row in inner for root in row.writes))
        return Row(
            number,
            Kind.CONTROL,
            operator,
            "",
            self.refs(makes),
            self.refs(reads),
            written,
            _source(step.location),
            place,
            parts,
        )


def _versions(values: Iterable[steps.Value]) -> dict[tuple[str | None, int | None], int]:
    """The plan counts the versions of all roots together; readers look at one root."""
    found = sorted({(v.root, v.version) for v in values if v.root and v.version is not None})
    by_root = itertools.groupby(found, lambda pair: pair[0])
    return {pair: number for _, pairs in by_root for number, pair in enumerate(pairs)}


def _grouped(
    found: Sequence[Row], calls: Sequence[tuple[Call, ...]], depth: int
) -> Iterator[Entry]:
    """Neighbours that come from one call, as one entry."""
    pairs = list(zip(found, calls, strict=True))
    for call, run in itertools.groupby(
        pairs, lambda pair: pair[1][depth] if depth < len(pair[1]) else None
    ):
        members = list(run)
        if call is None:
            yield from (row for row, _ in members)
            continue
        inner = _grouped([row for row, _ in members], [calls for _, calls in members], depth + 1)
        yield Group(call.function, _source(call.location), tuple(inner))


def _source(location: object) -> str:
    return "" if location is None else str(location)
