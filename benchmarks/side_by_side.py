"""Attention of ours and of its peers at one shape, in turns; a table of what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import ggml
import memory_speed
import onnxruntime_peer as peer
import ours
import timing
from problem import Problem
from record import Row

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

    ``ours`` are names of ``ours.DTYPES``, of page formats ("FLOAT16 pages" where the two could be
    mixed up) or "mixture"; with " fast" behind, at accuracy_level 4, with ", portable", on the
    kernels for every CPU. Peers run on one thread and on ``threads``.
    """

    problem: Problem
    threads: int
    ours: Sequence[str]
    group_query: Sequence[str] = ()
    attention: Sequence[str] = ()
    ggml: Sequence[str] = ()


class Table(NamedTuple):
    """What was measured at one shape."""

    problem: Problem
    threads: int
    times: dict[Key, float]  # [us]
    nbytes: dict[str, int]
    errors: dict[str, float]
    bandwidth: float  # [GB/s]

    def mine(self, label: str) -> float:
        """Time of ours [us]."""
        return self.times[Key(OURS, label, self.threads)]

    def gigabytes(self, label: str) -> float:
        """GB/s of its cache that a variant of ours reads."""
        return self.nbytes[label] / self.mine(label) / 1e3

    def best(self, family: str, kind: str) -> float | None:
        """Time of a peer with its better number of threads; None if it did not take part."""
        found = [t for key, t in self.times.items() if (key.family, key.kind) == (family, kind)]
        return min(found, default=None)

    def show(self) -> None:
        """Print it."""
        notes = {str(Key(READING, "", self.threads)): f"{self.bandwidth:5.1f} GB/s"}
        for label, error in self.errors.items():
            speed = self.gigabytes(label)
            note = f"{speed:5.1f} GB/s ({speed / self.bandwidth:.2f}), error {error:.1e}"
            notes[str(Key(OURS, label, self.threads))] = note
        times = {str(key): time for key, time in self.times.items()}
        timing.report(str(self.problem), times, notes)

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
                "us": time,
            }
            if key.family == OURS:
                row["bytes"] = self.nbytes[key.kind]
                row["gigabytes_per_second"] = self.gigabytes(key.kind)
                row["error"] = self.errors[key.kind]
            elif key.family == READING:
                row["gigabytes_per_second"] = self.bandwidth
            found.append(row)
        return found


def step(problem: Problem, label: str, threads: int) -> ours.Step:
    """Ours, by the label of a ``Contest``."""
    kind, portable = label.removesuffix(", portable"), label.endswith(", portable")
    with ours.portable(portable):
        if kind in ours.DTYPES:
            return ours.dense(problem, kind, threads)
        if kind == "mixture":
            pattern = [name for name, count in MIXTURE.items() for _ in range(count)]
            return ours.paged(problem, pattern, threads)
        level = 4 if kind.endswith(" fast") else 0
        name = kind.removesuffix(" pages").removesuffix(" fast")
        return ours.paged(problem, [name], threads, level)


def peers(contest: Contest, skipped: list[str]) -> dict[Key, Callable[[], object]]:
    """Calls of all peers that are installed; the others are added to ``skipped``."""
    problem, both = contest.problem, sorted({1, contest.threads})
    found: dict[Key, Callable[[], object]] = {}
    for kind in contest.group_query:
        for count in both:
            run = peer.group_query_attention(problem, kind, count)
            found[Key(GROUP_QUERY, kind, count)] = run
    for kind in contest.attention:
        run = peer.attention(problem, ours.DTYPES[kind], contest.threads)
        found[Key(ATTENTION, kind, contest.threads)] = run
    if contest.ggml and ggml.library() is None:
        skipped.append("ggml: llama-cpp-python is not installed")
        return found
    for kind in contest.ggml:
        flash = ggml.FlashAttention(problem, ggml.Type[kind])
        found |= {Key(GGML, kind, count): flash.run(count) for count in both}
    return found


def measure(contest: Contest, rounds: int, skipped: list[str]) -> Table:
    """All variants in turns, each over a cold cache."""
    problem, threads = contest.problem, contest.threads
    reading, read = memory_speed.reading(8 * problem.keys.size, threads)  # as a float32 cache
    steps = {label: step(problem, label, threads) for label in contest.ours}
    calls: dict[Key, Callable[[], object]] = {Key(READING, "", threads): reading}
    calls |= {Key(OURS, label, threads): ready.run for label, ready in steps.items()}
    calls |= peers(contest, skipped)
    errors = {label: ready.error() for label, ready in steps.items()}
    cold, _ = memory_speed.reading(memory_speed.COLD, threads)
    found = timing.interleaved({str(k): c for k, c in calls.items()}, rounds, before=cold)
    times = {key: found[str(key)] for key in calls}
    nbytes = {label: ready.nbytes for label, ready in steps.items()}
    bandwidth = read / times[Key(READING, "", threads)] / 1e3
    return Table(problem, threads, times, nbytes, errors, bandwidth)
