"""Attention of ours and of its peers at one shape, in turns; a table of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import ggml
import memory_speed
import onnxruntime_peer as peer
import ours
import timing
from problem import Batch, Problem, alone
from record import Row
from timing import Call, Pair, Spent

from onnx_inplace.runner.threads import without_pauses

READING, OURS = "reading memory", "onnx-inplace"
GROUP_QUERY, ATTENTION, GGML = "GroupQueryAttention", "Attention", "ggml flash attention"
MIXTURE = {"FLOAT16": 1, "INT8": 3, "INT4": 3, "FP8_E4M3": 1}
"""Pages of each format, in turns."""


class Key(NamedTuple):
    """Who computes over which type of cache on how many threads."""

    family: str
    kind: str
    threads: int

    def __str__(self) -> str:
        kind = f" {self.kind}" if self.kind else ""
        return f"{self.family}{kind}, {self.threads} thread{'s' * (self.threads > 1)}"


class Contest(NamedTuple):
    """Who takes part, by types of cache.

    ``problems`` are two of one shape: of the cache whose time counts, and of the one before it.
    ``ours`` are names of ``ours.DTYPES``, of page formats ("FLOAT16 pages" where the two could be
    mixed up) or "mixture"; with " fast" behind, at accuracy_level 4, with ", portable", on the
    kernels for every CPU. Peers run on one thread and on ``threads``.
    """

    problems: tuple[Problem, Problem]
    threads: int
    ours: Sequence[str]
    group_query: Sequence[str] = ()
    attention: Sequence[str] = ()
    ggml: Sequence[str] = ()


class Table(NamedTuple):
    """What was measured at one shape; what is compared and promised is what a later layer takes."""

    problem: Problem
    threads: int
    times: dict[Key, Spent]
    nbytes: dict[str, int]
    errors: dict[str, float]
    bandwidth: float  # [GB/s]

    def mine(self, label: str) -> float:
        """Time of ours [us]."""
        return self.times[Key(OURS, label, self.threads)].later

    def gigabytes(self, label: str) -> float:
        """GB/s of its cache that a variant of ours reads."""
        return self.nbytes[label] / self.mine(label) / 1e3

    def best(self, family: str, kind: str) -> float | None:
        """Time of a peer with its better number of threads; None if it did not take part."""
        found = [
            t.later for key, t in self.times.items() if (key.family, key.kind) == (family, kind)
        ]
        return min(found, default=None)

    def show(self) -> None:
        """Print it."""
        notes = {str(Key(READING, "", self.threads)): f"{self.bandwidth:5.1f} GB/s"}
        for label, error in self.errors.items():
            speed = self.gigabytes(label)
            note = f"{speed:5.1f} GB/s ({speed / self.bandwidth:.2f}), error {error:.1e}"
            notes[str(Key(OURS, label, self.threads))] = note
        times = {str(key): time for key, time in self.times.items()}
        timing.report_layers(str(self.problem), times, notes)

    def rows(self) -> list[Row]:
        """For JSON."""
        found: list[Row] = []
        for key, time in self.times.items():
            row: Row = {
                "family": key.family,
                "cache": key.kind,
                "threads": key.threads,
                "tokens": self.problem.tokens,
                "new": self.problem.new,
                "head_size": self.problem.size,
                "group": self.problem.heads // self.problem.kv_heads,
                "us": time.later,
                "first_us": time.first,
            }
            if key.family == OURS:
                row["bytes"] = self.nbytes[key.kind]
                row["gigabytes_per_second"] = self.gigabytes(key.kind)
                row["error"] = self.errors[key.kind]
            elif key.family == READING:
                row["gigabytes_per_second"] = self.bandwidth
            found.append(row)
        return found


def steps(batches: Sequence[Batch], label: str, threads: int) -> list[ours.Step]:
    """Ours, by the label of a ``Contest``; one for each of the batches."""
    kind, portable = label.removesuffix(", portable"), label.endswith(", portable")
    with ours.portable(portable):
        if kind in ours.DTYPES:
            return ours.dense(batches, kind, threads)
        if kind == "mixture":
            pattern = [name for name, count in MIXTURE.items() for _ in range(count)]
            return ours.paged(batches, pattern, threads)
        level = 4 if kind.endswith(" fast") else 0
        name = kind.removesuffix(" pages").removesuffix(" fast")
        return ours.paged(batches, [name], threads, level)


def peers(contest: Contest, skipped: list[str]) -> dict[Key, Pair]:
    """Calls of all peers that are installed; the others are added to ``skipped``."""
    problems, both = contest.problems, sorted({1, contest.threads})
    found: dict[Key, Pair] = {}
    for kind in contest.group_query:
        for count in both:
            runs = peer.group_query_attention(alone(problems), kind, count)
            found[Key(GROUP_QUERY, kind, count)] = pair(runs)
    for kind in contest.attention:
        runs = peer.attention(problems, ours.DTYPES[kind], contest.threads)
        found[Key(ATTENTION, kind, contest.threads)] = pair(runs)
    if contest.ggml and ggml.library() is None:
        skipped.append("ggml: llama-cpp-python is not installed")
        return found
    for kind in contest.ggml:
        flash = [ggml.FlashAttention(problem, ggml.Type[kind]) for problem in problems]
        for count in both:
            found[Key(GGML, kind, count)] = pair([each.run(count) for each in flash])
    return found


def pair(calls: Sequence[Call]) -> Pair:
    """Of calls for ``Contest.problems``, in that order."""
    counts, before = calls
    return Pair(before, counts)


def measure(contest: Contest, rounds: int, skipped: list[str]) -> Table:
    """All variants in turns, each over cold caches."""
    problem, threads = contest.problems[0], contest.threads
    nbytes = 8 * problem.keys.size  # as a float32 cache
    (counts, read), (before, _) = (memory_speed.reading(nbytes, threads) for _ in "ab")
    mine = {label: steps(alone(contest.problems), label, threads) for label in contest.ours}
    calls = {Key(READING, "", threads): Pair(before, counts)}
    for label, made in mine.items():
        calls[Key(OURS, label, threads)] = pair([step.run for step in made])
    calls |= peers(contest, skipped)
    errors = {label: made[0].error() for label, made in mine.items()}
    cool = memory_speed.cooling(len(calls), threads)
    with without_pauses():
        found = timing.layered({str(k): c for k, c in calls.items()}, rounds, cool)
    times = {key: found[str(key)] for key in calls}
    sizes = {label: made[0].nbytes for label, made in mine.items()}
    bandwidth = read / times[Key(READING, "", threads)].later / 1e3
    return Table(problem, threads, times, sizes, errors, bandwidth)
