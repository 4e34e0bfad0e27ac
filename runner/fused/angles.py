"""Angles of rotary embeddings by position: rows of tables, gathered once for all layers."""

from __future__ import annotations

import numpy as np

from onnx_inplace.compiler import errors
from onnx_inplace.numba_kernels.fused import moves, places
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.fused.table import Bound, Builder, NotFused

KERNELS = (places.count, moves.rows)
"""What instructions for angles name."""


def of_places(b: Builder, table: int | None, index: int, tokens: tuple[int, int]) -> Array:
    """(batch, tokens, half) float32: rows of a table (positions, half).

    ``index``: position_ids, (batch, tokens) int64, or (1): of the first token of each row.
    """
    rows = b.contiguous(b.array(table))
    given = b.array(index)
    if rows.ndim != 2 or given.shape not in (tokens, (1,)):
        raise NotFused(f"RotaryEmbedding with positions {given.shape} of {rows.shape}")
    first = given.shape != tokens
    end, name = len(rows) - (tokens[1] - 1 if first else 0), b.value(index).name

    def fail(numbers: Array) -> None:
        raise errors.OperatorError(
            f"RotaryEmbedding: `{name}` is {numbers.ravel().tolist()}, for angles of "
            f"{len(rows)} positions"
        )

    b.bounds.append(Bound(index, 0, end, fail))
    found = given
    if first:
        found = b.derived(
            index, f"from {tokens}", tokens, np.int64, lambda to: _count(b, given, to)
        )
    shape = (*tokens, rows.shape[1])
    return b.derived(
        index, f"angles of {table}", shape, np.float32, lambda to: _gather(b, rows, found, to)
    )


def _count(b: Builder, first: Array, target: Array) -> None:
    block = places.Count(address(first), address(target), *target.shape)
    b.emit(places.count, block, [first], [target])


def _gather(b: Builder, rows: Array, given: Array, target: Array) -> None:
    size = rows.strides[0]
    block = moves.Rows(
        address(rows), address(target), address(given), 1, given.size, len(rows), size
    )
    b.emit(moves.rows, block, [rows, given], [target])
