"""What a caller sees of one page, and what a caller may compare: values without storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_inplace.compiler.formats import PageFormat
from onnx_inplace.runner.storage import Array

if TYPE_CHECKING:
    from onnx_inplace.runner.page_owner import PageOwner


class Use:
    """A run that uses a paged cache, and the name under which it does.

    It ends at the latest when nobody holds this object any more: an interrupt may come between any
    two calls, also before the one that says that the run has ended.
    """

    __slots__ = ("__weakref__", "name")

    def __init__(self, name: str):
        self.name = name


class Page:
    """The page that has an id now. Made by ``PagedCache.page``; it follows the page when it moves.

    Everything is looked up when it is asked for: after the page was converted, the new format and
    address are seen; after it was freed, PageError. During a run BindingInUse.
    """

    __slots__ = ("_cache", "id")

    def __init__(self, cache: PageOwner, page: int):
        self._cache, self.id = cache, page

    @property
    def format(self) -> PageFormat:
        """How the bytes are read."""
        return self._cache.store.format_of(self.id)

    @property
    def quantized_type(self) -> str:
        """Name of the format."""
        return self.format.name

    @property
    def address(self) -> int:
        """Place of the first byte, a multiple of 64."""
        store = self._cache.store
        return int(store.table.address[store.row(self.id)])

    @property
    def nbytes(self) -> int:
        """Bytes of the page, scales included."""
        store = self._cache.store
        return int(store.table.size[store.row(self.id)])

    @property
    def fill(self) -> int:
        """One more than the last token that was written [tokens]."""
        return self._cache.store.fill(self.id)

    @property
    def owners(self) -> int:
        """How many count on the page. A page with several is not written, but copied first."""
        store = self._cache.store
        return int(store.table.owners[store.row(self.id)])

    @property
    def raw(self) -> Array:
        """The bytes, (nbytes,) uint8: a read-only view, nothing is copied.

        It shows what runs write as long as the page stays where it is. When the page is freed or
        replaced by one of another size, the view keeps the old memory alive, with the bytes that it
        had, and that memory is never used for another page.
        """
        return self._cache.view(self.id)

    def decode(self, dtype: Any = None) -> Array:
        """The numbers of the page, rounded to the cache's element type unless ``dtype`` is given.

        Returns:
            (2, heads, page_size, head_size): K and V, a new array. Tokens that were never written
            are 0 in pages that a run has made.
        """
        return self._cache.decode(self.id, dtype)

    def __repr__(self) -> str:
        """Id, format and fill, where the page is there."""
        if self.id not in self._cache:
            return f"Page({self.id}: freed)"
        return f"Page({self.id}: {self.quantized_type}, {self.fill} tokens, {self.owners} owners)"


@dataclasses.dataclass(frozen=True, slots=True)
class PageState:
    """The value of one page.

    Attributes:
        format: how the bytes are read.
        fill: tokens.
        owners: who counts on it.
        raw: the bytes.
    """

    format: PageFormat
    fill: int
    owners: int
    raw: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The value of a paged cache, with a copy of every byte. Equal values are equal snapshots.

    Where pages lie is no part of it.

    Attributes:
        dims: of a page, (2, heads, page_size, head_size).
        elem_type: logical element type.
        sparse_ids: whether any int64 is an id.
        pages: by id, ascending.
    """

    dims: tuple[int, ...]
    elem_type: np.dtype[Any]
    sparse_ids: bool
    pages: Mapping[int, PageState]
