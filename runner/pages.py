"""A cache made of pages, each with a format of its own, that can be saved and loaded.

What its owner may do is decided in ``page_owner``; what a saved cache says, in ``cache_state``;
what a file is, in ``state_file``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Self

from onnx_inplace.compiler import schema
from onnx_inplace.runner import cache_state, saved_state, state_file
from onnx_inplace.runner.cache_state import SavedCache
from onnx_inplace.runner.page_owner import PageOwner
from onnx_inplace.runner.page_store import PageStore
from onnx_inplace.runner.storage import Array


class PagedCache(PageOwner):
    """K and V of many tokens in pages of ``page_size`` tokens.

    Made by ``Session.allocate`` or ``load``; ``Session.bind`` lends it to a session. Between runs
    the owner may do everything here, also while it is lent; during a run BindingInUse is raised.
    All methods may be called from any thread. Iteration gives page ids, ascending.

    Attributes:
        dims: of a page, (2, heads, page_size, head_size): K, then V.
        elem_type: logical element type, that pages decode to.
        allowed: page formats that pages may have; empty: any.
        sparse_ids: whether any int64 is a page id. Otherwise ids are 0 to n-1.
        store: the pages themselves, for a run.
    """

    def to_proto(self) -> Any:
        """The cache as a ``schema.PagedCacheProto``: every page, and the format of each.

        Protobuf holds at most 2 GiB; ``save`` has no such limit.
        """
        with self._runs.none("saved"):
            return cache_state.describe(self.store, self.allowed, inline=True)[0]

    @classmethod
    def from_proto(cls, proto: Any) -> Self:
        """The cache of a ``schema.PagedCacheProto``: ``from_proto(to_proto())``.

        Raises:
            ValueError: the message is damaged, or says what is not known here.
        """
        saved = cache_state.read(proto)
        return cls.of_state(saved, cache_state.inline_parts(proto, saved), copy=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache into a file, as ``checkpoint.save`` does with several values.

        Raises:
            errors.BindingInUse: a run uses it.
            OSError: the file cannot be written; an older one of that name is as it was.
        """
        with self._runs.none("saved"):
            proto, blocks = cache_state.describe(self.store, self.allowed, inline=False)
            state_file.write(path, schema.SavedStateProto(caches=[proto]), blocks)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, map: bool = False) -> Self:
        """The only paged cache of a file, with its page ids. ``map``: see ``checkpoint.load``.

        Raises:
            errors.SavedStateError: the file is no saved state, damaged anywhere, or holds another
                number of paged caches.
            MemoryError: it finds no room.
            OSError: it cannot be read.
        """
        _, saved, parts = saved_state.read_cache(path)
        return cls.of_state(saved, parts, copy=not map)

    def insert(self, path: str | os.PathLike[str]) -> dict[int, int]:
        """Add the pages of a saved cache to this one, under the smallest ids that are free.

        Returns:
            The new id of each saved one, to renumber block tables with.

        Raises:
            errors.SavedStateError: as ``load``, or its pages cannot be pages of this cache.
            errors.PageError: a pool of sequences has this cache: it would not know the pages.
            errors.PageBudget, MemoryError: they find no room. The cache is as it was.
        """
        file, saved, parts = saved_state.read_cache(path)
        with self._runs.none("grown"):
            self.membership.refuse("fill a cache of its own")
            fault = saved.fault(self.store)
            if fault is not None:
                file.refuse(fault)
            ids = self.store.free_ids(len(parts))
            cache_state.enter(self.store, saved, parts, ids, copy=True)
        return {page.id: new for page, new in zip(saved.pages, ids, strict=True)}

    @classmethod
    def of_state(cls, saved: SavedCache, parts: Sequence[Array], *, copy: bool) -> Self:
        """A cache of saved pages; see ``cache_state.enter``."""
        cache = cls(
            saved.dims, saved.elem_type, saved.allowed, sparse_ids=saved.sparse_ids, name=saved.name
        )
        ids = [page.id for page in saved.pages]
        cache_state.enter(cache.store, saved, parts, ids, copy=copy)
        return cache

    def prepare_state(self, saved: SavedCache, parts: Sequence[Array]) -> PageStore:
        """A store like that of this cache, with saved pages, for ``take_over``.

        Raises:
            ValueError: they cannot be pages of this cache.
            errors.PageBudget, MemoryError: they find no room.
        """
        old = self.store
        store = PageStore(
            old.name, old.elem_type, old.codec, old.sparse_ids, old.budget, old.memory
        )
        fault = saved.fault(store)
        if saved.sparse_ids != self.sparse_ids:
            fault = "its page ids are dense" if self.sparse_ids else "its page ids are sparse"
        if fault is not None:
            raise ValueError(fault)
        ids = [page.id for page in saved.pages]
        cache_state.enter(store, saved, parts, ids, copy=True)
        return store

    def take_over(self, other: PageStore) -> None:
        """Get the pages of a prepared store; the own ones are freed."""
        self.store.table.swap(other.table)
        for page in other.table.ids.ids():
            other.drop(page)
