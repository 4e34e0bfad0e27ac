"""The usual run over pages, judged in one call: one sequence grows in all caches, and is read.

Every layer of a decoder writes the same tokens into the same pages, each of a cache of its own, and
reads the sequence from there, if anything does. What is not so, or would be refused, is left to
``page_checks.play``, which also says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from onnx_inplace.compiler.page_checks import Mode, PageAccess
from onnx_inplace.numba_kernels import pages_table
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.page_store import PageStore
from onnx_inplace.runner.page_table import DenseIds
from onnx_inplace.runner.storage import Array


def ready() -> None:
    """Compile what judging needs, so that no run has to."""
    pages_table.find_unready.ready()


class Pattern(NamedTuple):
    """What such a run does to pages.

    Attributes:
        roots: the caches that the sequence grows in.
        write: what lets it grow in the first one, and in all others likewise.
        read: what reads it there; None: nothing does.
    """

    roots: tuple[str, ...]
    write: PageAccess
    read: PageAccess | None


def pattern(accesses: Sequence[PageAccess]) -> Pattern | None:
    """How accesses let one sequence grow, and read it; None: they do other things.

    All accesses have the ids of the first one, all writes its positions and length, all reads the
    lengths and the window of the first read. Either every write is followed by a read, or none. A
    batch of block tables may hold that of one sequence.
    """
    reads = any(access.mode is Mode.READ for access in accesses)
    writes, others = (accesses[::2], accesses[1::2]) if reads else (accesses, ())
    if not writes or (reads and len(writes) != len(others)):
        return None
    write, read = writes[0], others[0] if others else None
    if not write.rank or any(_what(w) != _what(write) for w in writes):
        return None
    if write.mode is not Mode.WRITE or any(r.mode is not Mode.READ for r in others):
        return None
    if read is not None:
        pairs = zip(writes, others, strict=True)
        if any(w.root != r.root or _what(r) != _what(read) for w, r in pairs):
            return None
        if (read.ids, read.length, read.rank) != (write.ids, write.length, write.rank):
            return None
    roots = tuple(w.root for w in writes)
    return Pattern(roots, write, read) if len(set(roots)) == len(roots) else None


def _what(access: PageAccess) -> tuple[object, ...]:
    how = access.mode, access.ids, access.rank, access.positions
    return *how, access.length, access.blocks, access.left


class Growth:
    """Judges such runs."""

    def __init__(self, roots: int, tokens: int, left: int):
        """For so many caches; ``tokens`` are written, and look back at ``left`` more; -1: all."""
        self._tokens, self._left = tokens, left
        self._seen: list[object] = [None] * roots
        self._tables = np.zeros(roots, np.int64)
        self._tables_at = address(self._tables)
        self._find = pages_table.find_unready.ready()

    def allowed(self, stores: Sequence[PageStore], ids: Array, position: int) -> bool:
        """Whether all tokens can be written and read, and no page has to be made."""
        page_size, end = stores[0].page_size, position + self._tokens
        if not self._tokens or position < 0 or end > len(ids) * page_size:
            return False
        for k, store in enumerate(stores):
            table = store.table
            if table is not self._seen[k]:
                if not isinstance(table.ids, DenseIds) or store.page_size != page_size:
                    return False
                self._tables[k], self._seen[k] = address(table.words), table
        low = 0 if self._left < 0 else max(position - self._left, 0)
        arguments = address(ids), len(ids), page_size, low, position, end
        return bool(self._find(self._tables_at, len(stores), *arguments) < 0)
