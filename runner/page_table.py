"""Which page is where: flat arrays of descriptors, one row a page, and the way from ids to rows.

Kernels read the arrays; nothing here follows Python objects for every page. Growth moves
descriptors, never pages. What may be done to a page is decided in ``pages``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.numba_kernels.pages_table import Table
from onnx_inplace.runner.storage import Array

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
NOWHERE = -1
"""The row of an id that has no page."""
_FIRST = 8  # rows


class Ids(Protocol):
    """The way from page ids to rows."""

    def __len__(self) -> int:
        """Dense: one more than the largest id. Sparse: number of pages."""

    def row(self, page: int) -> int:
        """The row of a page, or ``NOWHERE``."""

    def rows(self, pages: Int64s) -> Int64s:
        """The row of each page, or ``NOWHERE``."""

    def make_room(self, rows: int) -> None:
        """Room for so many rows: ``place`` then does not fail."""

    def place(self, page: int) -> int:
        """A row for a new page."""

    def remove(self, page: int) -> None:
        """A page is gone."""

    def ids(self) -> list[int]:
        """Ids of all pages, ascending."""


class DenseIds:
    """Ids 0 to n-1, each its own row. A page that is freed leaves a hole, or shortens the table."""

    def __init__(self) -> None:
        """No page."""
        self._held: npt.NDArray[np.bool_] = np.zeros(_FIRST, np.bool_)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def row(self, page: int) -> int:
        """The row of a page, or ``NOWHERE``."""
        return page if 0 <= page < self._length and self._held[page] else NOWHERE

    def rows(self, pages: Int64s) -> Int64s:
        """The row of each page, or ``NOWHERE``."""
        inside = (pages >= 0) & (pages < self._length)
        known = inside & self._held[np.where(inside, pages, 0)]
        return np.where(known, pages, NOWHERE)

    def make_room(self, rows: int) -> None:
        """Room for ids below ``rows``."""
        more = rows - len(self._held)
        if more > 0:
            self._held = np.concatenate([self._held, np.zeros(max(more, self._length), np.bool_)])

    def place(self, page: int) -> int:
        """The row is the id."""
        self._held[page] = True
        self._length = max(self._length, page + 1)
        return page

    def remove(self, page: int) -> None:
        """Leaves a hole; at the end the table becomes shorter."""
        self._held[page] = False
        while self._length and not self._held[self._length - 1]:
            self._length -= 1

    def ids(self) -> list[int]:
        """Ids of all pages, ascending."""
        return np.flatnonzero(self._held[: self._length]).tolist()


class SparseIds:
    """Any int64. Rows of pages that are gone serve later ones."""

    def __init__(self) -> None:
        """No page."""
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._sorted: tuple[Int64s, Int64s] | None = None  # ids and rows, made when asked for

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, page: int) -> int:
        """The row of a page, or ``NOWHERE``."""
        return self._rows.get(page, NOWHERE)

    def rows(self, pages: Int64s) -> Int64s:
        """The row of each page, or ``NOWHERE``."""
        if not self._rows:
            return np.full(pages.shape, NOWHERE, np.int64)
        if self._sorted is None:
            ids = np.fromiter(self._rows, np.int64, len(self._rows))
            order = np.argsort(ids)
            rows = np.fromiter(self._rows.values(), np.int64, len(self._rows))
            self._sorted = ids[order], rows[order]
        ids, rows = self._sorted
        at = np.minimum(np.searchsorted(ids, pages), len(ids) - 1)
        return np.where(ids[at] == pages, rows[at], NOWHERE)

    def make_room(self, rows: int) -> None:
        """Nothing to prepare: a dictionary grows by itself."""

    def place(self, page: int) -> int:
        """A row that is free, or one more."""
        row = self._rows[page] = self._free.pop() if self._free else len(self._rows)
        self._sorted = None
        return row

    def remove(self, page: int) -> None:
        """The row is free for another page."""
        self._free.append(self._rows.pop(page))
        self._sorted = None

    def ids(self) -> list[int]:
        """Ids of all pages, ascending."""
        return sorted(self._rows)


class NewPage(NamedTuple):
    """A page that enters the table: its id, its bytes, how they are read."""

    page: int
    block: Array
    format: int
    fill: int = 0
    owners: int = 1


class PageTable:
    """Descriptors of pages.

    Attributes:
        ids: from page ids to rows.
        address: (rows,) int64, first byte of each page; 0: none.
        format: (rows,) int32, index of its page format; -1: none.
        fill: (rows,) int32 [tokens], one more than the last token that was written.
        owners: (rows,) int32, who counts on the page; a page with several is not written.
        size: (rows,) int64 [bytes].
        seen: (rows,) bool, whether somebody may hold a view of the bytes.
        blocks: by row, what keeps the bytes alive.
        nbytes: of all pages.
        version: grows whenever a page comes, goes or moves.
        words: ``pages_table.Table``, for kernels, at one place as long as the table lives.
    """

    def __init__(self, *, sparse_ids: bool):
        """No page."""
        self.ids: Ids = SparseIds() if sparse_ids else DenseIds()
        self.address: Int64s = np.zeros(0, np.int64)
        self.format: Int32s = np.zeros(0, np.int32)
        self.fill: Int32s = np.zeros(0, np.int32)
        self.owners: Int32s = np.zeros(0, np.int32)
        self.size: Int64s = np.zeros(0, np.int64)
        self.seen: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.blocks: list[Array | None] = []
        self.nbytes = self.version = 0
        self.words: Int64s = np.zeros(Table.END, np.int64)
        self._found: tuple[tuple[int, bytes, tuple[int, ...], int], Int64s] | None = None

    def make_room(self, rows: int) -> None:
        """Room for so many rows. The only step of an addition that can fail; then nothing changed.

        Raises:
            MemoryError: descriptors of so many pages find no room.
        """
        held = len(self.blocks)
        if rows <= held:
            return
        more = max(rows, 2 * held, _FIRST) - held
        grown = [
            np.concatenate([column, np.full(more, nothing, column.dtype)])
            for column, nothing in (
                (self.address, 0),
                (self.format, -1),
                (self.fill, 0),
                (self.owners, 0),
                (self.size, 0),
                (self.seen, False),
            )
        ]
        self.ids.make_room(rows)
        self.blocks.extend([None] * more)
        self.address, self.format, self.fill, self.owners, self.size, self.seen = grown
        columns: list[Array] = [self.address, self.format, self.fill, self.owners]
        self.words[: Table.ROWS + 1] = *map(address, columns), len(self.blocks)

    @property
    def places(self) -> tuple[int, int, int]:
        """Addresses of ``address``, ``format`` and ``fill``."""
        addresses, formats, fills = self.words[: Table.OWNERS].tolist()
        return addresses, formats, fills

    @property
    def views(self) -> int:
        """Number of rows that were seen."""
        return int(self.words[Table.VIEWS])

    @property
    def views_at(self) -> int:
        """Where a kernel finds that number."""
        return address(self.words) + 8 * Table.VIEWS

    def rows_of(self, pages: Array, batch: int) -> Int64s:
        """The row of each page, (batch, blocks), or ``NOWHERE``; ``pages`` are as many integers.

        Update and attention of a run, and the checks before it, look for the same pages.
        """
        key, found = (self.version, pages.tobytes(), pages.shape, batch), self._found
        if found is not None and found[0] == key:
            return found[1]
        tables = pages.reshape(batch, pages.shape[-1] if pages.ndim else 1)
        rows = self.ids.rows(np.ascontiguousarray(tables, dtype=np.int64))
        self._found = key, rows
        return rows

    def rows_with(self, pages: Iterable[int]) -> int:
        """How many rows there must be for these ids to be added."""
        new = list(pages)
        if isinstance(self.ids, SparseIds):
            return len(self.ids) + len(new)
        return max(new, default=-1) + 1

    def add(self, pages: Sequence[NewPage]) -> None:
        """Enter pages whose ids have none."""
        self.make_room(self.rows_with(new.page for new in pages))
        for new in pages:
            row = self.ids.place(new.page)
            self._put(row, new.block, new.format)
            self.fill[row], self.owners[row] = new.fill, new.owners

    def replace(self, row: int, block: Array, format: int) -> Array:
        """Put other bytes in the place of a page; returns the old ones."""
        old = self.blocks[row]
        assert old is not None
        self.nbytes -= old.nbytes
        self._hide(row)
        self._put(row, block, format)
        return old

    def remove(self, page: int) -> Array:
        """Take a page out of the table; returns its bytes."""
        row = self.ids.row(page)
        block = self.blocks[row]
        assert block is not None
        self.ids.remove(page)
        self.blocks[row] = None
        self.address[row], self.format[row], self.size[row] = 0, -1, 0
        self.fill[row] = self.owners[row] = 0
        self._hide(row)
        self.nbytes -= block.nbytes
        self.version += 1
        return block

    def _put(self, row: int, block: Array, format: int) -> None:
        self.blocks[row] = block
        self.address[row], self.size[row] = address(block), block.nbytes
        self.format[row] = format
        self.nbytes += block.nbytes
        self.version += 1

    def swap(self, other: PageTable) -> None:
        """Exchange all rows with another table."""
        mine, theirs = dict(vars(self)), dict(vars(other))
        words = mine.pop("words"), theirs.pop("words")  # they stay, and what they say is exchanged
        vars(self).update(theirs)
        vars(other).update(mine)
        self.words[:], other.words[:] = words[1].copy(), words[0].copy()
        self.version = other.version = max(self.version, other.version) + 1

    def show(self, row: int) -> None:
        """Somebody gets a view of a page."""
        if not self.seen[row]:
            self.seen[row] = True
            self.words[Table.VIEWS] += 1

    def _hide(self, row: int) -> None:
        """The row has no bytes that somebody has seen."""
        if self.seen[row]:
            self.seen[row] = False
            self.words[Table.VIEWS] -= 1

    def reaches(self, start: int, stop: int) -> bool:
        """Whether somebody may see bytes from ``start`` to before ``stop`` as part of a page."""
        first = self.address[self.seen]
        last = first + self.size[self.seen]
        return bool(np.any(np.maximum(first, start) < np.minimum(last, stop)))
