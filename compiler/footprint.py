"""Collects what a plan needs: sizes of values and their lives, step by step.

``memory`` evaluates it. Sizes come from ``extents``: what does not follow from the dimensions of
the inputs is named as unknown. What a sub-session holds inside is found by ``subsession_memory``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import onnx_ir as ir

from onnx_inplace.compiler import (
    conditions,
    integrity,
    lifetimes,
    loader,
    resident,
    sizes,
    subsession_memory,
    workspace,
)
from onnx_inplace.compiler.conditions import Kind, Linear, Requirement
from onnx_inplace.compiler.fused import Fusion
from onnx_inplace.compiler.memory import Allocations, BlockUse, Fit, Footprint, Item, Use
from onnx_inplace.compiler.new_pages import NewPages
from onnx_inplace.compiler.notes import Copied
from onnx_inplace.compiler.paged_types import is_paged
from onnx_inplace.compiler.sizes import Size
from onnx_inplace.compiler.steps import (
    Block,
    Branch,
    Repeat,
    ScanStep,
    Step,
    Storage,
    SubSession,
    Value,
)

_INTEGERS = {ir.DataType[f"{sign}INT{bits}"] for sign in ("", "U") for bits in (8, 16, 32, 64)}


def build(
    loaded: loader.Loaded,
    block: Block,
    values: Sequence[Value],
    slots: Mapping[ir.Value, int],
    nodes: Mapping[int, Sequence[ir.Node]],
    copies: Sequence[Copied],
    made: Sequence[NewPages],
    fusion: Fusion,
) -> Footprint:
    """What ``block`` needs.

    Args:
        loaded: the model.
        block: of the plan.
        values: of the plan.
        slots: of the plan, by value of the model.
        nodes: of steps, by their ``id``.
        copies: of the plan.
        made: pages that steps may make.
        fusion: of the plan.
    """
    held = resident.Resident(block, values, list(slots), nodes, fusion)
    collector = _Collector(loaded, values, slots, nodes)
    found = collector.run(block, copies, made, held.forms)
    fused = () if fusion.block is None else tuple(map(collector.buffers, _blocks(fusion.block)))
    return dataclasses.replace(found, fused=fused)


def _blocks(block: Block) -> Iterator[Block]:
    """A block and those in it, in the order of the program."""
    yield block
    for step in block.steps:
        match step:
            case Branch():
                inner = [step.then, step.otherwise]
            case Repeat() | ScanStep():
                inner = [step.body]
            case _:
                inner = []
        for body in inner:
            yield from _blocks(body)


class _Collector:
    def __init__(
        self,
        loaded: loader.Loaded,
        values: Sequence[Value],
        slots: Mapping[ir.Value, int],
        nodes: Mapping[int, Sequence[ir.Node]],
    ):
        self.loaded, self.known, self.values, self.nodes = loaded, loaded.extents, values, nodes
        self.of_slot = list(slots)
        self.unknown: dict[str, None] = {}
        self.simulation = subsession_memory.Simulation(self.known, self.bytes)

    def run(
        self,
        block: Block,
        copies: Sequence[Copied],
        made: Sequence[NewPages],
        weights: Callable[[str], Mapping[str, int]],
    ) -> Footprint:
        graph = self.loaded.model.graph
        dims = {
            size: None
            for value in graph.inputs
            for size in self.known.partial(value) or ()
            if isinstance(size, str)
        }
        uses = self.block(block, list(self.integers()))
        pages = tuple(self.pages(made))
        return Footprint(
            tuple(dims),
            tuple(self.bytes(v) for v in self.loaded.mutable if not is_paged(v)),
            tuple(self.copied(copies)),
            uses,
            tuple(self.fits()),
            tuple(self.unknown),
            tuple(self.simulation.estimates),
            weights,
            pages,
        )

    def pages(self, made: Sequence[NewPages]) -> Iterator[Size]:
        """New pages; those that are there already, only their owner knows."""
        for value in self.loaded.mutable:
            if is_paged(value):
                self.unknown[f"pages of {value.name} that are there"] = None
        for pages in made:
            if pages.bytes is None:
                self.unknown[f"new pages of {pages.root} in a loop"] = None
            else:
                yield pages.bytes

    def bytes(self, value: ir.Value) -> Size:
        """Bytes of a value; 0, and its name is noted, where nobody knows."""
        shape, dtype = self.known.shape(value), value.dtype
        if shape is None or dtype is None or dtype == ir.DataType.STRING:
            self.unknown[str(value.name)] = None
            return 0
        elements = sizes.product(shape)
        if dtype.bitwidth % 8 == 0:
            return sizes.operation("*", dtype.bitwidth // 8, elements)
        bits = sizes.operation("*", dtype.bitwidth, elements)
        return sizes.operation("//", sizes.operation("+", bits, 7), 8)

    def copied(self, copies: Sequence[Copied]) -> Iterator[Size]:
        """Roots that are copied: the copy's own size, or the root's where the copy has none."""
        graph = self.loaded.model.graph
        named = {v.name: v for node in graph.all_nodes() for v in node.outputs}
        named |= {v.name: v for inner in graph.subgraphs() for v in inner.inputs}
        roots = {v.name: v for v in self.loaded.mutable}
        for copy in copies:
            if copy.root is None:
                continue
            value = named.get(copy.value)
            whole = value is None or not isinstance(value.type, ir.TensorType)
            yield self.bytes(roots[copy.root] if whole or value is None else value)

    def integers(self) -> Iterator[int]:
        """Inputs that may be positions: a run copies them, so that no one changes them."""
        for value in self.loaded.model.graph.inputs:
            whole = isinstance(value.type, ir.TensorType) and value.dtype is not None
            if whole and value not in self.loaded.mutable and value.dtype in _INTEGERS:
                yield self.of_slot.index(value)

    # -- blocks

    def buffers(self, block: Block) -> tuple[Item, ...]:
        """What stays in the block's arena between runs."""
        return tuple(
            Item(slot, self.bytes(self.of_slot[slot]), (first, last))
            for slot, (first, last) in block.lifetimes.items()
            if self.values[slot].storage is Storage.BUFFER
        )

    def block(self, block: Block, held: Sequence[int] = ()) -> BlockUse:
        """``held``: values that are kept during the block, as a loop's from the round before."""
        handed_on = {
            slot
            for step in block.steps
            if isinstance(step, Branch | Repeat | ScanStep)
            for slot in lifetimes.fills(step)
        }
        passing = []
        for slot, (first, last) in block.lifetimes.items():
            if self.values[slot].storage is Storage.FRESH:
                # what a block hands on, or a loop stacks, is counted there until the step ends
                first = first + 1 if slot in handed_on else first
                if first <= last:
                    passing.append(Item(slot, self.bytes(self.of_slot[slot]), (first, last)))
        whole = 0, len(block.steps)
        passing += [Item(slot, self.bytes(self.of_slot[slot]), whole) for slot in held]
        return BlockUse(
            self.buffers(block), tuple(passing), tuple(self.step(step) for step in block.steps)
        )

    def step(self, step: Step) -> Use:
        nodes = self.nodes.get(id(step), ())
        match step:
            case SubSession():
                kept = {self.of_slot[port.slot] for port in step.outputs}
                return Use(self.simulation.workspace(nodes, kept))
            case Branch():
                return Use((), 0, 0, (self.block(step.then), self.block(step.otherwise)))
            case Repeat():
                return self.rounds(step, [*step.carried, step.number, step.going])
            case ScanStep():
                copied = [
                    element
                    for element, whole in zip(step.elements, step.scanned, strict=True)
                    if whole.axis != 0
                ]
                return self.rounds(step, [*step.carried, *copied])
            case _:
                needs = [self.kernel(node) for node in nodes]
                return Use(tuple(together for found in needs for together in found))

    def kernel(self, node: ir.Node) -> tuple[Allocations, ...]:
        found = workspace.of(node, self.known)
        if found is None:
            self.unknown[f"workspace of {node.op_type}"] = None
        return found or ()

    def rounds(self, step: Repeat | ScanStep, held: Sequence[int]) -> Use:
        """Elements are collected, one array a round; in the end they are put together."""
        collected: Size = 0
        joined: Size = 0
        elements = step.body.outputs[len(step.body.outputs) - len(step.stacked) :]
        for whole, slot in zip(step.stacked, elements, strict=True):
            size = self.bytes(self.of_slot[whole.slot])
            joined = sizes.total((joined, size, size))
            if size != 0:  # the last element is counted in the body
                element = self.bytes(self.of_slot[slot])
                collected = sizes.total((collected, sizes.operation("-", size, element)))
        fresh = [slot for slot in held if self.values[slot].storage is Storage.FRESH]
        return Use((), collected, joined, (self.block(step.body, fresh),))

    # -- what must fit

    def fits(self) -> Iterator[Fit]:
        """Requirements outside of all branches and loops: there, a run may not come to them."""
        roots = self.loaded.aliases.owner
        for node in self.loaded.model.graph:
            for r in conditions.requirements(node, roots, self.loaded.mutable):
                yield from self.fit(r)

    def fit(self, r: Requirement) -> Iterator[Fit]:
        code = "E102" if r.kind is Kind.SHAPE else "E112"
        length, location = self.term(r.length), integrity.source(r.node)
        count = len(r.subject) if isinstance(r.subject, tuple) else 1
        for k in range(count):
            low, high, capacity = (
                self.term(terms[k % len(terms)]) for terms in (r.low, r.high, r.capacity)
            )
            if low is None or high is None or capacity is None or length is None:
                continue
            number = self.number(r, k)
            if number is None and code == "E102":
                continue
            yield Fit(code, r.root, r.port, low, high, number, length, capacity, location)

    def number(self, r: Requirement, k: int) -> Size | None:
        if isinstance(r.subject, tuple):
            return self.term(r.subject[k])
        number, offset = self.known.integer(r.subject), self.term(r.offset)
        return None if number is None or offset is None else sizes.operation("+", number, offset)

    def term(self, term: Linear) -> Size | None:
        total: Size = term.constant
        for factor, value, axis in term.axes:
            size = self.known.size(value, axis)
            if size is None:
                return None
            operator = "+" if factor > 0 else "-"
            total = sizes.operation(operator, total, sizes.operation("*", abs(factor), size))
        return total
