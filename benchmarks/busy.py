"""Decoding beside another process that takes one core: fused steps against ordinary ones.

    python benchmarks/busy.py [--threads 2] [--position 64]

Exit code 1 if fused steps are slower than ``fuse="off"`` while the core is taken, or if they do not
come back to their speed when it is free again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tutorials" / "smollm2"))

import competitors
from record import Bound, Claim

_WARM = 30  # tokens that do not count
_BURN = "while True: pass"


@contextlib.contextmanager
def burning(processes: int) -> Iterator[None]:
    """Processes that do nothing but take their core."""
    burners = [subprocess.Popen([sys.executable, "-c", _BURN]) for _ in range(processes)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def milliseconds(ours: competitors.InPlace, position: int, tokens: int) -> tuple[float, float]:
    """Of a token: mean and median. The mean has what a late thread costs now and then."""
    ours.go_to(position)
    spent = []
    for _ in range(tokens):
        start = time.perf_counter()
        ours.token()
        spent.append(1e3 * (time.perf_counter() - start))
    return statistics.fmean(spent), statistics.median(spent)


def main() -> None:
    """Print a table and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--position", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400, help="of each measurement")
    parser.add_argument("--cache", default="float16")
    given = parser.parse_args()
    means: dict[tuple[str, str], float] = {}
    length = given.position + max(_WARM, given.tokens)
    ways: tuple[competitors.Fuse, ...] = ("off", "auto")
    ours = {how: competitors.InPlace(given.cache, given.threads, how, length) for how in ways}
    for how, one in ours.items():
        milliseconds(one, given.position, _WARM)
        for when, burners in (("free", 0), ("one core taken", 1), ("free again", 0)):
            with burning(burners):
                mean, median = milliseconds(one, given.position, given.tokens)
            means[how, when] = mean
            print(
                f'fuse="{how}", {when}: mean {mean:.2f} ms a token, median {median:.2f}', flush=True
            )
    claims = [
        Claim(
            "fused beside a busy core, in terms of off",
            means["auto", "one core taken"] / means["off", "one core taken"],
            1.0,
            Bound.AT_MOST,
        ),
        Claim(
            "fused when the core is free again, in terms of before",
            means["auto", "free again"] / means["auto", "free"],
            1.5,
            Bound.AT_MOST,
        ),
    ]
    for claim in claims:
        word = "holds" if claim.holds else "FAILS"
        print(f"  {word}  {claim.text}: {claim.value:.2f} (at most {claim.limit})")
    if not all(claim.holds for claim in claims):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
