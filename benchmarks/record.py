"""What a benchmark found: numbers, promises that hold or not, peers that are missing; as JSON.

A promise is a number and the limit that an issue or a document names for it. Every benchmark prints
each of its promises with "holds" or "FAILS" and the number, and ends with status 1 if one fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

Row = dict[str, str | int | float | None]
LIBRARIES = "numba", "numpy", "onnxruntime", "onnxruntime-genai", "llama-cpp-python"


class Bound(enum.Enum):
    """On which side of the limit a number has to be."""

    AT_LEAST = "at least"
    AT_MOST = "at most"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A promise, and what was measured."""

    text: str
    value: float
    limit: float
    bound: Bound = Bound.AT_LEAST

    @property
    def holds(self) -> bool:
        """Whether the number is on the right side; NaN never is."""
        if self.bound is Bound.AT_LEAST:
            return self.value >= self.limit
        return self.value <= self.limit

    def __str__(self) -> str:
        word = "holds" if self.holds else "FAILS"
        return f"{word}  {self.text}: {self.value:.3g} ({self.bound.value} {self.limit:.3g})"


@dataclasses.dataclass(frozen=True)
class Record:
    """The result of one benchmark program.

    Attributes:
        benchmark: name of the program.
        options: how it was called.
        rows: one for each thing that was timed: names, sizes, numbers with units in their keys.
        claims: promises of this run.
        skipped: peers and parts that were left out, and why.
    """

    benchmark: str
    options: dict[str, object]
    rows: Sequence[Row] = ()
    claims: Sequence[Claim] = ()
    skipped: Sequence[str] = ()

    def conclude(self, path: Path | None) -> bool:
        """Print promises and what is missing, write JSON if asked to; True if all hold."""
        for reason in self.skipped:
            print(f"  skipped: {reason}")
        for claim in self.claims:
            print(f"  {claim}")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        return all(claim.holds for claim in self.claims)

    def to_json(self) -> dict[str, object]:
        """Plain numbers, texts, lists and dictionaries."""
        claims = [
            {
                "claim": claim.text,
                "value": claim.value,
                "bound": claim.bound.value,
                "limit": claim.limit,
                "holds": claim.holds,
            }
            for claim in self.claims
        ]
        return {
            "benchmark": self.benchmark,
            "machine": machine(),
            "options": self.options,
            "rows": list(self.rows),
            "claims": claims,
            "skipped": list(self.skipped),
        }


def machine() -> dict[str, object]:
    """CPU and versions of what takes part."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _cpu() -> str:
    """The name that the system has for the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=int, default=15, help="of which medians are taken")
    made.add_argument("--json", type=Path, help="write the result to this file, too")
    return made


def options(given: argparse.Namespace) -> dict[str, object]:
    """What a record keeps of the command line."""
    return {name: value for name, value in vars(given).items() if name != "json"}
