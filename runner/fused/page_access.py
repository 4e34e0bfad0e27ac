"""What a run does to pages for a fused step, before its call and behind it.

Pages come and go between runs, and an update may need a page that is not there yet. Before the call
everything is judged that the checks before the run have left open, pages are made, and kernels are
told where pages are, if that has changed. Nothing is written before all is judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from onnx_inplace.numba_kernels import pages_attention, pages_kernels
from onnx_inplace.numba_kernels.fused import paging
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import operators_pages
from onnx_inplace.runner.actions import Array, Slots
from onnx_inplace.runner.fused.buffers import aligned
from onnx_inplace.runner.operators_paged_attention import Options, layout_of
from onnx_inplace.runner.page_pieces import Outlook, pieces, reading
from onnx_inplace.runner.page_store import PageStore
from onnx_inplace.runner.pages import PagedCache

Source = Callable[[Slots], Array]
"""Finds a value of a run."""


class Ids:
    """Page ids of a run, (blocks), (batch, blocks) or (). Many layers share them.

    Attributes:
        array: of the last run.
        version: grows when they are others than those of the run before.
    """

    def __init__(self, source: Source):
        self._source, self._key = source, b""
        self.array: Array = np.empty(0, np.int64)
        self.version = 0

    def read(self, slots: Slots) -> None:
        """Look at those of this run."""
        array = self.array = self._source(slots)
        key = array.tobytes()
        if key != self._key or not self.version:
            self._key = key
            self.version += 1

    def rows(self, store: PageStore, batch: int) -> Array:
        """Where the pages stand in the table, (batch, blocks)."""
        return store.table.rows_of(self.array, batch)


class Access:
    """What one operation does to the pages of a cache."""

    def __init__(self, cache: PagedCache, ids: Ids, batch: int):
        self.cache, self.ids, self.batch = cache, ids, batch
        self._seen = -1, -1, -1

    def judge(self, outlook: Outlook, slots: Slots) -> None:
        """Refuse what cannot happen; note the pages that it makes."""
        raise NotImplementedError

    def point(self) -> None:
        """Tell the kernel where pages are, if that has changed since the last run."""
        store = self.cache.store
        now = self.ids.version, store.table.version, store.codec.key
        if now != self._seen:
            self._point(store)
            self._seen = now

    def _point(self, store: PageStore) -> None:
        raise NotImplementedError


class Writing(Access):
    """PagedCacheUpdate of ``tokens`` tokens in each sequence.

    Attributes:
        table: a ``paging.Table``, for the kernel.
        clipped: one number, of this run.
    """

    def __init__(
        self,
        cache: PagedCache,
        ids: Ids,
        batch: int,
        positions: Source,
        tokens: int,
        created: str | None,
    ):
        """``created``: the format of pages that are made, where the operator names one."""
        super().__init__(cache, ids, batch)
        self._positions, self._tokens, self._created = positions, tokens, created
        self.table = np.zeros(len(paging.Table._fields), np.int64)
        self.clipped = np.zeros(1, np.int64)

    def judge(self, outlook: Outlook, slots: Slots) -> None:
        """Missing pages are made."""
        store, positions = self.cache.store, self._positions(slots)
        touched = pieces(store.name, self.ids.array, positions, self._tokens, store.page_size)
        outlook.update(touched, operators_pages.created_format(store, self._created))

    def _point(self, store: PageStore) -> None:
        self._rows = self.ids.rows(store, self.batch)
        places = address(store.codec.descriptions), *store.table.places, address(self._rows)
        self.table[:] = paging.Table(*places)


class Reading(Access):
    """PagedAttention.

    Attributes:
        calls: a ``paging.Calls``, for the kernels.
        tables: a ``pages_attention.Tables``, for them.
    """

    def __init__(
        self,
        cache: PagedCache,
        ids: Ids,
        batch: int,
        lengths: Source,
        arrays: tuple[Array, Array],
        options: Options,
        limits: Limits,
    ):
        """``arrays``: query and output, (batch, heads, tokens, head_size)."""
        super().__init__(cache, ids, batch)
        self._lengths, self._arrays, self._options, self._limits = lengths, arrays, options, limits
        self.calls = np.zeros(len(paging.Calls._fields), np.int64)
        self.tables = np.zeros(len(pages_attention.Tables._fields), np.int64)
        self._space: Array = np.empty(0, np.uint8)

    def judge(self, outlook: Outlook, slots: Slots) -> None:
        """All pages have the tokens that are read."""
        lengths, tokens = self._lengths(slots), self._arrays[0].shape[2]
        store, left = self.cache.store, self._options.left
        outlook.read(reading(store, self.ids.array, lengths, tokens, left))

    def _point(self, store: PageStore) -> None:
        self._rows = self.ids.rows(store, self.batch)
        if store.codec.key != self._seen[2]:
            self._choose(store)
        places = *store.table.places[:2], address(store.codec.descriptions)
        self.tables[:] = pages_attention.Tables(
            *places, address(self._kernels), address(self._rows)
        )

    def _choose(self, store: PageStore) -> None:
        """Kernels for the formats that pages may have now."""
        query, output = self._arrays
        blocks = self._rows.shape[1]
        x = layout_of(store, query, output, self.batch, blocks, self._options)
        known, portable = store.codec.descriptions, self._limits.portable
        found = pages_kernels.ready(known, x.group, portable, self._options.accuracy)
        layout, self._kernels = found.choose(x)
        size = pages_attention.workspace_size(layout, self._limits.splits, self._limits.threads)
        if self._space.size < size:
            self._space = aligned(size)
        self._layout = np.array(layout, np.int64)
        self.calls[:] = paging.Calls(
            found.attend, found.merge, address(self._layout), address(self._space)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What attention is prepared for: parts of a sequence, threads, any CPU."""

    splits: int
    threads: int
    portable: bool


