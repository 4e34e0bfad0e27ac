"""Ordinary values of a random program, most of them made from what a cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from authoring.block import (
    CACHE,
    CAPACITY,
    DOMAIN,
    ROWS,
    TOKEN,
    WIDTH,
    Block,
    Name,
    typed,
)
from authoring.choices import Choices

T = TypeVar("T")
MODULUS = 1009


class Values:
    """Chooses names, and makes tokens, whole arrays, numbers and truths."""

    def __init__(self, choices: Choices, element: ir.DataType = ir.DataType.INT64) -> None:
        self.choices, self.element = choices, element
        self.counts = [0]  # names given so far, by depth of the block
        self.hidden = False  # an outer name has been given again
        self.symbol: str | None = None  # the capacity's name, where it is declared by one
        self.slips = self.pick([0, 0, 20, 10, 4])  # one wrong choice in how many; 0: none

    def below(self, count: int) -> int:
        return self.choices.below(count) if count > 1 else 0

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def chance(self, one_in: int) -> bool:
        return self.below(one_in) == one_in - 1

    def slip(self) -> bool:
        return self.slips > 0 and self.chance(self.slips)

    @property
    def depth(self) -> int:
        """How many blocks stand around this place."""
        return len(self.counts) - 1

    def fresh(self, hint: str) -> str:
        """A name that no outer block has; siblings, and functions, have each other's names."""
        if self.depth and not self.hidden and self.slip() and self.chance(6):
            self.hidden = True
            return self.pick(["new", "frozen", "steps"])  # what the model calls an input
        self.counts[-1] += 1
        return f"{hint}{self.depth or ''}_{self.counts[-1]}"

    def declared(self, value: ir.Value, name: Name) -> ir.Value:
        """Declare a parameter or a result as what ``name`` is."""
        typed(value, name.shape, name.dtype)
        if self.symbol is not None and name.cache is not None and name.shape == CACHE:
            value.shape = ir.Shape([ROWS, self.symbol, WIDTH])
        return value

    def cache_name(self, block: Block, cache: int) -> Name:
        """The current name of a cache; a slip takes any name of any cache."""
        return self.any_cache(block) if self.slip() else block.current[cache]

    def any_cache(self, block: Block) -> Name:
        whole = [n for n in block.tensors if n.shape == CACHE]
        return self.pick(whole[::-1])

    def token(self, block: Block, new: bool = False) -> Name:
        """An ordinary value of one token for each row, often made from what a cache holds."""
        known = [n for n in block.tensors if n.shape == TOKEN and n.cache is None]
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
            return self.small(block, total)
        if kind == 2:
            added = block.node("Add", [self.pick(known).value, total.value], TOKEN, hint="a")
            return self.bounded(block, added)
        return self.small(
            block, block.node("Mul", [self.pick(known).value, total.value], TOKEN, hint="m")
        )

    def small(self, block: Block, name: Name) -> Name:
        """A value below MODULUS: onnxruntime adds up integers as doubles, exact below 2**53."""
        modulus = block.constant(np.array(MODULUS), small=False)
        return block.node("Mod", [name.value, modulus.value], name.shape, hint="z")

    def bounded(self, block: Block, name: Name) -> Name:
        """A value that need not be small."""
        return name

    def as_integer(self, block: Block, name: Name) -> Name:
        """A sum of what a cache holds, as something that can be a position."""
        return name

    def as_element(self, block: Block, name: Name) -> Name:
        """A number, of the type of caches."""
        return name

    def whole(self, block: Block) -> Name:
        """An ordinary value of a cache's shape, or the name of a cache."""
        kind = self.below(4)
        source = self.cache_name(block, self.pick(list(block.current)))
        if kind == 0:
            added = block.node("Add", [source.value, self.token(block).value], CACHE, hint="w")
            return self.bounded(block, added)
        if kind == 1:
            return block.node("Copy", [source.value], CACHE, domain=DOMAIN, hint="copy")
        if kind == 2 and len(block.current) > 1:
            return source  # another cache's content, most likely
        ordinary = [n for n in block.tensors if n.shape == CACHE and n.cache is None]
        if ordinary:
            return self.pick(ordinary[::-1])
        return self.small(block, block.node("Mul", [source.value, source.value], CACHE, hint="w"))

    def content(self, block: Block, shape: tuple[int, ...]) -> Name:
        """Values to be written, of any shape."""
        if shape == TOKEN:
            return self.token(block)
        if shape == CACHE:
            return self.whole(block)
        known = [n for n in block.tensors if n.shape == shape and n.cache is None]
        if known and self.chance(2):
            return self.pick(known)
        numbers = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape) + self.below(50)
        fixed = block.numbers(numbers)
        if self.chance(2):
            return fixed
        number = self.as_element(block, self.number(block))
        return block.node("Add", [fixed.value, number.value], shape, hint="b")

    def number(self, block: Block, limit: int = CAPACITY) -> Name:
        """A scalar from 0 to ``limit - 1``, perhaps an input, or made from a cache's content."""
        kind = self.below(5)
        if kind == 0:
            return block.constant(np.array(self.below(limit)))
        known = [n for n in block.names if n.kind == "number"]
        if kind <= 2 and known:
            return self.pick(known[::-1])
        total = self.as_integer(block, self.total(block))
        return block.node(
            "Mod", [total.value, block.constant(np.array(limit)).value], (), kind="number", hint="n"
        )

    def total(self, block: Block) -> Name:
        source = self.cache_name(block, self.pick(list(block.current))).value
        return block.node("ReduceSum", [source], (), keepdims=0, hint="sum", kind="sum")

    def truth(self, block: Block) -> Name:
        known = [n for n in block.names if n.kind == "truth"]
        if known and self.chance(2):
            return self.pick(known[::-1])
        limit = block.constant(np.array(self.below(60)), small=False)
        op = self.pick(["Greater", "Less"])
        return block.node(op, [self.number(block).value, limit.value], (), kind="truth", hint="q")

    def rows(self, block: Block) -> Name:
        """One position, or one row number, for each row."""
        known = [n for n in block.names if n.shape == (ROWS,) and n.cache is None]
        known = [n for n in known if n.dtype == ir.DataType.INT64]
        if known and self.chance(2):
            return self.pick(known)
        return block.constant(np.array([self.below(2) for _ in range(ROWS)]))

    def read(self, block: Block) -> None:
        self.token(block, new=True)
