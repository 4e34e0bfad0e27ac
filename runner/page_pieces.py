"""Which tokens of which pages a step touches, and whether the pages allow it.

A *piece* is what one page gets, or gives, of the tokens of one sequence. Positions and lengths are
judged here against the block table; ``Outlook`` judges pages against a page table as it will be
when the steps before have run, so that a whole run can be judged before its first write.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onnx_inplace.compiler import errors
from onnx_inplace.numba_kernels import pages_table
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.page_store import PageStore
from onnx_inplace.runner.page_table import NOWHERE
from onnx_inplace.runner.storage import Array


class Piece(NamedTuple):
    """Some tokens of one page.

    Attributes:
        page: its id.
        first: token in the page.
        length: number of tokens.
    """

    page: int
    first: int
    length: int

    @property
    def end(self) -> int:
        """One more than the last token, in the page."""
        return self.first + self.length


def pieces(name: str, ids: Array, positions: Array, length: int, page_size: int) -> list[Piece]:
    """What ``length`` tokens from each position on touch, in order.

    Args:
        name: of the cache.
        ids: () a page; (blocks,) the block table of a sequence; (batch, blocks).
        positions: (): first token, in the page or in the sequence; (batch,).
        length: tokens of each sequence.
        page_size: tokens of a page.

    Raises:
        errors.CapacityError: tokens leave the page, or the pages of the block table.
        errors.StorageMismatch: not one position, or one for each sequence.
    """
    starts = positions.reshape(-1).tolist()
    tables = _rows(ids).tolist()
    if len(starts) == 1 and len(tables) != 1:
        starts *= len(tables)
    if len(starts) != len(tables):
        raise errors.StorageMismatch(
            f"`{name}`: {len(starts)} positions for {len(tables)} sequences",
            name,
            len(tables),
            len(starts),
        )
    found: list[Piece] = []
    for k, (table, start) in enumerate(zip(tables, starts, strict=True)):
        row, capacity = (k if ids.ndim == 2 else None), len(table) * page_size
        if start < 0 or start > capacity - length:
            raise errors.CapacityError(name, start, length, capacity, row)
        at, end = start, start + length
        while at < end:
            first = at % page_size
            count = min(page_size - first, end - at)
            found.append(Piece(table[at // page_size], first, count))
            at += count
    return found


def _rows(ids: Array) -> Array:
    """(sequences, blocks); a sequence of no blocks is one, too."""
    return ids.reshape(ids.shape[0] if ids.ndim == 2 else 1, ids.shape[-1] if ids.ndim else 1)


class Reading(NamedTuple):
    """What attention reads.

    Attributes:
        tables: (batch, blocks) int64, page ids.
        starts: (batch,) int64, first token of each sequence that is read.
        ends: (batch,) int64, one more than the last one.
        rows: whether there is a batch.
    """

    tables: Array
    starts: Array
    ends: Array
    rows: bool

    def row(self, index: int) -> int | None:
        """A row of the batch, as errors name it."""
        return index if self.rows else None


def reading(store: PageStore, ids: Array, lengths: Array, queries: int, left: int) -> Reading:
    """What attention reads: the first ``length`` tokens of each sequence, or a window of them.

    Args:
        store: the cache.
        ids: (blocks,) or (batch, blocks).
        lengths: one valid length for all sequences, or one for each.
        queries: number of last tokens that look back.
        left: tokens before its own that a query sees; -1: all.

    Raises:
        errors.CapacityError: a length is negative, or exceeds the block table.
        errors.StorageMismatch: not one length, or one for each sequence.
    """
    tables = np.ascontiguousarray(_rows(ids), dtype=np.int64)
    ends = ends_of(store, ids, lengths)[0].reshape(-1)
    starts = np.zeros(len(tables), np.int64)
    if left >= 0:
        starts = np.maximum(ends - (queries + left), 0)
    return Reading(tables, starts, ends, ids.ndim == 2)


def ends_of(store: PageStore, ids: Array, lengths: Array) -> tuple[Array, int]:
    """Valid lengths, one after the other for each sequence of a block table; the longest of them.

    Arguments and errors as of :func:`reading`.
    """
    batch = ids.shape[0] if ids.ndim == 2 else 1
    capacity = (ids.shape[-1] if ids.ndim else 1) * store.page_size
    if lengths.size != batch:
        lengths = _for_each(store.name, lengths, batch)
    longest = 0
    # of one sequence, Python has its number at once
    given = (lengths.item(),) if batch == 1 else lengths.reshape(-1).tolist()
    for row, length in enumerate(given):
        if not 0 <= length <= capacity:
            place = row if ids.ndim == 2 else None
            raise errors.CapacityError(store.name, 0, length, capacity, place)
        longest = max(longest, length)
    return lengths if lengths.flags.c_contiguous else lengths.copy("C"), longest


def _for_each(name: str, numbers: Array, batch: int) -> Array:
    if numbers.size != 1:
        raise errors.StorageMismatch(
            f"`{name}`: {numbers.size} lengths for {batch} sequences", name, batch, numbers.size
        )
    return np.repeat(numbers, batch)


def check_readable(store: PageStore, wanted: Reading, outlook: Outlook | None = None) -> Array:
    """Places of the pages in the table, (batch, blocks); those that are not read may be any number.

    ``outlook`` knows what will be there when the steps before have run.

    Raises:
        errors.PageError: a page is missing.
        errors.UnwrittenTokens: tokens that were never written, or were cut off.
    """
    table, page_size = store.table, store.page_size
    places = table.rows_of(wanted.tables, len(wanted.tables))
    batch, blocks = places.shape
    find = pages_table.find_unreadable.ready()
    at = 0
    while True:
        at = find(
            address(places), batch, blocks, address(wanted.starts), address(wanted.ends), page_size,
            table.places[0], table.places[2], len(table.address), at,
        )  # fmt: skip
        if at < 0:
            return places
        row, block = divmod(at, blocks)
        length = int(wanted.ends[row])
        page = int(wanted.tables[row, block])
        if outlook is None:
            store.row(page)
            fill = int(table.fill[places[row, block]])
        else:
            fill = outlook.fill(page)
        if fill < min(length - block * page_size, page_size):
            valid = block * page_size + fill
            raise errors.UnwrittenTokens(store.name, 0, length, valid, wanted.row(row))
        at += 1


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
            before = self._fill.get(piece.page)
            if before is None:
                row = self._table.ids.row(piece.page)
                before = 0 if row == NOWHERE else int(self._table.fill[row])
            self._fill[piece.page] = max(before, piece.end)

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
        if page not in store.reserved:  # its bytes count as used already
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

    def read(self, wanted: Reading) -> None:
        """Tokens will be read. Raises as ``check_readable``."""
        check_readable(self._store, wanted, self)

    def gather(self, pages: list[int]) -> None:
        """Whole pages will be read.

        Raises:
            errors.PageError: a page is missing.
        """
        for page in pages:
            self._format_of(page)

    def fill(self, page: int) -> int:
        """Tokens of a page.

        Raises:
            errors.PageError: there is none.
        """
        found = self._fill.get(page)
        return int(self._table.fill[self._store.row(page)]) if found is None else found

    def _format_of(self, page: int) -> int:
        found = self._format.get(page, self._new.get(page))
        return int(self._table.format[self._store.row(page)]) if found is None else found

    def _grow(self, more: int) -> None:
        self._store.afford(self._more + more)
        self._more += more