class Pages:
    """All accesses of a fused step, in order."""

    def __init__(self) -> None:
        self.accesses: list[Access] = []
        self._ids: dict[int, Ids] = {}
        self._bytes: dict[int, Array] = {}

    def ids(self, value: int, source: Source) -> Ids:
        """The page ids that a value holds."""
        return self._ids.setdefault(value, Ids(source))

    def bytes_of(self, cache: PagedCache) -> Array:
        """Stands for the bytes of all pages where it is asked who reads and writes the same."""
        return self._bytes.setdefault(id(cache), np.zeros(1, np.int64))

    def prepare(self, slots: Slots) -> None:
        """Before the call.

        Raises:
            errors.PageError, errors.CapacityError, errors.PageBudget: an access cannot happen.
            MemoryError: pages that are made find no room. In either case nothing has changed.
        """
        for ids in self._ids.values():
            ids.read(slots)
        made = self._judged(slots)
        for store, pages in made:  # takes all memory, or none: the run gives back what is left
            store.reserve([page for page in pages if page[0] not in store.reserved])
        for store, pages in made:
            store.add(pages)
        for access in self.accesses:
            access.point()

    def _judged(self, slots: Slots) -> list[tuple[PageStore, list[tuple[int, int]]]]:
        """The pages that are made, after judging what has not been judged."""
        outlooks: dict[int, Outlook] = {}
        for access in self.accesses:
            store = access.cache.store
            if store.judged and (not store.reserved or isinstance(access, Reading)):
                continue
            outlook = outlooks.setdefault(id(store), Outlook(store))
            access.judge(outlook, slots)
        caches = {id(a.cache.store): a.cache.store for a in self.accesses}
        return [(caches[key], o.created) for key, o in outlooks.items() if o.created]

    def finish(self) -> None:
        """Behind the call."""
        for access in self.accesses:
            if isinstance(access, Writing) and access.clipped[0]:
                access.cache.store.clipped += int(access.clipped[0])
                access.clipped[0] = 0
