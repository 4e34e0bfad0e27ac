"""Checked flat model -> plan: puts the decisions of the modules beside this one together.

``flat`` has inlined and named, ``partition`` orders, ``fixed`` and ``lifetimes`` say whose bytes a
value is, and ``subsession`` builds the models of the library. Here values get their slots, nodes
become steps, and what copies or falls back is listed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from types import MappingProxyType

import onnx_ir as ir

from onnx_inplace.compiler import (
    attributes,
    calls,
    collector,
    contract,
    control,
    fixed,
    footprint,
    fusable_context,
    fuse,
    integrity,
    lifetimes,
    listing,
    loader,
    new_pages,
    paged_types,
    partition,
    positions,
    subsession,
)
from onnx_inplace.compiler.contract import OutputAlias
from onnx_inplace.compiler.steps import (
    Block,
    Branch,
    ExecutionPlan,
    Input,
    Kernel,
    MustAlias,
    Output,
    Repeat,
    Scanned,
    ScanStep,
    Stacked,
    Step,
    Storage,
    SubSession,
    Value,
    View,
)


@collector.paused()
def plan(source: loader.Source) -> ExecutionPlan:
    """What a run of the model does, in steps; see ``steps.ExecutionPlan``.

    Raises:
        errors.ContractError: the file does not keep its contract.
        errors.UnsupportedOperator: the type of a value cannot be found.
    """
    return _Planner(loader.load(source)).run()


@dataclasses.dataclass(frozen=True)
class _Ordered:
    """A graph whose nodes are ordered; ``bodies`` by node, in order of its attributes."""

    graph: ir.Graph
    order: partition.Order
    bodies: dict[ir.Node, tuple[_Ordered, ...]]


class _Planner:
    def __init__(self, loaded: loader.Loaded):
        self.loaded, self.model = loaded, loaded.model
        self.graph = loaded.model.graph
        self.aliases = loaded.aliases
        self.mutable = frozenset(loaded.mutable)
        self.facts = partition.Facts(loaded.aliases, loaded.mutable)
        self.fixed = fixed.FixedShapes(self.graph)
        self.escaping = lifetimes.escaping(self.graph, self.facts)
        self.slots: dict[ir.Value, int] = {}
        named = (d for v in self.graph.inputs for d in v.shape or () if not isinstance(d, int))
        self.dims = {d.value for d in named if d.value}
        self.outside: set[ir.Value] = set()  # initializers that steps other than sub-sessions read
        self.used: dict[ir.Value, int] = {}  # sub-sessions by initializer
        self.from_sessions: set[ir.Value] = set()
        self.orders: list[partition.Order] = []
        self.nodes: dict[int, tuple[ir.Node, ...]] = {}  # by id of the step that executes them
        self.special_steps: dict[ir.Node, Step] = {}

    def run(self) -> ExecutionPlan:
        """The plan, in two passes: a weight is shared or not only when all steps are known."""
        graph = self.graph
        for value in graph.inputs:
            self.slot(value)
        ordered = self.order(graph)
        self.outside.update(v for v in graph.outputs if v.is_initializer())
        often = {v for v, count in self.used.items() if count > 1}
        self.shared = frozenset(often | (self.outside & set(self.used)))
        block = self.block(ordered)
        context = fusable_context.Context(self.loaded.extents, self.facts, self.model.opset_imports)
        fusion = fuse.build(graph, ordered.order, context, self.fusing())
        values = tuple(self.describe(v) for v in self.slots)
        every = list(graph.all_nodes())
        tensors = [(k, v.const_value) for v, k in self.slots.items() if v.is_initializer()]
        copies, made = listing.copies(every, self.facts), new_pages.of(self.loaded)
        return ExecutionPlan(
            values=values,
            constants=MappingProxyType({k: t for k, t in tensors if t is not None}),
            inputs=tuple(
                Input(v.name or "", self.slots[v], v in self.mutable, paged_types.of(v))
                for v in graph.inputs
            ),
            outputs=tuple(
                Output(v.name or "", slot, self.root(v))
                for v, slot in zip(graph.outputs, block.outputs, strict=True)
            ),
            block=block,
            must_alias=tuple(
                MustAlias(v.slot, v.root) for v in values if v.root not in (None, v.name)
            ),
            inplace_reuse=frozenset(v.slot for v in values if v.storage is Storage.BUFFER),
            write_after_read=listing.write_after_read(self.orders),
            copies=copies,
            fallbacks=listing.fallbacks(every, self.facts),
            conditions=listing.conditions(
                self.loaded.judgements, positions.build(self.loaded), every, self.aliases.pages
            ),
            proofs=listing.proofs(self.loaded.judgements),
            new_pages=made,
            # a session does not ask for it, and it takes a quarter of the time of a plan
            footprint_of=functools.cache(
                lambda: footprint.build(
                    self.loaded, block, values, self.slots, self.nodes, copies, made, fusion
                )
            ),
            fused=fusion,
        )

    def fusing(self) -> fuse.Planner:
        """What the fused alternative is made with: one tensor of a weight serves both.

        Its sub-sessions pack what those of ordinary steps pack, although each keeps its own packed
        copy then: LSTM, for one, sums in another order over weights that are not packed, and a
        recurrent state would drift from what onnxruntime makes of the same model.
        """
        weights = frozenset(self.graph.initializers.values())

        def sub_session(nodes: tuple[ir.Node, ...], wanted: set[ir.Value]) -> Step:
            step = self.sub_session(nodes, wanted, weights)
            self.nodes[id(step)] = nodes
            return step

        return fuse.Planner(
            self.slot,
            sub_session,
            self.special_steps.__getitem__,
            self.model.opset_imports,
        )

    # -- first pass: order and use of weights

    def order(self, graph: ir.Graph) -> _Ordered:
        order = partition.order(graph, self.facts)
        self.orders.append(order)
        bodies = {}
        for batch in order.batches:
            if isinstance(batch, tuple):
                for value in subsession.inputs(batch):
                    if value.is_initializer():
                        self.used[value] = self.used.get(value, 0) + 1
                continue
            inner = control.bodies(batch)
            self.outside.update(v for v in batch.inputs if v is not None and v.is_initializer())
            self.outside.update(v for g in inner for v in g.outputs if v.is_initializer())
            bodies[batch] = tuple(self.order(g) for g in inner)
        return _Ordered(graph, order, bodies)

    # -- second pass: steps

    def block(self, ordered: _Ordered) -> Block:
        steps: list[Step] = []
        batches = tuple(map(partition.members, ordered.order.batches))
        wanted = subsession.leaving(batches, ordered.graph.outputs)
        for batch in ordered.order.batches:
            if isinstance(batch, tuple):
                steps.append(self.sub_session(batch, wanted))
            else:
                self.special_steps[batch] = self.special(batch, ordered.bodies[batch])
                steps.append(self.special_steps[batch])
            if isinstance(steps[-1], SubSession | Kernel):
                self.nodes[id(steps[-1])] = partition.members(batch)
        outputs = tuple(self.slot(v) for v in ordered.graph.outputs)
        return Block(
            tuple(steps),
            outputs,
            MappingProxyType(lifetimes.lifetimes(steps, outputs)),
            tuple(map(calls.common, batches)),
        )

    def sub_session(
        self,
        nodes: tuple[ir.Node, ...],
        wanted: set[ir.Value],
        shared: frozenset[ir.Value] | None = None,
    ) -> Step:
        results = [v for node in nodes for v in node.outputs if v in wanted]
        entering = [v for v in subsession.inputs(nodes) if not v.is_initializer()]
        for value in (*entering, *results):
            self.slot(value)
        self.from_sessions.update(results)
        return subsession.build(
            nodes,
            results,
            self.model,
            self.slots,
            self.shared if shared is None else shared,
            self.shared,
            self.loaded.extents,
        )

    def special(self, node: ir.Node, bodies: tuple[_Ordered, ...]) -> Step:
        if node.op_type == "If" and bodies:
            return self.branch(node, *bodies)
        if node.op_type == "Loop" and bodies:
            return self.repeat(node, *bodies)
        if node.op_type == "Scan" and bodies:
            return self.scan(node, *bodies)
        return self.view(node) if self.facts.is_view(node) else self.kernel(node)

    def view(self, node: ir.Node) -> View:
        source, output = node.inputs[0], node.outputs[0]
        assert source is not None
        parameter = node.inputs[1] if len(node.inputs) > 1 else None
        root = self.root(output) or str(self.aliases.pages[output].name)
        return View(
            node.op_type,
            self.slot(source),
            self.optional(parameter),
            self.slot(output),
            attributes.values(node),
            root,
            integrity.source(node),
        )

    def kernel(self, node: ir.Node) -> Kernel:
        rule = contract.rule(node)
        declared: Iterable[OutputAlias] = self.aliases.node.get(node, ())
        if rule is not None:
            declared = rule.aliases
        aliases = tuple(
            a
            for a in declared
            if a.output_index < len(node.outputs)
            and node.outputs[a.output_index] in self.facts.roots
        )
        inputs = tuple(self.optional(v) for v in node.inputs)
        outputs = tuple(self.optional(v if v.name else None) for v in node.outputs)
        named = dict.fromkeys(v for v in (*node.inputs, *node.outputs) if v in self.slots)
        return Kernel(
            node.domain,
            node.op_type,
            self.model.opset_imports.get(node.domain, 1),
            inputs,
            outputs,
            attributes.values(node),
            aliases,
            MappingProxyType(
                {a.output_index: self.root(node.outputs[a.output_index]) or "" for a in aliases}
            ),
            MappingProxyType({self.slots[v]: self.describe(v) for v in named if v is not None}),
            integrity.source(node),
        )

    def branch(self, node: ir.Node, *bodies: _Ordered) -> Branch:
        condition = node.inputs[0]
        assert condition is not None
        by_graph = {body.graph: body for body in bodies}
        then, otherwise = (
            self.block(by_graph[node.attributes[name].as_graph()])
            for name in ("then_branch", "else_branch")
        )
        return Branch(
            self.slot(condition),
            then,
            otherwise,
            self.all(node.outputs),
            self.roots(node.outputs),
            integrity.source(node),
        )

    def repeat(self, node: ir.Node, ordered: _Ordered) -> Repeat:
        body = ordered.graph
        carried = len(body.inputs) - 2
        number, going, *formals = self.all(body.inputs)
        return Repeat(
            self.optional(node.inputs[0]),
            self.optional(node.inputs[1] if len(node.inputs) > 1 else None),
            self.all(node.inputs[2:]),
            number,
            going,
            tuple(formals),
            self.block(ordered),
            self.all(node.outputs[:carried]),
            tuple(map(self.stacked, node.outputs[carried:], body.outputs[1 + carried :])),
            self.roots(node.outputs[:carried]),
            integrity.source(node),
        )

    def scan(self, node: ir.Node, ordered: _Ordered) -> ScanStep:
        body = ordered.graph
        carried = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
        formals = self.all(body.inputs)
        scanned = self.all(node.inputs[carried:])
        taken = attributes.directions(node, "input", len(scanned))
        made = attributes.directions(node, "output", len(node.outputs) - carried)
        return ScanStep(
            self.all(node.inputs[:carried]),
            tuple(Scanned(s, *how) for s, how in zip(scanned, taken, strict=True)),
            formals[:carried],
            formals[carried:],
            self.block(ordered),
            self.all(node.outputs[:carried]),
            tuple(
                self.stacked(whole, element, *how)
                for whole, element, how in zip(
                    node.outputs[carried:], body.outputs[carried:], made, strict=True
                )
            ),
            self.roots(node.outputs[:carried]),
            integrity.source(node),
        )

    def stacked(
        self, whole: ir.Value, element: ir.Value, axis: int = 0, reverse: bool = False
    ) -> Stacked:
        known = element if element.dtype is not None else whole
        return Stacked(
            self.slot(whole), axis, reverse, known.dtype, attributes.shape(element, self.dims)
        )

    # -- values

    def slot(self, value: ir.Value) -> int:
        return self.slots.setdefault(value, len(self.slots))

    def optional(self, value: ir.Value | None) -> int | None:
        return None if value is None else self.slot(value)

    def all(self, values: Iterable[ir.Value | None]) -> tuple[int, ...]:
        found = []
        for value in values:
            assert value is not None
            found.append(self.slot(value))
        return tuple(found)

    def root(self, value: ir.Value) -> str | None:
        root = self.facts.roots.get(value)
        return None if root is None else root.name

    def roots(self, values: Iterable[ir.Value]) -> MappingProxyType[int, str]:
        named = {k: self.root(v) for k, v in enumerate(values)}
        return MappingProxyType({k: root for k, root in named.items() if root is not None})

    def describe(self, value: ir.Value) -> Value:
        is_tensor = isinstance(value.type, ir.TensorType)
        return Value(
            self.slots[value],
            value.name or "",
            value.dtype if is_tensor else None,
            attributes.shape(value, self.dims),
            self.root(value),
            self.storage(value),
            is_tensor and value in self.fixed,
            self.aliases.version.get(value) if value in self.facts.roots else None,
            paged_types.of(value),
        )

    def storage(self, value: ir.Value) -> Storage:
        is_input = value.is_graph_input() and value.graph is self.graph
        if value in self.facts.roots or is_input or paged_types.is_paged(value):
            return Storage.CALLER
        if value.is_initializer():
            return Storage.CONSTANT
        if (
            value in self.from_sessions
            and value in self.fixed
            and value not in self.escaping
            and isinstance(value.type, ir.TensorType)
        ):
            return Storage.BUFFER
        return Storage.FRESH
