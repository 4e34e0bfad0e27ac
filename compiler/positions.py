"""Will every write fit? Decides how that is found out before the first write of a run.

Each requirement of ``conditions`` becomes one of four things. *Static*: it compares sizes only, and
is decided once for each combination of input dimensions. *Direct*: it bounds an integer input of
the graph, or one plus a constant, outside of all branches and loops: a comparison of two numbers.
*Sliced*: everything else that can be known; the backward slice of what is bounded, with If, Loop
and Scan as they are and every write replaced by its check, is an ordinary ONNX model that writes
nothing (``slicing``). *Late*: it depends on what this run writes, and is checked by the step
itself.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnx_inplace.compiler import (
    check_nodes,
    conditions,
    loader,
    merging,
    page_checks,
    sizes,
    slicing,
)
from onnx_inplace.compiler.conditions import Kind, Linear, Requirement
from onnx_inplace.compiler.control import bodies, is_control
from onnx_inplace.compiler.errors import ContractError, Finding
from onnx_inplace.compiler.knowledge import Knowledge
from onnx_inplace.compiler.page_checks import PageChecks
from onnx_inplace.compiler.sizes import Size


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """What a violation is reported as, and the bounds where sizes fix them.

    Attributes:
        kind: what the bounded numbers are.
        root: name of the mutable parameter.
        operator: that requires it.
        port: name of what is bounded.
        rows: whether the numbers stand one for each row of a batch.
        location: the author's line, where it is known.
        low: one bound, or one for each element of the last axis; empty where a run computes them.
        high: likewise.
        length: tokens from a position on; None where a run computes it.
        capacity: as ``low``.
    """

    kind: Kind
    root: str
    operator: str
    port: str
    rows: bool
    location: str | None
    low: tuple[Size, ...]
    high: tuple[Size, ...]
    length: Size | None
    capacity: tuple[Size, ...]

    def __str__(self) -> str:
        what = {Kind.POSITION: f"{self.port} of", Kind.LENGTH: f"{self.port} of"}.get(
            self.kind, f"shape of {self.port} for"
        )
        bounds = ""
        if self.low and self.kind is not Kind.SHAPE:
            low, high = (", ".join(map(str, bound)) for bound in (self.low, self.high))
            bounds = f": {low} <= {self.port} <= {high}"
        return f"{self.operator}: {what} `{self.root}`{bounds}"


@dataclasses.dataclass(frozen=True, slots=True)
class Static:
    """Sizes that are bounded by sizes."""

    bound: Bound
    sizes: tuple[Size, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Direct:
    """Elements of an input, plus ``offset``, are bounded by sizes."""

    bound: Bound
    input: str
    offset: Size


@dataclasses.dataclass(frozen=True, slots=True)
class Sliced:
    """A model that finds the first violation, in program order, of all of ``bounds``.

    Attributes:
        model: serialized ModelProto with one output, int64[5]: number of the bound, from 1 on (0:
            none is
            violated), then position, length, capacity, row.
        inputs: inputs of the graph that it reads, mutable ones as they are before the run.
        sizes: further inputs, int64 vectors: name and content.
        bounds: what a number means.
    """

    model: bytes
    inputs: tuple[str, ...]
    sizes: tuple[tuple[str, tuple[Size, ...]], ...]
    bounds: tuple[Bound, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Late:
    """What the step itself must check, and why."""

    bound: Bound
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Checks:
    """What must hold before a run writes, in program order; ``pages``: of page tables."""

    static: tuple[Static, ...]
    direct: tuple[Direct, ...]
    sliced: Sliced | None
    late: tuple[Late, ...]
    pages: PageChecks | None = None


_built: weakref.WeakKeyDictionary[loader.Loaded, Checks] = weakref.WeakKeyDictionary()


def build(loaded: loader.Loaded) -> Checks:
    """The checks of a model whose calls are inlined: made once, for the plan and for sessions."""
    checks = _built.get(loaded)
    if checks is None:
        checks = _built[loaded] = _Builder(loaded).run()
    return checks


class _Builder:
    def __init__(self, loaded: loader.Loaded):
        self.loaded = loaded
        self.model, self.aliases, self.mutable = loaded.model, loaded.aliases, loaded.mutable
        graph = loaded.model.graph
        self.extents = loaded.extents
        self.knowledge = Knowledge(graph, self.aliases.root, self.mutable)
        self.owner = self.aliases.owner
        self.static: dict[object, Static] = {}
        self.direct: dict[object, Direct] = {}
        self.late: list[Late] = []
        self.sites: list[check_nodes.Site] = []
        self.bounds: list[Bound] = []
        self.equalities: dict[ir.Node, list[merging.Equality]] = {}
        for needed in self.aliases.equalities:
            if needed.node is not None and not conditions.covers(needed.node):
                self.equalities.setdefault(needed.node, []).append(needed)

    def run(self) -> Checks:
        self.block(self.model.graph, ())
        for needed in self.returned():
            self.decide(conditions.equality(needed, self.aliases.root), ())
        for value, one, other in self.extents.agreements:
            self.agree(value, one, other)
        sliced = None
        if self.sites:
            model = slicing.Slicer(
                self.model,
                self.aliases.root,
                self.knowledge,
                self.sites,
                check_nodes.CheckWriter(),
            )
            proto = model.run()
            sliced = Sliced(
                proto.SerializeToString(), model.inputs, model.sizes, tuple(self.bounds)
            )
        return Checks(
            tuple(self.static.values()),
            tuple(self.direct.values()),
            sliced,
            tuple(self.late),
            page_checks.build(self.loaded, self.extents, self.knowledge),
        )

    def returned(self) -> Iterator[merging.Equality]:
        """What comes back as a root has its shape. What an author calls the axes proves nothing."""
        for value in dict.fromkeys(self.model.graph.outputs):
            root = self.aliases.root.get(value)
            if root is not None and root is not value and root.shape is not None:
                for axis in range(len(root.shape)):
                    yield merging.Equality(None, value, axis, root, axis)

    def agree(self, value: ir.Value, one: Size, other: Size) -> None:
        """Two branches give one storage shapes that look different: they must be the same."""
        root = str(self.aliases.root[value].name)
        place = _location(value.producer())
        size = (other,)
        bound = Bound(Kind.SHAPE, root, "If", str(value.name), False, place, size, size, 0, size)
        self.static.setdefault((size, size, (one,)), Static(bound, (one,)))

    def block(self, graph: ir.Graph, around: tuple[ir.Node, ...]) -> None:
        for node in graph:
            for r in conditions.requirements(node, self.owner, self.mutable):
                self.decide(r, around)
            for needed in self.equalities.pop(node, ()):
                self.decide(conditions.equality(needed, self.aliases.root), around)
            if is_control(node):
                for body in bodies(node):
                    self.block(body, (*around, node))

    def decide(self, r: Requirement, around: tuple[ir.Node, ...]) -> None:
        """Put a requirement where it is checked earliest and at the least cost."""
        low, high, capacity = (self.sizes(terms) for terms in (r.low, r.high, r.capacity))
        length = self.size(r.length)
        bound = Bound(
            r.kind,
            r.root,
            "Alias" if r.node is None else r.node.op_type,
            r.port,
            isinstance(r.subject, ir.Value) and _rank(r.subject) == 1,
            _location(r.node),
            low or (),
            high or (),
            length,
            capacity or (),
        )
        known = low is not None and high is not None and capacity is not None and length is not None
        numbers = self.numbers(r) if known else None
        if known and numbers is not None and numbers == low == high:
            return  # two shapes are the same, whatever the dimensions are
        if known and not around:
            if numbers is not None:
                self.static.setdefault((low, high, numbers), Static(bound, numbers))
                return
            direct = self.input(r)
            if direct is not None:
                name, offset = direct
                key = (r.kind, name, offset, low, high, length)
                self.direct.setdefault(key, Direct(bound, name, offset))
                return
        reason = self.why_unknown(r, around)
        if reason is not None and (r.node is None or is_control(r.node)):
            # No step could check it before it matters: it holds in every run, or there is none.
            if not known or numbers is None:
                raise ContractError([_unproven(r)])
            self.static.setdefault((low, high, numbers), Static(bound, numbers))
            return
        if reason is not None:
            self.late.append(Late(bound, reason))
            return
        self.bounds.append(bound)
        self.sites.append(self.site(r, len(self.bounds)))

    def site(self, r: Requirement, number: int) -> check_nodes.Site:
        """What the slice is told: sizes where they are known, else what to measure."""

        def vector(terms: Sequence[Linear]) -> check_nodes.Vector:
            return tuple(self.partial(term) for term in terms)

        subject = r.subject if isinstance(r.subject, ir.Value) else vector(r.subject)
        assert r.node is not None
        return check_nodes.Site(
            r.node,
            number,
            subject,
            vector((r.offset,)),
            vector(r.low),
            vector(r.high),
            vector((r.length,)),
            vector(r.capacity),
        )

    def numbers(self, r: Requirement) -> tuple[Size, ...] | None:
        """What is bounded, when sizes fix it."""
        if not isinstance(r.subject, ir.Value):
            return self.sizes(tuple(r.subject))
        number, offset = self.extents.integer(r.subject), self.size(r.offset)
        if number is None or offset is None:
            return None
        return (sizes.operation("+", number, offset),)

    def input(self, r: Requirement) -> tuple[str, Size] | None:
        """What is bounded, as an input plus a number."""
        offset = self.size(r.offset)
        found = self.extents.affine(r.subject) if isinstance(r.subject, ir.Value) else None
        if found is None or offset is None:
            return None
        value, number = found
        return str(value.name), sizes.operation("+", number, offset)

    def partial(self, term: Linear) -> Size | check_nodes.Measured:
        """A term with all sizes that are known put in."""
        total: Size = term.constant
        unknown = []
        for factor, value, axis in sorted(term.axes, key=lambda t: -t[0]):
            size = self.extents.size(value, axis)
            if size is None:
                unknown.append((factor, value, axis))
                continue
            if abs(factor) != 1:
                size = sizes.operation("*", abs(factor), size)
            if total == 0 and factor > 0:
                total = size
            else:
                total = sizes.operation("+" if factor > 0 else "-", total, size)
        return check_nodes.Measured(total, tuple(unknown)) if unknown else total

    def size(self, term: Linear) -> Size | None:
        found = self.partial(term)
        return None if isinstance(found, check_nodes.Measured) else found

    def sizes(self, terms: Sequence[Linear]) -> tuple[Size, ...] | None:
        found = [self.size(term) for term in terms]
        return None if None in found else tuple(size for size in found if size is not None)

    def why_unknown(self, r: Requirement, around: tuple[ir.Node, ...]) -> str | None:
        """The reason why a requirement cannot be checked before the run."""
        if r.node is None:
            return "it compares with a size that a run computes"
        for node in around:
            reason = self.knowledge.why_unsteered(node)
            if reason is not None:
                return reason
        if isinstance(r.subject, ir.Value):
            reason = self.knowledge.why_unknown(r.subject)
            if reason is not None:
                return reason
        for value in self.site(r, 0).measured():
            reason = self.knowledge.why_unknown(value)
            if reason is not None:
                return f"the shape of `{value.name}` is not known: {reason}"
        return None


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _location(node: ir.Node | None) -> str | None:
    return None if node is None else node.metadata_props.get("onnx_inplace.source")


def _unproven(r: Requirement) -> Finding:
    """E102: a view comes back as its root, or from a body, in a shape that nobody knows."""
    message = f"`{r.port}` is not known to have the shape that it must have as `{r.root}`."
    return Finding(
        "E102", message, None, f"Give it the shape of `{r.root}` by operators, not data."
    )
