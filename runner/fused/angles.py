"""Rotary embeddings: angles by position, gathered once for all layers, and what turns heads."""

from __future__ import annotations

import numpy as np

from onnx_inplace.compiler import errors
from onnx_inplace.numba_kernels.fused import moves, places, rotary
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.attend import KINDS
from onnx_inplace.runner.fused.table import Bound, Builder, NotFused

KERNELS = (places.count, moves.rows)
"""What instructions for angles name."""


def of_places(b: Builder, table: int | None, index: int, tokens: tuple[int, int]) -> Array:
    """(batch, tokens, half) float32: rows of a table (positions, half).

    ``index``: position_ids, (batch, tokens) int64, or (1): of the first token of each row.
    """
    count, given = len(b.array(table)), b.array(index)
    if given.shape not in (tokens, (1,)):
        raise NotFused(f"RotaryEmbedding with positions {given.shape}")
    first = given.shape != tokens
    end, name = count - (tokens[1] - 1 if first else 0), b.value(index).name

    def fail(numbers: Array) -> None:
        raise errors.OperatorError(
            f"RotaryEmbedding: `{name}` is {numbers.ravel().tolist()}, for angles of "
            f"{count} positions"
        )

    b.bounds.append(Bound(index, 0, end, fail))
    found = given
    if first:
        found = b.derived(
            index, f"from {tokens}", tokens, np.int64, lambda to: _count(b, given, to)
        )
    return at(b, table, found, index)


def at(b: Builder, table: int | None, places: Array, owner: int) -> Array:
    """(batch, tokens, half) float32: rows of a table (positions, half), which are checked.

    ``places``: (batch, tokens) int64, made of the value ``owner``.
    """
    rows = b.array(table)
    if rows.ndim != 2:
        raise NotFused(f"RotaryEmbedding with angles {rows.shape}")

    def gather(target: Array) -> None:
        fixed = b.value(table or 0).constant is not None and rows.dtype != np.float32
        source = b.lasting(rows.astype(np.float32)) if fixed else b.contiguous(rows)
        _gather(b, source, places, target)

    shape = (*places.shape, rows.shape[1])
    return b.derived(owner, f"angles of {table} at {address(places)}", shape, np.float32, gather)


def _count(b: Builder, first: Array, target: Array) -> None:
    block = places.Count(address(first), address(target), *target.shape)
    b.emit(places.count, block, [first], [target])


def _gather(b: Builder, rows: Array, given: Array, target: Array) -> None:
    size = rows.strides[0]
    block = moves.Rows(
        address(rows), address(target), address(given), 1, given.size, len(rows), size
    )
    b.emit(moves.rows, block, [rows, given], [target])


def turn(
    source: Array, target: Array, angles: tuple[Array, Array] | None, interleaved: int
) -> rotary.Rotary:
    """Turns heads, or only converts them where there are no angles.

    Shapes:
        source, target: (batch, heads, tokens, head_size), the last axis contiguous
        angles:         cosines and sines, (batch, tokens, half) float32 each
    """
    batch, heads, tokens, size = source.shape
    cos, sin = (None, None) if angles is None else angles
    return rotary.Rotary(
        input=address(source),
        output=address(target),
        cos=0 if cos is None else address(cos),
        sin=0 if sin is None else address(sin),
        batch=batch,
        heads=heads,
        tokens=tokens,
        size=size,
        half=0 if cos is None else cos.shape[2],
        layout=rotary.PLAIN if cos is None else interleaved,
        kind=KINDS[target.dtype],
        input_batch=source.strides[0],
        input_head=source.strides[1],
        input_token=source.strides[2],
        output_batch=target.strides[0],
        output_head=target.strides[1],
        output_token=target.strides[2],
        angle_batch=0 if cos is None else cos.strides[0],
        angle_token=0 if cos is None else cos.strides[1],
        position=0,
        capacity=0,
        units=heads,
    )
