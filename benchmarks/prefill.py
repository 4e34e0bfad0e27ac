"""Attention of a prompt: many new tokens over what is cached, beside GroupQueryAttention.

    python benchmarks/prefill.py
    python benchmarks/prefill.py --lengths 16/4096 512/512 --cache float16 INT8

"128/4096" are 128 new tokens, the last ones of 4,096. Every variant writes them and attends. Ours
has --threads threads; the peer has one and --threads, and the better one counts.
"""

from __future__ import annotations

import sys

import record
from problem import random_problems
from record import Bound, Claim
from side_by_side import GROUP_QUERY, Contest, Table, measure

LEAST = {"16/4096": 1.1, "128/4096": 1.1, "512/512": 1.3, "2048/2048": 1.1}
"""Times as fast as the peer over the same type, by lengths."""
MOST_OF_PAGES = 1.2  # times what an array of float16 takes
DENSE = "float32", "float16"
PAGES = "FLOAT16 pages", "INT8", "INT4", "FP8_E4M3"


def claims(table: Table, lengths: str) -> list[Claim]:
    """What is promised for these lengths."""
    found = []
    for label in table.nbytes:
        theirs = table.best(GROUP_QUERY, label)
        if theirs is not None and lengths in LEAST:
            text = f"{lengths}, {label}: times as fast as {GROUP_QUERY}"
            found.append(Claim(text, theirs / table.mine(label), LEAST[lengths]))
        elif label not in DENSE and "float16" in table.nbytes:
            text = f"{lengths}, {label}: time, in that of float16"
            ratio = table.mine(label) / table.mine("float16")
            found.append(Claim(text, ratio, MOST_OF_PAGES, Bound.AT_MOST))
    return found


def main(arguments: list[str] | None = None) -> bool:
    """Measure, print, judge."""
    parser = record.parser(__doc__)
    parser.set_defaults(rounds=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", nargs="+", default=list(LEAST), help="new/all tokens")
    parser.add_argument("--shape", default="128x4", help="head size x queries a head")
    parser.add_argument("--heads", type=int, default=8, help="kv heads")
    parser.add_argument("--cache", nargs="+", default=[*DENSE, *PAGES])
    given = parser.parse_args(arguments)
    size, group = map(int, given.shape.split("x"))
    peers = [kind for kind in given.cache if kind in DENSE]
    tables, held = [], []
    for lengths in given.lengths:
        new, tokens = map(int, lengths.split("/"))
        problems = random_problems(given.heads, group, size, tokens, new)
        table = measure(Contest(problems, given.threads, given.cache, peers), given.rounds, [])
        table.show()
        held += claims(table, lengths)
        tables.append(table)
    rows = [row for table in tables for row in table.rows()]
    return record.Record("prefill", record.options(given), rows, held).conclude(given.json)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
