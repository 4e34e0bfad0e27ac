"""Templates of what works on whole rows: norms and rotary embeddings."""

from __future__ import annotations

import numpy as np

from onnx_inplace.compiler.fused import Operation
from onnx_inplace.numba_kernels import layout
from onnx_inplace.numba_kernels.fused import elementwise as arithmetic
from onnx_inplace.numba_kernels.fused import halves, norms, quantize
from onnx_inplace.numba_kernels.fused import rotary as turning
from onnx_inplace.numba_kernels.fused.elementwise import Two
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.fused import angles, elementwise, products
from onnx_inplace.runner.fused.table import Builder, NotFused
from onnx_inplace.runner.fused.template import template


@template(norms.norm)
def norm(b: Builder, o: Operation) -> None:
    """RMS or layer normalization over the last axis."""
    bias = o.inputs[2] if len(o.inputs) > 2 else None
    source = b.contiguous(b.array(o.inputs[0]))
    _normalize(b, o, source, None, bias, centered=o.op_type == "LayerNormalization")


@template(norms.norm, arithmetic.binary)
def skip_norm(b: Builder, o: Operation) -> None:
    """SkipLayerNormalization and its RMS form: of a sum, which is a result as well."""
    centered = o.op_type == "SkipLayerNormalization"
    bias = o.inputs[3] if centered and len(o.inputs) > 3 else None
    last = 4 if centered else 3
    added = o.inputs[last] if len(o.inputs) > last else None
    source = b.contiguous(b.array(o.inputs[0]))
    skip = b.array(o.inputs[1])
    rows = source.shape[-2:]  # what the library lets every sequence of a batch share
    if skip.shape not in (source.shape, rows, (1, *rows)) or skip.ndim not in (2, source.ndim):
        raise NotFused(f"{o.op_type} of {source.shape} with a skip of {skip.shape}")
    skip = b.contiguous(np.broadcast_to(skip, source.shape))
    if added is not None:  # a row that is added to the sum
        sum_ = b.temporary(source.shape)
        elementwise.binary_of(b, Two.ADD, source, b.array(added), sum_)
        source = sum_
    _normalize(b, o, source, skip, bias, centered=centered)


def _normalize(
    b: Builder,
    o: Operation,
    source: Array,
    skip: Array | None,
    bias: int | None,
    *,
    centered: bool,
) -> None:
    """The norm of ``source + skip``; the sum goes to the fourth output, where there is one."""
    scale = b.contiguous(b.array(o.inputs[1 if skip is None else 2]))
    added = None if bias is None else b.contiguous(b.array(bias))
    columns = source.shape[-1]
    rows = source.size // columns
    sums = o.outputs[3] if len(o.outputs) > 3 else None
    total = None
    if sums is not None:
        total, summed = b.writing(sums)
    planes = products.planes_of(b, o.outputs[0]) or 0
    output, codes, each, row = 0, 0, 0, 0
    if planes:  # every thread for itself, with the integers that products take
        row = quantize.row_bytes(columns, planes)
        own = b.private(o.outputs[0] or 0, planes, 4 * source.size, rows * row)
        output, codes, each = address(own.memory), own.place, own.each
    else:
        target, written = b.writing(o.outputs[0])
        output = address(target)
    block = norms.Norm(
        input=address(source),
        skip=0 if skip is None else address(skip),
        total=0 if total is None else address(total),
        scale=address(scale),
        bias=0 if added is None else address(added),
        output=output,
        codes=codes,
        rows=rows,
        columns=columns,
        input_row=4 * columns,
        skip_row=4 * columns,
        total_row=4 * columns,
        output_row=4 * columns,
        codes_row=row,
        centered=int(centered),
        epsilon=layout.bits(o.attributes.get("epsilon", 1e-5 if skip is None else 1e-12)),
        planes=planes,
        each=each,
    )
    reads = [array for array in (source, skip, scale, added) if array is not None]
    writes = [] if total is None else [total]
    if planes:
        b.emit(norms.norm, block, reads, writes, first=False)
    else:
        b.emit(norms.norm, block, reads, [*writes, target])
        written()
    if sums is not None:
        summed()


@template(turning.rotary, *angles.KERNELS)
def rotary(b: Builder, o: Operation) -> None:
    """RotaryEmbedding of (batch, heads, tokens, size), or of (batch, tokens, heads * size).

    Both operators of this name; tables are the angles of every token, or of every position.
    """
    microsoft = o.domain == "com.microsoft"
    inputs = (*o.inputs, None)[:4]
    tables, places = (inputs[2:], inputs[1]) if microsoft else (inputs[1:3], inputs[3])
    source = b.array(inputs[0])
    target, written = b.writing(o.outputs[0])
    output = target
    if source.ndim == 3:
        heads = o.attributes["num_heads"]
        split = (*source.shape[:2], heads, source.shape[2] // heads)
        source = b.contiguous(source).reshape(split).transpose(0, 2, 1, 3)
        output = target.reshape(split).transpose(0, 2, 1, 3)
    if source.dtype != np.float32 or source.strides[-1] != 4:
        source = b.contiguous(source)
    batch, heads, tokens, size = source.shape
    if places is None:
        cos, sin = (b.contiguous(b.array(k)) for k in tables)
    else:
        cos, sin = (angles.of_places(b, table, places, (batch, tokens)) for table in tables)
    rotated = o.attributes.get("rotary_embedding_dim", 0) or size
    if cos.shape != (batch, tokens, rotated // 2) or sin.shape != cos.shape:
        raise NotFused(f"RotaryEmbedding with angles {cos.shape}")
    block = angles.turn(source, output, (cos, sin), o.attributes.get("interleaved", 0))
    b.emit(turning.rotary, block, [source, cos, sin], [output])
    written()


@template(halves.turn)
def turn(b: Builder, o: Operation) -> None:
    """``Turn`` of ``compiler.rewrite_rules``: a rotation by tables of whole heads."""
    x, cos, sin = (_in_rows(b, b.array(k)) for k in o.inputs)
    target, written = b.writing(o.outputs[0])
    batch, heads, tokens, size = x.shape
    steps = [np.broadcast_to(a, x.shape).strides[:3] for a in (x, target, cos, sin)]
    block = halves.Turn(
        address(x),
        address(target),
        address(cos),
        address(sin),
        batch,
        heads,
        tokens,
        size // 2,
        *(step for strides in steps for step in strides),
    )
    b.emit(halves.turn, block, [x, cos, sin], [target])
    written()


def _in_rows(b: Builder, array: Array) -> Array:
    """Float32 whose last axis lies side by side."""
    if array.dtype == np.float32 and array.strides[-1] == 4:
        return array
    return b.contiguous(array)
