"""Random stateful programs: what an author could have written, right or wrong.

A program is written at the level of the IR: several lent caches and a read-only one, functions that
call functions, If, Loop and Scan to some depth, views, every operator that writes, reads of every
kind, and values that are derived from reads. The writer keeps no versions. It remembers one
*current* name for each cache, as an author does, takes it nearly always, and a wrong name now and
then (``slips``). Whether the program is right is for others to say.

Everything is drawn through ``Choices``, so that hypothesis can shrink a program and a plain seed
can repeat one. Tensors are INT64: every oracle then agrees to the last bit.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import onnx_ir as ir
from hypothesis import strategies as st

from onnx_inplace.compiler import errors, program
from onnx_inplace.compiler.contract import Access

T = TypeVar("T")
DOMAIN, LOCAL = "onnx_inplace", "local"
OPSET = 24
ROWS, CAPACITY, WIDTH = 2, 3, 2
CACHE, TOKEN = (ROWS, CAPACITY, WIDTH), (ROWS, 1, WIDTH)
SHAPES = (CACHE, (12,), (2, 6), (6, 2), (4, 3), (3, 2, 2))  # what a cache can be viewed as
HERE = errors.Location("strategies.py", 1)


class Choices(Protocol):
    """Where the program's accidents come from."""

    def below(self, count: int) -> int:
        """A number from 0 to ``count - 1``; small numbers are the plain choices."""


