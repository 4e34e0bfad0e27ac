"""What operations on a sequence would cost: asked before they are done."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from onnx_inplace.runner import relocation
from onnx_inplace.runner.costs import FREE, Cost

if TYPE_CHECKING:
    from onnx_inplace.runner.page_pool import PagePool
    from onnx_inplace.runner.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """What operations would cost now, by the names and arguments of the operations.

    Of a sequence that was freed all of them raise PageError.

    Attributes:
        sequence: that they are of.
    """

    sequence: Sequence

    def fork(self) -> Cost:
        """Tables only."""
        self._there()
        return FREE

    def reserve(self, count: int) -> Cost:
        """New pages, and a copy of the last page where others count on it."""
        mine, pool = self._there()
        more = mine._more_pages(count)
        cost = Cost(pages=more, allocated=more * pool.new_bytes())
        place = mine._written(count)
        if place is None:
            return cost
        page = mine.pages[place]
        size = pool.size_of(page)
        if pool.owners(page) > 1:
            cost += Cost(pages=1, allocated=size, copied=size)
        return cost + relocation.cost_of_appendable(pool, page)

    def truncate(self, length: int) -> Cost:
        """Pages that nobody else counts on are freed."""
        mine, pool = self._there()
        return pool.cost_of_release(mine.pages[-(-length // pool.page_size) :])

    def drop(self, start: int, stop: int) -> Cost:
        """Tables, or new pages."""
        mine, pool = self._there()
        plan = relocation.plan_drop(list(mine.pages), mine.length, start, stop, pool.page_size)
        return relocation.cost(pool, plan, mine.pages)

    def recode_keys(self, start: int, stop: int) -> Cost:
        """Copies of all pages that are touched."""
        mine, pool = self._there()
        relocation.check_range(start, stop, mine.length)
        size = pool.page_size
        touched = mine.pages[start // size : -(-stop // size)] if stop > start else ()
        total = sum(map(pool.size_of, touched))
        return Cost(len(touched), total, total, total) + pool.cost_of_release(touched)

    def free(self) -> Cost:
        """Pages that nobody else counts on are freed."""
        mine, pool = self._there()
        return pool.cost_of_release(mine.pages)

    def _there(self) -> tuple[Sequence, PagePool]:
        self.sequence._check_there()
        return self.sequence, self.sequence.pool.pages
