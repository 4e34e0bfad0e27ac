"""What a run needs, before anything is allocated: in bytes, or as formulas of the dimensions.

Facts and their evaluation only; ``footprint`` collects them when a model is planned. A cache that
is updated in place is counted once, however often it is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import sympy

from onnx_inplace.compiler import arena, sizes, symbols
from onnx_inplace.compiler.errors import BindingError, ContractError, Finding, Location
from onnx_inplace.compiler.sizes import Size

Bytes: TypeAlias = "int | sympy.Expr"
"""A number where all dimensions are given, else a formula of those that are not."""


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """The most that a run holds at once.

    What the caller passes in for one run, and weights, are not in it; copies of integers that he
    passes in are. With formulas, ``values``
    leaves out what alignment and the layout of the arena add.

    Attributes:
        caches: mutable inputs, each once.
        values: what passes between steps, buffers of the arena and results included.
        workspace: temporary bytes of the step that needs most, with one thread. For kernels at
            most that; for sub-sessions an estimate: what is alive between their nodes.
        pages: new pages of paged caches, which are not there yet.
        extra_cache_bytes: copies of caches, which are part of ``values``.
        unknown: values and steps whose size depends on data: they are not counted.
    """

    caches: Bytes
    values: Bytes
    workspace: Bytes
    pages: Bytes
    extra_cache_bytes: Bytes
    unknown: tuple[str, ...]

    @property
    def peak(self) -> Bytes:
        """All of it."""
        return self.caches + self.values + self.workspace + self.pages


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """A value, its bytes, and the steps of its block during which it is alive."""

    slot: int
    size: Size
    life: arena.Life


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """What a step needs beside values: temporary bytes, elements that it collects, its blocks.

    ``workspace``: the largest of these; which one that is depends on the dimensions.
    """

    workspace: tuple[Size, ...] = ()
    collected: Size = 0
    blocks: tuple[BlockUse, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class BlockUse:
    """Values of one block: ``buffers`` stay between runs, ``passing`` are made anew."""

    buffers: tuple[Item, ...]
    passing: tuple[Item, ...]
    steps: tuple[Use, ...]

    def all(self) -> Iterator[BlockUse]:
        """This block and those in it."""
        yield self
        for step in self.steps:
            for block in step.blocks:
                yield from block.all()


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """What must hold of sizes alone, or no run with them is possible: low <= number <= high.

    ``number``: None where an input decides; then there must be room for any number.
    """

    code: str
    root: str
    port: str
    low: Size
    high: Size
    number: Size | None
    length: Size
    capacity: Size
    location: Location | None


@dataclasses.dataclass(frozen=True, slots=True)
class Footprint:
    """All that ``Memory`` is computed from.

    ``dims``: names of the dimensions of the graph's inputs.
    """

    dims: tuple[str, ...]
    caches: tuple[Size, ...]
    copied: tuple[Size, ...]
    block: BlockUse
    fits: tuple[Fit, ...]
    unknown: tuple[str, ...]

    def memory(self, dims: Mapping[str, int]) -> Memory:
        """What a run with these dimensions needs; formulas where some are missing.

        Raises:
            BindingError: the model has no such dimension, or the size is none.
            ContractError: no run with these dimensions is possible (E112, E102).
        """
        self._known(dims)
        if len(dims) < len(self.dims):
            return self._formulas(dims)
        self._possible(dims)
        return Memory(
            sum(sizes.evaluate(size, dims) for size in self.caches),
            sum(_laid_out(block, dims)[1] for block in self.block.all()) + _alive(self.block, dims),
            max((sizes.evaluate(size, dims) for size in self._workspaces()), default=0),
            0,
            sum(sizes.evaluate(size, dims) for size in self.copied),
            self.unknown,
        )

    def layout(self, dims: Mapping[str, int]) -> tuple[Mapping[int, tuple[int, int]], ...]:
        """Begin and end of each buffer in its block's arena, by slot; blocks in program order.

        Raises:
            BindingError: a dimension is unknown, missing or no size.
        """
        self._known(dims)
        missing = [name for name in self.dims if name not in dims]
        if missing:
            raise BindingError(f"missing sizes: {', '.join(missing)}.", missing[0])
        return tuple(_laid_out(block, dims)[0] for block in self.block.all())

    def _workspaces(self) -> dict[Size, None]:
        uses = (step for block in self.block.all() for step in block.steps)
        return dict.fromkeys(size for use in uses for size in use.workspace)

    def _known(self, dims: Mapping[str, int]) -> None:
        strange = [name for name in dims if name not in self.dims]
        if strange:
            raise BindingError(
                f"unknown sizes: {', '.join(strange)}. "
                f"The inputs have: {', '.join(self.dims) or 'none'}.",
                strange[0],
            )
        for name, size in dims.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise BindingError(f"`{name}` is no size: {size!r}.", name)

    def _possible(self, dims: Mapping[str, int]) -> None:
        found = {_finding(fit, dims): None for fit in self.fits if not _fits(fit, dims)}
        if found:
            raise ContractError(found)

    def _formulas(self, dims: Mapping[str, int]) -> Memory:
        def whole(terms: Sequence[Size]) -> Bytes:
            return symbols.expression(_sum(terms), dims)

        passing = _largest([symbols.expression(size, dims) for size in _alive_formulas(self.block)])
        buffers: Bytes = 0
        for block in self.block.all():
            sums = _sums(block.buffers, len(block.steps))
            buffers += _largest([symbols.expression(size, dims) for size in dict.fromkeys(sums)])
        workspace = _largest([symbols.expression(size, dims) for size in self._workspaces()])
        return Memory(
            whole(self.caches), buffers + passing, workspace, 0, whole(self.copied), self.unknown
        )


def _laid_out(block: BlockUse, dims: Mapping[str, int]) -> tuple[dict[int, tuple[int, int]], int]:
    wanted = [(sizes.evaluate(item.size, dims), item.life) for item in block.buffers]
    offsets, total = arena.place(wanted)
    places = {
        item.slot: (offset, offset + size)
        for item, offset, (size, _) in zip(block.buffers, offsets, wanted, strict=True)
    }
    return places, total + (arena.ALIGNMENT if total else 0)  # room to align the whole


def _alive(block: BlockUse, dims: Mapping[str, int]) -> int:
    """The most bytes of values that are made anew and alive together."""
    alive = [0] * (len(block.steps) + 1)
    for item in block.passing:
        size = sizes.evaluate(item.size, dims)
        for step in range(max(item.life[0], 0), item.life[1] + 1):
            alive[step] += size
    for index, use in enumerate(block.steps):
        alive[index] += sizes.evaluate(use.collected, dims)
        alive[index] += max((_alive(inner, dims) for inner in use.blocks), default=0)
    return max(alive)


def _alive_formulas(block: BlockUse) -> dict[Size, None]:
    found: dict[Size, None] = {}
    for index, size in enumerate(_sums(block.passing, len(block.steps))):
        use = block.steps[index] if index < len(block.steps) else Use()
        inner = [s for b in use.blocks for s in _alive_formulas(b)]
        for more in inner or [0]:
            found[_sum((size, use.collected, more))] = None
    return found


def _sums(items: Sequence[Item], steps: int) -> list[Size]:
    """Bytes that are alive at each step, and behind the last one."""
    alive: list[list[Size]] = [[] for _ in range(steps + 1)]
    for item in items:
        for step in range(max(item.life[0], 0), item.life[1] + 1):
            alive[step].append(item.size)
    return [_sum(terms) for terms in alive]


def _sum(terms: Sequence[Size]) -> Size:
    total: Size = 0
    for term in terms:
        total = sizes.operation("+", total, term)
    return total


def _largest(formulas: Sequence[sympy.Expr]) -> sympy.Expr:
    """The largest, without those that never are: another one minus it is nothing negative."""
    kept: list[sympy.Expr] = []
    for formula in dict.fromkeys(sympy.expand(f) for f in formulas):
        if any((other - formula).is_nonnegative for other in kept):
            continue
        kept = [other for other in kept if not (formula - other).is_nonnegative]
        kept.append(formula)
    if not kept:
        return sympy.Integer(0)
    return kept[0] if len(kept) == 1 else sympy.Max(*kept, evaluate=False)


def _fits(fit: Fit, dims: Mapping[str, int]) -> bool:
    low, high = sizes.evaluate(fit.low, dims), sizes.evaluate(fit.high, dims)
    return low <= (low if fit.number is None else sizes.evaluate(fit.number, dims)) <= high


def _finding(fit: Fit, dims: Mapping[str, int]) -> Finding:
    capacity, length = sizes.evaluate(fit.capacity, dims), sizes.evaluate(fit.length, dims)
    if fit.code == "E102":
        number = sizes.evaluate(fit.number or 0, dims)
        message = f"`{fit.root}` gets {fit.port} with a size of {number} where it has {capacity}."
        return Finding("E102", message, fit.location)
    where = "at no position"
    if fit.number is not None:
        where = f"at {fit.port} {sizes.evaluate(fit.number, dims)}"
    message = f"`{fit.root}` has a capacity of {capacity}: {length} fit {where}."
    return Finding("E112", message, fit.location)