class Seeded:
    """Choices of a pseudo-random generator: fast, and repeated by the seed alone."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, count: int) -> int:
        return self._random.randrange(count)


class Drawn:
    """Choices that hypothesis makes, and shrinks."""

    def __init__(self, draw: Callable[[st.SearchStrategy[int]], int]) -> None:
        self._draw = draw

    def below(self, count: int) -> int:
        return self._draw(st.integers(0, count - 1))


@dataclasses.dataclass(frozen=True)
class Example:
    """A program and what to run it on, one run after the other on the same storage."""

    declaration: program.Declaration
    storage: dict[str, np.ndarray]
    feeds: tuple[dict[str, np.ndarray], ...]
    seed: int | None = None

    def plain(self) -> bytes:
        """The program as an ordinary model, made without the compiler."""
        graph = self.declaration.function.graph
        functions = [d.function for d in self.declaration.functions]
        for d in self.declaration.functions:
            pairs = zip(d.function.inputs, d.access, strict=True)
            lent = [v.name for v, access in pairs if access is Access.READ_WRITE]
            d.function.metadata_props["mutable"] = ",".join(lent)
        model = ir.Model(graph, ir_version=11, functions=functions)
        return ir.to_proto(model).SerializeToString()


@dataclasses.dataclass(frozen=True)
class Name:
    """A value of the program, its shape, and the cache that its author believes it to be."""

    value: ir.Value
    shape: tuple[int, ...]
    cache: int | None = None
    kind: str = (
        "tensor"  # or number (INT64 scalar), truth (BOOL scalar), stack (first axis unknown)
    )


class Block:
    """What can be named at a place of the program, and the nodes written so far."""

    def __init__(self, writer: Writer, outer: Block | None, writable: Sequence[int]) -> None:
        self.writer, self.nodes = writer, []
        self.outer_values = outer.values if outer is not None else set()
        self.values: set[ir.Value] = set(self.outer_values)
        self.names: list[Name] = list(outer.names) if outer is not None else []
        self.current: dict[int, Name] = dict(outer.current) if outer is not None else {}
        self.writable = list(writable)  # caches that the author means to write here

    def add(self, name: Name) -> Name:
        self.values.add(name.value)
        self.names.append(name)
        return name

    def node(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        shape: tuple[int, ...],
        *,
        domain: str = "",
        cache: int | None = None,
        kind: str = "tensor",
        hint: str = "v",
        **attributes: object,
    ) -> Name:
        value = ir.Value(name=self.writer.fresh(hint))
        kept = {k: a for k, a in attributes.items() if a is not None}
        node = ir.node(op, inputs, kept, domain=domain, outputs=[value])
        node.meta[program.LOCATION] = HERE
        self.nodes.append(node)
        return self.add(Name(value, shape, cache, kind))

    def constant(self, array: np.ndarray) -> Name:
        kind = "number" if array.ndim == 0 else "tensor"
        return self.node("Constant", [], array.shape, kind=kind, hint="k", value=ir.tensor(array))


@dataclasses.dataclass(frozen=True)
class Callee:
    """A function that has been written."""

    declaration: program.Declaration
    parameters: tuple[Name, ...]
    results: tuple[Name, ...]


class Writer:
    """Writes one program."""

    def __init__(self, choices: Choices) -> None:
        self.choices, self.count = choices, 0
        self.functions: list[Callee] = []
        self.slips = self.pick([0, 0, 0, 8, 4])  # one wrong choice in how many; 0: none
        self.budget = 0
        self.depth = 0

    # choices

    def below(self, count: int) -> int:
        return self.choices.below(count) if count > 1 else 0

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def chance(self, one_in: int) -> bool:
        return self.below(one_in) == one_in - 1

    def slip(self) -> bool:
        return self.slips > 0 and self.chance(self.slips)

    def fresh(self, hint: str) -> str:
        self.count += 1
        return f"{hint}{self.count}"

    # whole programs

    def program(self) -> program.Declaration:
        for _ in range(self.pick([0, 0, 1, 1, 2, 3])):
            self.functions.append(self.function())
        caches = self.pick([1, 1, 2, 2, 3])
        block = Block(self, None, range(caches))
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
        self.budget = 3 + self.below(6)
        self.statements(block, 2 + self.below(4))
        outputs, returns = self.returns(block)
        function = self.close("model", block, inputs, outputs)
        return program.Declaration(
            function, tuple(access), returns, tuple(f.declaration for f in self.functions), HERE
        )

    def input(
        self,
        block: Block,
        name: str,
        shape: tuple[int, ...],
        cache: int | None,
        dtype: ir.DataType = ir.DataType.INT64,
    ) -> ir.Value:
        value = typed(ir.Value(name=name), shape, dtype)
        kind = "tensor" if shape else "number" if dtype == ir.DataType.INT64 else "truth"
        added = block.add(Name(value, shape, cache, kind))
        if cache is not None:
            block.current[cache] = added
        return value

    def function(self) -> Callee:
        """A function of one or two caches, lent or only read."""
        count = self.pick([1, 1, 2])
        lent = [self.pick([True, True, True, False]) for _ in range(count)]
        block = Block(self, None, [k for k in range(count) if lent[k]])
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
        function = self.close(self.fresh("f"), block, inputs, [o for o in outputs])
        called = called_functions(function, self.functions)
        declaration = program.Declaration(function, tuple(access), returns, called, HERE)
        by_name = {v.name: k for k, v in enumerate(inputs)}
        results = tuple(
            Name(o, shape_of(o), by_name[r] if r is not None else None)
            for o, r in zip(outputs, returns, strict=True)
        )
        return Callee(declaration, parameters, results)

    def close(
        self, name: str, block: Block, inputs: list[ir.Value], outputs: list[ir.Value]
    ) -> ir.Function:
        imports = {"": OPSET, DOMAIN: 1, LOCAL: 1}
        graph = ir.Graph(inputs, outputs, nodes=block.nodes, name=name, opset_imports=imports)
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
        for _ in range(self.pick([0, 1, 1, 2])):
            results.append((self.token(block), None))
        if self.slip():
            results.append((self.any_cache(block), None))
        if not results:
            results.append((self.token(block), None))
        return self.outputs(block, results)

    def outputs(
        self, block: Block, results: list[tuple[Name, str | None]]
    ) -> tuple[list[ir.Value], tuple[str | None, ...]]:
        values = [self.own(block, name, ()) for name, _ in results]
        for k, value in enumerate(values):
            if value in values[:k]:
                values[k] = block.node("Identity", [value], results[k][0].shape, hint="same").value
        for value, (name, _) in zip(values, results, strict=True):
            typed(value, name.shape, dtype_of(name))
        return values, tuple(declared for _, declared in results)

    def own(self, block: Block, name: Name, taken: Sequence[ir.Value]) -> ir.Value:
        """A value that this block has made: ONNX wants it of a result."""
        made = name.value.producer() is not None and name.value not in block.outer_values
        if made and name.value not in taken:
            return name.value
        return block.node("Identity", [name.value], name.shape, cache=name.cache, hint="same").value

    # statements

    def statements(self, block: Block, count: int) -> None:
        for _ in range(count):
            if self.budget <= 0:
                return
            self.budget -= 1
            kinds = [self.write, self.write, self.view, self.read, self.call, self.call]
            if self.depth < 2:
                kinds += [self.branch, self.branch, self.loop, self.loop, self.scan]
            self.pick(kinds)(block)

    def cache_name(self, block: Block, cache: int) -> Name:
        """The current name of a cache; a slip takes any name of any cache."""
        return self.any_cache(block) if self.slip() else block.current[cache]

    def any_cache(self, block: Block) -> Name:
        whole = [n for n in block.names if n.shape == CACHE]
        return self.pick(whole[::-1])

    def write(self, block: Block) -> None:
        if not block.writable and not self.slip():
            return self.read(block)
        cache = self.pick(block.writable or list(block.current))
        if self.slip():
            cache = self.pick(list(block.current))
        target = self.cache_name(block, cache)
        if self.slip():
            target = self.pick([n for n in block.names if n.kind == "tensor"])
        if self.chance(5):
            target = self.view_of(block, target)
        result = self.pick(WRITERS)(self, block, target)
        if result.shape != CACHE and int(np.prod(result.shape)) == int(np.prod(CACHE)):
            result = self.reshape(block, result, CACHE)
        if result.shape == CACHE and not self.slip():
            block.current[cache] = result

    def view(self, block: Block) -> None:
        cache = self.pick(list(block.current))
        result = self.view_of(block, self.cache_name(block, cache))
        if result.shape == CACHE and self.chance(2) and cache in block.writable:
            block.current[cache] = result

    def view_of(self, block: Block, name: Name) -> Name:
        x, rank = name.value, len(name.shape)
        kind = self.below(5)
        if kind == 0:
            return block.node("Identity", [x], name.shape, cache=name.cache, hint="i")
        if kind == 1 and int(np.prod(name.shape)) == int(np.prod(CACHE)):
            return self.reshape(block, name, self.pick(SHAPES))
        if kind == 2 and rank:
            axis = self.below(rank + 1)
            flat = (int(np.prod(name.shape[:axis])), int(np.prod(name.shape[axis:])))
            return block.node("Flatten", [x], flat, cache=name.cache, hint="f", axis=axis)
        axis = self.below(rank + 1)
        axes = block.constant(np.array([axis]))
        longer = (*name.shape[:axis], 1, *name.shape[axis:])
        wide = block.node("Unsqueeze", [x, axes.value], longer, cache=name.cache, hint="u")
        if kind == 3:
            return wide
        return block.node(
            "Squeeze", [wide.value, axes.value], name.shape, cache=name.cache, hint="s"
        )

    def reshape(self, block: Block, name: Name, shape: tuple[int, ...]) -> Name:
        target = block.constant(np.array(shape))
        return block.node("Reshape", [name.value, target.value], shape, cache=name.cache, hint="r")

    def read(self, block: Block) -> None:
        self.token(block, new=True)

    # ordinary values

    def token(self, block: Block, new: bool = False) -> Name:
        """An ordinary value of one token for each row, often made from what a cache holds."""
        known = [n for n in block.names if n.shape == TOKEN and n.cache is None]
        if known and not new and self.chance(2):
            return self.pick(known[::-1])
        kind = self.below(4)
        source = self.cache_name(block, self.pick(list(block.current))).value
        if kind == 0:
            at = block.constant(np.array([self.below(CAPACITY)]))
            return block.node("Gather", [source, at.value], TOKEN, axis=1, hint="g")
        axes = block.constant(np.array([1]))
        total = block.node("ReduceSum", [source, axes.value], TOKEN, keepdims=1, hint="t")
        if kind == 1 or not known:
            return total
        if kind == 2:
            return block.node("Add", [self.pick(known).value, total.value], TOKEN, hint="a")
        return block.node("Mul", [self.pick(known).value, total.value], TOKEN, hint="m")

    def whole(self, block: Block) -> Name:
        """An ordinary value of a cache's shape, or the name of a cache."""
        kind = self.below(4)
        source = self.cache_name(block, self.pick(list(block.current)))
        if kind == 0:
            return block.node("Add", [source.value, self.token(block).value], CACHE, hint="w")
        if kind == 1:
            return block.node("Copy", [source.value], CACHE, domain=DOMAIN, hint="copy")
        if kind == 2 and len(block.current) > 1:
            return source  # another cache's content, most likely
        ordinary = [n for n in block.names if n.shape == CACHE and n.cache is None]
        if ordinary:
            return self.pick(ordinary[::-1])
        return block.node("Mul", [source.value, source.value], CACHE, hint="w")

    def content(self, block: Block, shape: tuple[int, ...]) -> Name:
        """Values to be written, of any shape."""
        if shape == TOKEN:
            return self.token(block)
        if shape == CACHE:
            return self.whole(block)
        known = [n for n in block.names if n.shape == shape and n.cache is None]
        if known and self.chance(2):
            return self.pick(known)
        numbers = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape) + self.below(50)
        fixed = block.constant(numbers)
        if self.chance(2):
            return fixed
        return block.node("Add", [fixed.value, self.number(block).value], shape, hint="b")

    def number(self, block: Block, limit: int = CAPACITY) -> Name:
        """A scalar from 0 to ``limit - 1``, perhaps an input, or made from a cache's content."""
        kind = self.below(5)
        if kind == 0:
            return block.constant(np.array(self.below(limit)))
        known = [n for n in block.names if n.kind == "number"]
        if kind <= 2 and known:
            return self.pick(known[::-1])
        total = self.total(block)
        return block.node(
            "Mod", [total.value, block.constant(np.array(limit)).value], (), kind="number", hint="n"
        )

    def total(self, block: Block) -> Name:
        source = self.cache_name(block, self.pick(list(block.current))).value
        return block.node("ReduceSum", [source], (), keepdims=0, hint="sum", kind="number")

    def truth(self, block: Block) -> Name:
        known = [n for n in block.names if n.kind == "truth"]
        if known and self.chance(2):
            return self.pick(known[::-1])
        limit = block.constant(np.array(self.below(60)))
        op = self.pick(["Greater", "Less"])
        return block.node(op, [self.number(block).value, limit.value], (), kind="truth", hint="q")

    # writes: (block, target) -> the new name

    def cache_update(self, block: Block, target: Name) -> Name:
        rank = len(target.shape)
        if rank == 0:
            return self.assign(block, target)
        axis = 1 if target.shape == CACHE else self.below(rank)
        capacity = target.shape[axis]
        length = self.pick([n for n in (1, 2) if n <= capacity])
        circular = self.chance(4)
        shape = (*target.shape[:axis], length, *target.shape[axis + 1 :])
        values = self.content(block, shape)
        batch_axis = None
        if target.shape == CACHE and self.chance(4):
            position, batch_axis = self.rows(block), 0
        else:
            position = self.number(block, capacity - length + 1)
        return block.node(
            "CacheUpdate",
            [target.value, values.value, position.value],
            target.shape,
            domain=DOMAIN,
            cache=target.cache,
            hint="cu",
            axis=axis - rank if self.chance(2) else axis,
            batch_axis=batch_axis,
            mode="circular" if circular else None,
        )

    def rows(self, block: Block) -> Name:
        """One position, or one row number, for each row."""
        known = [n for n in block.names if n.shape == (ROWS,) and n.cache is None]
        if known and self.chance(2):
            return self.pick(known)
        return block.constant(np.array([self.below(2) for _ in range(ROWS)]))

    def assign(self, block: Block, target: Name) -> Name:
        value = self.content(block, target.shape)
        return block.node(
            "Assign",
            [target.value, value.value],
            target.shape,
            domain=DOMAIN,
            cache=target.cache,
            hint="as",
        )

    def reorder(self, block: Block, target: Name) -> Name:
        if target.shape != CACHE:
            return self.assign(block, target)
        return block.node(
            "CacheReorder",
            [target.value, self.rows(block).value],
            CACHE,
            domain=DOMAIN,
            cache=target.cache,
            hint="cr",
            batch_axis=0,
        )

    def tensor_scatter(self, block: Block, target: Name) -> Name:
        if target.shape != CACHE:
            return self.cache_update(block, target)
        inputs = [target.value, self.token(block).value, self.rows(block).value]
        return block.node("TensorScatter", inputs, CACHE, cache=target.cache, hint="ts")

    def scatter_elements(self, block: Block, target: Name) -> Name:
        rank = len(target.shape)
        if rank == 0:
            return self.assign(block, target)
        axis = self.below(rank)
        shape = (*target.shape[:axis], 1, *target.shape[axis + 1 :])
        indices = block.constant(np.full(shape, self.below(target.shape[axis])))
        values = self.content(block, shape)
        return block.node(
            "ScatterElements",
            [target.value, indices.value, values.value],
            target.shape,
            cache=target.cache,
            hint="se",
            axis=axis,
        )

    def scatter_nd(self, block: Block, target: Name) -> Name:
        if not target.shape:
            return self.assign(block, target)
        indices = block.constant(np.array([[self.below(target.shape[0])]]))
        values = self.content(block, (1, *target.shape[1:]))
        inputs = [target.value, indices.value, values.value]
        return block.node("ScatterND", inputs, target.shape, cache=target.cache, hint="sn")

    # control flow

    def inside(self, outer: Block, writable: Sequence[int]) -> Block:
        return Block(self, outer, outer.writable if self.slip() else writable)

    def branch(self, block: Block) -> None:
        condition = self.truth(block)
        self.depth += 1
        branches = [self.inside(block, block.writable) for _ in range(2)]
        for inner in branches:
            self.statements(inner, self.below(3))
        self.depth -= 1
        changed = [
            k
            for k in block.current
            if any(b.current[k].value is not block.current[k].value for b in branches)
            or self.chance(6)
        ]
        changed = [k for k in changed if not self.slip()]
        results: list[list[ir.Value]] = []
        extra = self.chance(2) or not changed
        shapes = [CACHE] * len(changed) + [TOKEN] * extra
        for inner in branches:
            values: list[ir.Value] = []
            for k in changed:
                values.append(self.own(inner, self.cache_name(inner, k), values))
            if extra:
                values.append(self.own(inner, self.token(inner), values))
            results.append([typed(v, s) for v, s in zip(values, shapes, strict=True)])
        graphs = {
            key: ir.Graph([], values, nodes=inner.nodes, name=self.fresh("branch"))
            for key, inner, values in zip(
                ("then_branch", "else_branch"), branches, results, strict=True
            )
        }
        made = self.control(
            block, "If", [condition.value], shapes, [*changed, *[None] * extra], graphs
        )
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
        values = [ir.Value(name=self.fresh("o")) for _ in shapes]
        node = ir.node(op, inputs, attributes, outputs=values)
        node.meta[program.LOCATION] = HERE
        block.nodes.append(node)
        return [
            block.add(Name(v, s, c, "number" if not s else "stack" if s[0] < 0 else "tensor"))
            for v, s, c in zip(values, shapes, caches, strict=True)
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
            formal = typed(ir.Value(name=self.fresh("carried")), name.shape)
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
            results.append(typed(self.own(inner, after, results), name.shape))
        return results

    def stacked(self, inner: Block, results: list[ir.Value]) -> list[Name]:
        """Values to be stacked, one for each round."""
        names = []
        for _ in range(self.pick([0, 0, 1])):
            name = self.any_cache(inner) if self.slip() else self.token(inner, new=self.chance(2))
            value = typed(self.own(inner, name, results), name.shape)
            results.append(value)
            names.append(Name(value, name.shape))
        return names

    def loop(self, block: Block) -> None:
        count = self.number(block, 4)
        condition = self.truth(block).value if self.chance(3) else None
        state = self.carried(block)
        self.depth += 1
        inner, formals = self.enter(block, state)
        step = typed(ir.Value(name=self.fresh("step")), ())
        going = typed(ir.Value(name=self.fresh("going")), (), ir.DataType.BOOL)
        inner.add(Name(step, (), None, "number"))
        inner.add(Name(going, (), None, "truth"))
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
        self.depth -= 1
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
        self.depth += 1
        inner, formals = self.enter(block, state)
        row = typed(ir.Value(name=self.fresh("row")), CACHE[1:])
        inner.add(Name(row, CACHE[1:]))
        self.statements(inner, 1 + self.below(2))
        results = self.leave(inner, state)
        stacked = self.stacked(inner, results)
        if not results:
            name = self.token(inner, new=True)
            results.append(typed(name.value, TOKEN))
            stacked = [name]
        self.depth -= 1
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
        shapes = [n.shape for n in callee.results]
        caches = [None if n.cache is None else given.get(n.cache) for n in callee.results]
        values = [ir.Value(name=self.fresh("o")) for _ in shapes]
        function = callee.declaration.function
        node = ir.node(function.name, [a.value for a in arguments], domain=LOCAL, outputs=values)
        node.meta[program.LOCATION] = HERE
        block.nodes.append(node)
        for value, shape, cache in zip(values, shapes, caches, strict=True):
            name = block.add(Name(value, shape, cache))
            if cache is not None and shape == CACHE and not self.slip():
                block.current[cache] = name


WRITERS = (
    Writer.cache_update,
    Writer.cache_update,
    Writer.assign,
    Writer.reorder,
    Writer.tensor_scatter,
    Writer.scatter_elements,
    Writer.scatter_nd,
)


def typed(
    value: ir.Value, shape: tuple[int, ...], dtype: ir.DataType = ir.DataType.INT64
) -> ir.Value:
    """Declare what a result or a parameter is."""
    value.type = ir.TensorType(dtype)
    value.shape = ir.Shape([f"n{k}" if d < 0 else d for k, d in enumerate(shape)])
    return value


def shape_of(value: ir.Value) -> tuple[int, ...]:
    assert value.shape is not None
    return tuple(int(d) for d in value.shape)


def dtype_of(name: Name) -> ir.DataType:
    return ir.DataType.BOOL if name.kind == "truth" else ir.DataType.INT64


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


def example(choices: Choices, seed: int | None = None) -> Example:
    """A program with storage and inputs for three runs."""
    declaration = Writer(choices).program()
    generator = np.random.default_rng(choices.below(1000))
    caches = {v.name: generator.integers(0, 9, CACHE) for v in declaration.mutable}
    feeds = []
    for k in range(3):
        feeds.append(
            {
                "frozen": generator.integers(0, 9, CACHE),
                "new": generator.integers(-9, 9, TOKEN),
                "position": generator.integers(0, CAPACITY if k else 2, ()),
                "steps": generator.integers(0, 4, ()),
                "rows": generator.integers(0, 2, ROWS),
                "flag": np.asarray(bool((k + generator.integers(2)) % 2)),
            }
        )
    return Example(
        declaration, caches, tuple({k: np.asarray(v) for k, v in f.items()} for f in feeds), seed
    )


def seeded(seed: int) -> Example:
    """The program of a seed."""
    return example(Seeded(seed), seed)


@st.composite
def programs(draw: Callable) -> Example:
    """Programs for hypothesis."""
    return example(Drawn(draw))
