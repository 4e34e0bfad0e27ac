"""Whether a pool of sequences counts on the pages of a cache: then nobody else replaces them."""

from __future__ import annotations

import weakref
from typing import Any

from onnx_inplace.runner.page_store import PageStore


class Membership:
    """Of one cache; ends when the pool is closed, or gone."""

    def __init__(self, store: PageStore):
        """In no pool."""
        self._store = store
        self._pool: weakref.ref[Any] | None = None

    def join(self, pool: Any) -> None:
        """Pages belong to a pool from now on. It has a ``name``.

        Raises:
            errors.PageError: they belong to another one.
        """
        self.refuse("close that one first")
        self._pool = weakref.ref(pool)

    def leave(self, pool: Any) -> None:
        """Pages belong to that pool no longer."""
        if self._pool is not None and self._pool() is pool:
            self._pool = None

    def refuse(self, repair: str) -> None:
        """Raise PageError in a pool: block tables of its sequences would be wrong."""
        pool = None if self._pool is None else self._pool()
        if pool is not None:
            reason = f"its pages belong to pool `{pool.name}`: {repair}"
            raise self._store.error(None, reason)
