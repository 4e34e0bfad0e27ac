"""Control flow of a random program: If, Loop and Scan around more statements."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from authoring.block import CACHE, HERE, TOKEN, Block, Name, typed
from authoring.writes import Writes
from onnx_inplace.compiler import program


class Flow(Writes):
    """Blocks inside of blocks."""

    def __init__(self, choices, element: ir.DataType = ir.DataType.INT64) -> None:
        super().__init__(choices, element)
        self.budget = 0  # statements that may still be written

    def statements(self, block: Block, count: int) -> None:
        for _ in range(count):
            if self.budget <= 0:
                return
            self.budget -= 1
            kinds = [self.write, self.write, self.view, self.read, self.call, self.call]
            if self.depth < 2:
                kinds += [self.branch, self.branch, self.loop, self.loop, self.scan]
            if self.slip():
                kinds = [self.reread]
            self.pick(kinds)(block)

    def call(self, block: Block) -> None:
        """Call a function, where there are any."""
        raise NotImplementedError

    def own(self, block: Block, name: Name, taken: Sequence[ir.Value]) -> ir.Value:
        """A value that this block has made: ONNX wants it of a result."""
        made = name.value.producer() is not None and name.value not in block.outer_values
        if made and name.value not in taken:
            return name.value
        same = block.node(
            "Identity", [name.value], name.shape, cache=name.cache, hint="same", dtype=name.dtype
        )
        return same.value

    def inside(self, outer: Block, writable: Sequence[int]) -> Block:
        names = outer.writable if self.slip() else writable
        return Block(self.fresh, outer, names, outer.ranks, outer.element)

    def branch(self, block: Block) -> None:
        condition = self.truth(block)
        branches = [self.inside(block, block.writable) for _ in range(2)]
        ends = []
        for inner in branches:
            self.counts.append(0)
            self.statements(inner, self.below(3))
            ends.append(self.counts.pop())
        changed = [
            k
            for k in block.current
            if any(b.current[k].value is not block.current[k].value for b in branches)
            or self.chance(6)
        ]
        changed = [k for k in changed if not self.slip()]
        if changed and self.slip():
            changed.append(self.pick(changed))
        results: list[list[ir.Value]] = []
        extra = self.chance(2) or not changed
        shapes = [CACHE] * len(changed) + [TOKEN] * extra
        caches = [*changed, *[None] * extra]
        for inner, end in zip(branches, ends, strict=True):
            self.counts.append(end)
            values: list[ir.Value] = []
            for k in changed:
                values.append(self.own(inner, self.cache_name(inner, k), values))
            if extra:
                values.append(self.own(inner, self.token(inner), values))
            parts = zip(values, shapes, caches, strict=True)
            kinds = [Name(v, s, k, dtype=inner.element) for v, s, k in parts]
            results.append([self.declared(name.value, name) for name in kinds])
            self.counts.pop()
        graphs = {
            key: ir.Graph([], values, nodes=inner.nodes, name=self.fresh("branch"))
            for key, inner, values in zip(
                ("then_branch", "else_branch"), branches, results, strict=True
            )
        }
        made = self.control(block, "If", [condition.value], shapes, caches, graphs)
        for k, name in zip(changed, made, strict=False):
            block.current[k] = name

    def control(
        self,
        block: Block,
        op: str,
        inputs: Sequence[ir.Value | None],
        shapes: Sequence[tuple[int, ...]],
        caches: Sequence[int | None],
        attributes: dict,
    ) -> list[Name]:
        types = [block.element if shape else ir.DataType.INT64 for shape in shapes]
        pairs = zip(shapes, types, strict=True)
        values = [typed(ir.Value(name=self.fresh("o")), s, t) for s, t in pairs]
        if block.ranks:
            for value, shape in zip(values, shapes, strict=True):
                value.shape = ir.Shape([None] * len(shape))
        node = ir.node(op, inputs, attributes, outputs=values)
        node.meta[program.LOCATION] = HERE
        block.nodes.append(node)
        return [
            block.add(Name(v, s, c, "number" if not s else "stack" if s[0] < 0 else "tensor", t))
            for v, s, c, t in zip(values, shapes, caches, types, strict=True)
        ]

    def carried(self, block: Block) -> list[Name]:
        """Initial values of a loop: caches that it will write, an ordinary value, a number."""
        state = [self.cache_name(block, k) for k in block.writable if not self.chance(4)]
        if self.slip():
            state.append(self.any_cache(block))
        if self.chance(2):
            state.append(self.token(block))
        if self.chance(3):
            state.append(self.number(block))
        return state

    def enter(self, block: Block, state: Sequence[Name]) -> tuple[Block, list[ir.Value]]:
        """A body whose formals carry ``state``."""
        inner = self.inside(block, [n.cache for n in state if n.cache in block.writable])
        formals = []
        for name in state:
            formal = self.declared(ir.Value(name=self.fresh("carried")), name)
            added = inner.add(dataclasses.replace(name, value=formal))
            if name.cache is not None:
                inner.current[name.cache] = added
            formals.append(formal)
        return inner, formals

    def leave(self, inner: Block, state: Sequence[Name]) -> list[ir.Value]:
        """What the body carries to the next round."""
        results: list[ir.Value] = []
        for name in state:
            if name.cache is not None:
                after = self.cache_name(inner, name.cache)
            elif name.shape == TOKEN:
                after = self.token(inner)
            elif name.shape == CACHE:
                after = self.whole(inner)
            else:
                after = self.number(inner)
            results.append(self.declared(self.own(inner, after, results), name))
        return results

    def stacked(self, inner: Block, results: list[ir.Value]) -> list[Name]:
        """Values to be stacked, one for each round."""
        names = []
        for _ in range(self.pick([0, 0, 1])):
            name = self.any_cache(inner) if self.slip() else self.token(inner, new=self.chance(2))
            value = typed(self.own(inner, name, results), name.shape, inner.element)
            results.append(value)
            names.append(Name(value, name.shape, dtype=inner.element))
        return names

    def loop(self, block: Block) -> None:
        count = self.number(block, 4)
        condition = self.truth(block).value if self.chance(3) else None
        state = self.carried(block)
        self.counts.append(0)
        inner, formals = self.enter(block, state)
        step = typed(ir.Value(name=self.fresh("step")), ())
        going = typed(ir.Value(name=self.fresh("going")), (), ir.DataType.BOOL)
        inner.add(Name(step, (), None, "number"))
        inner.add(Name(going, (), None, "truth", ir.DataType.BOOL))
        self.statements(inner, 1 + self.below(2))
        again = (
            self.truth(inner)
            if self.chance(4)
            else inner.names[[n.value for n in inner.names].index(going)]
        )
        again_value = self.own(inner, dataclasses.replace(again, cache=None), ())
        typed(again_value, (), ir.DataType.BOOL)
        results = [again_value, *self.leave(inner, state)]
        stacked = self.stacked(inner, results)
        self.counts.pop()
        body = ir.Graph(
            [step, going, *formals], results, nodes=inner.nodes, name=self.fresh("body")
        )
        self.after(
            block,
            "Loop",
            [count.value, condition, *(n.value for n in state)],
            state,
            stacked,
            {"body": body},
        )

    def scan(self, block: Block) -> None:
        """Over the rows of a constant, or of a cache."""
        source = self.whole(block)
        state = self.carried(block)
        self.counts.append(0)
        inner, formals = self.enter(block, state)
        row = typed(ir.Value(name=self.fresh("row")), CACHE[1:], inner.element)
        inner.add(Name(row, CACHE[1:], dtype=inner.element))
        self.statements(inner, 1 + self.below(2))
        results = self.leave(inner, state)
        stacked = self.stacked(inner, results)
        if not results:
            name = self.token(inner, new=True)
            results.append(typed(name.value, TOKEN, inner.element))
            stacked = [name]
        self.counts.pop()
        body = ir.Graph([*formals, row], results, nodes=inner.nodes, name=self.fresh("body"))
        inputs = [*(n.value for n in state), source.value]
        self.after(block, "Scan", inputs, state, stacked, {"body": body, "num_scan_inputs": 1})

    def after(
        self,
        block: Block,
        op: str,
        inputs: Sequence[ir.Value | None],
        state: Sequence[Name],
        stacked: Sequence[Name],
        attributes: dict,
    ) -> None:
        if not state and not stacked:
            return  # a node without results: not written
        shapes = [n.shape for n in state] + [(-1, *n.shape) for n in stacked]
        caches = [n.cache for n in state] + [None] * len(stacked)
        for name in self.control(block, op, inputs, shapes, caches, attributes):
            if name.cache is not None and name.shape == CACHE and not self.slip():
                block.current[name.cache] = name
