"""A whole random program: its parameters, its functions, what it returns and declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from authoring.block import (
    CACHE,
    DOMAIN,
    HERE,
    LOCAL,
    OPSET,
    ROWS,
    TOKEN,
    Block,
    Name,
    shape_of,
    typed,
)
from authoring.flow import Flow
from onnx_inplace.compiler import program
from onnx_inplace.compiler.contract import Access


@dataclasses.dataclass(frozen=True)
class Callee:
    """A function that has been written."""

    declaration: program.Declaration
    parameters: tuple[Name, ...]
    results: tuple[Name, ...]


class Author(Flow):
    """Writes one program."""

    def __init__(self, choices, element: ir.DataType = ir.DataType.INT64) -> None:
        super().__init__(choices, element)
        self.functions: list[Callee] = []

    def program(self) -> program.Declaration:
        for _ in range(self.pick([0, 0, 1, 1, 2, 3])):
            self.functions.append(self.function())
        self.symbol = self.pick([None, None, "capacity"])
        caches = self.pick([1, 1, 2, 2, 3])
        block = Block(self.fresh, None, range(caches), self.symbol is not None, self.element)
        inputs, access = [], []
        for k in range(caches):
            inputs.append(self.input(block, f"cache{k}", CACHE, k))
            access.append(Access.READ_WRITE)
        plain = (
            ("frozen", CACHE),
            ("new", TOKEN),
            ("position", ()),
            ("steps", ()),
            ("rows", (ROWS,)),
        )
        for name, shape in plain:
            inputs.append(self.input(block, name, shape, None))
            access.append(Access.READ_ONLY)
        inputs.append(self.input(block, "flag", (), None, ir.DataType.BOOL))
        access.append(Access.READ_ONLY)
        weights = [self.weight(block)] if self.chance(3) else []
        self.budget = 3 + self.below(6)
        self.statements(block, 2 + self.below(4))
        outputs, returns = self.returns(block)
        function = self.close("model", block, inputs, outputs, weights)
        called = called_functions(function, self.functions)
        return program.Declaration(function, tuple(access), returns, called, HERE)

    def weight(self, block: Block) -> ir.Value:
        """An initializer of a cache's shape."""
        array = np.arange(np.prod(CACHE), dtype=self.element.numpy()).reshape(CACHE) % 7
        value = ir.Value(name="weight", const_value=ir.tensor(array, name="weight"))
        typed(value, CACHE, self.element)
        return block.add(Name(value, CACHE, dtype=self.element)).value

    def input(
        self,
        block: Block,
        name: str,
        shape: tuple[int, ...],
        cache: int | None,
        dtype: ir.DataType | None = None,
    ) -> ir.Value:
        kind = "tensor" if shape else "number" if dtype is None else "truth"
        if dtype is None:
            dtype = self.element if shape and shape != (ROWS,) else ir.DataType.INT64
        added = block.add(Name(ir.Value(name=name), shape, cache, kind, dtype))
        value = self.declared(added.value, added)
        if cache is not None:
            block.current[cache] = added
        return value

    def function(self) -> Callee:
        """A function of one or two caches, lent or only read."""
        counts, self.counts = self.counts, [0]
        self.symbol = self.pick([None, "room"])
        count = self.pick([1, 1, 2])
        lent = [self.pick([True, True, True, False]) for _ in range(count)]
        writable = [k for k in range(count) if lent[k]]
        block = Block(self.fresh, None, writable, self.symbol is not None, self.element)
        inputs, access = [], []
        for k in range(count):
            inputs.append(self.input(block, self.fresh("c"), CACHE, k))
            access.append(Access.READ_WRITE if lent[k] else Access.READ_ONLY)
        for hint, shape in (("x", TOKEN), ("p", ())):
            inputs.append(self.input(block, self.fresh(hint), shape, None))
            access.append(Access.READ_ONLY)
        parameters = tuple(block.names)
        self.budget = 2 + self.below(4)
        self.statements(block, 1 + self.below(3))
        outputs, returns = self.returns(block)
        function = self.close(f"f{len(self.functions)}", block, inputs, [o for o in outputs])
        self.counts = counts
        called = called_functions(function, self.functions)
        declaration = program.Declaration(function, tuple(access), returns, called, HERE)
        by_name = {v.name: k for k, v in enumerate(inputs)}
        results = tuple(
            Name(o, shape_of(o), by_name[r] if r is not None else None, dtype=o.dtype)
            for o, r in zip(outputs, returns, strict=True)
        )
        return Callee(declaration, parameters, results)

    def close(
        self,
        name: str,
        block: Block,
        inputs: list[ir.Value],
        outputs: list[ir.Value],
        weights: Sequence[ir.Value] = (),
    ) -> ir.Function:
        graph = ir.Graph(
            inputs,
            outputs,
            nodes=block.nodes,
            initializers=weights,
            name=name,
            opset_imports={"": OPSET, DOMAIN: 1, LOCAL: 1},
        )
        return ir.Function(LOCAL, name, graph=graph, attributes=[])

    def returns(self, block: Block) -> tuple[list[ir.Value], tuple[str | None, ...]]:
        """The current name of each cache that can be written, and an ordinary result or two."""
        parameters = {
            n.cache: n
            for n in reversed(block.names)
            if n.value.producer() is None and n.cache is not None
        }
        results: list[tuple[Name, str | None]] = []
        for k in block.writable:
            if block.current[k].value is parameters[k].value and self.chance(2):
                continue  # never written: need not come back
            if self.slip():
                continue
            declared = parameters[k].value.name
            if self.slip():
                declared = self.pick([None, parameters[self.pick(block.writable)].value.name])
            results.append((self.cache_name(block, k), declared))
            if self.slips and self.chance(8):  # twice, perhaps an older version of it
                names = [n for n in block.names if n.cache == k and n.shape == CACHE]
                results.append((self.pick(names), declared))
        for _ in range(self.pick([0, 1, 1, 2])):
            results.append((self.token(block), None))
        if self.slip():
            results.append((self.any_cache(block), None))
        if self.chance(6):  # what is only read may be returned: a fresh copy, or the caller's view
            results.append((self.only_read(block), None))
        if not results:
            results.append((self.token(block), None))
        return self.outputs(block, results)

    def only_read(self, block: Block) -> Name:
        """A parameter that cannot be written, of a function perhaps a cache of its caller."""
        lent = set(block.writable)
        parameters = [n for n in block.names if n.value.producer() is None]
        return self.pick([n for n in parameters if n.cache not in lent])

    def outputs(
        self, block: Block, results: list[tuple[Name, str | None]]
    ) -> tuple[list[ir.Value], tuple[str | None, ...]]:
        values = [self.own(block, name, ()) for name, _ in results]
        for k, value in enumerate(values):
            if value in values[:k]:
                name = results[k][0]
                same = block.node("Identity", [value], name.shape, hint="same", dtype=name.dtype)
                values[k] = same.value
        for value, (name, _) in zip(values, results, strict=True):
            self.declared(value, name)
        return values, tuple(declared for _, declared in results)

    def call(self, block: Block) -> None:
        """Call a function with caches, or with an ordinary value where it only reads."""
        if not self.functions:
            return self.write(block)
        callee = self.pick(self.functions)
        free = list(block.current)
        arguments: list[Name] = []
        given: dict[int, int] = {}
        pairs = zip(callee.parameters, callee.declaration.access, strict=True)
        for port, (parameter, access) in enumerate(pairs):
            if parameter.cache is None:
                arguments.append(self.number(block) if not parameter.shape else self.token(block))
                continue
            wanted = [k for k in free if access is Access.READ_ONLY or k in block.writable]
            if not wanted and not self.slip():
                if access is Access.READ_WRITE:
                    return self.read(block)
                arguments.append(self.whole(block))
                continue
            cache = self.pick(wanted or list(block.current))
            if cache in free and not self.slip():
                free.remove(cache)
            given[port] = cache
            arguments.append(self.cache_name(block, cache))
        caches = [None if n.cache is None else given.get(n.cache) for n in callee.results]
        values = [typed(ir.Value(name=self.fresh("o")), n.shape, n.dtype) for n in callee.results]
        function = callee.declaration.function
        node = ir.node(function.name, [a.value for a in arguments], domain=LOCAL, outputs=values)
        node.meta[program.LOCATION] = HERE
        block.nodes.append(node)
        for value, result, cache in zip(values, callee.results, caches, strict=True):
            kind = "tensor" if result.shape else "number"
            name = block.add(Name(value, result.shape, cache, kind, result.dtype))
            if cache is not None and result.shape == CACHE and not self.slip():
                block.current[cache] = name


def called_functions(
    function: ir.Function, known: Sequence[Callee]
) -> tuple[program.Declaration, ...]:
    """Declarations of what a function calls, directly or not, callees first."""
    nodes = ir.traversal.RecursiveGraphIterator(function.graph)
    wanted = {n.op_identifier() for n in nodes}
    found: dict[tuple, program.Declaration] = {}
    for callee in known:
        if callee.declaration.function.identifier() in wanted:
            for d in (*callee.declaration.functions, callee.declaration):
                found.setdefault(d.function.identifier(), d)
    return tuple(found.values())
