"""Peak memory of SmolLM2-135M: what the plan states, and what is measured part by part.

Each line is measured in processes of its own, by counters under malloc and in numpy and by Linux
(see tests/peaks.py). "inside" is what onnxruntime holds between the nodes of a sub-session.

    python benchmarks/memory.py
    python benchmarks/memory.py --tokens 1 512 --threads 1 2 --max-length 8192 --cache float16

Needs Linux, and a C compiler for the counter under malloc.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tutorials" / "smollm2"), str(ROOT / "tests")]

import allocations  # noqa: E402
import generate  # noqa: E402
from decoder import Precision  # noqa: E402
from peaks import Job, Peaks, measure  # noqa: E402

MIB = 2**20
COLUMNS = ("stated", "measured", "ratio")


def job(element: str, tokens: int, threads: int, max_length: int) -> Job:
    """A prompt of ``tokens``; resident memory is seen from after a run with small sizes."""

    def feeds(count: int) -> dict[str, np.ndarray]:
        return {"tokens": np.ones((1, count), np.int64), "position": np.zeros((), np.int64)}

    return Job(
        generate.compiled(Precision.FAST, element),
        feeds(tokens),
        {"new_length": tokens, "max_length": max_length},
        threads,
        warm=(feeds(1), {"new_length": 1, "max_length": 64}),
    )


def table(peaks: Peaks) -> None:
    """Print one line a part."""
    beyond = peaks.caches
    rows = (
        ("packed weights", peaks.packed, peaks.weights),
        ("inside of onnxruntime", peaks.inside, peaks.library),
        ("a run, without caches", peaks.stated - beyond, peaks.run - beyond),
        ("a run, with caches", peaks.stated, peaks.run),
        ("a run, resident", peaks.stated, peaks.resident),
    )
    for part, stated, measured in rows:
        ratio = f"{measured / stated:6.3f}" if stated and measured else "     -"
        print(f"  {part:24} {stated / MIB:10.3f} {measured / MIB:10.3f} {ratio}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 512])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--max-length", type=int, default=8192)
    parser.add_argument("--cache", choices=generate.ELEMENTS, default="float32")
    given = parser.parse_args()
    if not allocations.AVAILABLE:
        raise SystemExit("needs Linux and a C compiler")
    for tokens in given.tokens:
        for threads in given.threads:
            plural = "s" if threads > 1 else ""
            title = f"{tokens} tokens, {threads} thread{plural}, {given.cache}"
            print(f"{title:26} [MiB] {COLUMNS[0]:>5} {COLUMNS[1]:>10} {COLUMNS[2]:>6}")
            with tempfile.TemporaryDirectory() as folder:
                one = job(given.cache, tokens, threads, given.max_length)
                table(measure({"": one}, Path(folder))[""])


if __name__ == "__main__":
    main()
