"""Templates of what makes one number of many: reductions, the largest one's place, softmax.

Kernels take rows. Axes that do not stand last are brought there by a copy.
"""

from __future__ import annotations

import math

import numpy as np

from onnx_inplace.compiler.fused import Operation
from onnx_inplace.numba_kernels.fused import reductions as kernels
from onnx_inplace.numba_kernels.fused.reductions import Of
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.fused.table import Builder
from onnx_inplace.runner.fused.template import template

REDUCTIONS = {
    "ReduceSum": Of.SUM,
    "ReduceMean": Of.MEAN,
    "ReduceMax": Of.MAXIMUM,
    "ReduceMin": Of.MINIMUM,
}


@template(kernels.reduce)
def reduce(b: Builder, o: Operation) -> None:
    """ReduceSum, ReduceMean, ReduceMax, ReduceMin over any axes."""
    source = b.array(o.inputs[0])
    axes = _axes(b, o, source.ndim)
    target, written = b.writing(o.outputs[0])
    if not axes:  # noop_with_empty_axes: the numbers themselves
        b.move(source, target.reshape(source.shape))
        written()
        return
    rows, columns = _rows(b, source, axes)
    block = kernels.Reduce(
        REDUCTIONS[o.op_type], address(rows), address(target), target.size, columns, 4 * columns
    )
    b.emit(kernels.reduce, block, [rows], [target])
    written()


def _axes(b: Builder, o: Operation, rank: int) -> tuple[int, ...]:
    """What is reduced: an input, or in older versions an attribute; without any, all or nothing."""
    given = b.integers(o.inputs[1]) if len(o.inputs) > 1 else o.attributes.get("axes")
    if given is None or not len(given):
        return () if o.attributes.get("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({axis % rank for axis in given}))


def _rows(b: Builder, source: Array, axes: tuple[int, ...]) -> tuple[Array, int]:
    """Float32 rows side by side, each of the numbers that become one; numbers of a row."""
    columns = math.prod(source.shape[axis] for axis in axes)
    behind = tuple(range(source.ndim - len(axes), source.ndim))
    return b.contiguous(np.moveaxis(source, axes, behind)), columns


@template(kernels.largest)
def argmax(b: Builder, o: Operation) -> None:
    """ArgMax along an axis: the first place of the largest number."""
    source = b.array(o.inputs[0])
    axis = o.attributes.get("axis", 0) % source.ndim
    rows, columns = _rows(b, source, (axis,))
    target = b.result(o.outputs[0])
    block = kernels.Largest(address(rows), address(target), target.size, columns, 4 * columns)
    b.emit(kernels.largest, block, [rows], [target])


@template(kernels.softmax)
def softmax(b: Builder, o: Operation) -> None:
    """Softmax along an axis."""
    source = b.array(o.inputs[0])
    axis = o.attributes.get("axis", -1) % source.ndim
    rows, columns = _rows(b, source, (axis,))
    target, written = b.writing(o.outputs[0])
    last = axis == source.ndim - 1
    result = target if last else b.temporary(rows.shape)
    block = kernels.Softmax(
        address(rows), address(result), rows.size // columns, columns, 4 * columns, 4 * columns
    )
    b.emit(kernels.softmax, block, [rows], [result])
    if not last:
        b.move(np.moveaxis(result, -1, axis), target)
    written()
