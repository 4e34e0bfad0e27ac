"""Attention over pages of one format and of several, updates and conversions.

    python benchmarks/paged.py [--threads 1] [--tokens 16384] [--head-size 128] [--group 4]

One new token attends over cold pages: each call takes other pages, 80 MB in turn. A mixture is held
against the weighted sum of its pure parts. GB/s count the bytes of the pages, scales included, and
stand beside what reading memory costs in the same rounds. Peers: our own attention over an array of
float16, onnxruntime's GroupQueryAttention over float16.
"""

import argparse
import concurrent.futures
import itertools
import sys
from collections.abc import Callable

import attention
import numpy as np
import timing

from onnx_inplace import Session, formats
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, Paged, kv, model

HEADS, PAGE = 8, 128
COLD = 80 << 20  # [bytes]
MIXTURE = {"FLOAT16": 1, "INT8": 3, "INT4": 3, "FP8_E4M3": 1}
PURE = ["FLOAT32", "FLOAT16", "BFLOAT16", "FP8_E4M3", "FP8_E5M2", "INT8", "INT4", "INT4T", "INT2"]

Calls = dict[str, Callable[[], object]]


class Pages:
    """A paged cache of 8 kv heads, and the programs that write it and attend over it."""

    def __init__(self, names: list[str], head_size: int, group: int, threads: int):
        size, allowed = head_size, [formats.BUILTIN[name] for name in names]
        pages = Paged[FLOAT[2, HEADS, PAGE, size], *allowed]
        first = names[0]

        @model
        def write(
            cache: Mutable[pages],
            page: INT64[()],
            values: FLOAT[2, HEADS, "n", size],
            at: INT64[()],
        ) -> Alias["cache"]:
            return kv.PagedCacheUpdate(cache, page, values, at, quantized_type=first)

        @model
        def attend(
            cache: Mutable[pages],
            blocks: INT64["blocks"],
            query: FLOAT[1, HEADS * group, "n", size],
            length: INT64[()],
        ) -> tuple[FLOAT[1, HEADS * group, "n", size], Alias["cache"]]:
            return kv.PagedAttention(query, cache, blocks, length, is_causal=1), cache

        self.names, self.size = names, size
        self.query = np.random.default_rng(1).standard_normal(
            (1, HEADS * group, 1, size), np.float32
        )
        self.writer = Session(write)
        self.reader = Session(attend, threads=threads)
        self.cache = self.writer.allocate("cache")

    def fill(self, pattern: list[str], tokens: int) -> list[np.ndarray]:
        """Pages of these formats in turn; block tables of sequences that share none."""
        blocks = tokens // PAGE
        kinds = [pattern[i % len(pattern)] for i in range(blocks)]
        size = sum(formats.BUILTIN[k].page_bytes((2, HEADS, PAGE, self.size)) for k in kinds)
        copies = max(1, min(32, -(-COLD // size)))
        values = np.random.default_rng(2).standard_normal((2, HEADS, PAGE, self.size), np.float32)
        with self.writer.bind(cache=self.cache) as step:
            for page in range(blocks * copies):
                step.run(page=page, values=values, at=0)
                self.cache.convert(page, kinds[page % blocks])
        self.bytes = size
        return list(np.arange(blocks * copies).reshape(copies, blocks))

    def attending(self, tables: list[np.ndarray]) -> Callable[[], object]:
        """One call over the pages of the next block table."""
        step, turn = self.reader.bind(cache=self.cache), itertools.cycle(tables)

        def call() -> object:
            table = next(turn)
            length = len(table) * PAGE
            return step.run(blocks=table, query=self.query, length=length)[0]

        return call


def reading(threads: int) -> tuple[Callable[[], object], int]:
    """Read memory on several threads; bytes of a call."""
    parts = [np.ones(COLD // 8 // threads, np.float64) for _ in range(threads)]
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    return lambda: list(pool.map(np.add.reduce, parts)), sum(part.nbytes for part in parts)


def attend(tokens: int, head_size: int, group: int, threads: int, rounds: int) -> bool:
    """Pure tables, a mixture, peers."""
    calls: Calls = {}
    sizes: dict[str, int] = {}
    calls["reading memory"], sizes["reading memory"] = reading(threads)
    patterns = {name: [name] for name in PURE}
    patterns["mixture"] = [name for name, count in MIXTURE.items() for _ in range(count)]
    for label, pattern in patterns.items():
        pages = Pages(list(dict.fromkeys(pattern)), head_size, group, threads)
        calls[label] = pages.attending(pages.fill(pattern, tokens))
        sizes[label] = pages.bytes
    attention.CAPACITY = tokens
    case = attention.Case(np.float16, HEADS * group, HEADS, head_size, 1, tokens)
    calls["an array of float16"] = case.ours(threads)
    for count in sorted({1, threads}):
        calls[f"GroupQueryAttention, float16, {count} threads"] = case.group_query_attention(count)
    times = timing.interleaved(calls, rounds)
    timing.report(
        f"{tokens:,} tokens, {HEADS} kv heads of {head_size}, {group} queries a head", times
    )
    print()
    for label, size in sizes.items():
        print(f"  {label:<52}{size / times[label] / 1e3:>12.1f} GB/s")
    total = sum(MIXTURE.values())
    weighted = sum(times[name] * count / total for name, count in MIXTURE.items())
    peer = min(t for label, t in times.items() if label.startswith("Group"))
    claims = [("a mixture against the weighted sum of its parts", times["mixture"] / weighted, 1.1)]
    limits = {"FLOAT32": 1.0, "FLOAT16": 0.2, "BFLOAT16": 0.2, "INT8": 0.12, "INT4": 0.07}
    for label, limit in limits.items():
        claims.append((f"{label} against GroupQueryAttention", times[label] / peer, limit))
    claims.append(("INT2 against INT4", times["INT2"] / times["INT4"], 1.0))
    return timing.judge(claims)


def change(head_size: int, rounds: int) -> None:
    """Updates of a page in place, and conversions from FLOAT16."""
    calls: Calls = {}
    for name in PURE:
        pages = Pages([name], head_size, 4, 1)
        pages.fill([name], PAGE)
        step = pages.writer.bind(cache=pages.cache)
        for count in (1, PAGE):
            values = np.random.default_rng(3).standard_normal(
                (2, HEADS, count, head_size), np.float32
            )
            feeds = {"page": 0, "values": values, "at": 0}
            label = f"{name}: {count} tokens"
            calls[label] = lambda step=step, feeds=feeds: step.run(**feeds)
    timing.report(
        f"update of a page of {PAGE} tokens, {HEADS} heads", timing.interleaved(calls, rounds)
    )
    calls = {}
    for name in PURE:
        if name == "FLOAT16":
            continue
        pages = Pages(["FLOAT16", name], head_size, 4, 1)
        pages.fill(["FLOAT16"], PAGE)
        turn = itertools.cycle([name, "FLOAT16"])
        calls[f"{name} and back"] = lambda cache=pages.cache, turn=turn: [
            cache.convert(0, next(turn)) for _ in range(2)
        ]
    timing.report("conversion of a page of FLOAT16", timing.interleaved(calls, rounds))


def main() -> bool:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16_384])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--group", type=int, default=4)
    options = parser.parse_args()
    shape = options.head_size, options.group
    held = [attend(tokens, *shape, options.threads, options.rounds) for tokens in options.tokens]
    change(options.head_size, options.rounds)
    return all(held)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
