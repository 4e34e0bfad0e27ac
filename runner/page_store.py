"""Pages of one cache and what may be done to them, for those who have the right to.

Decides what is refused, and that a refusal, or a lack of memory, leaves everything as it was: each
method first checks, then takes memory, then enters what it made, which cannot fail. Who may call
and when is decided by ``pages.PagedCache`` (the owner) and by a binding (a run).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnx_inplace.compiler import errors
from onnx_inplace.compiler.formats import PageFormat
from onnx_inplace.runner.page import PageState
from onnx_inplace.runner.page_codec import Codec
from onnx_inplace.runner.page_memory import PageMemory
from onnx_inplace.runner.page_table import NOWHERE, NewPage, PageTable
from onnx_inplace.runner.storage import Array

_INT64 = range(-(2**63), 2**63)


class PageStore:
    """Table, formats and memory of a cache.

    Attributes:
        name: in errors.
        elem_type: that pages decode to.
        codec: reads and writes the bytes of pages; knows the formats.
        table: descriptors, for kernels.
        sparse_ids: whether any int64 is an id.
        budget: most bytes of all pages; None: no limit.
        memory: where pages come from.
        reserved: memory of pages that this run will add, by id.
        judged: whether all that this run does to pages has been found right before it began.
        clipped: numbers that did not fit the format of their page, since the cache was made.
    """

    def __init__(
        self,
        name: str,
        elem_type: np.dtype[Any],
        codec: Codec,
        sparse_ids: bool,
        budget: int | None,
        memory: PageMemory,
    ):
        self.name, self.elem_type, self.codec = name, elem_type, codec
        self.sparse_ids, self.budget, self.memory = sparse_ids, budget, memory
        self.table = PageTable(sparse_ids=sparse_ids)
        self.reserved: dict[int, Array] = {}
        self.judged = False
        self.clipped = 0

    # -- what is there

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.codec.dims[2]

    def row(self, page: int) -> int:
        """The row of a page.

        Raises:
            errors.PageError: there is none.
        """
        row = self.table.ids.row(operator.index(page))
        if row == NOWHERE:
            raise self.error(page, self.absence(operator.index(page)))
        return row

    def absence(self, page: int) -> str:
        """Why there is no such page."""
        if self.sparse_ids:
            return "there is no such page"
        if page < 0:
            return "an id is not negative"
        if page >= len(self.table.ids):
            return f"there are {len(self.table.ids)} pages"
        return "the page was freed"

    def block(self, row: int) -> Array:
        """The bytes of a row."""
        block = self.table.blocks[row]
        assert block is not None
        return block

    def fill(self, page: int) -> int:
        """Tokens of a page. Raises PageError where there is none."""
        return int(self.table.fill[self.row(page)])

    def format_of(self, page: int) -> PageFormat:
        """How a page is stored. Raises PageError where there is none."""
        found: PageFormat = self.codec.formats[self.table.format[self.row(page)]]
        return found

    def state(self, page: int) -> PageState:
        """The value of a page."""
        row = self.row(page)
        return PageState(
            self.codec.formats[self.table.format[row]],
            int(self.table.fill[row]),
            int(self.table.owners[row]),
            self.block(row).tobytes(),
        )

    def format(self, format: str | PageFormat) -> int:
        """Index of a format.

        Raises:
            errors.PageError: it is not allowed.
        """
        found = self.codec.find(format)
        if found is None:
            known = ", ".join(f.name for f in self.codec.formats)
            what = format if isinstance(format, str) else format.name
            raise self.error(None, f"page format {what} is not allowed here: {known}")
        return found

    def error(self, page: int | None, reason: str) -> errors.PageError:
        """An error of this cache."""
        return errors.PageError(self.name, page, reason)

    # -- what would be refused

    def refuse_new(self, page: int) -> None:
        """Raise PageError unless a page of this id can be made."""
        if page not in _INT64:
            raise self.error(page, "an id is an int64")
        if self.table.ids.row(page) != NOWHERE:
            raise self.error(page, "the id is taken")
        if not self.sparse_ids and not 0 <= page <= len(self.table.ids):
            raise self.error(page, f"dense ids have no gaps: the next is {len(self.table.ids)}")

    def free_ids(self, count: int) -> list[int]:
        """The smallest ids, from 0 on, that have no page."""
        found: list[int] = []
        page = 0
        while len(found) < count:
            if self.table.ids.row(page) == NOWHERE:
                found.append(page)
            page += 1
        return found

    def afford(self, more: int) -> None:
        """Refuse what the budget has no room for.

        Raises:
            errors.PageBudget: ``more`` bytes are too many.
        """
        used = self.table.nbytes + sum(block.nbytes for block in self.reserved.values())
        if self.budget is not None and more > 0 and used + more > self.budget:
            raise errors.PageBudget(self.name, more, used, self.budget)

    def refuse_shared(self, page: int, row: int, repair: str) -> None:
        """Raise PageError where several count on a page."""
        owners = int(self.table.owners[row])
        if owners > 1:
            raise self.error(page, f"{owners} owners count on it: {repair}")

    def check_write(self, page: int, position: int, length: int) -> int:
        """The row of a page that may be written there.

        Raises:
            errors.PageError: no such page, or it has several owners.
            errors.CapacityError: the tokens leave the page.
        """
        row = self.row(page)
        if position < 0 or position > self.page_size - length:
            raise errors.CapacityError(self.name, position, length, self.page_size)
        self.refuse_shared(page, row, "write a copy (copy_page)")
        return row

    # -- changes

    def add(self, pages: Sequence[tuple[int, int]]) -> None:
        """Make pages of zeros, given as id and index of the format: all or none.

        Raises:
            errors.PageBudget, MemoryError: nothing has changed.
        """
        self.reserve([new for new in pages if new[0] not in self.reserved])
        self.enter([NewPage(page, self.reserved.pop(page), format) for page, format in pages])

    def reserve(self, pages: Sequence[tuple[int, int]]) -> None:
        """Take memory for pages that will be added: all or none.

        Raises:
            errors.PageBudget, MemoryError: nothing has changed.
        """
        sizes = [self.codec.page_bytes[format] for _, format in pages]
        self.afford(sum(sizes))
        blocks = self.memory.take(sizes)
        try:
            self.table.make_room(self.table.rows_with(page for page, _ in pages))
        except MemoryError:
            for block in blocks:
                self.memory.give(block)
            raise
        self.reserved.update(zip((page for page, _ in pages), blocks, strict=True))

    def release(self) -> None:
        """The run is over: give back what is still reserved."""
        self.judged = False
        while self.reserved:
            self.memory.give(self.reserved.popitem()[1])

    def enter(self, new: Sequence[NewPage]) -> None:
        """Put pages into the table. Their memory is given back where that fails."""
        try:
            self.table.add(new)
        except MemoryError:  # of the descriptors: nothing has been entered
            for page in new:
                self.memory.give(page.block)
            raise

    def copy(self, row: int, to: int, most: int) -> None:
        """Copy a page into a new one, that has at most ``most`` tokens.

        Raises:
            errors.PageBudget, MemoryError: nothing has changed.
        """
        old = self.block(row)
        self.afford(old.nbytes)
        (block,) = self.memory.take([old.nbytes], zeroed=False)
        block[:] = old
        fill = min(most, int(self.table.fill[row]))
        self.enter([NewPage(to, block, int(self.table.format[row]), fill)])

    def write(self, rows: Array, values: Array, positions: Array, layout: Array) -> None:
        """Write tokens; all has been checked. See ``Codec.write``."""
        self.clipped += self.codec.write(self.table, rows, values, positions, layout)

    def convert(self, rows: Sequence[int], format: int) -> None:
        """Store pages in another format; where the number of bytes is the same, in place.

        Memory is taken first: all pages are converted, or none.

        Raises:
            errors.PageBudget, MemoryError: nothing has changed.
        """
        rows = [row for row in rows if self.table.format[row] != format]
        size = self.codec.page_bytes[format]
        self.afford(sum(size - self.block(row).nbytes for row in rows))
        for row, new in zip(rows, self.memory.take([size] * len(rows), zeroed=False), strict=True):
            old, fill = self.block(row), int(self.table.fill[row])
            before = int(self.table.format[row])
            self.clipped += self.codec.convert(old, before, new, format, fill)
            if size == old.nbytes:
                old[:] = new
                self.table.format[row] = format
                self.memory.give(new)
            else:
                seen = bool(self.table.seen[row])
                self.table.replace(row, new, format)
                self._give(old, seen)

    def drop(self, page: int) -> None:
        """Free a page, whoever counts on it."""
        seen = bool(self.table.seen[self.row(page)])
        self._give(self.table.remove(operator.index(page)), seen)

    def _give(self, block: Array, seen: bool) -> None:
        if not seen:  # else a view may be around: its memory is never used again
            self.memory.give(block)
