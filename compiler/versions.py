"""The state of the analysis: who names which version of which root, and what has been found.

Decides nothing about operators or control flow; those are in ``operations`` and ``alias``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from onnx_inplace.compiler import classes, diagnosis, merging
from onnx_inplace.compiler.classes import Block, Restriction, Summary
from onnx_inplace.compiler.contract import OutputAlias
from onnx_inplace.compiler.errors import Finding, Location
from onnx_inplace.compiler.paged_types import is_paged


@dataclasses.dataclass
class AliasMap:
    """What the analysis found. Only names of mutable roots stand in it, but where it says so.

    Attributes:
        root: the parameter whose storage a value is.
        version: of the value. Values of one root and version hold the same content; numbers grow in
            program order.
        pages: the parameter whose pages a paged cache is, READ_ONLY ones included: unlike arrays
            they are never copied, so that every paged cache is a parameter's.
        source: the value it was made from: the node's own input, for If the root, for a parameter
            of a body the initial value. A root has none.
        node: aliases of a node by its ports, calls, Loop and Scan included. An If has no port.
        result: aliases of the whole graph or function, as declared.
        stateful: control nodes whose bodies carry facts: the plan runs them.
        equalities: dimensions that must be equal and are not known to be: conditions of a run.
        summary: what callers have to know, READ_ONLY parameters that come back included.
        findings: broken rules in the order of the program. If there is one, the rest is not whole.
    """

    root: dict[ir.Value, ir.Value] = dataclasses.field(default_factory=dict)
    version: dict[ir.Value, int] = dataclasses.field(default_factory=dict)
    pages: dict[ir.Value, ir.Value] = dataclasses.field(default_factory=dict)
    source: dict[ir.Value, ir.Value] = dataclasses.field(default_factory=dict)
    node: dict[ir.Node, list[OutputAlias]] = dataclasses.field(default_factory=dict)
    result: list[OutputAlias] = dataclasses.field(default_factory=list)
    stateful: dict[ir.Node, None] = dataclasses.field(default_factory=dict)
    equalities: list[merging.Equality] = dataclasses.field(default_factory=list)
    summary: Summary = dataclasses.field(default_factory=lambda: Summary((), ()))
    findings: list[Finding] = dataclasses.field(default_factory=list)

    @property
    def owner(self) -> Mapping[ir.Value, ir.Value]:
        """The parameter of every value in ``root`` or ``pages``."""
        return {**self.root, **self.pages}


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where the content of a value is.

    Attributes:
        root: whose storage it is in.
        version: of that content.
        reshaped: a view under another shape than the root's.
        sliced: only a part of the storage, which a Scan hands to its body.
    """

    root: ir.Value
    version: int
    reshaped: bool = False
    sliced: bool = False

    def shares(self, other: Place) -> bool:
        """Whether both are the same storage."""
        return self.root is other.root and self.sliced == other.sliced


