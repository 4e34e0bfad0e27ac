"""Side by side timing: every variant once a round, in one process; the median over the rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Call = Callable[[], object]


def interleaved(
    variants: Mapping[str, Call], rounds: int, calls: int = 1, before: Call | None = None
) -> dict[str, float]:
    """Microseconds of a call of each variant: median over ``rounds`` of the mean of ``calls``.

    The variants take turns within a round, so that what disturbs the machine disturbs all of them.
    A first round is thrown away. ``before`` runs before each turn and is not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, call in variants.items():
            if before is not None:
                before()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if number:
                times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def report(title: str, times: Mapping[str, float], notes: Mapping[str, str] | None = None) -> None:
    """Print a table of microseconds, each with a note."""
    print(f"\n{title}")
    for name, found in times.items():
        note = (notes or {}).get(name, "")
        print(f"  {name:<52}{found:>12,.2f} us  {note}".rstrip(), flush=True)
