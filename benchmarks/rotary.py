"""What an operator that rotates keys while it writes them into the cache would save.

    python benchmarks/rotary.py

Today onnxruntime rotates (``RotaryEmbedding``) and a kernel writes. For the keys of one layer: the
node, without what a call of a session costs; the write; and the kernel of fused steps, which does
both in one pass and is what ``kv.RotaryCacheUpdate`` would run. The saving is an upper bound:
queries are rotated in any case, and decoders rotate them and keys by one node.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx
import onnxruntime_peer as peer
import record
import timing
from record import Row
from timing import Call

from onnx_inplace.numba_kernels import dense
from onnx_inplace.numba_kernels.fused import interpreter, kernel, rotary
from onnx_inplace.numba_kernels.memory import FIELD, address

CAPACITY, POSITION = 8192, 4000
SHAPES = "3x64", "8x128"


def node(keys: np.ndarray, tables: tuple[np.ndarray, np.ndarray], threads: int) -> Call:
    """RotaryEmbedding of onnxruntime, of keys (1, heads, tokens, size)."""
    feeds = dict(zip(("x", "cos", "sin"), (keys, *tables), strict=True))
    made = onnx.helper.make_node("RotaryEmbedding", list(feeds), ["y"], interleaved=1)
    session = peer.session(made, feeds, {"y": np.float32}, threads)
    return lambda: session.run(None, feeds)


def call_alone(threads: int) -> Call:
    """``session.run`` with three inputs that hold next to nothing."""
    feeds = {name: np.ones(4, np.float32) for name in "abc"}
    made = onnx.helper.make_node("Sum", list(feeds), ["y"])
    session = peer.session(made, feeds, {"y": np.float32}, threads)
    return lambda: session.run(None, feeds)


def write(cache: np.ndarray, keys: np.ndarray) -> Call:
    """The kernel of ``CacheUpdate``."""
    update = dense.update.ready()
    _, heads, tokens, size = keys.shape
    numbers = heads, cache.shape[2], tokens, 4 * size, POSITION
    return lambda keep=(cache, keys): update(id(cache) + FIELD, id(keys) + FIELD, *numbers)


def both(cache: np.ndarray, keys: np.ndarray, tables: tuple[np.ndarray, np.ndarray]) -> Call:
    """One pass: rotate into the cache."""
    _, heads, tokens, size = keys.shape
    position = np.array(POSITION)
    block = kernel.block(
        rotary.Rotary(
            address(keys), address(cache), *map(address, tables), 1, heads, tokens, size, size // 2,
            1, 0, *keys.strides[:3], *cache.strides[:3], *tables[0].strides[:2],
            address(position), 0, 1,
        )
    )  # fmt: skip
    code = rotary.rotary.ready().address
    table = interpreter.table([(code, address(block), interpreter.FIRST)])
    run, at, count = interpreter.run.ready(), address(table), len(table)
    return lambda keep=(cache, keys, tables, position, block, table): run(at, count)


def main(arguments: list[str] | None = None) -> bool:
    """Measure and print."""
    parser = record.parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 1024])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="kv heads x head size")
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    for shape in given.shapes:
        heads, size = map(int, shape.split("x"))
        for tokens in given.tokens:
            rng = np.random.default_rng(0)
            keys = rng.standard_normal((1, heads, tokens, size), np.float32)
            angles = rng.standard_normal((1, tokens, size // 2)).astype(np.float32)
            tables = np.cos(angles), np.sin(angles)
            caches = [np.ones((1, heads, CAPACITY, size), np.float32) for _ in range(2)]
            calls = {
                "RotaryEmbedding, by session.run": node(keys, tables, given.threads),
                "session.run alone": call_alone(given.threads),
                "write": write(caches[0], keys),
                "rotate and write in one pass": both(caches[1], keys, tables),
            }
            times = timing.interleaved(calls, given.rounds, max(1, 200 // tokens))
            timing.report(f"{tokens:,} tokens, {heads} kv heads of {size}", times)
            rotated, alone, written, fused = times.values()
            saved = rotated - alone + written - fused
            print(f"  saved at most {saved:.2f} us a layer")
            rows += [
                {"shape": shape, "tokens": tokens, "variant": name, "us": time}
                for name, time in (times | {"saved": saved}).items()
            ]
    return record.Record("rotary", record.options(given), rows).conclude(given.json)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
