"""Sequences of tokens on shared pages: fork, cut, drop, reorder, without moving what stays.

A sequence is a block table and a length. Operations edit tables and count owners; a page is copied
only when a sequence is about to write into one that others count on. Each operation says what it
costs before it is done: ``sequence.cost.drop(0, 100)`` takes what ``sequence.drop(0, 100)`` takes.

    pool = SequencePool(session.allocate("cache"), format="FLOAT16")
    one = pool.new()
    with one.writing(5) as place:
        step.run(block_table=place.block_table[0], position=place.position[0], values=values)
    two = one.fork()
"""

from __future__ import annotations

import collections
import contextlib
import json
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Several
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from onnx_inplace.compiler import errors
from onnx_inplace.runner import checkpoint
from onnx_inplace.runner.page_pool import PagePool
from onnx_inplace.runner.pages import PagedCache
from onnx_inplace.runner.prefixes import Prefixes
from onnx_inplace.runner.sequence import Batch, Int64s, Sequence

_SAVED = "onnx_inplace.pool/"  # names of arrays in a file
_PARTS = ("formats", "name", "limit", "sequences", "tables", "known", "tokens")
NO_PAGE = -1
"""What fills block tables behind the last page of a sequence; nothing reads or writes it."""


class SequencePool:
    """Sequences over the pages of one or several caches (one a layer).

    All methods may be called from any thread, between runs.

    Attributes:
        pages: which pages there are, and how many there may be.
        prefixes: full pages that can be found by their tokens.
    """

    def __init__(
        self,
        caches: PagedCache | Iterable[PagedCache] | Mapping[str, PagedCache],
        format: str | Mapping[str, str] = "FLOAT16",
        *,
        max_pages: int | None = None,
        name: str = "pool",
    ):
        """A pool without sequences.

        Args:
            caches: without pages; all with one page size.
            format: of new pages; one for all caches, or by name of the cache.
            max_pages: most pages; None: no limit but the caches' budgets.
            name: what errors call it.

        Raises:
            ValueError: see ``PagePool``.
            errors.PageError: a cache does not allow its format, or belongs to another pool.
        """
        if isinstance(caches, PagedCache):
            caches = [caches]
        found = list(caches.values()) if isinstance(caches, Mapping) else list(caches)
        self._begin(found, format, max_pages, name, adopt=False)

    def _begin(
        self,
        caches: Iterable[PagedCache],
        format: str | Mapping[str, str],
        limit: int | None,
        name: str,
        *,
        adopt: bool,
    ) -> None:
        found = list(caches)
        formats = [format if isinstance(format, str) else format[c.name] for c in found]
        self.pages = PagePool(found, formats, limit, name, adopt=adopt)
        self.prefixes = Prefixes(self.pages)
        self.pages.evict = self.prefixes.give_up
        self._sequences: dict[int, Sequence] = {}
        self._next = 0

    @property
    def caches(self) -> tuple[PagedCache, ...]:
        """The caches."""
        return self.pages.caches

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.pages.page_size

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of all caches."""
        return self.pages.nbytes

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All that are not freed, oldest first."""
        return tuple(self._sequences.values())

    def new(self, prefix: Iterable[int] = ()) -> Sequence:
        """A sequence. It begins with the full pages that are known to hold ``prefix``.

        Args:
            prefix: tokens. At least one of them stays to be computed: a model needs the result of
                the last one.

        Returns:
            A sequence whose ``length`` says how many tokens were found.
        """
        tokens = _tokens(prefix)
        with self.pages.lock:
            found = self.prefixes.find(tokens[: max(len(tokens) - 1, 0)])
            self.pages.share(found)
            return self._add(found, len(found) * self.page_size)

    def publish(self, sequence: Sequence, tokens: Iterable[int]) -> int:
        """Let later sequences find the full pages of this one. They are then counted as shared.

        Args:
            sequence: of this pool.
            tokens: that it holds, from the first one on: as many as its ``length``.

        Returns:
            How many pages can be found that could not before.

        Raises:
            ValueError: other than ``length`` tokens, or tokens were dropped from the sequence:
                then pages do not hold what a text from the beginning would give.
        """
        given = _tokens(tokens)
        with self.pages.lock:
            sequence._check_usable()
            if len(given) != sequence.length or sequence.dropped:
                raise ValueError(
                    f"{len(given)} tokens are given for a sequence of {sequence.length} "
                    f"({sequence.dropped} were dropped)"
                )
            return self.prefixes.publish(sequence.pages, given)

    def reorder(self, sequences: Several[Sequence], indices: Iterable[int]) -> None:
        """Beam search: sequence i becomes what ``sequences[indices[i]]`` was. Tables are edited.

        Raises:
            ValueError: not one index for each sequence, a sequence twice, or of another pool.
            errors.PageError: a sequence is being written.
        """
        chosen = [operator.index(i) for i in indices]
        with self.pages.lock:
            self._check_rows(sequences)
            if len(chosen) != len(sequences) or not all(0 <= i < len(sequences) for i in chosen):
                raise ValueError(f"indices {chosen} for {len(sequences)} sequences")
            states = [sequences[i]._state() for i in chosen]
            old = [page for sequence in sequences for page in sequence.pages]
            for pages, _, _ in states:
                self.pages.share(pages)
            for sequence, state in zip(sequences, states, strict=True):
                sequence._become(*state)
            self.pages.release(old)

    def keep(self, sequence: Sequence) -> None:
        """Free all sequences but one."""
        for other in self.sequences:
            if other is not sequence:
                other.free()

    def clear(self) -> None:
        """Free all sequences, and what is known of prefixes."""
        for sequence in self.sequences:
            sequence.free()
        self.prefixes.clear()

    def close(self) -> None:
        """Free everything, and give the caches back: ``checkpoint.restore`` may fill them then.

        Not needed for a pool that nobody refers to any more.
        """
        self.clear()
        self.pages.close()

    @contextlib.contextmanager
    def writing(
        self, sequences: Several[Sequence], count: int, blocks: int | None = None
    ) -> Iterator[Batch]:
        """Reserve ``count`` tokens in each sequence; commit them, or roll back after an exception.

        Args:
            sequences: rows of the batch.
            count: tokens that the run writes in each row.
            blocks: width of the block table; None: as many as the longest row needs. One width for
                all runs means one tuple of shapes, which is prepared once.

        Raises:
            errors.PoolExhausted, errors.PoolTooSmall: there is no room now, or never. No sequence
                has changed.
            ValueError: ``blocks`` is too small; a sequence twice, or of another pool.
        """
        with self.pages.lock:
            self._check_rows(sequences)
            begun: list[Sequence] = []
            try:
                for sequence in sequences:
                    sequence.reserve(count)
                    begun.append(sequence)
                batch = self.batch(sequences, blocks)
            except BaseException:
                for sequence in begun:
                    sequence.rollback()
                raise
        try:
            yield batch
        except BaseException:
            for sequence in sequences:
                sequence.rollback()
            raise
        for sequence in sequences:
            sequence.commit()

    def batch(self, sequences: Several[Sequence], blocks: int | None = None) -> Batch:
        """Block tables, positions and lengths of several sequences, as a model takes them."""
        longest = max((len(s.pages) for s in sequences), default=0)
        width = longest if blocks is None else blocks
        if width < longest:
            raise ValueError(f"a block table of {width} blocks for {longest} pages")
        table = np.full((len(sequences), width), NO_PAGE, np.int64)
        for row, sequence in zip(table, sequences, strict=True):
            row[: len(sequence.pages)] = sequence.pages
        length = np.array([s.length for s in sequences], np.int64)
        reserved = np.array([s.reserved for s in sequences], np.int64)
        dropped = np.array([s.dropped for s in sequences], np.int64)
        return Batch(table, length, length + reserved, length + dropped)

    # -- saved state

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write caches, sequences and known prefixes into one file (``checkpoint.save``).

        Raises:
            ValueError: two caches have one name; pages were freed or shared past the pool.
            errors.PageError: a sequence is being written.
            errors.BindingInUse: a run uses a cache.
            OSError: the file cannot be written; an older one of that name is as it was.
        """
        with self.pages.lock:
            self._check_rows(self.sequences)
            if len({cache.name for cache in self.caches}) < len(self.caches):
                raise ValueError("caches that are saved together need names of their own")
            self._check_owners()
            known, tokens, before = self.prefixes.rows()
            state: dict[str, Any] = {cache.name: cache for cache in self.caches}
            state |= {
                _SAVED + "formats": _text(list(self.pages.formats)),
                _SAVED + "name": _text(self.pages.name),
                _SAVED + "limit": np.array([-1 if self.pages.limit is None else self.pages.limit]),
                _SAVED + "sequences": np.array(
                    [(len(s.pages), s.length, s.dropped) for s in self.sequences], np.int64
                ).reshape(-1, 3),
                _SAVED + "tables": np.array([p for s in self.sequences for p in s.pages], np.int64),
                _SAVED + "known": np.array([known, before], np.int64),
                _SAVED + "tokens": tokens,
            }
            checkpoint.save(path, state)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, map: bool = False) -> Self:
        """A pool as it was saved, with new caches, whose sequences are in the same order.

        Args:
            path: of the file.
            map: see ``checkpoint.load``.

        Raises:
            errors.SavedStateError: the file is no saved pool, or damaged anywhere.
            MemoryError: it finds no room.
            OSError: it cannot be read.
        """
        state = checkpoint.load(path, map=map)
        caches = {n: c for n, c in state.items() if isinstance(c, PagedCache)}
        if not any(name.startswith(_SAVED) for name in state):
            what = ", ".join(f"`{name}`" for name in state) or "nothing"
            reader = "PagedCache.load" if len(state) == len(caches) == 1 else "checkpoint.load"
            reason = f"it is no pool of sequences: it holds {what}, which {reader} reads"
            raise errors.SavedStateError(os.fspath(path), reason)
        try:
            saved = {name: np.asarray(state[_SAVED + name]) for name in _PARTS}
            return cls._of_state(caches, saved)
        except (KeyError, ValueError, IndexError) as error:
            raise errors.SavedStateError(os.fspath(path), f"it is no pool: {error}") from error

    @classmethod
    def _of_state(cls, caches: Mapping[str, PagedCache], saved: Mapping[str, Any]) -> Self:
        limit = int(saved["limit"][0])
        formats = dict(zip(caches, json.loads(saved["formats"].tobytes()), strict=True))
        name = json.loads(saved["name"].tobytes())
        pool = cls.__new__(cls)
        pool._begin(caches.values(), formats, None if limit < 0 else limit, name, adopt=True)
        tables = iter(saved["tables"].tolist())
        for count, length, dropped in saved["sequences"].tolist():
            pages = [next(tables, NO_PAGE) for _ in range(count)]
            if length < 0 or dropped < 0 or count != -(-length // pool.page_size):
                raise ValueError(f"a sequence of {length} tokens in {count} pages")
            pool._add(pages, length, dropped)
        known, before = saved["known"].tolist()
        pool.prefixes.adopt(known, saved["tokens"], before)
        pool._check_owners()
        return pool

    def _check_owners(self) -> None:
        """Refuse tables that count on other pages than there are."""
        counts = collections.Counter(p for s in self.sequences for p in s.pages)
        counts.update(self.prefixes.pages)
        for cache in self.caches:
            if counts != {page: cache.page(page).owners for page in cache}:
                raise ValueError("block tables and pages do not agree")

    # -- for sequences

    def _add(self, pages: Iterable[int], length: int, dropped: int = 0) -> Sequence:
        sequence = Sequence(self, self._next)
        sequence._become(list(pages), length, dropped)
        self._sequences[self._next] = sequence
        self._next += 1
        return sequence

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]

    def _check_rows(self, sequences: Several[Sequence]) -> None:
        if len({id(s) for s in sequences}) < len(sequences):
            raise ValueError("a sequence is named twice: fork it")
        for sequence in sequences:
            if sequence.pool is not self:
                raise ValueError(f"sequence {sequence.id} belongs to another pool")
            sequence._check_usable()


def _tokens(tokens: Iterable[int]) -> Int64s:
    given: Any = tokens if isinstance(tokens, np.ndarray) else list(tokens)
    found = np.asarray(given, np.int64 if len(given) == 0 else None)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError("tokens are a list of whole numbers")
    return found.astype(np.int64)


def _text(value: Any) -> npt.NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)
