"""Which tokens of which pages a step touches, and whether the pages allow it.

A *piece* is what one page gets, or gives, of the tokens of one sequence. Positions and lengths are
judged here against the block table; ``Outlook`` judges pages against a page table as it will be
when the steps before have run, so that a whole run can be judged before its first write.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onnx_inplace.compiler import errors
from onnx_inplace.runner.page_store import PageStore
from onnx_inplace.runner.page_table import NOWHERE
from onnx_inplace.runner.storage import Array


class Piece(NamedTuple):
    """Some tokens of one page.

    Attributes:
        page: its id.
        first: token in the page.
        length: number of tokens.
        token: in the sequence, where the piece begins; with a page id, in the page.
        row: of the batch; None: there is no batch.
    """

    page: int
    first: int
    length: int
    token: int
    row: int | None

    @property
    def end(self) -> int:
        """One more than the last token, in the page."""
        return self.first + self.length


def pieces(
    name: str, ids: Array, positions: Array, length: int | Array, page_size: int
) -> list[Piece]:
    """What ``length`` tokens from each position on touch, in order.

    Args:
        name: of the cache.
        ids: () a page; (blocks,) the block table of a sequence; (batch, blocks).
        positions: (): first token, in the page or in the sequence; (batch,).
        length: tokens of each sequence, or of all.
        page_size: tokens of a page.

    Raises:
        errors.CapacityError: tokens leave the page, or the pages of the block table.
        errors.StorageMismatch: not one position, or one for each sequence.
    """
    starts = positions.reshape(-1).tolist()
    lengths = [length] * len(starts) if isinstance(length, int) else length.tolist()
    tables = ids.reshape(-1, ids.shape[-1] if ids.ndim else 1).tolist()
    if len(starts) == 1 and len(tables) != 1:
        starts, lengths = starts * len(tables), lengths * len(tables)
    if len(starts) != len(tables):
        raise errors.StorageMismatch(
            f"`{name}`: {len(starts)} positions for {len(tables)} sequences",
            name,
            len(tables),
            len(starts),
        )
    found: list[Piece] = []
    for k, (table, start, tokens) in enumerate(zip(tables, starts, lengths, strict=True)):
        row, capacity = (k if ids.ndim == 2 else None), len(table) * page_size
        if start < 0 or start > capacity - tokens:
            raise errors.CapacityError(name, start, tokens, capacity, row)
        at, end = start, start + tokens
        while at < end:
            first = at % page_size
            count = min(page_size - first, end - at)
            found.append(Piece(table[at // page_size], first, count, at, row))
            at += count
    return found


def attended(
    store: PageStore, tables: Array, lengths: Array, queries: int, left: int
) -> list[Piece]:
    """What attention reads: the first ``length`` tokens of each sequence, or a window of them.

    Args:
        store: the cache.
        tables: (blocks,) or (batch, blocks).
        lengths: () or (batch,), valid tokens of each sequence.
        queries: number of last tokens that look back.
        left: tokens before its own that a query sees; -1: all.

    Raises:
        errors.CapacityError: a length is negative, or exceeds the block table.
        errors.StorageMismatch: not one length, or one for each sequence.
    """
    ends = lengths.reshape(-1)
    negative = np.flatnonzero(ends < 0)
    if negative.size:
        row, capacity = int(negative[0]), tables.shape[-1] * store.page_size
        length = int(ends[row])
        raise errors.CapacityError(
            store.name, 0, length, capacity, row if tables.ndim == 2 else None
        )
    if left < 0:
        return pieces(store.name, tables, np.zeros_like(ends), ends, store.page_size)
    starts = np.maximum(ends - queries - left, 0)
    return pieces(store.name, tables, starts, ends - starts, store.page_size)


class Outlook:
    """A page table as it will be: what is there, and what steps of this run add or change.

    Attributes:
        created: pages that will be made, in order: id and index of the format.
    """

    def __init__(self, store: PageStore):
        """Nothing is planned yet."""
        self._store, self._table = store, store.table
        self.created: list[tuple[int, int]] = []
        self._new: dict[int, int] = {}  # page -> format
        self._format: dict[int, int] = {}  # of pages that will be converted
        self._fill: dict[int, int] = {}  # of pages that will be written
        self._more = 0  # bytes

    def update(self, touched: list[Piece], format: int | None) -> None:
        """Tokens will be written; missing pages are made in ``format``.

        Raises:
            errors.PageError: a page is missing and cannot be made, is touched twice, or has several
                owners.
            errors.PageBudget: no room for a page that is made.
        """
        seen: set[int] = set()
        for piece in touched:
            page = piece.page
            if page in seen:
                raise self._store.error(page, "it is written twice by one call")
            seen.add(page)
            row = self._table.ids.row(page)
            if row == NOWHERE and page not in self._new:
                self._create(page, format)
            elif row != NOWHERE:
                self._store.refuse_shared(page, row, "write a copy (copy_page)")
        for piece in touched:
            self._fill[piece.page] = max(self.fill(piece.page), piece.end)

    def _create(self, page: int, format: int | None) -> None:
        store = self._store
        if not store.sparse_ids:
            length = len(self._table.ids) + len(self.created)
            if page != length:
                freed = 0 <= page < length
                raise store.error(
                    page,
                    "the page was freed (allocate_page makes it again)"
                    if freed
                    else f"there are {length} pages, and only the next one, {length}, can be made",
                )
        if format is None:
            raise store.error(
                page, "there is no such page, and no `quantized_type` says how to make it"
            )
        self._grow(store.codec.page_bytes[format])
        self._new[page] = format
        self.created.append((page, format))

    def convert(self, pages: list[int], format: int) -> None:
        """Pages will have another format.

        Raises:
            errors.PageError: a page is missing or named twice.
            errors.PageBudget: no room for larger pages.
        """
        sizes = self._store.codec.page_bytes
        if len(set(pages)) < len(pages):
            twice = next(page for page in pages if pages.count(page) > 1)
            raise self._store.error(twice, "it is converted twice by one call")
        for page in pages:
            self._grow(sizes[format] - sizes[self._format_of(page)])
            self._format[page] = format

    def read(self, touched: list[Piece]) -> None:
        """Tokens will be read.

        Raises:
            errors.PageError: a page is missing.
            errors.CapacityError: tokens that were never written, or were cut off.
        """
        for piece in touched:
            self._format_of(piece.page)
            filled = self.fill(piece.page)
            if piece.end > filled:
                begin = piece.token - piece.first
                raise errors.CapacityError(
                    self._store.name, 0, begin + piece.end, begin + filled, piece.row
                )

    def gather(self, pages: list[int]) -> None:
        """Whole pages will be read.

        Raises:
            errors.PageError: a page is missing.
        """
        for page in pages:
            self._format_of(page)

    def fill(self, page: int) -> int:
        """Tokens of a page."""
        found = self._fill.get(page)
        if found is not None:
            return found
        row = self._table.ids.row(page)
        return 0 if row == NOWHERE else int(self._table.fill[row])

    def _format_of(self, page: int) -> int:
        found = self._format.get(page, self._new.get(page))
        return int(self._table.format[self._store.row(page)]) if found is None else found

    def _grow(self, more: int) -> None:
        self._store.afford(self._more + more)
        self._more += more
