"""Which stretches of a plan can run as one call, for runs with few rows. Pure: builds facts.

The nodes of the main graph are grouped again: those that have a template (``fusable``) together,
the others before, between and behind them, as the conflicts of ``partition`` allow. Nodes that only
prepare what others need (positions, angles, masks) join the others, so that they stand in front.
The groups become the steps of ``fused.Fusion.block``; the ordinary steps stay what they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

import onnx_ir as ir

from onnx_inplace.compiler import (
    calls,
    flat,
    fusable,
    fusable_context,
    integrity,
    lifetimes,
    paged_types,
    partition,
    patterns,
    rewriting,
    sizes,
)
from onnx_inplace.compiler.attributes import values as attributes_of
from onnx_inplace.compiler.fused import NOTHING, Fused, FusedValue, Fusion, Link, Operation, Refusal
from onnx_inplace.compiler.steps import Block, Step


@dataclasses.dataclass(frozen=True)
class Planner:
    """What the planner does for this module.

    Attributes:
        slot: the slot of a value.
        sub_session: the step of ordinary nodes, of which the second argument are the results.
        step: the ordinary step of a node that is none of a sub-session.
        opsets: versions of the domains that the model imports.
    """

    slot: Callable[[ir.Value], int]
    sub_session: Callable[[tuple[ir.Node, ...], set[ir.Value]], Step]
    step: Callable[[ir.Node], Step]
    opsets: Mapping[str, int]


def build(
    graph: ir.Graph, order: partition.Order, context: fusable_context.Context, planner: Planner
) -> Fusion:
    """The fused alternative of a main graph that is ordered."""
    reasons = {node: fusable.reason(node, context) for node in _nodes(order)}
    products = {node for node in reasons if fusable.is_product(node, context)}
    chosen = {node for node, reason in reasons.items() if reason is None}
    chosen -= _preparing(list(reasons), chosen, products, context)
    groups = partition.regroup(graph, context.facts, order, chosen)
    while True:  # a group without products is not worth a call
        poor = {n for fused, nodes in groups if fused and not products & {*nodes} for n in nodes}
        if not poor:
            break
        chosen -= poor
        groups = partition.regroup(graph, context.facts, order, chosen)
    refusals = tuple(
        Refusal(_title(node), reason, integrity.source(node))
        for node, reason in reasons.items()
        if reason is not None and (node in products or not _is_preparation(node))
    )
    if not any(fused for fused, _ in groups):
        return dataclasses.replace(NOTHING, refusals=refusals)
    rows = dict.fromkeys(sizes.product(fusable.rows(node, context)) for node in chosen & products)
    block = _block(graph, groups, context, planner)
    return Fusion(block, tuple(sorted(rows, key=str)), refusals)


def _nodes(order: partition.Order) -> list[ir.Node]:
    return [n for b in order.batches for n in (b if isinstance(b, tuple) else (b,))]


def _preparing(
    nodes: list[ir.Node],
    chosen: Collection[ir.Node],
    products: Collection[ir.Node],
    context: fusable_context.Context,
) -> set[ir.Node]:
    """Chosen nodes that an ordinary node needs and that need no product, no cache themselves."""
    depends: set[ir.Node] = set()
    for node in nodes:
        makers = [v.producer() for v in flat.captures(node)]
        heavy = node in products or any(context.root(v) for v in (*node.inputs, *node.outputs))
        if heavy or any(maker in depends for maker in makers):
            depends.add(node)
    found: set[ir.Node] = set()
    needed = {node for node in nodes if node not in chosen}
    for node in reversed(nodes):
        if node not in needed:
            continue
        for value in flat.captures(node):
            maker = value.producer()
            if maker is not None and maker not in needed and maker not in depends:
                needed.add(maker)
                found.add(maker)
    return found & set(chosen)


def _is_preparation(node: ir.Node) -> bool:
    """Whether a node makes integers or truths of such, which the library does for good reason."""
    values = [v for v in (*node.inputs, *node.outputs) if v is not None]
    return all(v.dtype is not None and not v.dtype.is_floating_point() for v in values)


def _title(node: ir.Node) -> str:
    name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    return f"{name} `{node.outputs[0].name}`" if node.outputs else name


def _block(
    graph: ir.Graph,
    groups: Iterable[tuple[bool, tuple[ir.Node, ...]]],
    context: fusable_context.Context,
    planner: Planner,
) -> Block:
    parts: list[tuple[bool, tuple[ir.Node, ...]]] = []
    for fused, nodes in groups:
        parts += [(True, nodes)] if fused else [(False, part) for part in _split(nodes, context)]
    wanted = set(graph.outputs)
    for _, nodes in parts:
        made = {v for node in nodes for v in node.outputs}
        wanted.update(v for node in nodes for v in flat.captures(node) if v not in made)
    steps: list[Step] = []
    for fused, nodes in parts:
        if fused:
            steps.append(_Region(nodes, wanted, context, planner).step())
        elif context.facts.is_special(nodes[0]):
            steps.append(planner.step(nodes[0]))
        else:
            steps.append(planner.sub_session(nodes, wanted))
    outputs = tuple(planner.slot(v) for v in graph.outputs)
    return Block(
        tuple(steps),
        outputs,
        MappingProxyType(lifetimes.lifetimes(steps, outputs)),
        tuple(calls.common(nodes) for _, nodes in parts),
    )


def _split(
    nodes: tuple[ir.Node, ...], context: fusable_context.Context
) -> list[tuple[ir.Node, ...]]:
    """Sub-sessions, and nodes that are steps of their own, in order."""
    parts: list[list[ir.Node]] = []
    for node in nodes:
        special = context.facts.is_special(node)
        if special or not parts or context.facts.is_special(parts[-1][0]):
            parts.append([node])
        else:
            parts[-1].append(node)
    return [tuple(part) for part in parts]


class _Region:
    """Nodes -> one fused step."""

    def __init__(
        self,
        nodes: tuple[ir.Node, ...],
        wanted: Collection[ir.Value],
        context: fusable_context.Context,
        planner: Planner,
    ):
        self.nodes, self.wanted, self.context, self.planner = nodes, wanted, context, planner
        self.index: dict[ir.Value, int] = {}

    def step(self) -> Fused:
        operations = []
        for node in self.nodes:
            if not fusable.decided(node, self.context):
                operations.append(self.operation(node))
                continue
            for value in node.outputs:
                if value in self.wanted:
                    self.number(value)  # an ordinary step asks for it
        made = {v for node in self.nodes for v in node.outputs}
        inputs = tuple(
            Link(k, self.planner.slot(v))
            for v, k in self.index.items()
            if v not in made and not self.context.constant(v) and not self.parameter(v)
        )
        outputs = tuple(
            Link(k, self.planner.slot(v))
            for v, k in self.index.items()
            if v in made and v in self.wanted
        )
        values = tuple(self.value(v) for v in self.index)
        leaving = frozenset(link.value for link in outputs)
        opset = self.planner.opsets.get("", 1)
        named = rewriting.rewrite(operations, values, leaving, opset)
        joined = patterns.join(named, values, leaving)
        return Fused(values, tuple(joined), inputs, outputs, len(self.nodes))

    def operation(self, node: ir.Node) -> Operation:
        roots = {
            k: self.context.facts.roots[v].name or ""
            for k, v in enumerate(node.outputs)
            if v in self.context.facts.roots
        }
        return Operation(
            node.domain,
            node.op_type,
            self.planner.opsets.get(node.domain, 1),
            tuple(None if v is None else self.number(v) for v in node.inputs),
            tuple(self.number(v) if self.needed(v) else None for v in node.outputs),
            attributes_of(node),
            MappingProxyType(roots),
            integrity.source(node),
        )

    def needed(self, output: ir.Value) -> bool:
        """Whether an output is made: something uses it, or it is the caller's storage."""
        return fusable_context.wanted(output) or self.context.root(output)

    def number(self, value: ir.Value) -> int:
        return self.index.setdefault(value, len(self.index))

    def parameter(self, value: ir.Value) -> bool:
        """Whether the dimensions decide what a value holds: a run need not bring it."""
        return self.context.content(value) is not None

    def value(self, value: ir.Value) -> FusedValue:
        root = self.context.facts.roots.get(value)
        return FusedValue(
            value.name or "",
            value.dtype,
            self.context.known.shape(value),
            self.context.tensor(value),
            self.context.content(value),
            None if root is None else root.name,
            paged_types.of(value),
        )
