"""Which node belongs to which step, and in which order the steps run. Builds nothing.

**Soundness.** Two nodes conflict if both touch the storage of one root and at least one writes it.
The order made here respects every use of a value and keeps every pair of conflicting nodes in
program order, and the alias analysis has accepted the program order. So each read meets the
version that it names, whatever else moves. A control node touches all that its bodies touch; its
bodies are ordered by the same rule.

**Few sub-sessions.** Ordinary and special nodes are taken in turns, each time all that are ready.
A chain of uses and conflicts that alternates n times between special and ordinary needs n
sub-sessions in any order, and no more are made.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnx_inplace.compiler import alias, contract, control, flat
from onnx_inplace.compiler.contract import Effect
from onnx_inplace.compiler.paged_types import is_paged

# Operators that a kernel of ours executes when one of these inputs belongs to a root.
_CACHE_PORTS: dict[tuple[str, str], tuple[int, ...]] = {
    ("", "Attention"): (1, 2),
    ("com.microsoft", "GroupQueryAttention"): (3, 4),
}
_VALID_LENGTH = 6  # Attention's input nonpad_kv_seqlen: without it the whole capacity is meant


@dataclasses.dataclass(frozen=True, slots=True)
class Conflict:
    """``reader`` touches an old version of ``root``; ``writer`` comes after it."""

    root: ir.Value
    reader: ir.Node
    writer: ir.Node


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """Nodes of one graph in order.

    Attributes:
        batches: a list of nodes is one sub-session; a single node is a step of its own.
        conflicts: reads that stand before a write.
    """

    batches: tuple[ir.Node | tuple[ir.Node, ...], ...]
    conflicts: tuple[Conflict, ...]


class Facts:
    """What the alias analysis says about nodes, in the words of the partition."""

    def __init__(self, aliases: alias.AliasMap, mutable: Sequence[ir.Value]):
        lent = set(mutable)
        self.roots = {v: root for v, root in aliases.root.items() if root in lent}
        self._aliases = aliases
        self._special: dict[ir.Node, bool] = {}
        self._touches: dict[ir.Node, tuple[frozenset[ir.Value], frozenset[ir.Value]]] = {}

    def is_view(self, node: ir.Node) -> bool:
        """Whether the node only gives a root, or any paged cache, another shape or name."""
        rule = contract.rule(node)
        if rule is None or rule.effect is not Effect.VIEW:
            return False
        return node.outputs[0] in self.roots or is_paged(node.outputs[0])

    def is_kernel(self, node: ir.Node) -> bool:
        """Whether a kernel of ours executes the node: it writes a root, or reads its valid part."""
        if node.domain == contract.DOMAIN:
            return True
        if control.bodies(node) or self.is_view(node):
            return False
        if any(v in self.roots for v in node.outputs):
            return True
        ports = _CACHE_PORTS.get((node.domain, node.op_type), ())
        if node.op_type == "Attention" and (
            len(node.inputs) <= _VALID_LENGTH or node.inputs[_VALID_LENGTH] is None
        ):
            return False
        return any(node.inputs[p] in self.roots for p in ports if p < len(node.inputs))

    def is_special(self, node: ir.Node) -> bool:
        """Whether the node is a step of its own, not part of a sub-session."""
        if node not in self._special:
            self._special[node] = (
                self.is_kernel(node)
                or self.is_view(node)
                or node in self._aliases.stateful
                or any(map(is_paged, (*node.inputs, *node.outputs)))
                or any(self.is_special(n) for graph in control.bodies(node) for n in graph)
            )
        return self._special[node]

    def touches(self, node: ir.Node) -> tuple[frozenset[ir.Value], frozenset[ir.Value]]:
        """Roots whose bytes the node reads and roots whose bytes it writes, bodies included."""
        if node not in self._touches:
            self._touches[node] = self._find_touches(node)
        return self._touches[node]

    def _find_touches(self, node: ir.Node) -> tuple[frozenset[ir.Value], frozenset[ir.Value]]:
        if self.is_view(node):
            return frozenset(), frozenset()
        bodies = control.bodies(node)
        reads = {self.roots[v] for v in node.inputs if v in self.roots}
        writes: set[ir.Value] = set()
        if not bodies:
            writes.update(self.roots[v] for v in node.outputs if v in self.roots)
        for graph in bodies:
            for inner in graph:
                more_reads, more_writes = self.touches(inner)
                reads |= more_reads
                writes |= more_writes
        return frozenset(reads), frozenset(writes)

    def live(self, graph: ir.Graph) -> list[ir.Node]:
        """Nodes that matter, in program order. A write always does."""
        needed, found = set(graph.outputs), []
        for node in reversed(graph):
            if any(v in needed for v in node.outputs) or self.touches(node)[1]:
                needed.update(flat.captures(node))
                found.append(node)
        return found[::-1]


def order(graph: ir.Graph, facts: Facts) -> Order:
    """Order the nodes of one graph; see the module for what that promises."""
    nodes = facts.live(graph)
    before, conflicts = _before(nodes, facts)
    return Order(tuple(_batches(nodes, facts, before)), tuple(conflicts))


def regroup(
    graph: ir.Graph, facts: Facts, ordered: Order, fused: Collection[ir.Node]
) -> list[tuple[bool, tuple[ir.Node, ...]]]:
    """The nodes of ``ordered`` in other groups: those in ``fused`` together, as far as may be.

    Keeps what ``order`` promises. True marks a group of ``fused`` nodes; in the others, nodes stand
    as near to their old order as possible.
    """
    program = facts.live(graph)
    needs, _ = _before(program, facts)
    nodes = [n for b in ordered.batches for n in (b if isinstance(b, tuple) else (b,))]
    place = {node: k for k, node in enumerate(nodes)}
    before: list[set[int]] = [set() for _ in nodes]
    for node, needed in zip(program, needs, strict=True):
        before[place[node]] = {place[program[k]] for k in needed}
    after, constant = _after(before), _constants(nodes, before)
    special = [node in fused for node in nodes]
    candidates = []
    for start in (False, True):
        runs = _take_turns(special, before, after, start)
        _sink(constant, after, runs)
        candidates.append([run for run in runs if run.nodes])
    best = min(candidates, key=len)
    return [(run.special, tuple(nodes[k] for k in run.nodes)) for run in best]


def _before(nodes: list[ir.Node], facts: Facts) -> tuple[list[set[int]], list[Conflict]]:
    """Which nodes come before which, by index: uses of values, and conflicts."""
    index = {node: k for k, node in enumerate(nodes)}
    maker = {v: k for node, k in index.items() for v in node.outputs}
    before: list[set[int]] = [
        {maker[v] for v in flat.captures(node) if v in maker} for node in nodes
    ]
    return before, _add_conflicts(nodes, facts, before)


def _after(before: list[set[int]]) -> list[list[int]]:
    after: list[list[int]] = [[] for _ in before]
    for k, needed in enumerate(before):
        for earlier in needed:
            after[earlier].append(k)
    return after


def _add_conflicts(nodes: list[ir.Node], facts: Facts, before: list[set[int]]) -> list[Conflict]:
    """Keep conflicting nodes in program order: read after write, write after read and write."""
    conflicts = []
    last_write: dict[ir.Value, int] = {}
    readers: dict[ir.Value, list[int]] = {}
    for k, node in enumerate(nodes):
        reads, writes = facts.touches(node)
        for root in reads | writes:
            if root in last_write:
                before[k].add(last_write[root])
        for root in sorted(writes, key=lambda value: value.name or ""):
            for reader in readers.pop(root, ()):
                before[k].add(reader)
                conflicts.append(Conflict(root, nodes[reader], node))
            last_write[root] = k
        for root in reads - writes:
            readers.setdefault(root, []).append(k)
    return conflicts


@dataclasses.dataclass
class _Run:
    """Nodes, by index, that stand together; special ones each for itself."""

    special: bool
    nodes: list[int]


def _batches(
    nodes: list[ir.Node], facts: Facts, before: list[set[int]]
) -> list[ir.Node | tuple[ir.Node, ...]]:
    """The order with the fewest sub-sessions.

    It begins with ordinary or with special nodes. Where both are as good, with ordinary ones: what
    the library refuses is then refused before something is written.
    """
    special = [facts.is_special(node) for node in nodes]
    after, constant = _after(before), _constants(nodes, before)
    candidates = []
    for start in (False, True):
        runs = _take_turns(special, before, after, start)
        _sink(constant, after, runs)
        candidates.append([run for run in runs if run.nodes])
    best = min(candidates, key=lambda runs: sum(not run.special for run in runs))
    found: list[ir.Node | tuple[ir.Node, ...]] = []
    for run in best:
        members = [nodes[k] for k in run.nodes]
        found += members if run.special else [tuple(members)]
    return found


def _take_turns(
    special: list[bool], before: list[set[int]], after: list[list[int]], start: bool
) -> list[_Run]:
    """Special and ordinary nodes in turns, each time all that are ready, in program order."""
    waiting = [len(needed) for needed in before]
    ready: dict[bool, list[int]] = {True: [], False: []}
    for k, count in enumerate(waiting):
        if not count:
            heapq.heappush(ready[special[k]], k)
    runs: list[_Run] = []
    turn = start
    while ready[True] or ready[False]:
        run: list[int] = []
        while ready[turn]:
            k = heapq.heappop(ready[turn])
            run.append(k)
            for later in after[k]:
                waiting[later] -= 1
                if not waiting[later]:
                    heapq.heappush(ready[special[later]], later)
        runs.append(_Run(turn, run))
        turn = not turn
    return runs


def _constants(nodes: list[ir.Node], before: list[set[int]]) -> set[int]:
    """Nodes, by index, that compute from weights alone."""
    constant: set[int] = set()
    for k, node in enumerate(nodes):
        if all(v.is_initializer() for v in flat.captures(node) if v.producer() is None) and all(
            earlier in constant for earlier in before[k]
        ):
            constant.add(k)
    return constant


def _sink(constant: set[int], after: list[list[int]], runs: list[_Run]) -> None:
    """Move what is computed from weights alone to its first user.

    There the library folds it; as a value between two sub-sessions a transposed weight would be
    computed and kept beside the weight.
    """
    place = {k: at for at, run in enumerate(runs) for k in run.nodes}
    for k in sorted(constant, reverse=True):  # users before what they use
        at = place[k]
        target = min((place[later] for later in after[k]), default=at)
        while target > at and runs[target].special:
            target -= 1  # a special step uses it: the sub-session before it
        if runs[at].special or target == at:
            continue
        runs[at].nodes.remove(k)
        runs[target].nodes = sorted((*runs[target].nodes, k))
        place[k] = target


def members(batch: ir.Node | tuple[ir.Node, ...]) -> tuple[ir.Node, ...]:
    """The nodes of a batch of an order."""
    return batch if isinstance(batch, tuple) else (batch,)
