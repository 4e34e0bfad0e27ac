"""Templates of what only arranges elements: other names of bytes where possible, else copies."""

from __future__ import annotations

import numpy as np

from onnx_inplace.compiler import errors
from onnx_inplace.compiler.fused import Operation
from onnx_inplace.numba_kernels.fused import moves
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.fused.table import Bound, Builder, NotFused
from onnx_inplace.runner.fused.template import template


@template()
def reshape(b: Builder, o: Operation) -> None:
    """Identity, Reshape, Squeeze, Unsqueeze, Flatten: the plan knows the shape."""
    source, output = b.array(o.inputs[0]), o.outputs[0]
    assert output is not None
    shape = b.shape(output)
    if source.size != int(np.prod(shape, dtype=np.int64)):
        raise NotFused(f"{o.op_type} of {source.shape} to {shape}")
    if _viewable(source, shape):
        b.view(output, source.reshape(shape))
    else:
        target = b.result(output)
        b.move(source, target.reshape(source.shape))


def _viewable(array: Array, shape: tuple[int, ...]) -> bool:
    if array.flags.c_contiguous:
        return True
    return np.shares_memory(array.reshape(shape), array) if array.size else False


@template()
def transpose(b: Builder, o: Operation) -> None:
    """Transpose: other strides."""
    source = b.array(o.inputs[0])
    order = o.attributes.get("perm")
    b.view(o.outputs[0], source.transpose(None if order is None else list(order)))


@template()
def split(b: Builder, o: Operation) -> None:
    """Split: parts of an axis."""
    source, begin = b.array(o.inputs[0]), 0
    axis = o.attributes.get("axis", 0) % source.ndim
    given = b.integers(o.inputs[1]) if len(o.inputs) > 1 else o.attributes.get("split")
    even = -(-source.shape[axis] // len(o.outputs))  # the last part may be smaller
    for output, size in zip(o.outputs, given or [even] * len(o.outputs), strict=True):
        if output is not None:
            b.view(output, _part(source, axis, slice(begin, begin + size)))
        begin += size


@template()
def slice_(b: Builder, o: Operation) -> None:
    """Slice: other strides and another begin."""
    source = b.array(o.inputs[0])
    inputs = (*o.inputs, *[None] * (5 - len(o.inputs)))
    starts, ends, axes, steps = (b.integers(k) for k in inputs[1:5])
    if starts is None or ends is None:
        raise NotFused("Slice without starts or ends")
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = source.shape[axis]
        if step < 0:
            raise NotFused("Slice backwards")
        low = min(max(start + size if start < 0 else start, 0), size)
        high = min(max(end + size if end < 0 else end, low), size)
        source = _part(source, axis % source.ndim, slice(low, high, step))
    b.view(o.outputs[0], source)


def _part(array: Array, axis: int, part: slice) -> Array:
    view: Array = array[(slice(None),) * axis + (part,)]
    return view


@template()
def concat(b: Builder, o: Operation) -> None:
    """Concat: copies into one place."""
    target, begin = b.result(o.outputs[0]), 0
    axis = o.attributes["axis"] % target.ndim
    for index in o.inputs:
        source = b.array(index)
        size = source.shape[axis]
        b.move(source, _part(target, axis, slice(begin, begin + size)))
        begin += size


@template()
def cast(b: Builder, o: Operation) -> None:
    """Cast between floats."""
    source, output = b.array(o.inputs[0]), o.outputs[0]
    assert output is not None
    if source.dtype == b.dtype(output):
        b.view(output, source)
    else:
        b.move(source, b.result(output))


@template(moves.rows)
def gather(b: Builder, o: Operation) -> None:
    """Gather: one place of an axis is a view; rows of a weight are copied."""
    data, indices = b.array(o.inputs[0]), o.inputs[1]
    assert indices is not None
    axis = o.attributes.get("axis", 0) % data.ndim
    fixed = b.value(indices).content
    if fixed is not None and b.shape(indices) == ():
        (place,) = b.integers(indices) or (0,)
        if not -data.shape[axis] <= place < data.shape[axis]:
            raise NotFused(f"Gather at {place} of {data.shape[axis]}")
        place %= data.shape[axis]
        view = _part(data, axis, slice(place, place + 1))
        b.view(o.outputs[0], view.reshape(data.shape[:axis] + data.shape[axis + 1 :]))
        return
    places, target = b.array(indices), b.result(o.outputs[0])
    if places.dtype not in (np.int64, np.int32) or not data.flags.c_contiguous:
        raise NotFused("Gather with odd indices")
    count, name = len(data), b.value(indices).name

    def fail(numbers: Array) -> None:
        raise errors.OperatorError(
            f"Gather: `{name}` is {numbers.ravel().tolist()}, for {count} rows"
        )

    b.bounds.append(Bound(indices, -count, count, fail))
    block = moves.Rows(
        address(data),
        address(target),
        address(places),
        int(places.dtype == np.int64),
        places.size,
        count,
        data.nbytes // max(count, 1),
    )
    b.emit(moves.rows, block, [places], [target])
