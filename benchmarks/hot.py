"""What attention of one token computes, memory aside: caches that lie in the CPU's own.

    python benchmarks/hot.py
    python benchmarks/hot.py --shape 2x64x3 --cache INT8 INT4

One thread; nanoseconds a token and kv head. Each type of cache has two lengths of context, the
longer one of 1 MiB: the difference leaves out what a call takes whatever its length.
"""

from __future__ import annotations

import sys

import ours
import record
import timing
from problem import random_problem
from record import Row
from side_by_side import steps

CACHES = [
    "float32", "float16", "FP8_E4M3", "FP8_E5M2", "INT8", "INT4", "INT4 fast", "INT2",
]  # fmt: skip
NBYTES = 1 << 20  # of the second cache of a core, which is no smaller on the CPUs this ran on


def main(arguments: list[str] | None = None) -> bool:
    """Measure and print."""
    parser = record.parser(__doc__)
    parser.add_argument("--shape", default="2x128x4", help="kv heads x head size x queries a head")
    parser.add_argument("--cache", nargs="+", default=CACHES, help="arrays or page formats")
    given = parser.parse_args(arguments)
    kv_heads, size, group = map(int, given.shape.split("x"))
    calls, lengths = {}, {}
    for label in given.cache:
        (page,) = steps([[random_problem(kv_heads, group, size, ours.PAGE)]], label, 1)
        pages = max(2, NBYTES // page.nbytes)
        lengths[label] = [(pages + 1) // 2 * ours.PAGE, pages * ours.PAGE]
        for tokens in lengths[label]:
            (step,) = steps([[random_problem(kv_heads, group, size, tokens)]], label, 1)
            calls[f"{label}, {tokens:,} tokens"] = step.run
    times = timing.interleaved(calls, given.rounds, 20, calls)
    timing.report(f"{given.shape} (kv heads, head size, queries a head), 1 thread", times)
    rows: list[Row] = []
    for label, (short, long) in lengths.items():
        took = [times[f"{label}, {tokens:,} tokens"] for tokens in (short, long)]
        ns = 1e3 * (took[1] - took[0]) / (long - short) / kv_heads
        print(f"  {label:<20}{ns:8.1f} ns a token and kv head")
        rows.append({"cache": label, "shape": given.shape, "ns": ns, "us": took[1]})
    return record.Record("hot", record.options(given), rows).conclude(given.json)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
