"""Tokens that move between pages: what must be made anew when some are dropped or changed.

Pages that hold the same tokens in the same places are kept, whoever else counts on them. Others are
made from decoded tokens, each in the widest format that its tokens had, and written at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from onnx_inplace.runner.costs import Cost
from onnx_inplace.runner.page_pool import PagePool
from onnx_inplace.runner.pages import PagedCache
from onnx_inplace.runner.storage import Array

Change = Callable[[npt.NDArray[np.float32], npt.NDArray[np.int64]], npt.NDArray[np.float32]]
"""Keys (heads, n, head_size) and their places (n,) to new keys."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one page: ``count`` from ``first`` on."""

    page: int
    first: int
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A new block table.

    Attributes:
        blocks: by place, the page that is kept, or the parts that a new page is made of.
    """

    blocks: tuple[int | tuple[Part, ...], ...]

    @property
    def kept(self) -> list[int]:
        """Pages that stay."""
        return [block for block in self.blocks if isinstance(block, int)]

    @property
    def made(self) -> list[tuple[Part, ...]]:
        """What new pages are made of."""
        return [block for block in self.blocks if not isinstance(block, int)]

    def table(self, made: Sequence[int]) -> list[int]:
        """The block table, when the new pages have ids."""
        new = iter(made)
        return [block if isinstance(block, int) else next(new) for block in self.blocks]


def check_range(start: int, stop: int, length: int) -> None:
    """Refuse a range that a sequence does not have.

    Raises:
        ValueError: it is none of ``length`` tokens.
    """
    if not 0 <= start <= stop <= length:
        raise ValueError(f"tokens {start} to {stop} of a sequence of {length}")


def plan_drop(pages: Sequence[int], length: int, start: int, stop: int, size: int) -> Plan:
    """The block table without tokens ``start`` to before ``stop``.

    Args:
        pages: the block table.
        length: valid tokens.
        start: first token that goes.
        stop: one more than the last.
        size: tokens of a page.

    Raises:
        ValueError: not a range of the sequence.
    """
    check_range(start, stop, length)
    blocks: list[int | tuple[Part, ...]] = []
    rest = length - (stop - start)
    for begin in range(0, rest, size):
        parts = _parts(pages, begin, min(begin + size, rest), start, stop - start, size)
        whole = len(parts) == 1 and parts[0].first == 0
        blocks.append(parts[0].page if whole else tuple(parts))
    return Plan(tuple(blocks))


def _parts(
    pages: Sequence[int], begin: int, end: int, start: int, gone: int, size: int
) -> list[Part]:
    """Where the tokens ``begin`` to before ``end`` of the shorter sequence stand now."""
    parts = []
    while begin < end:
        place = begin if begin < start else begin + gone
        bound = min(end, start) if begin < start else end
        count = min(bound - begin, size - place % size)
        parts.append(Part(pages[place // size], place % size, count))
        begin += count
    return parts


def make(pool: PagePool, plan: Plan) -> list[int]:
    """The new pages of a plan, all or none.

    Raises:
        errors.PoolExhausted, errors.PoolTooSmall, MemoryError: no room.
    """
    made = pool.make_as([_widest(pool, parts) for parts in plan.made])
    try:
        for page, parts in zip(made, plan.made, strict=True):
            for cache in pool.caches:
                cache.write(page, _tokens(cache, parts), 0)
    except BaseException:
        pool.release(made)
        raise
    return made


def cost(pool: PagePool, plan: Plan, pages: Sequence[int]) -> Cost:
    """What ``make`` costs, and giving up the pages of the old table that are not kept."""
    size = sum(
        cache.store.codec.page_bytes[cache.store.format(name)]
        for parts in plan.made
        for cache, name in zip(pool.caches, _widest(pool, parts), strict=True)
    )
    kept = set(plan.kept)
    freed = pool.cost_of_release(page for page in pages if page not in kept)
    return Cost(len(plan.made), size, 0, size) + freed


def _widest(pool: PagePool, parts: Sequence[Part]) -> list[str]:
    """By cache, the format with most bytes of those that tokens have."""
    return [
        max((cache.page(p.page) for p in parts), key=lambda page: page.nbytes).quantized_type
        for cache in pool.caches
    ]


def _tokens(cache: PagedCache, parts: Sequence[Part]) -> Array:
    """(2, heads, n, head_size) float32."""
    decoded = [
        cache.page(p.page).decode(np.float32)[:, :, p.first : p.first + p.count] for p in parts
    ]
    return np.concatenate(decoded, axis=2)


def make_appendable(pool: PagePool, page: int) -> None:
    """Convert a page that is written best as a whole, and will get more tokens."""
    for cache, name in zip(pool.caches, pool.formats, strict=True):
        if not cache.store.format_of(page).appendable:
            cache.convert(page, name)


def cost_of_appendable(pool: PagePool, page: int) -> Cost:
    """What ``make_appendable`` costs."""
    size = freed = 0
    for cache, name in zip(pool.caches, pool.formats, strict=True):
        found = cache.page(page)
        index = cache.store.format(name)
        if not found.format.appendable and found.quantized_type != name:
            size += cache.store.codec.page_bytes[index]
            freed += found.nbytes
    return Cost(allocated=size, recoded=size, freed=freed)


def recode_keys(
    pool: PagePool, pages: Sequence[int], length: int, start: int, stop: int, change: Change
) -> list[int]:
    """The block table with copies of pages in which keys are changed; ``pages`` are released.

    Raises:
        ValueError: not a range of the sequence; keys of another shape.
        errors.PoolExhausted, errors.PoolTooSmall, MemoryError: no room. Nothing has changed.
    """
    check_range(start, stop, length)
    size, table = pool.page_size, list(pages)
    places = range(start // size, -(-stop // size)) if stop > start else range(0)
    made: list[int] = []
    try:
        for k in places:
            made.append(pool.copy(pages[k], min(size, length - k * size)))
            first, last = max(start - k * size, 0), min(stop - k * size, size)
            for cache in pool.caches:
                _recode(cache, made[-1], first, last, k * size, change)
    except BaseException:
        pool.release(made)
        raise
    for k, page in zip(places, made, strict=True):
        pool.release([table[k]])
        table[k] = page
    return table


def _recode(
    cache: PagedCache, page: int, first: int, last: int, begin: int, change: Change
) -> None:
    tokens = cache.page(page).decode(np.float32)[:, :, first:last]
    places = np.arange(begin + first, begin + last)
    keys = np.asarray(change(tokens[0], places), np.float32)
    if keys.shape != tokens[0].shape:
        raise ValueError(f"{cache.name}: new keys {keys.shape} for {tokens[0].shape}")
    cache.write(page, np.stack([keys, tokens[1]]), first)


def rotary_shift(delta: int, base: float = 10000.0, *, interleaved: bool = False) -> Change:
    """Keys with a rotary embedding, turned as if their tokens stood ``delta`` places later.

    Args:
        delta: places; negative: earlier.
        base: of the embedding (Su et al., https://arxiv.org/abs/2104.09864): pair i of a head turns
            by ``base ** (-2 i / head_size)`` a place.
        interleaved: pairs are neighbours; otherwise a channel and that half a head later.
    """

    def change(
        keys: npt.NDArray[np.float32], places: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        half = keys.shape[-1] // 2
        angle = delta * base ** (-np.arange(half) / half)
        cos, sin = np.cos(angle), np.sin(angle)
        first = keys[..., 0::2] if interleaved else keys[..., :half]
        second = keys[..., 1::2] if interleaved else keys[..., half:]
        turned = first * cos - second * sin, second * cos + first * sin
        if interleaved:
            return np.stack(turned, axis=-1).reshape(keys.shape).astype(np.float32)
        return np.concatenate(turned, axis=-1).astype(np.float32)

    return change
