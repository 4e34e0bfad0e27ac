"""SmolLM2-135M: ms a token in place, by onnxruntime-genai and by llama.cpp, in one run.

All read the same weights with as many threads. They take turns, a few tokens each, so that all see
the same machine; medians count.

    python benchmarks/decode.py
    python benchmarks/decode.py --threads 1 --positions 64 1024 --cache float16 --fuse auto
    python benchmarks/decode.py --fuse off --pool
    python benchmarks/decode.py --overhead

The peers need: pip install onnxruntime-genai llama-cpp-python
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import onnxruntime

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tutorials" / "smollm2"))

import competitors  # noqa: E402
import overhead  # noqa: E402
import record  # noqa: E402
from competitors import KINDS, PEERS, Competitor, Reading, label  # noqa: E402
from config import SMOLLM2_135M  # noqa: E402
from record import Claim, Row  # noqa: E402

from onnx_inplace.runner.threads import without_pauses  # noqa: E402

PROMPT = 1024  # [tokens] of the timed prefill, in pieces of 512
REST = 0.05  # [s] before a turn: threads of the one before stop to spin


class Times(NamedTuple):
    """What was measured on so many threads."""

    threads: int
    token: dict[tuple[str, int], float]  # [ms] by name and position
    prompt: dict[str, float]  # [tokens/s] by name
    bandwidth: dict[int, float]  # [GB/s] by position


LEAST: dict[tuple[str, str, int], dict[int, float]] = {
    ("off", "onnxruntime-genai", 2): {64: 1.0, 1024: 1.5, 4000: 2.6, 8000: 3.8},
    ("off", "llama.cpp", 2): {64: 0.95, 1024: 1.3, 4000: 1.6, 8000: 1.8},
    ("auto", "onnxruntime-genai", 2): {64: 2.2, 1024: 3.0, 4000: 4.2, 8000: 5.5},
    ("auto", "llama.cpp", 2): {64: 2.0, 1024: 2.5, 4000: 2.7, 8000: 2.7},
    ("auto", "onnxruntime-genai", 1): {64: 2.2, 1024: 3.0, 4000: 4.0, 8000: 5.0},
}
"""Times as fast as a peer over float16 caches: (fuse, peer, threads) -> position -> ratio."""

LEAST_PROMPT = 1.0  # of onnxruntime-genai's tokens/s
LEAST_INT8 = 8000, 1.25  # position; times as fast as float16
LEAST_READ = 64, 0.85  # position; of the bandwidth


def seconds(action: Callable[[], object]) -> float:
    """How long ``action`` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def decode(all_: list[Competitor], position: int, rounds: int, tokens: int) -> dict[str, float]:
    """Median ms a token of each, from ``position`` on.

    The first third of a turn does not count: weights that fit into the last cache of the CPU come
    back into it from token to token, as they stay there while one program decodes.
    """
    times: dict[str, list[float]] = {c.name: [] for c in all_}
    for turn in range(rounds + 1):
        for competitor in all_:
            competitor.go_to(position)
            time.sleep(REST)
            spent = [seconds(competitor.token) for _ in range(tokens)]
            if turn:  # the first turn warms up
                times[competitor.name] += spent[tokens // 3 :]
    return {name: 1e3 * statistics.median(spent) for name, spent in times.items()}


def prefill(all_: list[Competitor], rounds: int) -> dict[str, float]:
    """Median tokens/s of each while it reads a prompt."""
    pieces = [list(range(1000 + k, 1512 + k)) for k in range(0, PROMPT, 512)]
    times: dict[str, list[float]] = {c.name: [] for c in all_}
    for turn in range(rounds + 1):
        for competitor in all_:
            competitor.go_to(0)
            time.sleep(REST)
            spent = seconds(lambda c=competitor: [c.read(piece) for piece in pieces])
            if turn:
                times[competitor.name].append(spent)
    return {name: PROMPT / statistics.median(spent) for name, spent in times.items()}


def measure(
    all_: list[Competitor], given: argparse.Namespace, show: Callable[[str], object] = print
) -> Times:
    """All positions, and the prompt."""
    reading = next(c for c in all_ if isinstance(c, Reading))
    token: dict[tuple[str, int], float] = {}
    bandwidth: dict[int, float] = {}
    for position in given.positions:
        with without_pauses():
            found = decode(all_, position, given.rounds, given.tokens)
        bandwidth[position] = reading.nbytes / found.pop(reading.name) / 1e6
        token |= {(name, position): ms for name, ms in found.items()}
        show(f"\nposition {position:,}, {given.threads} threads, {bandwidth[position]:.1f} GB/s")
        for name, ms in found.items():
            show(f"  {name:<48}{ms:8.2f} ms{1e3 / ms:10.1f} tokens/s{ratios(name, found)}")
    prompt: dict[str, float] = {}
    if given.prompt:
        readers = [c for c in all_ if c is not reading]
        prompt = prefill(readers, max(1, given.rounds // 2))
        show(f"\nprompt of {PROMPT:,}, {given.threads} threads")
        for name, speed in prompt.items():
            show(f"  {name:<48}{speed:11.0f} tokens/s")
    return Times(given.threads, token, prompt, bandwidth)


def best(found: dict[str, float], family: str) -> float | None:
    """The time of a peer in its faster way; None if it took no part."""
    return min((ms for name, ms in found.items() if name.split(",")[0] == family), default=None)


def ratios(name: str, found: dict[str, float]) -> str:
    """How many times as fast as each peer."""
    if name.split(",")[0] in PEERS:
        return ""
    peers = [(peer, best(found, peer)) for peer in PEERS]
    return "   " + ", ".join(f"{ms / found[name]:5.2f}x {peer}" for peer, ms in peers if ms)


def claims(times: Times) -> list[Claim]:
    """What is promised of float16 and INT8 caches on so many threads."""
    found = []
    for (fuse, peer, threads), by_position in LEAST.items():
        for position, least in by_position.items():
            here = {name: ms for (name, at), ms in times.token.items() if at == position}
            mine, theirs = here.get(label("float16", fuse)), best(here, peer)
            if threads == times.threads and mine and theirs:
                text = (
                    f"fuse={fuse}, {threads} threads, position {position:,}: times {peer}'s speed"
                )
                found.append(Claim(text, theirs / mine, least))
    for fuse in ("off", "auto"):
        found += alone(times, fuse)
    return found


def alone(times: Times, fuse: competitors.Fuse) -> list[Claim]:
    """What is promised beside the speed of a token."""
    found, half = [], label("float16", fuse)
    position, least = LEAST_INT8
    pair = times.token.get((half, position)), times.token.get((label("INT8", fuse), position))
    if pair[0] and pair[1]:
        text = f"fuse={fuse}: INT8 pages at {position:,}, times the speed of float16"
        found.append(Claim(text, pair[0] / pair[1], least))
    theirs = times.prompt.get("onnxruntime-genai")
    if theirs and half in times.prompt:
        text = f"fuse={fuse}: prompt of {PROMPT:,}, times onnxruntime-genai's speed"
        found.append(Claim(text, times.prompt[half] / theirs, LEAST_PROMPT))
    position, least = LEAST_READ
    ms = times.token.get((half, position))
    if fuse == "auto" and ms:
        read = competitors.weight_bytes() + cache_bytes(position)
        text = f"fuse=auto: GB/s read at {position}, in what the machine reads"
        found.append(Claim(text, read / ms / 1e6 / times.bandwidth[position], least))
    return found


def cache_bytes(position: int) -> int:
    """Bytes of a float16 cache that a token at ``position`` reads."""
    config = SMOLLM2_135M
    return 2 * 2 * config.layers * config.kv_heads * config.head_size * position


def rows(times: Times) -> list[Row]:
    """For JSON."""
    found: list[Row] = [
        {"variant": name, "threads": times.threads, "position": position, "ms": ms}
        for (name, position), ms in times.token.items()
    ]
    found += [
        {"variant": name, "threads": times.threads, "prompt": PROMPT, "tokens_per_second": speed}
        for name, speed in times.prompt.items()
    ]
    found += [
        {
            "variant": Reading.name,
            "threads": times.threads,
            "position": p,
            "gigabytes_per_second": s,
        }
        for p, s in times.bandwidth.items()
    ]
    return found


def main(arguments: list[str] | None = None) -> bool:
    """Measure, print, judge."""
    parser = record.parser(__doc__)
    parser.set_defaults(rounds=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--positions", type=int, nargs="*", default=[64, 1024, 4000, 8000])
    parser.add_argument("--cache", nargs="+", choices=KINDS, default=["float16", "INT8"])
    parser.add_argument("--fuse", nargs="+", choices=["auto", "off"], default=["auto", "off"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--tokens", type=int, default=24, help="of a turn; a third is not timed")
    parser.add_argument(
        "--pool", action="store_true", help="onnxruntime has one pool of threads for the process"
    )
    parser.add_argument("--no-prompt", dest="prompt", action="store_false")
    parser.add_argument(
        "--same-file",
        action="store_true",
        help="this project runs onnxruntime-genai's file, too; with it all are slower, for what "
        "stands between two turns of one drives more of it out of the CPU's last cache",
    )
    parser.add_argument("--overhead", action="store_true", help="only what the runner takes")
    given = parser.parse_args(arguments)
    if given.overhead:
        for case in itertools.product(given.cache, given.fuse, given.positions):
            print(overhead.line(*case))
        return True
    if given.pool:  # onnxruntime-genai brings an onnxruntime of its own
        onnxruntime.set_global_thread_pool_sizes(given.threads, 1)
    length = SMOLLM2_135M.context
    all_: list[Competitor] = [
        competitors.InPlace(kind, given.threads, fuse, length)
        for kind in given.cache
        for fuse in given.fuse
    ]
    skipped = []
    for name in given.peers:
        ways = competitors.peers(name, given.threads, length, given.fuse if given.same_file else ())
        all_ += ways
        if not ways:
            skipped.append(f"{name}: it is not installed")
    times = measure([*all_, Reading(given.threads)], given)
    result = record.Record("decode", record.options(given), rows(times), claims(times), skipped)
    return result.conclude(given.json)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
