"""Products of a fused step: GB/s of weights, against what the machine reads in the same run.

python benchmarks/matvec.py [--threads 2] [--rounds 9]

Each kind of weight is a list of matrices much larger than the caches, multiplied one after the
other as in a decoder. "hot" is one small matrix again and again: what the arithmetic allows.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import numpy as np
import timing

from onnx_inplace.numba_kernels import specialise
from onnx_inplace.numba_kernels.fused import (
    interpreter,
    panels,
    product,
    product_codes,
    product_floats,
    quantize,
    reductions,
)
from onnx_inplace.numba_kernels.memory import OnDemand, address
from onnx_inplace.runner import threads as policy

Array = np.ndarray[Any, Any]
COLD = 160 << 20  # bytes of weights
AGAIN = 400  # times that a hot matrix is multiplied


@dataclasses.dataclass
class Call:
    """A table of instructions, and what it points to."""

    rows: list[tuple[int, int, int]]
    nbytes: int
    keep: list[Array]

    def __post_init__(self) -> None:
        self.table, self.state = interpreter.table(self.rows), interpreter.control()
        self.serial, self.parallel = interpreter.run.ready(), interpreter.run_parallel.ready()

    def run(self, threads: int) -> None:
        """One pass."""
        table, count = address(self.table), len(self.rows)
        if threads == 1:
            self.serial(table, count)
        else:
            self.parallel(table, count, address(self.state), threads)


def aligned(size: int) -> Array:
    """Bytes that begin on a cache line."""
    raw = np.ones(size + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:size]


def reading() -> Call:
    """Sums over memory: what reading costs."""
    data, sums = aligned(COLD).view(np.float32), np.zeros(64, np.float32)
    columns = data.size // 64
    block = reductions.Reduce(0, address(data), address(sums), 64, columns, 4 * columns)
    words = np.array(block, np.int64)
    row = reductions.reduce.ready().address, address(words), interpreter.BARRIER
    return Call([row], data.nbytes, [data, sums, words])


def multiplying(
    kernel: OnDemand, layout: panels.Layout, data: Array, inputs: int, planes: int, hot: bool
) -> Call:
    """Products with copies of a matrix, or with the same one again and again."""
    count = 1 if hot else COLD // layout.nbytes
    outputs = 32 * layout.panels
    weights, output = aligned(count * layout.nbytes), np.zeros(outputs, np.float32)
    weights.reshape(count, -1)[:] = data
    row = quantize.row_bytes(inputs, planes) if planes else 4 * inputs
    activations = np.zeros(row, np.uint8)
    rows, keep = [], [weights, output, activations]
    for k in range(count):
        fields = dict.fromkeys(product.Product._fields, 0) | {
            "weights": address(weights) + k * layout.nbytes,
            "activations": address(activations),
            "inputs": inputs,
            "outputs": outputs,
            "output": address(output),
            "next_weights": address(weights) + (k + 1) % count * layout.nbytes,
            "next_panels": layout.panels,
            "next_panel_bytes": layout.panel_bytes,
        }
        words = np.array(product.Product(**fields), np.int64)
        keep.append(words)
        rows.append((kernel.ready().address, address(words), interpreter.BARRIER))
    times = AGAIN if hot else 1
    return Call(rows * times, weights.nbytes * times, keep)


def kinds(outputs: int, inputs: int) -> dict[str, Any]:
    """Kernel, layout, panels, inputs and planes by name."""
    rng, found = np.random.default_rng(0), {}
    for bits, minimums, planes in ((4, False, 1), (4, True, 1), (4, True, 2), (8, False, 1)):
        codes = rng.integers(0, 256, (outputs, inputs // 32, 4 * bits), dtype=np.uint8)
        scales = rng.random((outputs, inputs // 32)).astype(np.float16)
        matrix = panels.Codes(bits, codes, scales, None, scales if minimums else None)
        layout = panels.layout_codes([matrix])
        data = aligned(layout.nbytes)
        panels.pack_codes([matrix], layout, data)
        constants = bits, layout.kind, layout.correction, planes, 1, 0
        kernel = specialise.specialise(product_codes, *constants).multiply
        name = f"{bits} bits{', minimums' if minimums else ''}, {8 * planes}-bit activations"
        found[name] = kernel, layout, data, inputs, planes
    for dtype in (np.float16, np.float32):
        weights = rng.standard_normal((outputs, inputs)).astype(dtype)
        layout = panels.layout_floats([weights])
        data = aligned(layout.nbytes)
        panels.pack_floats([weights], layout, data)
        kernel = specialise.specialise(product_floats, layout.kind, 1, 0).multiply
        found[np.dtype(dtype).name] = kernel, layout, data, inputs, 0
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    read = reading()
    for name, (kernel, layout, data, inputs, planes) in kinds(576, 576).items():
        cold = multiplying(kernel, layout, data, inputs, planes, False)
        hot = multiplying(kernel, layout, data, inputs, planes, True)
        line = f"{name:<36}"
        for threads in dict.fromkeys((1, given.threads)):
            calls = {"read": read, "cold": cold, "hot": hot}
            with policy.region(threads):
                variants = {n: (lambda c=c, t=threads: c.run(t)) for n, c in calls.items()}
                times = timing.interleaved(variants, given.rounds)
            speed = {n: calls[n].nbytes / times[n] / 1e3 for n in calls}
            part = speed["cold"] / speed["read"]
            line += f" | {threads} thread(s): {speed['cold']:5.1f} of {speed['read']:5.1f} GB/s"
            line += f" ({part:.2f}), hot {speed['hot']:5.1f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
