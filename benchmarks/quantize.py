"""Quantizing new tokens into pages, beside ggml's ``from_float``; conversions of whole pages.

    python benchmarks/quantize.py
    python benchmarks/quantize.py --tokens 512 --formats INT8 INT4

Ours is ``step.run`` of a model of one ``PagedCacheUpdate`` on one thread: keys and values of 8
heads of 128 go into existing pages in place, in the layout that attention reads. ggml writes rows.
Before many tokens are timed, each variant runs once, then its tokens are written again: all find
them as a projection leaves them, whatever ran before.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import NamedTuple

import ggml
import numpy as np
import record
import step_models
import timing
from numpy.typing import NDArray
from record import Claim, Row

from onnx_inplace import formats

HEADS, SIZE, PAGE = 8, 128, 128
FORMATS = (
    "FLOAT32",
    "FLOAT16",
    "BFLOAT16",
    "FP8_E4M3",
    "FP8_E5M2",
    "INT8",
    "INT4",
    "INT4T",
    "INT2",
)
KINDS = "Q8_0", "Q4_0", "F16"  # of ggml
LEAST = {"INT8": ("Q8_0", 1.0), "INT4": ("Q4_0", 3.0)}
"""Times as fast as ggml's type."""


class Variant(NamedTuple):
    """A call that quantizes ``tokens``, float32."""

    run: Callable[[], object]
    tokens: NDArray[np.float32]

    def prepare(self) -> None:
        """Run, and write the tokens again."""
        self.run()
        np.negative(self.tokens, out=self.tokens)


def update(name: str, tokens: int) -> Variant:
    """Writes the first tokens of pages that exist, again and again."""
    cache, session = step_models.page_writer(HEADS, PAGE, SIZE, [name])
    table = np.arange(-(-max(tokens, PAGE) // PAGE))
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((2, HEADS, len(table) * PAGE, SIZE), np.float32)
    step, position = session.bind(cache=cache), np.array(0)
    step.run(blocks=table, values=whole, position=position)
    values = rng.standard_normal((2, HEADS, tokens, SIZE), np.float32)
    return Variant(lambda: step.run(blocks=table, values=values, position=position), values)


def peer(kind: str, elements: int) -> Variant:
    """What ggml does with as many numbers."""
    source = np.random.default_rng(0).standard_normal(elements, np.float32)
    return Variant(ggml.quantizer(ggml.Type[kind], source), source)


def conversion(name: str) -> Callable[[], object]:
    """A page of FLOAT16 becomes one of this format, and FLOAT16 again."""
    cache, session = step_models.page_writer(HEADS, PAGE, SIZE, ["FLOAT16", name])
    values = np.random.default_rng(0).standard_normal((2, HEADS, PAGE, SIZE), np.float32)
    with session.bind(cache=cache) as step:
        step.run(blocks=np.arange(1), values=values, position=np.array(0))
    turn = itertools.cycle([name, "FLOAT16"])
    return lambda: [cache.convert(0, next(turn)) for _ in range(2)]


def main(arguments: list[str] | None = None) -> bool:
    """Measure, print, judge."""
    parser = record.parser(__doc__)
    parser.set_defaults(rounds=31)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--formats", nargs="+", choices=formats.BUILTIN, default=list(FORMATS))
    given = parser.parse_args(arguments)
    tokens, elements = given.tokens, 2 * HEADS * given.tokens * SIZE
    bulk = {name: update(name, tokens) for name in given.formats}
    skipped = []
    if ggml.library() is None:
        skipped.append("ggml: llama-cpp-python is not installed")
    else:
        bulk |= {f"ggml {kind}": peer(kind, elements) for kind in KINDS}
    calls = {name: variant.run for name, variant in bulk.items()}
    before = {name: variant.prepare for name, variant in bulk.items()}
    times = timing.interleaved(calls, given.rounds, before=before)
    notes = {name: f"{1e3 * time / elements:6.3f} ns an element" for name, time in times.items()}
    timing.report(f"{tokens} tokens of {HEADS} heads of {SIZE} into pages", times, notes)
    single = {f"{name}, one token": update(name, 1).run for name in given.formats}
    one = timing.interleaved(single, given.rounds, 50)
    timing.report("One token", one)
    others = [name for name in given.formats if name != "FLOAT16"]
    back = {f"{name} and back": conversion(name) for name in others}
    conversions = timing.interleaved(back, given.rounds)
    timing.report(f"A page of {PAGE} tokens of FLOAT16 becomes", conversions)
    claims = [
        Claim(f"{name}: times as fast as ggml {kind}", times[f"ggml {kind}"] / times[name], least)
        for name, (kind, least) in LEAST.items()
        if name in times and f"ggml {kind}" in times
    ]
    rows: list[Row] = [
        {"variant": name, "us": time} for name, time in (times | one | conversions).items()
    ]
    result = record.Record("quantize", record.options(given), rows, claims, skipped)
    return result.conclude(given.json)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
