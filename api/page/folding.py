"""What repeats in a long plan, so that thirty layers can be read as one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from onnx_inplace.page.facts import Entry, Group, Row

T = TypeVar("T")

_LONGEST = 64  # entries of a pattern
_FEWEST = 3  # repetitions that are worth folding


@dataclasses.dataclass(frozen=True, slots=True)
class Repeated(Generic[T]):
    """A pattern that stands ``count`` times, one behind the other: the first, and the others."""

    first: tuple[T, ...]
    others: tuple[T, ...]
    count: int


def repetitions(entries: Sequence[T], signature: Callable[[T], Hashable]) -> list[T | Repeated[T]]:
    """Entries in their order; runs of one pattern, the longest first, as one item."""
    signs = [signature(entry) for entry in entries]
    longest = min(_LONGEST, len(entries) // _FEWEST)
    same = [_matches(signs, period) for period in range(1, longest + 1)]
    found: list[T | Repeated[T]] = []
    at = 0
    while at < len(entries):
        covered, period = 0, 0
        for index, matches in enumerate(same):
            count = matches[at] // (index + 1) + 1
            if count >= _FEWEST and count * (index + 1) > covered:
                covered, period = count * (index + 1), index + 1
        if covered <= 2 * period or covered < 6:
            found.append(entries[at])
            at += 1
            continue
        first, others = entries[at : at + period], entries[at + period : at + covered]
        found.append(Repeated(tuple(first), tuple(others), covered // period))
        at += covered
    return found


def _matches(signs: Sequence[Hashable], period: int) -> list[int]:
    """For each place, how many entries from there on equal the one a period behind them."""
    matches = [0] * (len(signs) + 1)
    for at in range(len(signs) - period - 1, -1, -1):
        matches[at] = matches[at + 1] + 1 if signs[at] == signs[at + period] else 0
    return matches


def alike(items: Sequence[T], signature: Callable[[T], Hashable]) -> list[list[T]]:
    """Items that look the same, wherever they stand, in the order of the first of each kind."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(signature(item), []).append(item)
    return list(groups.values())


def anonymous(name: str) -> str:
    """A name without its numbers: ``keys.3`` and ``keys.12`` are of one kind."""
    return re.sub(r"\d+", "#", name)


def entry_signature(entry: Entry) -> Hashable:
    """What two entries have in common that differ in numbers only."""
    if isinstance(entry, Group):
        return (entry.function, tuple(map(entry_signature, entry.entries)))
    return _row_signature(entry)


def _row_signature(row: Row) -> Hashable:
    parts = tuple((part.title, tuple(map(entry_signature, part.entries))) for part in row.parts)
    counts = len(row.makes), len(row.reads)
    return row.kind, row.operator, row.detail, counts, len(row.writes), parts
