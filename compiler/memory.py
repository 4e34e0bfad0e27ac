"""What a run needs, before anything is allocated: in bytes, or as formulas of the dimensions.

Facts and their evaluation only; ``footprint`` collects them when a model is planned, and
``symbols`` says what is left where dimensions are missing. A cache that is updated in place is
counted once, however often it is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import sympy

from onnx_inplace.compiler import arena, sizes, symbols
from onnx_inplace.compiler.errors import (
    BindingError,
    ContractError,
    Finding,
    Location,
    MemoryBudget,
)
from onnx_inplace.compiler.sizes import Size

THREADS = "<threads>"  # a size that is no dimension: how many threads a run may use
PORTABLE = "<portable>"  # another: 1 where the kernels for every CPU run, else 0
UNIT = 256  # [bytes] allocations of the library are multiples of it

Bytes: TypeAlias = "int | sympy.Expr"
"""A number where all dimensions are given, else a formula of those that are not."""

Allocations: TypeAlias = "tuple[Size, ...]"
"""Bytes of what a step has allocated at one time, each number one allocation."""


def machine(dims: Mapping[str, int], threads: int = 1, portable: bool = False) -> dict[str, int]:
    """Sizes that a workspace depends on: dimensions, and what is told of the machine."""
    return {**dims, THREADS: threads, PORTABLE: int(portable)}


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """The most that a session and one binding hold at once.

    What the caller passes in for one run is not in it; copies of integers that he passes in are.
    With formulas, ``values`` leaves out what alignment and the layout of the arena add, and
    ``workspace`` is that of the step that needs most, whatever is alive at it: a bound.

    Attributes:
        caches: mutable inputs, each once. Not the pages that paged caches have already.
        values: what passes between steps: buffers of the arena, which stay between runs, and the
            most that is alive together of what each run makes anew, results included.
        workspace: what the peak of a run holds beyond ``values``: temporary bytes of kernels, and
            what is alive between the nodes of a sub-session.
        pages: new pages of paged caches.
        weights: of the model, each once, and copies of them in another form.
        weights_in: parts of ``weights``, by what they are.
        extra_cache_bytes: copies of caches, which are part of ``values``.
        unknown: values and steps whose size depends on data: they are not counted.
        estimates: operators of sub-sessions whose kernels may take memory that is not counted.
    """

    caches: Bytes
    values: Bytes
    workspace: Bytes
    pages: Bytes
    weights: int
    weights_in: Mapping[str, int]
    extra_cache_bytes: Bytes
    unknown: tuple[str, ...]
    estimates: tuple[str, ...]

    @property
    def peak(self) -> Bytes:
        """What running takes: all but the weights."""
        return self.caches + self.values + self.workspace + self.pages

    @property
    def total(self) -> Bytes:
        """All of it."""
        return self.weights + self.peak

    def require(self, budget: int) -> None:
        """Raise unless ``total`` is known, and at most ``budget`` bytes.

        Raises:
            MemoryBudget: it is more.
            BindingError: a dimension is missing, or ``unknown`` names what is not counted.
        """
        total = self.total
        if not isinstance(total, int):
            missing = sorted(symbol.name for symbol in total.free_symbols)
            raise BindingError(f"the sizes are missing: {', '.join(missing)}.", missing[0])
        if total > budget:
            names = ("weights", "caches", "values", "workspace", "pages")
            parts = ", ".join(f"{name} {getattr(self, name):,}" for name in names)
            raise MemoryBudget(
                f"{total:,} bytes are needed, {budget:,} may be used: {parts}.", total, budget
            )
        if self.unknown:
            raise BindingError(
                f"{total:,} bytes are known of {budget:,} that may be used, but sizes that depend "
                f"on data are not: {', '.join(self.unknown)}.",
                self.unknown[0],
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """A value, its bytes, and the steps of its block during which it is alive."""

    slot: int
    size: Size
    life: arena.Life


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """What a step needs beside values.

    Attributes:
        workspace: what it has allocated at different times; which needs most depends on the
            dimensions.
        collected: elements that it has collected when its last round begins.
        joined: elements, and what is put together of them, when the last round is done.
        blocks: that it executes.
    """

    workspace: tuple[Allocations, ...] = ()
    collected: Size = 0
    joined: Size = 0
    blocks: tuple[BlockUse, ...] = ()

    def most(self, dims: Mapping[str, int]) -> int:
        """Bytes of the workspace that needs most; the library rounds every allocation."""
        return max((_rounded(together, dims) for together in self.workspace), default=0)


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

    Attributes:
        dims: names of the dimensions of the graph's inputs.
        caches: bytes of each mutable input.
        copied: bytes of each copy of a cache.
        block: of the plan.
        fits: what must hold of the dimensions.
        unknown: see ``Memory``.
        estimates: see ``Memory``.
        weights: bytes by what they are: as the model gives them, repacked, ...; of a session that
            is loaded with this choice of fused steps.
        pages: the most bytes of pages that each step may add to a paged cache in one run.
        fused: buffers of each block of the plan's fused alternative, in program order.
    """

    dims: tuple[str, ...]
    caches: tuple[Size, ...]
    copied: tuple[Size, ...]
    block: BlockUse
    fits: tuple[Fit, ...]
    unknown: tuple[str, ...]
    estimates: tuple[str, ...] = ()
    weights: Callable[[str], Mapping[str, int]] = lambda fuse: MappingProxyType({})
    pages: tuple[Size, ...] = ()
    fused: tuple[tuple[Item, ...], ...] = ()

    def memory(
        self,
        dims: Mapping[str, int],
        threads: int = 1,
        fuse: str = "auto",
        *,
        portable: bool = False,
    ) -> Memory:
        """What a run with these dimensions needs; formulas where some are missing.

        Args:
            dims: sizes by name of the dimension.
            threads: how many a run may use.
            fuse: what the session is loaded with.
            portable: of the kernels for every CPU, not of those for AVX-512.

        Raises:
            BindingError: the model has no such dimension, or the size is none; or there is no such
                choice.
            ContractError: no run with these dimensions is possible (E112, E102).
        """
        self._known(dims)
        held = self.weights(fuse)
        if threads < 1:
            raise BindingError(f"threads is {threads}: at least 1 is needed.", "threads")
        given = machine(dims, threads, portable)
        if len(dims) < len(self.dims):
            return self._memory(held, *self._formulas(given))
        self._possible(dims)
        alive, most = _most(self.block, given)
        buffers = sum(_laid_out(block.buffers, dims)[1] for block in self.block.all())
        caches, pages, copied = (
            sum(sizes.evaluate(size, dims) for size in terms)
            for terms in (self.caches, self.pages, self.copied)
        )
        return self._memory(held, caches, buffers + alive, most - alive, pages, copied)

    def _memory(
        self,
        held: Mapping[str, int],
        caches: Bytes,
        values: Bytes,
        workspace: Bytes,
        pages: Bytes,
        copied: Bytes,
    ) -> Memory:
        weights = sum(held.values())
        return Memory(
            caches, values, workspace, pages, weights, held, copied, self.unknown,
            self.estimates,
        )  # fmt: skip

    def layout(self, dims: Mapping[str, int]) -> tuple[Mapping[int, tuple[int, int]], ...]:
        """Begin and end of each buffer in its block's arena, by slot; blocks in program order.

        Raises:
            BindingError: a dimension is unknown, missing or no size.
        """
        self._all(dims)
        return tuple(_laid_out(block.buffers, dims)[0] for block in self.block.all())

    def fused_layout(self, dims: Mapping[str, int]) -> tuple[Mapping[int, tuple[int, int]], ...]:
        """``layout`` of the fused alternative."""
        self._all(dims)
        return tuple(_laid_out(buffers, dims)[0] for buffers in self.fused)

    def _all(self, dims: Mapping[str, int]) -> None:
        self._known(dims)
        missing = [name for name in self.dims if name not in dims]
        if missing:
            raise BindingError(f"missing sizes: {', '.join(missing)}.", missing[0])

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

    def _formulas(self, dims: Mapping[str, int]) -> tuple[Bytes, Bytes, Bytes, Bytes, Bytes]:
        def whole(terms: Sequence[Size]) -> Bytes:
            return symbols.largest([sizes.total(terms)], dims)

        blocks = list(self.block.all())
        values = symbols.largest(_alive_formulas(self.block), dims)
        for block in blocks:
            values += symbols.largest(_sums(block.buffers, len(block.steps)), dims)
        together = (a for block in blocks for use in block.steps for a in use.workspace)
        workspace = symbols.largest([sizes.total(a) for a in dict.fromkeys(together)], dims)
        return whole(self.caches), values, workspace, whole(self.pages), whole(self.copied)


