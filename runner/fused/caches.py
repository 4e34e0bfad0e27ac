"""Templates of writes: new tokens of a cache."""

from __future__ import annotations

import itertools
import math

from onnx_inplace.compiler import errors
from onnx_inplace.compiler.fused import Operation
from onnx_inplace.numba_kernels.fused import moves
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.fused.table import Bound, Builder, NotFused
from onnx_inplace.runner.fused.template import template


@template(moves.tokens)
def update(b: Builder, o: Operation) -> None:
    """CacheUpdate and TensorScatter with one position."""
    cache, values = b.array(o.inputs[0]), b.array(o.inputs[1])
    position = o.inputs[2] if len(o.inputs) > 2 else None
    axis = o.attributes.get("axis", -2) % cache.ndim
    circular = o.attributes.get("mode", "linear") == "circular"
    capacity, length, root = cache.shape[axis], values.shape[axis], o.roots[0]
    if values.dtype != cache.dtype or length > capacity:
        raise NotFused(f"{o.op_type} of {values.dtype}{values.shape} into {cache.shape}")
    rest = cache.shape[:axis], cache.shape[axis + 1 :]
    if (values.shape[:axis], values.shape[axis + 1 :]) != rest:
        raise NotFused(f"{o.op_type} of {values.shape} into {cache.shape}")
    if position is not None:
        row = 0 if b.shape(position) else None

        def fail(numbers: Array) -> None:
            raise errors.CapacityError(root, int(numbers.item()), length, capacity, row)

        end = 2**63 if circular else capacity - length + 1
        b.bounds.append(Bound(position, 0, end, fail))
    place = None if position is None else b.array(position)
    rows, token = math.prod(rest[0]), math.prod(rest[1]) * cache.itemsize
    rows_view = _rows(values, axis, token)
    if rows_view is None:
        values = b.contiguous(values, values.dtype)
        rows_view = length * token, token
    block = moves.Tokens(
        address(cache),
        address(values),
        0 if place is None else address(place),
        rows,
        capacity,
        length,
        token,
        *rows_view,
        int(circular),
    )
    b.emit(moves.tokens, block, [values] + ([] if place is None else [place]), [cache])
    b.view(o.outputs[0], cache)


def _rows(values: Array, axis: int, token: int) -> tuple[int, int] | None:
    """Bytes from row to row and from token to token, where both are the same everywhere."""
    inner = values.itemsize
    for size, stride in zip(values.shape[:axis:-1], values.strides[:axis:-1], strict=True):
        if size > 1 and stride != inner:
            return None
        inner *= size
    lead = [(d, s) for d, s in zip(values.shape[:axis], values.strides, strict=False) if d > 1]
    if not lead:
        return 0, values.strides[axis]
    if any(s != d * t for (_, s), (d, t) in itertools.pairwise(lead)):
        return None
    return lead[-1][1], values.strides[axis]
