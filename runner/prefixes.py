"""Full pages found again by what is in them: the tokens of a prompt, from its first one on.

A page depends on all tokens before it, so its key is a hash of its tokens and of the key of the
page before. A hash may lie: what is found is compared, token by token, before it is shared.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from onnx_inplace.runner.page_pool import PagePool

Tokens = npt.NDArray[np.int64]
_ROOT = b""


@dataclasses.dataclass(eq=False, slots=True)
class _Entry:
    """A page that can be found.

    Attributes:
        page: its id.
        tokens: that it holds.
        before: the entry of the page before it; None: it is the first.
        followers: entries whose ``before`` it is.
        used: when it was found last; greater is later.
    """

    page: int
    tokens: Tokens
    before: _Entry | None
    key: bytes
    followers: int = 0
    used: int = 0


class Prefixes:
    """Pages by the tokens that they and the pages before them hold. It counts on each of them."""

    def __init__(self, pool: PagePool):
        """Nothing is known."""
        self._pool = pool
        self._entries: dict[bytes, _Entry] = {}
        self._clock = 0

    def __len__(self) -> int:
        """Pages that can be found."""
        return len(self._entries)

    @property
    def pages(self) -> list[int]:
        """Pages that can be found. It counts on each of them once."""
        return [entry.page for entry in self._entries.values()]

    def publish(self, pages: Sequence[int], tokens: Tokens) -> int:
        """Make full pages findable; those of other sequences with these tokens stay what they are.

        Args:
            pages: block table of a sequence.
            tokens: (n,) int64, all tokens of the sequence so far.

        Returns:
            How many pages are new here.
        """
        before: _Entry | None = None
        added = 0
        for page, (key, part) in zip(pages, self._parts(tokens), strict=False):
            entry = self._entries.get(key)
            if entry is None:
                self._pool.share([page])
                entry = self._entries[key] = _Entry(page, part.copy(), before, key)
                if before is not None:
                    before.followers += 1
                added += 1
            elif not self._is(entry, before, part):
                break  # another text has this hash: it was first
            self._touch(entry)
            before = entry
        return added

    def find(self, tokens: Tokens) -> list[int]:
        """Pages that hold ``tokens`` from the first one on: as many as are known."""
        found: list[int] = []
        before: _Entry | None = None
        for key, part in self._parts(tokens):
            entry = self._entries.get(key)
            if entry is None or not self._is(entry, before, part):
                break
            self._touch(entry)
            found.append(entry.page)
            before = entry
        return found

    def give_up(self, count: int) -> int:
        """Forget pages that nobody else counts on, those not found for longest first.

        Returns:
            How many pages were freed: ``count``, or all that could be.
        """
        freed = 0
        while freed < count:
            ends = [
                e
                for e in self._entries.values()
                if not e.followers and self._pool.owners(e.page) == 1
            ]
            if not ends:
                break
            self._forget(min(ends, key=lambda e: e.used))
            freed += 1
        return freed

    def rows(self) -> tuple[list[int], Tokens, list[int]]:
        """What is known, to be saved: pages, their tokens (n, page_size), rows of pages before."""
        entries = list(self._entries.values())
        number = {id(entry): row for row, entry in enumerate(entries)}
        tokens = np.array([e.tokens for e in entries], np.int64).reshape(-1, self._pool.page_size)
        before = [-1 if e.before is None else number[id(e.before)] for e in entries]
        return [entry.page for entry in entries], tokens, before

    def adopt(self, pages: Sequence[int], tokens: Tokens, before: Sequence[int]) -> None:
        """What ``rows`` has given. Its pages count it as an owner already.

        Raises:
            ValueError: rows that no ``rows`` has given.
        """
        entries: list[_Entry] = []
        if tokens.shape != (len(pages), self._pool.page_size):
            raise ValueError(f"tokens {tokens.shape} of {len(pages)} pages")
        for page, part, row in zip(pages, tokens, before, strict=True):
            if not -1 <= row < len(entries):
                raise ValueError(f"page {page} follows row {row}")
            parent = entries[row] if row >= 0 else None
            key = _hash(_ROOT if parent is None else parent.key, part)
            entries.append(_Entry(page, part.copy(), parent, key))
            self._entries[key] = entries[-1]
            if parent is not None:
                parent.followers += 1
            self._touch(entries[-1])

    def clear(self) -> None:
        """Forget all."""
        self._pool.release([entry.page for entry in self._entries.values()])
        self._entries.clear()

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        if entry.before is not None:
            entry.before.followers -= 1
        self._pool.release([entry.page])

    def _touch(self, entry: _Entry) -> None:
        self._clock += 1
        entry.used = self._clock

    def _parts(self, tokens: Tokens) -> Iterator[tuple[bytes, Tokens]]:
        """Key and tokens of each full page."""
        key, size = _ROOT, self._pool.page_size
        for end in range(size, len(tokens) + 1, size):
            part = np.ascontiguousarray(tokens[end - size : end], np.dtype("<i8"))
            key = _hash(key, part)
            yield key, part

    @staticmethod
    def _is(entry: _Entry, before: _Entry | None, tokens: Tokens) -> bool:
        return entry.before is before and np.array_equal(entry.tokens, tokens)


def _hash(before: bytes, tokens: Tokens) -> bytes:
    return hashlib.blake2b(before + tokens.tobytes(), digest_size=16).digest()
