"""Side by side timing: every variant once a round, in one process; the median over the rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

Call = Callable[[], object]


class Pair(NamedTuple):
    """One variant over two caches of its own, equally large, filled with different numbers."""

    first: Call
    later: Call


class Spent(NamedTuple):
    """Microseconds of the two calls of a ``Pair``.

    Attributes:
        first: behind other work; neither cache nor code nor tables are where the CPU finds them
            soon. A decoder pays this once a token.
        later: right behind ``first``: the cache is as cold, the code is not. Every further layer
            of a decoder pays this.
    """

    first: float
    later: float


def interleaved(
    variants: Mapping[str, Call],
    rounds: int,
    calls: int = 1,
    before: Mapping[str, Call] | None = None,
) -> dict[str, float]:
    """Microseconds of a call of each variant: median over ``rounds`` of the mean of ``calls``.

    The variants take turns within a round, so that what disturbs the machine disturbs all of them.
    A first round is thrown away. ``before`` holds by name what runs before a turn and is not timed.
    """
    before = before or {}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, call in variants.items():
            if name in before:
                before[name]()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if number:
                times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def layered(variants: Mapping[str, Pair], rounds: int, cool: Call) -> dict[str, Spent]:
    """What the first and a later layer of a token take: medians over ``rounds``.

    The variants take turns as in ``interleaved``. ``cool`` runs before each turn and is not timed:
    it reads so much that no cache of a variant is left in the CPU's from one round to the next.
    """
    times: dict[str, list[Spent]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, pair in variants.items():
            cool()
            start = time.perf_counter()
            pair.first()
            between = time.perf_counter()
            pair.later()
            end = time.perf_counter()
            if number:
                times[name].append(Spent((between - start) * 1e6, (end - between) * 1e6))
    return {
        name: Spent(*map(statistics.median, zip(*found, strict=True)))
        for name, found in times.items()
    }


def report(title: str, times: Mapping[str, float], notes: Mapping[str, str] | None = None) -> None:
    """Print a table of microseconds, each with a note."""
    print(f"\n{title}")
    for name, found in times.items():
        note = (notes or {}).get(name, "")
        print(f"  {name:<52}{found:>12,.2f} us  {note}".rstrip(), flush=True)


def report_layers(
    title: str, times: Mapping[str, Spent], notes: Mapping[str, str] | None = None
) -> None:
    """Print a table of what a later layer takes, each with a note and what the first one takes."""
    notes = notes or {}
    first = {
        name: f"(first: {spent.first:12,.2f})  {notes.get(name, '')}"
        for name, spent in times.items()
    }
    report(title, {name: spent.later for name, spent in times.items()}, first)
