"""One token into a cache: the cost does not depend on the capacity, nor on who holds the cache.

    python benchmarks/update.py

Compares the kernel with numpy's slice assignment, and a model of one CacheUpdate with onnxruntime's
session of one node: TensorScatter with one OrtValue bound as input and output (in place, as long as
nobody adds a second node), and not bound (a copy of the cache for every token). Then the caches of
60 layers: in one call of compiled code, as fused steps write them, and as a model.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx
import onnxruntime_peer as peer
import record
import step_models
import timing
from record import Bound, Claim, Row
from timing import Call

from onnx_inplace import Session
from onnx_inplace.numba_kernels import dense
from onnx_inplace.numba_kernels.fused import interpreter, kernel, moves
from onnx_inplace.numba_kernels.memory import FIELD, address

HEADS, SIZE = 8, 128
TOKEN = SIZE * 4  # [bytes] of a head
SMALL, LARGE = 1_024, 131_072  # capacities [tokens]
LAYERS, LAYER_CAPACITY = 60, 4_096
POSITION = 700


def committed(capacity: int) -> np.ndarray:
    """A cache that has been written: untouched pages of zeros would flatter whoever reads them."""
    return np.ones((1, HEADS, capacity, SIZE), np.float32)


def new_token() -> np.ndarray:
    """(1, heads, 1, head_size) float32."""
    return np.random.default_rng(0).standard_normal((1, HEADS, 1, SIZE), dtype=np.float32)


def one_node() -> Call:
    """``session.run`` of the smallest model: what a call of onnxruntime costs at least."""
    feeds = {"x": np.ones((1, 4), np.float32)}
    node = onnx.helper.make_node("Neg", ["x"], ["y"])
    session = peer.session(node, feeds, {"y": np.float32}, 1)
    return lambda: session.run(None, feeds)


def writing(cache: np.ndarray, values: np.ndarray) -> tuple[Call, Call]:
    """The kernel and numpy."""
    update, capacity = dense.update.ready(), cache.shape[2]
    to, source = id(cache) + FIELD, id(values) + FIELD

    def assign() -> None:
        cache[:, :, POSITION : POSITION + 1] = values

    def run(keep: object = (cache, values)) -> None:
        update(to, source, HEADS, capacity, 1, TOKEN, POSITION)

    return run, assign


def one_call(caches: list[np.ndarray], values: list[np.ndarray]) -> Call:
    """All layers by one call: a table of instructions of a fused step."""
    position = np.array(POSITION)
    blocks = [
        kernel.block(
            moves.Tokens(
                address(cache),
                address(new),
                address(position),
                HEADS,
                cache.shape[2],
                1,
                TOKEN,
                TOKEN,
                TOKEN,
                0,
            )
        )
        for cache, new in zip(caches, values, strict=True)
    ]
    code = moves.tokens.ready().address
    table = interpreter.table([(code, address(block), interpreter.FIRST) for block in blocks])
    run, at, count = interpreter.run.ready(), address(table), len(table)

    def write(keep: object = (caches, values, position, blocks, table)) -> None:
        run(at, count)

    return write


def layers(rounds: int) -> dict[str, float]:
    """Caches of many layers [us]."""
    variants: dict[str, Call] = {}
    values = [new_token() for _ in range(LAYERS)]
    variants[f"{LAYERS} layers, one call"] = one_call(
        [committed(LAYER_CAPACITY) for _ in values], values
    )
    program = step_models.updates(LAYERS, HEADS, SIZE)
    for fuse in ("off", "auto"):
        caches = [committed(LAYER_CAPACITY) for _ in values]
        step = Session(program, fuse=fuse).bind(caches=caches)
        position = np.array(POSITION)
        name = f'{LAYERS} layers, step.run, fuse="{fuse}"'
        variants[name] = lambda s=step, p=position: s.run(values=values, position=p)
    return timing.interleaved(variants, rounds, 20)


def main(arguments: list[str] | None = None) -> bool:
    """Measure, print, judge."""
    parser = record.parser(__doc__)
    parser.set_defaults(rounds=31)
    parser.add_argument("--calls", type=int, default=200, help="a turn")
    parser.add_argument("--capacities", type=int, nargs=2, default=[SMALL, LARGE])
    given = parser.parse_args(arguments)
    small, large = given.capacities
    values = new_token()
    names = {capacity: f"capacity {capacity:,}" for capacity in (small, large)}

    low: dict[str, Call] = {}
    for capacity, name in names.items():
        ours, numpys = writing(committed(capacity), values)
        low |= {f"kernel, {name}": ours, f"numpy slice assignment, {name}": numpys}
    times = timing.interleaved(low, given.rounds, given.calls)
    timing.report(f"One token of {HEADS} heads of {SIZE} float32, written by", times)

    session, position = Session(step_models.update(HEADS, SIZE)), np.array(POSITION)
    high: dict[str, Call] = {"onnxruntime session.run, a model of one Neg": one_node()}
    for capacity, name in names.items():
        step = session.bind(cache=committed(capacity))
        high[f"step.run, {name}"] = lambda s=step: s.run(values=values, position=position)
        cache = committed(capacity)
        bound = peer.tensor_scatter(cache, values, POSITION, 1, in_place=True)
        high[f"onnxruntime TensorScatter bound in place, {name}"] = bound
    models = timing.interleaved(high, given.rounds, given.calls)
    copies = {
        f"onnxruntime TensorScatter not bound, {name}": peer.tensor_scatter(
            committed(capacity), values, POSITION, 1, in_place=False
        )
        for capacity, name in names.items()
    }
    models |= timing.interleaved(copies, min(given.rounds, 5))
    timing.report("The same as a model", models)
    many = layers(given.rounds)
    timing.report(f"One token into {LAYERS} caches of {LAYER_CAPACITY:,}", many)

    here, there = names.values()
    at_most = Bound.AT_MOST
    claims = [
        Claim(f"kernel: us, {there}", times[f"kernel, {there}"], 1.0, at_most),
        Claim(
            f"kernel: time at {there}, in that at {here}",
            times[f"kernel, {there}"] / times[f"kernel, {here}"],
            1.2,
            at_most,
        ),
        Claim(
            "kernel: time, in that of a slice assignment",
            times[f"kernel, {there}"] / times[f"numpy slice assignment, {there}"],
            1.0,
            at_most,
        ),
        Claim(
            f"step.run: time at {there}, in that at {here}",
            models[f"step.run, {there}"] / models[f"step.run, {here}"],
            1.2,
            at_most,
        ),
        Claim(
            "step.run: time, in that of onnxruntime's session.run of one node",
            models[f"step.run, {there}"] / models["onnxruntime session.run, a model of one Neg"],
            2.0,
            at_most,
        ),
        Claim(f"{LAYERS} layers: us in one call", many[f"{LAYERS} layers, one call"], 25, at_most),
    ]
    rows: list[Row] = [
        {"variant": name, "us": time} for name, time in (times | models | many).items()
    ]
    return record.Record("update", record.options(given), rows, claims).conclude(given.json)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
