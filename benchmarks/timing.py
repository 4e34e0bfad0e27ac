"""Side by side timing: every variant once a round, in one process; the median over the rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(
    variants: Mapping[str, Callable[[], object]], rounds: int, calls: int = 1
) -> dict[str, float]:
    """Microseconds of a call of each variant: median over ``rounds`` of the mean of ``calls``.

    The variants take turns within a round, so that what disturbs the machine disturbs all of them.
    A first round is thrown away.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, call in variants.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if number:
                times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def report(title: str, times: Mapping[str, float]) -> None:
    """Print a table."""
    print(f"\n{title}")
    for name, found in times.items():
        print(f"  {name:<52}{found:>12,.2f} us")


def judge(claims: list[tuple[str, float, float]]) -> bool:
    """Print (claim, ratio, limit) and whether each holds; True if all do."""
    print()
    for claim, ratio, limit in claims:
        print(f"  {'holds' if ratio <= limit else 'FAILS'}  {claim}: {ratio:.2f} (at most {limit})")
    return all(ratio <= limit for _, ratio, limit in claims)
