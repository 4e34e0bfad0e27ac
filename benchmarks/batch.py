"""Decode attention over several sequences in one call: are the cores shared out evenly?

    python benchmarks/batch.py
    python benchmarks/batch.py --shapes 8x128x4 --lengths 500,1000,4000,16384 --cache float16 INT8

"500,1000,4000,16384" are four sequences of so many tokens, "16x1024" are 16 of 1,024. Beside the
batch runs one sequence of as many tokens in all: its heads are shared out evenly, and it reads as
many bytes. GroupQueryAttention runs over the same batch in one padded buffer, as does ours over
arrays. Caches are cold; what counts is a later layer of a token (README.md).
"""

from __future__ import annotations

import itertools
import sys
from typing import NamedTuple

import memory_speed
import onnxruntime_peer as peer
import record
import timing
from problem import Batch, random_problem
from record import Bound, Claim, Row
from side_by_side import GROUP_QUERY, OURS, pair, steps
from timing import Pair

from onnx_inplace.runner.threads import without_pauses

SHAPES = "8x128x4", "3x64x3"
LENGTHS = "500,1000,4000,16384", "16x1024"
CACHES = "float32", "float16", "INT8", "INT4"
MOST = 1.1  # times what one sequence of as many tokens takes
LEAST = {"float32": 1.6, "float16": 5.0}
"""Times as fast as the peer over the same type, at the first shape; at others no slower."""


class Key(NamedTuple):
    """Who runs over what on how many threads; ``whole``: one sequence of as many tokens."""

    family: str
    threads: int
    whole: bool = False

    def __str__(self) -> str:
        what = "one sequence" if self.whole else "batch"
        return f"{self.family}, {what}, {self.threads} thread{'s' * (self.threads > 1)}"


def lengths_of(text: str) -> list[int]:
    """Tokens of each sequence.

    Raises:
        ValueError: it is no text like "16x1024" or "500,1000".
    """
    count, times, length = text.partition("x")
    return [int(length)] * int(count) if times else [int(part) for part in text.split(",")]


class Case(NamedTuple):
    """What is measured in turns: a batch and one sequence of as many tokens, over one cache type.

    ``shape``: kv heads, head size, queries a head. ``lengths``: see :func:`lengths_of`.
    """

    shape: str
    lengths: str
    kind: str

    @property
    def whole(self) -> str:
        """``lengths`` of the one sequence."""
        return str(sum(lengths_of(self.lengths)))

    def __str__(self) -> str:
        return f"{self.kind}, {self.shape} (kv heads, size, group), {self.lengths} tokens"


def batch(shape: str, lengths: str, seed: int) -> Batch:
    """Sequences of these lengths, full of other numbers for each seed; all have one new token."""
    kv_heads, size, group = map(int, shape.split("x"))
    tokens = lengths_of(lengths)
    return [
        random_problem(kv_heads, group, size, count, 1, seed * len(tokens) + row)
        for row, count in enumerate(tokens)
    ]


def variants(case: Case, threads: int) -> dict[Key, Pair]:
    """Ours over the batch and over one sequence; the peer over the batch, where it is promised."""
    several, one = (
        [batch(case.shape, lengths, seed) for seed in (0, 1)]
        for lengths in (case.lengths, case.whole)
    )
    found = {
        Key(OURS, threads): pair([step.run for step in steps(several, case.kind, threads)]),
        Key(OURS, threads, True): pair([step.run for step in steps(one, case.kind, threads)]),
    }
    if case.kind in LEAST:
        for count in sorted({1, threads}):
            runs = peer.group_query_attention(several, case.kind, count)
            found[Key(GROUP_QUERY, count)] = pair(runs)
    return found


def claims(case: Case, us: dict[Key, float], threads: int) -> list[Claim]:
    """What is promised for a batch."""
    mine, tokens = us[Key(OURS, threads)], sum(lengths_of(case.lengths))
    text = f"{case}: time, in that of one sequence of {tokens:,} tokens"
    found = [Claim(text, mine / us[Key(OURS, threads, True)], MOST, Bound.AT_MOST)]
    theirs = [time for key, time in us.items() if key.family == GROUP_QUERY]
    if theirs:
        text = f"{case}: times as fast as {GROUP_QUERY}"
        least = LEAST[case.kind] if case.shape == SHAPES[0] else 1.0
        found.append(Claim(text, min(theirs) / mine, least))
    return found


def main(arguments: list[str] | None = None) -> bool:
    """Measure, print, judge."""
    parser = record.parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="kv heads x size x group")
    parser.add_argument("--lengths", nargs="+", default=LENGTHS, help="tokens of each sequence")
    parser.add_argument("--cache", nargs="+", default=CACHES, help="arrays or page formats")
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    held: list[Claim] = []
    for case in map(Case._make, itertools.product(given.shapes, given.lengths, given.cache)):
        calls = variants(case, given.threads)
        named = {str(key): call for key, call in calls.items()}
        cool = memory_speed.cooling(len(calls), given.threads)
        with without_pauses():
            times = timing.layered(named, given.rounds, cool)
        timing.report_layers(str(case), times)
        for key in calls:
            row: Row = {"family": key.family, "shape": case.shape, "cache": case.kind}
            row["lengths"] = case.whole if key.whole else case.lengths
            row["threads"] = key.threads
            us = times[str(key)]
            rows.append(row | {"us": us.later, "first_us": us.first})
        held += claims(case, {key: times[str(key)].later for key in calls}, given.threads)
    return record.Record("batch", record.options(given), rows, held).conclude(given.json)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
