"""The same tokens in a small and in a large cache: time does not depend on the capacity.

    python benchmarks/capacity.py
    python benchmarks/capacity.py --valid 1000 --capacities 1024 65536 --cache float32 float16

Caches are cold for all; what counts is a later layer of a token (README.md). Beside it,
onnxruntime's GroupQueryAttention and Attention; the latter computes over the whole capacity.
"""

from __future__ import annotations

import sys

import memory_speed
import onnxruntime_peer as peer
import ours
import record
import timing
from problem import alone, random_problems
from record import Bound, Claim, Row
from side_by_side import ATTENTION, GROUP_QUERY, OURS, pair
from timing import Pair

from onnx_inplace.runner.threads import without_pauses

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
    problems, threads = random_problems(8, 4, 128, given.valid), given.threads
    calls: dict[tuple[str, str, int], Pair] = {}
    for kind in given.cache:
        for capacity in given.capacities:
            spare = capacity - given.valid
            steps = ours.dense(alone(problems), kind, threads, spare)
            calls[OURS, kind, capacity] = pair([step.run for step in steps])
            if kind in PEERS:
                runs = peer.group_query_attention(alone(problems), kind, threads, spare)
                calls[GROUP_QUERY, kind, capacity] = pair(runs)
            if kind == WHOLE:
                runs = peer.attention(problems, ours.DTYPES[kind], threads, spare)
                calls[ATTENTION, kind, capacity] = pair(runs)
    names = {f"{who}, {kind}, capacity {n:,}": (who, kind, n) for who, kind, n in calls}
    variants = {name: calls[key] for name, key in names.items()}
    with without_pauses():
        times = timing.layered(variants, given.rounds, memory_speed.cooling(len(calls), threads))
    found = {names[name]: time.later for name, time in times.items()}
    timing.report_layers(f"{problems[0]}, {threads} threads", times)
    rows: list[Row] = []
    for name, time in times.items():
        who, kind, n = names[name]
        row: Row = {"family": who, "cache": kind, "capacity": n, "valid": given.valid}
        rows.append(row | {"us": time.later, "first_us": time.first})
    least, most = min(given.capacities), max(given.capacities)
    claims = []
    for kind in given.cache:
        text = f"{kind}: time at capacity {most:,}, in that at {least:,}"
        ratio = found[OURS, kind, most] / found[OURS, kind, least]
        claims.append(Claim(text, ratio, MOST, Bound.AT_MOST))
    return record.Record("capacity", record.options(given), rows, claims).conclude(given.json)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
