"""The same tokens in a small and in a large cache: time does not depend on the capacity.

    python benchmarks/capacity.py
    python benchmarks/capacity.py --valid 1000 --capacities 1024 65536 --cache float32 float16

Caches are cold for all. Beside it, onnxruntime's GroupQueryAttention and Attention; the latter
computes over the whole capacity.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import memory_speed
import onnxruntime_peer as peer
import ours
import record
import timing
from problem import random_problem
from record import Bound, Claim, Row
from side_by_side import ATTENTION, GROUP_QUERY, OURS

MOST = 1.1  # times what the smallest capacity takes
PEERS = "float32", "float16"
WHOLE = "float32"  # type of the Attention that computes over all: with float16 it takes seconds


def main(arguments: list[str] | None = None) -> bool:
    """Measure, print, judge."""
    parser = record.parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--valid", type=int, default=1000, help="tokens")
    parser.add_argument("--capacities", type=int, nargs="+", default=[1024, 65_536])
    parser.add_argument("--cache", nargs="+", choices=ours.DTYPES, default=list(PEERS))
    given = parser.parse_args(arguments)
    problem, threads = random_problem(8, 4, 128, given.valid), given.threads
    calls: dict[tuple[str, str, int], Callable[[], object]] = {}
    for kind in given.cache:
        for capacity in given.capacities:
            spare = capacity - given.valid
            calls[OURS, kind, capacity] = ours.dense(problem, kind, threads, spare).run
            if kind in PEERS:
                run = peer.group_query_attention(problem, kind, threads, spare)
                calls[GROUP_QUERY, kind, capacity] = run
            if kind == WHOLE:
                run = peer.attention(problem, ours.DTYPES[kind], threads, spare)
                calls[ATTENTION, kind, capacity] = run
    cold, _ = memory_speed.reading(memory_speed.COLD, threads)
    names = {f"{who}, {kind}, capacity {n:,}": (who, kind, n) for who, kind, n in calls}
    variants = {name: calls[key] for name, key in names.items()}
    times = timing.interleaved(variants, given.rounds, before=cold)
    timing.report(f"{problem}, {threads} threads", times)
    found = {names[name]: time for name, time in times.items()}
    rows: list[Row] = [
        {"family": who, "cache": kind, "capacity": n, "valid": given.valid, "us": time}
        for (who, kind, n), time in found.items()
    ]
    least, most = min(given.capacities), max(given.capacities)
    claims = []
    for kind in given.cache:
        text = f"{kind}: time at capacity {most:,}, in that at {least:,}"
        ratio = found[OURS, kind, most] / found[OURS, kind, least]
        claims.append(Claim(text, ratio, MOST, Bound.AT_MOST))
    return record.Record("capacity", record.options(given), rows, claims).conclude(given.json)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
