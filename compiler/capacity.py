"""Does what is written fit? Decides that before a run, as far as sizes tell.

Every requirement of ``conditions`` that bounds a position, an index or a length is one of three:
*proved*, it holds for all sizes and inputs; *refuted*, it holds for none (E112); *open*, a run
decides, and ``positions`` says how. A counter of a Loop is a symbol with a range, and stands for
its worst value. Dimensions are integers that are not negative; inputs may be any integer.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir
import sympy

from onnx_inplace.compiler import conditions, extents, symbols
from onnx_inplace.compiler.conditions import Kind, Linear, Requirement
from onnx_inplace.compiler.control import bodies, is_control
from onnx_inplace.compiler.diagnosis import Locate
from onnx_inplace.compiler.errors import Finding


class Verdict(enum.Enum):
    """What is known of a requirement before a run."""

    PROVED = "proved"
    REFUTED = "refuted"
    OPEN = "open"


@dataclasses.dataclass(frozen=True, slots=True)
class Judgement:
    """A requirement, and what is known of it.

    Attributes:
        requirement: what must hold.
        verdict: whether it does.
        lowest: the smallest value of what is bounded; None: nothing is known about it.
        highest: the largest, likewise. Counters of loops have their extreme values in both.
        length: what is written from there on.
        capacity: what there is room for.
        reason: for a refuted requirement, why it cannot hold.
    """

    requirement: Requirement
    verdict: Verdict
    lowest: sympy.Expr | None
    highest: sympy.Expr | None
    length: sympy.Expr | None
    capacity: sympy.Expr | None
    reason: str = ""


class Guarded(enum.Enum):
    """What can never fit, in a block that a run may leave out."""

    REFUTED = "refuted"  # as an author wrote it, it is a mistake
    OPEN = "open"  # with the arguments of a call put in, it may be what the test is there for


def judge(
    graph: ir.Graph,
    roots: Mapping[ir.Value, ir.Value],
    mutable: Sequence[ir.Value],
    known: extents.Extents,
    guarded: Guarded = Guarded.REFUTED,
) -> Iterator[Judgement]:
    """All requirements of a graph and its bodies that bound positions, indices or lengths."""
    for judgement, runs in _Judge(known, roots, mutable).block(graph, {}, True):
        if judgement.verdict is Verdict.REFUTED and not runs and guarded is Guarded.OPEN:
            yield dataclasses.replace(judgement, verdict=Verdict.OPEN)
        else:
            yield judgement


def findings(judgements: Iterable[Judgement], locate: Locate) -> list[Finding]:
    """E112 for every write or read that fits in no run, one for each node."""
    found: dict[ir.Node | None, Finding] = {}
    for judgement in judgements:
        node = judgement.requirement.node
        if judgement.verdict is Verdict.REFUTED and node not in found:
            found[node] = Finding("E112", judgement.reason, locate(node))
    return list(found.values())


@dataclasses.dataclass(frozen=True, slots=True)
class _Range:
    """A counter that runs from 0 to ``last``."""

    symbol: sympy.Dummy
    last: sympy.Expr | None


_Counters = dict[ir.Value, _Range]


class _Judge:
    def __init__(
        self,
        known: extents.Extents,
        roots: Mapping[ir.Value, ir.Value],
        mutable: Sequence[ir.Value],
    ):
        self.known, self.roots, self.mutable = known, roots, mutable
        self.sums: dict[ir.Value, sympy.Expr] = {}

    def block(
        self, graph: ir.Graph, counters: _Counters, runs: bool
    ) -> Iterator[tuple[Judgement, bool]]:
        """Judgements, and whether every run comes to the node; ``runs``: to the block."""
        for node in graph:
            self.learn(node, counters)
            for r in conditions.requirements(node, self.roots, self.mutable):
                if r.kind is not Kind.SHAPE:
                    yield self.judgement(r, counters), runs
            if is_control(node):
                inside = counters | self.counter(node)
                for body in bodies(node):
                    yield from self.block(body, inside, runs and self.surely_runs(node))

    def surely_runs(self, node: ir.Node) -> bool:
        """Whether the body of a node runs at least once, in every run."""
        if node.op_type != "Loop" or node.inputs[1] is not None:
            return False
        count = None if node.inputs[0] is None else self.expression(node.inputs[0], {})
        return count is not None and bool(count.is_positive)

    def counter(self, node: ir.Node) -> _Counters:
        """The iteration number of a Loop. Without a trip count its end is not known."""
        if node.op_type != "Loop":
            return {}
        number = bodies(node)[0].inputs[0]
        count = None if node.inputs[0] is None else self.expression(node.inputs[0], {})
        # a Dummy: a dimension may have the same name
        symbol = sympy.Dummy(str(number.name), integer=True, nonnegative=True)
        return {number: _Range(symbol, None if count is None else count - 1)}

    def judgement(self, r: Requirement, counters: _Counters) -> Judgement:
        low, high = self.terms(r.low), self.terms(r.high)
        length, capacity = self.term(r.length), self.terms(r.capacity)
        if len(low) != 1 or len(high) != 1 or low[0] is None or high[0] is None:
            return Judgement(r, Verdict.OPEN, None, None, length, None)
        number, offset = self.subject(r, counters), self.term(r.offset)
        room = high[0] - low[0]
        if number is None or offset is None:
            verdict = Verdict.REFUTED if room.is_negative else Verdict.OPEN
            reason = self.reason(r, None, length, capacity[0], verdict)
            return Judgement(r, verdict, None, None, length, capacity[0], reason)
        lowest = _extreme(number + offset, counters, largest=False)
        highest = _extreme(number + offset, counters, largest=True)
        verdict, at = Verdict.OPEN, highest
        if room.is_negative:
            verdict, at = Verdict.REFUTED, None
        elif lowest is None or highest is None:
            pass
        elif _surely(high[0] - highest) and _surely(lowest - low[0]):
            verdict = Verdict.PROVED
        elif not _depends(number, counters) and (
            sympy.expand(high[0] - highest).is_negative or sympy.expand(lowest - low[0]).is_negative
        ):
            verdict = Verdict.REFUTED
        reason = self.reason(r, at, length, capacity[0], verdict)
        return Judgement(r, verdict, lowest, highest, length, capacity[0], reason)

    def reason(
        self,
        r: Requirement,
        at: sympy.Expr | None,
        length: sympy.Expr | None,
        capacity: sympy.Expr | None,
        verdict: Verdict,
    ) -> str:
        if verdict is not Verdict.REFUTED:
            return ""  # expressions take long to print
        fit = "fit at no position" if at is None else f"do not fit at {r.port} {at}"
        if r.kind is Kind.LENGTH:
            return f"`{r.root}` has a capacity of {capacity}: {r.port} of {at} is out of range."
        return f"`{r.root}` has a capacity of {capacity}: {length} {fit}."

    # -- sizes and numbers as expressions

    def term(self, term: Linear) -> sympy.Expr | None:
        """A term in symbols; None where a size is not known before a run."""
        total: sympy.Expr = sympy.Integer(term.constant)
        for factor, value, axis in term.axes:
            size = self.known.size(value, axis)
            if size is None:
                return None
            total += factor * symbols.expression(size)
        return sympy.expand(total)

    def terms(self, terms: Sequence[Linear]) -> list[sympy.Expr | None]:
        return [self.term(term) for term in terms] or [None]

    def subject(self, r: Requirement, counters: _Counters) -> sympy.Expr | None:
        if isinstance(r.subject, ir.Value):
            return self.expression(r.subject, counters)
        return self.term(r.subject[0]) if len(r.subject) == 1 else None

    def expression(self, value: ir.Value | None, counters: _Counters) -> sympy.Expr | None:
        """The one integer that a value holds: sizes, inputs, counters, and sums of those."""
        if value is None:
            return None
        if value in counters:
            return counters[value].symbol
        if value in self.sums:
            return self.sums[value]
        size = self.known.integer(value)
        if size is not None:
            return symbols.expression(size)
        is_number = value.is_graph_input() and value.dtype in _INTEGERS
        if is_number and value.shape is not None and len(value.shape) == 0:
            return sympy.Symbol(f"{value.name}", integer=True)
        return None

    def learn(self, node: ir.Node, counters: _Counters) -> None:
        """Follow numbers through a node; in program order, so that no chain is too long."""
        if node.domain or len(node.outputs) != 1 or node.outputs[0].dtype not in _INTEGERS:
            return
        if node.op_type in _KEEPS:
            number = self.expression(node.inputs[0], counters)
        elif node.op_type in _ARITHMETIC:
            left, right = (self.expression(v, counters) for v in node.inputs)
            if left is None or right is None:
                return
            number = sympy.expand(_ARITHMETIC[node.op_type](left, right))
        else:
            return
        if number is not None:
            self.sums[node.outputs[0]] = number


_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)
_KEEPS = {"Identity", "Reshape", "Squeeze", "Unsqueeze"}
_ARITHMETIC = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
}


def _extreme(number: sympy.Expr, counters: _Counters, *, largest: bool) -> sympy.Expr | None:
    """The largest or smallest value over all rounds; None where an end is not known."""
    for counter in counters.values():
        if not number.has(counter.symbol):
            continue
        slope = sympy.diff(number, counter.symbol)
        if slope.has(counter.symbol) or not (slope.is_nonnegative or slope.is_nonpositive):
            return None
        at_end = largest == bool(slope.is_nonnegative)
        if at_end and counter.last is None:
            return None
        number = number.subs(counter.symbol, counter.last if at_end else 0)
    return sympy.expand(number)


def _depends(number: sympy.Expr, counters: _Counters) -> bool:
    """Whether a number differs from round to round: the round that breaks a rule may never come."""
    return any(number.has(counter.symbol) for counter in counters.values())


def _surely(difference: sympy.Expr) -> bool:
    return bool(sympy.expand(difference).is_nonnegative)
