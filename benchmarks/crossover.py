"""From which length of context on a second thread pays: one new token on one thread and on two.

    python benchmarks/crossover.py
    python benchmarks/crossover.py --shapes 8x128x4 --cache float16 INT8

Every call is forced to its number of threads: neither length nor clock decides. Caches are cold;
what counts is a later layer of a token (README.md), and the first one stands beside it, before
which the second thread slept. Work
is counted as the runner counts it, query heads * head size * tokens; ``attend.PARALLEL`` is the
constant that it compares with.
"""

from __future__ import annotations

import sys
from unittest import mock

import memory_speed
import ours
import record
import timing
from problem import alone, random_problems
from record import Row
from side_by_side import pair
from timing import Pair

from onnx_inplace.runner import attend, operators_paged_attention
from onnx_inplace.runner.threads import without_pauses

WORK = [1 << bits for bits in range(19, 25)]
CACHES = "float32", "float16", "INT8"
SHAPES = "8x128x4", "3x64x3"


def variants(shape: str, kind: str) -> dict[tuple[int, int], Pair]:
    """By tokens and threads."""
    kv_heads, size, group = map(int, shape.split("x"))
    found = {}
    for work in WORK:
        tokens = max(2, work // (kv_heads * group * size))
        batches = alone(random_problems(kv_heads, group, size, tokens))
        for count in (1, 2):
            if kind in ours.DTYPES:
                steps = ours.dense(batches, kind, count)
            else:
                steps = ours.paged(batches, [kind], count)
            found[tokens, count] = pair([step.run for step in steps])
    return found


def crossing(times: dict[tuple[int, int], float]) -> str:
    """From which length on two threads are faster at all lengths that were measured."""
    first = None
    for tokens in sorted({tokens for tokens, _ in times}, reverse=True):
        if times[tokens, 2] >= times[tokens, 1]:
            break
        first = tokens
    return f"from {first:,} tokens on" if first is not None else "at none of these lengths"


def main(arguments: list[str] | None = None) -> bool:
    """Measure and print."""
    parser = record.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="kv heads x size x group")
    parser.add_argument("--cache", nargs="+", default=list(CACHES))
    given = parser.parse_args(arguments)
    cool = memory_speed.cooling(2 * len(WORK), 1)
    rows: list[Row] = []
    with (
        mock.patch.object(attend, "PARALLEL", 0),
        mock.patch.object(operators_paged_attention, "PARALLEL", 0),
        without_pauses(),
    ):
        for shape in given.shapes:
            for kind in given.cache:
                pairs = variants(shape, kind)
                calls = {f"{n:>6,} tokens, threads: {t}": pair for (n, t), pair in pairs.items()}
                found = timing.layered(calls, given.rounds, cool)
                title = f"{kind}, {shape} (kv heads, head size, queries a head)"
                timing.report_layers(title, found)
                times = dict(zip(pairs, found.values(), strict=True))
                for who in ("later", "first"):
                    pays = crossing({key: getattr(us, who) for key, us in times.items()})
                    print(f"  two threads pay in a {who} layer {pays}")
                for (n, t), us in times.items():
                    row: Row = {"shape": shape, "cache": kind, "tokens": n, "threads": t}
                    rows.append(row | {"us": us.later, "first_us": us.first})
    return record.Record("crossover", record.options(given), rows).conclude(given.json)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