class Versions:
    """Names, versions, scopes and findings.

    Attributes:
        place: of every value that is the storage of a parameter, READ_ONLY ones included.
        live: the live version of every root, where the walk stands.
        unknown: values that depend on a finding: nothing is said about them.
        tainted: roots whose last version is not known because of a finding.
        restrictions: what READ_ONLY roots must not be given as (for callers of a function).
    """

    def __init__(
        self,
        graph: Block,
        mutable: Sequence[ir.Value],
        callee: classes.Callee,
        locate: diagnosis.Locate,
        declared: classes.Declared,
        returned: Location | None,
    ) -> None:
        self.graph, self.mutable = graph, dict.fromkeys(mutable)
        self.declared = declared
        self.classes = classes.Classes(graph, mutable, callee, declared)
        self.map = AliasMap()
        self.say = diagnosis.Diagnosis(locate, returned)
        self.place: dict[ir.Value, Place] = {}
        self.live: dict[ir.Value, int] = {}
        self.unknown: set[ir.Value] = set()
        self.tainted: set[ir.Value] = set()
        self.restrictions: dict[ir.Value, Restriction] = {}
        self._count = 0
        self._entries: list[dict[ir.Value, int]] = []  # per open block: versions before it
        self._names: dict[str, None] = {}
        self._scopes: list[int] = []  # per open block: how many names there were

    # -- findings

    def find(self, finding: Finding, *taints: ir.Value) -> None:
        """Report a fault; which name of the roots ``taints`` is the last one is unknown now."""
        self.map.findings.append(finding)
        self.tainted.update(taints)

    def conflict(self, roots: Sequence[ir.Value], finding: Finding, output: ir.Value) -> None:
        """``output`` is other storage than a rule wants: a fault where mutable storage takes part.

        For READ_ONLY roots it is legal, and a new value, but of pages, which nothing copies. But a
        caller of this function might lend mutable storage.
        """
        if any(root in self.mutable or is_paged(root) for root in roots):
            self.find(finding, *roots)
            self.unknown.add(output)
            return
        for root in roots:
            self.restrictions.setdefault(root, Restriction(finding.code, finding.message))

    # -- blocks

    def open(self) -> None:
        """Enter a block."""
        self._entries.append({})
        self._scopes.append(len(self._names))

    def close(self) -> dict[ir.Value, int]:
        """Leave it: its names end, versions are what they were before. Returns those inside."""
        before, names = self._entries.pop(), self._scopes.pop()
        while len(self._names) > names:
            self._names.popitem()
        after = {root: self.live[root] for root in before}
        self.live.update(before)
        return after

    def hide(self, values: Iterable[ir.Value], node: ir.Node | None) -> None:
        """New names; they must not hide one that can still be named (E114)."""
        for value in values:
            if not value.name:
                continue
            if value.name in self._names:
                self.find(self.say.hidden(value, node))
            self._names[value.name] = None

    # -- versions

    def name(self, value: ir.Value, place: Place, source: ir.Value | None) -> None:
        """``value`` names a version of a root."""
        self.place[value] = place
        if is_paged(place.root):
            self.map.pages[value] = place.root
        if place.root not in self.mutable or place.sliced:
            return
        self.map.root[value], self.map.version[value] = place.root, place.version
        self.say.named(place.root, place.version, value)
        if source is not None:
            self.map.source[value] = source

    def advance(self, root: ir.Value, node: ir.Node, writer: ir.Node) -> int:
        """``node`` makes the next version; ``writer``, in it or itself, overwrites the old one."""
        self._count += 1
        before = self.live[root]
        self._entries[-1].setdefault(root, before)
        self.live[root] = self._count
        self.say.made(root, self._count, node)
        self.say.replaced(root, before, writer)
        return self._count

    def is_stale(self, value: ir.Value) -> bool:
        """Whether a name no longer is the live one; unknown names are not."""
        place = self.place.get(value)
        if place is None or value in self.unknown:
            return False
        return place.version != self.live[place.root]

    def root_of(self, value: ir.Value | None) -> ir.Value | None:
        """Root of a known name."""
        place = None if value is None else self.place.get(value)
        return None if place is None else place.root

    # -- the ends of blocks

    def leave(self, results: Sequence[ir.Value], node: ir.Node | None) -> None:
        """To return a name is to read it at the end (E104). A stale result is unknown outside."""
        reported: set[ir.Value] = set()
        for value in results:
            if not self.is_stale(value):
                continue
            place = self.place[value]
            if place.root not in reported:
                reported.add(place.root)
                self.find(self.say.stale_result(value, place.root, place.version, self.live, node))
        self.unknown.update([value for value in results if self.is_stale(value)])

    def lose(self, results: Iterable[ir.Value], entry: Mapping[ir.Value, int], inner: bool) -> None:
        """The last version of every root that the open block wrote must leave it (E109).

        Args:
            results: of the block, after ``leave``.
            entry: versions at the entry, where they are not those from before the block.
            inner: the block is a body or branch.
        """
        values = list(results)
        returned = {self.place[v] for v in values if v in self.place and v not in self.unknown}
        kept = {(place.root, place.version) for place in returned}
        # a result that is unknown may have been the last version: its fault has been reported
        excused = {self.classes.root.get(v) for v in values if v in self.unknown} | self.tainted
        for root, before in self._entries[-1].items():
            version = self.live[root]
            changed = version != entry.get(root, before)
            if changed and root not in excused and (root, version) not in kept:
                self.find(self.say.lost(root, version, inner), root)
