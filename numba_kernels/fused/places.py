"""Integers that a fused step counts itself: positions from a first one on."""

from __future__ import annotations

from typing import NamedTuple

from onnx_inplace.numba_kernels.fused.kernel import KERNEL, reader
from onnx_inplace.numba_kernels.memory import kernel, load_int64, store_int64


class Count(NamedTuple):
    """``output[r, i] = first[0] + i`` for all rows.

    Shapes:
        first:  (1) int64
        output: (rows, columns) int64
    """

    first: int
    output: int
    rows: int
    columns: int


_read = reader(Count)


@kernel(KERNEL)
def count(arguments, thread, threads):
    """A :class:`Count`."""
    x = _read(arguments)
    start = load_int64(x.first)
    for r in range(x.rows):
        for i in range(x.columns):
            store_int64(x.output + 8 * (r * x.columns + i), start + i)
