"""SmolLM2-135M: ms a token in place and by onnxruntime-genai, on the same weights and threads.

Both have a 4-bit body and an 8-bit head, with inputs of products rounded to 8 bits. They take
turns, a few tokens each, so that both see the same machine; the median counts. Ours decodes over
caches of random numbers, which cost what real ones cost; the peer has to read a prompt first.

    python benchmarks/decode.py
    python benchmarks/decode.py --threads 1 --positions 64 1000 4000 --cache float32

The peer needs: pip install onnxruntime-genai
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import importlib.util
import itertools
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tutorials" / "smollm2"))

import generate  # noqa: E402
import weights  # noqa: E402
from config import SMOLLM2_135M  # noqa: E402
from decoder import Precision  # noqa: E402

from onnx_inplace import Session  # noqa: E402

FOLDER = generate.FOLDER / "genai"
MAX_LENGTH = 8192
PROMPT = 1024  # [tokens] of the timed prefill, in pieces of 512


class Competitor(Protocol):
    """What takes part."""

    name: str

    def read(self, tokens: list[int]) -> None:
        """Append a prompt."""

    def go_to(self, position: int) -> None:
        """Make ``position`` the place of the next token."""

    def token(self) -> None:
        """Decode one token and choose the next."""


class InPlace:
    """This project's decoder."""

    def __init__(self, element: str, threads: int, fuse: Literal["auto", "off"] = "auto") -> None:
        """Load it and fill its caches."""
        self.name = f"in place, {element}{', fused' if fuse == 'auto' else ''}"
        path = generate.compiled(Precision.FAST, element)
        session = Session(path, threads=threads, fuse=fuse)
        self.conversation = generate.Conversation(session, MAX_LENGTH)
        random = np.random.default_rng(0)
        for cache in self.conversation.caches:
            cache[:] = random.standard_normal(cache.shape, np.float32) * 0.1
        self.next = 504

    def read(self, tokens: list[int]) -> None:
        """Append a prompt."""
        self.next = int(self.conversation.run(tokens)["logits"].argmax())

    def go_to(self, position: int) -> None:
        """Make ``position`` the place of the next token."""
        self.conversation.length = position

    def token(self) -> None:
        """Decode one token and choose the next."""
        self.read([self.next])


def competitors(
    elements: list[str], threads: int, fuse: list[Literal["auto", "off"]], *, alone: bool
) -> list[Competitor]:
    """Ours, with fused steps and without, and the peer where it is installed."""
    found: list[Competitor] = [InPlace(e, threads, how) for e in elements for how in fuse]
    if alone:
        return found
    if importlib.util.find_spec("onnxruntime_genai") is None:
        print("onnxruntime-genai is not installed: no comparison")
        return found
    genai = importlib.import_module("genai")
    content = weights.read(SMOLLM2_135M, weights.gguf_path())
    genai.write(FOLDER, SMOLLM2_135M, content, threads, MAX_LENGTH)
    return [*found, genai.GenAI(FOLDER, MAX_LENGTH)]


def seconds(action: Callable[[], None]) -> float:
    """How long ``action`` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def decode(all_: list[Competitor], position: int, rounds: int, tokens: int) -> dict[str, float]:
    """Median ms a token of each, from ``position`` on."""
    times: dict[str, list[float]] = {c.name: [] for c in all_}
    for turn in range(rounds + 1):
        for competitor in all_:
            competitor.go_to(position)
            spent = [seconds(competitor.token) for _ in range(tokens)]
            if turn:  # the first turn warms up, and so does the first token of each
                times[competitor.name] += spent[1:]
    return {name: 1e3 * statistics.median(spent) for name, spent in times.items()}


def prefill(all_: list[Competitor], rounds: int) -> dict[str, float]:
    """Median tokens/s of each while it reads a prompt."""
    pieces = [list(range(1000 + k, 1512 + k)) for k in range(0, PROMPT, 512)]
    times: dict[str, list[float]] = {c.name: [] for c in all_}
    for turn in range(rounds + 1):
        for competitor in all_:
            competitor.go_to(0)
            start = time.perf_counter()
            for piece in pieces:
                competitor.read(piece)
            if turn:
                times[competitor.name].append(time.perf_counter() - start)
    return {name: PROMPT / statistics.median(spent) for name, spent in times.items()}


def overhead(
    element: str, position: int, fuse: Literal["auto", "off"], tokens: int = 20
) -> tuple[float, float]:
    """CPU ms a token, and those outside of onnxruntime and kernels, on one thread.

    A profiler says what native code takes; what a token takes is measured without one, because it
    slows down Python. The best of several turns counts, as others may use the caches of the CPU.
    """
    ours = InPlace(element, threads=1, fuse=fuse)

    def decode() -> None:
        ours.go_to(position)
        for _ in range(tokens):
            ours.token()

    wholes, natives = [], []
    for _ in range(6):
        start = time.thread_time()
        decode()
        wholes.append(time.thread_time() - start)
        profile = cProfile.Profile(time.thread_time)
        profile.runcall(decode)
        natives.append(native_seconds(profile))
    whole, native = min(wholes), min(natives)
    return 1e3 * whole / tokens, 1e3 * (whole - native) / tokens


def native_seconds(profile: cProfile.Profile) -> float:
    """The time inside of onnxruntime and of compiled kernels."""
    return sum(
        own
        for (file, _, name), (_, _, own, _, _) in pstats.Stats(profile).stats.items()
        if "onnxruntime" in name
        or ("numba_kernels" in Path(file).parts and Path(file).stem != "memory")
    )


def show(title: str, results: dict[str, float], unit: str) -> None:
    """One line, each with its ratio to the last one: the peer, if there is one."""
    *_, last = results.values()
    better = (lambda x: x / last) if unit == "tokens/s" else (lambda x: last / x)
    cells = [f"{name} {x:8.2f} {unit} ({better(x):.2f}x)" for name, x in results.items()]
    print(f"{title:>16}: " + " | ".join(cells), flush=True)


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M, in place and by onnxruntime-genai")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--positions", type=int, nargs="+", default=[64, 4000])
    parser.add_argument(
        "--cache", nargs="+", choices=generate.ELEMENTS, default=["float32", "float16"]
    )
    parser.add_argument("--fuse", nargs="+", choices=["auto", "off"], default=["auto"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--tokens", type=int, default=9, help="a turn, of which the first does not count"
    )
    parser.add_argument("--alone", action="store_true", help="without the peer")
    parser.add_argument("--overhead", action="store_true", help="only what the runner takes")
    options = parser.parse_args()
    if options.overhead:
        cases = itertools.product(options.cache, options.fuse, options.positions)
        for element, fuse, position in cases:
            whole, python = overhead(element, position, fuse)
            print(
                f"{element}, fuse={fuse}, position {position:,}: {whole:.2f} ms a token on one "
                f"thread, {python:.2f} outside of onnxruntime and kernels ({python / whole:.1%})"
            )
        return

    all_ = competitors(options.cache, options.threads, options.fuse, alone=options.alone)
    print(f"{options.threads} threads; x: times as fast as {all_[-1].name}")
    for position in options.positions:
        show(f"position {position:,}", decode(all_, position, options.rounds, options.tokens), "ms")
    show(f"prompt of {PROMPT:,}", prefill(all_, max(1, options.rounds // 2)), "tokens/s")


if __name__ == "__main__":
    main()