def _laid_out(
    buffers: Sequence[Item], dims: Mapping[str, int]
) -> tuple[dict[int, tuple[int, int]], int]:
    wanted = [(sizes.evaluate(item.size, dims), item.life) for item in buffers]
    offsets, total = arena.place(wanted)
    places = {
        item.slot: (offset, offset + size)
        for item, offset, (size, _) in zip(buffers, offsets, wanted, strict=True)
    }
    return places, total + (arena.ALIGNMENT if total else 0)  # room to align the whole


def _most(block: BlockUse, dims: Mapping[str, int]) -> tuple[int, int]:
    """The most bytes that are alive together of what is made anew; and with all workspace."""
    alive = [0] * (len(block.steps) + 1)
    for item in block.passing:
        size = sizes.evaluate(item.size, dims)
        for step in range(max(item.life[0], 0), item.life[1] + 1):
            alive[step] += size
    most = alive.copy()
    for index, use in enumerate(block.steps):
        inner = [_most(inner, dims) for inner in use.blocks]
        collected, joined = (sizes.evaluate(s, dims) for s in (use.collected, use.joined))
        rounds = max((values for values, _ in inner), default=0)
        alive[index] += max(collected + rounds, joined)
        most[index] += max((*(collected + m for _, m in inner), use.most(dims), joined))
    return max(alive), max(*alive, *most)


def _rounded(together: Allocations, dims: Mapping[str, int]) -> int:
    return sum(-(-sizes.evaluate(size, dims) // UNIT) * UNIT for size in together)


def _alive_formulas(block: BlockUse) -> list[Size]:
    found: dict[Size, None] = {}
    for index, size in enumerate(_sums(block.passing, len(block.steps))):
        use = block.steps[index] if index < len(block.steps) else Use()
        inner = [s for b in use.blocks for s in _alive_formulas(b)]
        for more in inner or [0]:
            found[sizes.total((size, use.collected, more))] = None
        if use.joined != 0:
            found[sizes.total((size, use.joined))] = None
    return list(found)


def _sums(items: Sequence[Item], steps: int) -> list[Size]:
    """Bytes that are alive at each step, and behind the last one."""
    alive: list[list[Size]] = [[] for _ in range(steps + 1)]
    for item in items:
        for step in range(max(item.life[0], 0), item.life[1] + 1):
            alive[step].append(item.size)
    return list(dict.fromkeys(sizes.total(terms) for terms in alive))


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
