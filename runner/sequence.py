"""One sequence: a block table and a length, and what may be done to them.

Tables are edited, pages are shared and counted. A page is copied only when the sequence is about to
write into one that others count on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from onnx_inplace.compiler import errors
from onnx_inplace.runner import relocation
from onnx_inplace.runner.sequence_costs import Costs

if TYPE_CHECKING:
    from onnx_inplace.runner.sequences import SequencePool

Int64s = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """What a model is told of the sequences of a run. Arrays of its own.

    Attributes:
        block_table: (batch, blocks) int64, ids of pages in order; ``NO_PAGE`` behind the last.
        position: (batch,) int64, place of the first new token: where it is written.
        length: (batch,) int64, valid tokens when the new ones are written.
        rotary_position: (batch,) int64, for position embeddings: tokens that were dropped count.
    """

    block_table: Int64s
    position: Int64s
    length: Int64s
    rotary_position: Int64s


class Sequence:
    """Tokens of one text in the pages of a pool. Made by ``SequencePool.new`` and ``fork``.

    Attributes:
        pool: that it belongs to.
        id: number in the pool, never used again.
        length: valid tokens.
        reserved: tokens that are about to be written behind them.
        dropped: tokens that were dropped: the next one stands at ``length`` in the pages, and has
            position ``length + dropped`` in the text.
    """

    def __init__(self, pool: SequencePool, number: int):
        """See ``SequencePool.new``."""
        self.pool, self.id = pool, number
        self.length = self.reserved = self.dropped = 0
        self._pages: list[int] = []
        self._replaced: tuple[int, int] | None = None  # place in the table, page before
        self._freed = False

    @property
    def pages(self) -> tuple[int, ...]:
        """Ids of its pages, in order: the block table."""
        return tuple(self._pages)

    @property
    def cost(self) -> Costs:
        """What operations on this sequence would cost now."""
        return Costs(self)

    def __repr__(self) -> str:
        """Number, length and pages."""
        return f"Sequence({self.id}: {self.length} tokens, pages {self._pages})"

    # -- writing

    def reserve(self, count: int) -> None:
        """Make room for tokens: new pages, and a page of its own where it will write.

        A page that is written best as a whole, and has room left, becomes one of the pool's format.

        Raises:
            errors.PoolExhausted, errors.PoolTooSmall: there is no room now, or never.
            errors.PageError: it is being written already.
            ValueError: a negative count.
            MemoryError: the system has none. Nothing has changed.
        """
        pool = self.pool.pages
        with pool.lock:
            self._check_usable()
            more = self._more_pages(count)
            if pool.limit is not None and len(self._pages) + more > pool.limit:
                raise errors.PoolTooSmall(pool.name, len(self._pages) + more, pool.limit)
            made = pool.make(more)
            try:
                self._own_last(count)
            except BaseException:
                pool.release(made)
                raise
            self._pages += made
            self.reserved = count

    def commit(self, count: int | None = None) -> None:
        """Keep the first ``count`` of the reserved tokens (all without), give back the others."""
        with self.pool.pages.lock:
            count = self.reserved if count is None else operator.index(count)
            if not 0 <= count <= self.reserved:
                raise ValueError(f"{count} of {self.reserved} reserved tokens")
            replaced, self._replaced = self._replaced, None
            self.length += count
            self.reserved = 0
            if replaced is not None:
                self.pool.pages.release([replaced[1]])
            self._cut()

    def rollback(self) -> None:
        """Give back all that was reserved: pages and length are as before."""
        pool = self.pool.pages
        with pool.lock:
            self.reserved = 0
            if self._replaced is not None:
                place, before = self._replaced
                mine, self._pages[place] = self._pages[place], before
                self._replaced = None
                pool.release([mine])
            self._cut()

    @contextlib.contextmanager
    def writing(self, count: int, blocks: int | None = None) -> Iterator[Batch]:
        """A batch of this sequence alone. See ``SequencePool.writing``."""
        with self.pool.writing([self], count, blocks) as batch:
            yield batch

    # -- tables

    def fork(self) -> Sequence:
        """Another sequence with the same tokens: all pages are shared, nothing is copied."""
        with self.pool.pages.lock:
            self._check_usable()
            self.pool.pages.share(self._pages)
            return self.pool._add(self._pages, self.length, self.dropped)

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on.

        Raises:
            ValueError: a length that it does not have.
        """
        with self.pool.pages.lock:
            self._check_usable()
            if not 0 <= length <= self.length:
                raise ValueError(f"length {length} of a sequence of {self.length} tokens")
            self.length = length
            self._cut()

    def drop(self, start: int, stop: int) -> None:
        """Forget tokens ``start`` to before ``stop``; later ones move up.

        Between whole pages the table is edited. Otherwise tokens are decoded and written again into
        new pages of the formats they had: one page where ``stop - start`` is whole pages, all
        later pages else.

        Raises:
            ValueError: a range that it does not have.
            errors.PoolExhausted, MemoryError: no room for the new pages. Nothing has changed.
        """
        pool = self.pool.pages
        with pool.lock:
            self._check_usable()
            plan = relocation.plan_drop(self._pages, self.length, start, stop, pool.page_size)
            made = relocation.make(pool, plan)
            old = self._pages
            self._pages = plan.table(made)
            pool.share(plan.kept)
            pool.release(old)
            if stop < self.length:  # at the end it is a cut: later tokens follow without a gap
                self.dropped += stop - start
            self.length -= stop - start
            self._cut()

    def recode_keys(self, start: int, stop: int, change: relocation.Change) -> None:
        """Replace the keys of tokens ``start`` to before ``stop``, for example to move positions.

        They are decoded, changed and written again, in copies of their pages: a failure changes
        nothing.

        Args:
            start: first token.
            stop: one more than the last.
            change: ``(keys, places)``: (heads, n, head_size) float32 and (n,) int64, gives the new
                keys. ``rotary_shift`` makes one.

        Raises:
            ValueError: a range that it does not have, or keys of another shape.
            errors.PoolExhausted, MemoryError: no room for copies. Nothing has changed.
        """
        pool = self.pool.pages
        with pool.lock:
            self._check_usable()
            table = relocation.recode_keys(pool, self._pages, self.length, start, stop, change)
            self._pages = table

    def free(self) -> None:
        """Give up all pages. The sequence cannot be used any more."""
        with self.pool.pages.lock:
            if self._freed:
                return
            if self.reserved or self._replaced is not None:
                self.rollback()
            self._freed = True
            self.pool._remove(self)
            pages, self._pages, self.length = self._pages, [], 0
            self.pool.pages.release(pages)

    # -- for the pool

    def _state(self) -> tuple[list[int], int, int]:
        return list(self._pages), self.length, self.dropped

    def _become(self, pages: list[int], length: int, dropped: int) -> None:
        self._pages, self.length, self.dropped = list(pages), length, dropped

    def _check_there(self) -> None:
        if self._freed:
            raise errors.PageError(self.pool.pages.name, None, f"sequence {self.id} was freed")

    def _check_usable(self) -> None:
        self._check_there()
        name = self.pool.pages.name
        if self.reserved or self._replaced is not None:
            raise errors.PageError(
                name, None, f"sequence {self.id} is being written: commit or roll back first"
            )

    def _more_pages(self, count: int) -> int:
        if count < 0:
            raise ValueError(f"{count} tokens")
        size = self.pool.page_size
        return max(-(-(self.length + count) // size) - len(self._pages), 0)

    def _written(self, count: int) -> int | None:
        """Place of the page that has tokens and will get more."""
        size = self.pool.page_size
        return self.length // size if count and self.length % size else None

    def _own_last(self, count: int) -> None:
        """The page that will get more tokens is its own, and of a format to append to."""
        place, pool = self._written(count), self.pool.pages
        if place is None:
            return
        page, fill = self._pages[place], self.length % pool.page_size
        if pool.owners(page) > 1:
            mine = pool.copy(page, fill)
            try:
                relocation.make_appendable(pool, mine)
            except BaseException:
                pool.release([mine])
                raise
            self._replaced, self._pages[place] = (place, page), mine
        else:
            relocation.make_appendable(pool, page)

    def _cut(self) -> None:
        """Pages behind the last token are given back; the last page forgets what is not valid."""
        pool = self.pool.pages
        count = -(-self.length // pool.page_size)
        extra = self._pages[count:]
        del self._pages[count:]
        pool.release(extra)
        fill = self.length % pool.page_size
        if fill and pool.owners(self._pages[-1]) == 1:
            for cache in pool.caches:
                if cache.store.fill(self._pages[-1]) > fill:
                    cache.truncate(self._pages[-1], fill)
