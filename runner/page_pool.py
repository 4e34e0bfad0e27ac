"""Pages of several caches under one id: page 7 of a sequence is page 7 of every layer.

Decides which ids are free and that all caches change or none does. Who counts on a page is written
in the caches' own tables, so that a run refuses to write what several count on.
"""

from __future__ import annotations

import functools
import heapq
import threading
from collections.abc import Callable, Iterable, Sequence

from onnx_inplace.compiler import errors
from onnx_inplace.runner.costs import Cost
from onnx_inplace.runner.pages import PagedCache


class PagePool:
    """Ids of pages of ``caches``, and how many of them there may be.

    Attributes:
        name: in errors.
        caches: with pages of equal ``page_size``.
        formats: of new pages, one for each cache.
        limit: most pages; None: no limit but the budgets of the caches and the memory.
        evict: called with a number of pages that are missing; says how many it has given up.
        lock: held while tables of the caches are edited.
    """

    def __init__(
        self,
        caches: Sequence[PagedCache],
        formats: Sequence[str],
        limit: int | None,
        name: str,
        *,
        adopt: bool = False,
    ):
        """A pool of caches without pages; ``adopt``: with the pages that they have, all the same.

        Raises:
            ValueError: no cache, a cache with pages, page sizes that differ, or a limit below 1.
            errors.PageError: a cache does not allow its format, or belongs to another pool.
        """
        self.caches, self.formats = tuple(caches), tuple(formats)
        self.name, self.limit = name, limit
        self.evict: Callable[[int], int] = lambda missing: 0
        self.lock = threading.RLock()
        self._free: list[int] = []  # ids below _next without a page, a heap
        self._next = 0
        if not self.caches or len(set(map(id, self.caches))) < len(self.caches):
            raise ValueError("a pool has one or more caches, each once")
        if len({cache.page_size for cache in self.caches}) > 1:
            sizes = [cache.page_size for cache in self.caches]
            raise ValueError(f"caches of one pool have pages of one size, not {sizes} tokens")
        if limit is not None and limit < 1:
            raise ValueError(f"a pool of {limit} pages holds nothing")
        for cache, format in zip(self.caches, self.formats, strict=True):
            cache.membership.refuse("close that one first")
            if len(cache) and not adopt:
                raise ValueError(f"`{cache.name}` has pages already: a pool makes its own")
            cache.store.format(format)
        if adopt:
            self._adopt()
        for cache in self.caches:
            cache.membership.join(self)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.caches[0].page_size

    @property
    def used(self) -> int:
        """Pages that there are."""
        return self._next - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of all caches."""
        return sum(cache.nbytes for cache in self.caches)

    def owners(self, page: int) -> int:
        """How many count on a page."""
        return self.caches[0].page(page).owners

    def size_of(self, page: int) -> int:
        """Bytes of a page in all caches."""
        return sum(cache.page(page).nbytes for cache in self.caches)

    def new_bytes(self) -> int:
        """Bytes of a new page in all caches."""
        pairs = zip(self.caches, self.formats, strict=True)
        return sum(cache.store.codec.page_bytes[cache.store.format(f)] for cache, f in pairs)

    def cost_of_release(self, pages: Iterable[int]) -> Cost:
        """What is freed when one less counts on each of these pages."""
        return Cost(freed=sum(self.size_of(p) for p in pages if self.owners(p) == 1))

    def make(self, count: int) -> list[int]:
        """New pages, in the pool's formats, with one owner: all or none.

        Raises:
            errors.PoolExhausted: there is no room now.
            errors.PoolTooSmall: there never is.
            MemoryError: the system has none.
        """
        return self._enter(count, functools.partial(_allocate_as, self.formats))

    def copy(self, page: int, fill: int) -> int:
        """A copy of the first ``fill`` tokens of a page, with one owner. See ``make``."""
        (made,) = self._enter(1, lambda cache, _, to: cache.copy_page(page, to, fill=fill))
        return made

    def make_as(self, formats: Sequence[Sequence[str]]) -> list[int]:
        """New pages, in formats by page and cache. See ``make``."""
        made: list[int] = []
        try:
            for row in formats:
                made += self._enter(1, functools.partial(_allocate_as, row))
        except BaseException:
            self.release(made)
            raise
        return made

    def share(self, pages: Iterable[int]) -> None:
        """One more counts on each of these pages."""
        with self.lock:
            for page in pages:
                for cache in self.caches:
                    cache.share(page)

    def release(self, pages: Iterable[int]) -> None:
        """One less counts on each of these pages; those without any are freed."""
        with self.lock:
            for page in pages:
                freed = [cache.release(page) for cache in self.caches]
                if all(freed):
                    heapq.heappush(self._free, page)

    def close(self) -> None:
        """Give the caches back to their owner."""
        for cache in self.caches:
            cache.membership.leave(self)

    def _adopt(self) -> None:
        """Take over the pages that all caches have.

        Raises:
            ValueError: a page is not in all caches.
        """
        pages = [set(cache) for cache in self.caches]
        if any(found != pages[0] for found in pages):
            raise ValueError("the caches do not have the same pages")
        self._next = max(pages[0], default=-1) + 1
        self._free = [page for page in range(self._next) if page not in pages[0]]

    def _enter(self, count: int, make: Callable[[PagedCache, int, int], object]) -> list[int]:
        """Make ``count`` pages in every cache, all or none."""
        with self.lock:
            self._refuse(count)
            try:
                return self._try(count, make)
            except errors.PoolExhausted:
                if not self.evict(count):
                    raise
            return self._try(count, make)

    def _try(self, count: int, make: Callable[[PagedCache, int, int], object]) -> list[int]:
        made: list[tuple[PagedCache, int]] = []
        pages = self._ids(count)
        try:
            for page in pages:
                for index, cache in enumerate(self.caches):
                    make(cache, index, page)
                    made.append((cache, page))
        except BaseException as error:
            for cache, page in made:
                cache.release(page)
            for page in pages:
                heapq.heappush(self._free, page)
            if isinstance(error, errors.PageBudget):
                raise self._of_budget(error, count) from error
            raise
        return pages

    def _refuse(self, count: int) -> None:
        """Raise where the pool has no room, after asking for some."""
        if self.limit is None:
            return
        if self.used + count > self.limit:
            self.evict(self.used + count - self.limit)
        if count > self.limit:
            raise errors.PoolTooSmall(self.name, count, self.limit)
        if self.used + count > self.limit:
            raise errors.PoolExhausted(self.name, count, self.limit - self.used)

    def _of_budget(self, error: errors.PageBudget, count: int) -> errors.PageError:
        if error.never:
            return errors.PoolTooSmall(self.name, count, 0, str(error))
        return errors.PoolExhausted(self.name, count, 0, str(error))

    def _ids(self, count: int) -> list[int]:
        found = []
        for _ in range(count):
            if self._free:
                found.append(heapq.heappop(self._free))
            else:
                found.append(self._next)
                self._next += 1
        return found


def _allocate_as(formats: Sequence[str], cache: PagedCache, index: int, page: int) -> None:
    cache.allocate_page(formats[index], page)
