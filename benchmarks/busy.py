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
from collections.abc import Iterator

import decode
import timing

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


def milliseconds(ours: decode.InPlace, position: int, tokens: int) -> tuple[float, float]:
    """Of a token: mean and median. The mean has what a late thread costs now and then."""
    ours.go_to(position)
    spent = [1e3 * decode.seconds(ours.token) for _ in range(tokens)]
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
    ours = {how: decode.InPlace(given.cache, given.threads, how) for how in ("off", "auto")}
    for how, one in ours.items():
        milliseconds(one, given.position, 30)  # warms up
        for when, burners in (("free", 0), ("one core taken", 1), ("free again", 0)):
            with burning(burners):
                mean, median = milliseconds(one, given.position, given.tokens)
            means[how, when] = mean
            print(
                f'fuse="{how}", {when}: mean {mean:.2f} ms a token, median {median:.2f}', flush=True
            )
    claims = [
        (
            "fused beside a busy core, in terms of off",
            means["auto", "one core taken"] / means["off", "one core taken"],
            1.0,
        ),
        (
            "fused when the core is free again, in terms of before",
            means["auto", "free again"] / means["auto", "free"],
            1.5,
        ),
    ]
    if not timing.judge(claims):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
