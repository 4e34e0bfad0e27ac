"""Decode attention: one new token over a long cache, every type of cache, beside its peers.

    python benchmarks/attention.py
    python benchmarks/attention.py --shapes 128x4 64x3 --tokens 16384 --cache float16 INT8

Every variant writes the new token and attends over all that is valid, over two caches of its own in
turn. Both are cold: other memory is read before. What counts is the second call, whose code and
tables are where a decoder finds them in all layers but the first; the first call, which finds
nothing, stands beside it. Ours has --threads threads; peers have one and --threads, and the better
one counts. Peers: onnxruntime's GroupQueryAttention and Attention, flash attention of ggml.

Memory: twice the caches of all that take part, 4 GiB by default. Fewer --cache or --tokens or
--no-peers take less.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import record
from problem import random_problems
from record import Bound, Claim
from side_by_side import GGML, GROUP_QUERY, MIXTURE, Contest, Table, measure


class Promise(NamedTuple):
    """What has to hold for a type of cache: times as fast as a peer, GB/s, error."""

    group_query: tuple[str, float] | None = None
    ggml: tuple[str, float] | None = None
    gigabytes: float | None = None
    error: float | None = None


PROMISES = {
    "float32": Promise(("float32", 1.6), None, 25, 5e-6),
    "float16": Promise(("float16", 5), ("F16", 3.2), 25, 5e-6),
    "bfloat16": Promise(("float16", 5), ("F16", 3.2), 25, 5e-6),
    "INT8": Promise(("int8", 4), ("Q8_0", 10), 25, 3e-4),
    "FP8_E4M3": Promise(("int8", 4), ("Q8_0", 10), 25, 8e-3),
    "FP8_E5M2": Promise(("int8", 4), ("Q8_0", 10), 25, 8e-3),
    "INT4": Promise(("int4", 7), ("Q4_0", 25), 18, 3e-4),
    "INT4 fast": Promise(("int4", 7), ("Q4_0", 25), 18, 3e-2),
    "INT2": Promise(error=3e-4),
    "float32, portable": Promise(("float32", 1.0), None, None, 5e-6),
    "FLOAT32 pages": Promise(error=5e-6),
    "FLOAT16 pages": Promise(error=5e-6),
    "BFLOAT16 pages": Promise(error=5e-6),
    "INT4T": Promise(error=3e-4),
    "mixture": Promise(error=8e-3),
}
PART_OF_BANDWIDTH = 0.75  # suffices where the machine reads less than the GB/s above ask for
OTHER_SHAPE = 0.85  # of the GB/s of the first shape
MOST_OF_MIXTURE = 1.15  # times the weighted sum of its parts


def claims(table: Table) -> list[Claim]:
    """What is promised for a long cache."""
    found = []
    for label in table.nbytes:
        promise = PROMISES[label]
        for family, asked in ((GROUP_QUERY, promise.group_query), (GGML, promise.ggml)):
            if asked is not None and (theirs := table.best(family, asked[0])) is not None:
                text = f"{label}: times as fast as {family} {asked[0]}"
                found.append(Claim(text, theirs / table.mine(label), asked[1]))
        if promise.gigabytes is not None:
            least = min(promise.gigabytes, PART_OF_BANDWIDTH * table.bandwidth)
            text = f"{label}: GB/s, of {table.bandwidth:.1f} that the machine reads"
            found.append(Claim(text, table.gigabytes(label), least))
        if promise.error is not None:
            text = f"{label}: error against float64"
            found.append(Claim(text, table.errors[label], promise.error, Bound.AT_MOST))
    if {"INT2", "INT4"} <= table.nbytes.keys():
        ratio = table.mine("INT2") / table.mine("INT4")
        found.append(Claim("INT2: time, in that of INT4", ratio, 1.0, Bound.AT_MOST))
    return found + mixture(table)


def mixture(table: Table) -> list[Claim]:
    """Pages of several formats cost what their parts cost."""
    parts = {f"{n} pages" if n == "FLOAT16" else n: count for n, count in MIXTURE.items()}
    if not {"mixture", *parts} <= table.nbytes.keys():
        return []
    sum_of_parts = sum(table.mine(name) * count for name, count in parts.items())
    ratio = table.mine("mixture") / (sum_of_parts / sum(parts.values()))
    text = "mixture: time, in the weighted sum of its parts"
    return [Claim(text, ratio, MOST_OF_MIXTURE, Bound.AT_MOST)]


def across(first: Table, other: Table) -> list[Claim]:
    """Another shape reads nearly as fast."""
    found = []
    for label in first.nbytes:
        if PROMISES[label].gigabytes is not None:
            text = f"{label}: GB/s at heads of {other.problem.size}, in those of the first shape"
            ratio = other.gigabytes(label) / first.gigabytes(label)
            found.append(Claim(text, ratio, OTHER_SHAPE))
    return found


def main(arguments: list[str] | None = None) -> bool:
    """Measure, print, judge."""
    parser = record.parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384])
    parser.add_argument("--shapes", nargs="+", default=["128x4"], help="head size x queries a head")
    parser.add_argument("--heads", type=int, default=8, help="kv heads")
    parser.add_argument("--cache", nargs="+", choices=PROMISES, default=list(PROMISES))
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    given = parser.parse_args(arguments)
    promised = [PROMISES[label] for label in given.cache if given.peers]
    group_query = [*dict.fromkeys(p.group_query[0] for p in promised if p.group_query)]
    flash = [*dict.fromkeys(p.ggml[0] for p in promised if p.ggml)]
    attention = [kind for kind in group_query if kind.startswith("float")]
    skipped: list[str] = []
    held: list[Claim] = []
    tables: list[Table] = []
    for tokens in given.tokens:
        here = []
        for shape in given.shapes:
            size, group = map(int, shape.split("x"))
            problems = random_problems(given.heads, group, size, tokens)
            contest = Contest(problems, given.threads, given.cache, group_query, attention, flash)
            here.append(measure(contest, given.rounds, skipped))
            here[-1].show()
        if tokens == max(given.tokens):  # what is promised is promised for long caches
            held += claims(here[0])
            held += [claim for other in here[1:] for claim in across(here[0], other)]
        tables += here
    rows = [row for table in tables for row in table.rows()]
    result = record.Record("attention", record.options(given), rows, held, sorted({*skipped}))
    return result.conclude(given.json)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
