"""What an operation on pages costs: known before it is done."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Bytes that an operation moves, over all caches of a pool. Tables are not counted.

    Attributes:
        pages: ids of new pages, each of which is one page of every cache.
        allocated: bytes of new pages.
        copied: bytes that are copied as they are.
        recoded: bytes of new pages whose tokens are decoded and written again: exact in float
            formats, with the error of the format in others.
        freed: bytes of pages that nobody counts on afterwards.
    """

    pages: int = 0
    allocated: int = 0
    copied: int = 0
    recoded: int = 0
    freed: int = 0

    def __add__(self, other: Cost) -> Cost:
        """Both, one after the other."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Cost(*(a + b for a, b in pairs))


FREE = Cost()
"""Only tables are edited."""
