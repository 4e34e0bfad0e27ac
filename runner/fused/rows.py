"""Templates of what works on whole rows: norms and rotary embeddings."""

from __future__ import annotations

import numpy as np

from onnx_inplace.compiler.fused import Operation
from onnx_inplace.numba_kernels import floats, layout
from onnx_inplace.numba_kernels.fused import norms, quantize
from onnx_inplace.numba_kernels.fused import rotary as turning
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.fused import products
from onnx_inplace.runner.fused.table import Builder, NotFused


def norm(b: Builder, o: Operation) -> None:
    """RMS or layer normalization over the last axis."""
    source = b.contiguous(b.array(o.inputs[0]))
    scale = b.contiguous(b.array(o.inputs[1]))
    bias = o.inputs[2] if len(o.inputs) > 2 else None
    added = None if bias is None else b.contiguous(b.array(bias))
    columns = source.shape[-1]
    if scale.size != columns or (added is not None and added.size != columns):
        raise NotFused(f"{o.op_type} with a scale of {scale.shape}")
    rows = source.size // columns
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
        skip=0,
        total=0,
        scale=address(scale),
        bias=0 if added is None else address(added),
        output=output,
        codes=codes,
        rows=rows,
        columns=columns,
        input_row=4 * columns,
        skip_row=0,
        total_row=0,
        output_row=4 * columns,
        codes_row=row,
        centered=int(o.op_type == "LayerNormalization"),
        epsilon=layout.bits(o.attributes.get("epsilon", 1e-5)),
        planes=planes,
        each=each,
    )
    reads = [source, scale, *([] if added is None else [added])]
    if planes:
        b.emit(norms.norm, block, reads, [], first=False)
        return
    b.emit(norms.norm, block, reads, [target])
    written()


def rotary(b: Builder, o: Operation) -> None:
    """RotaryEmbedding of (batch, heads, tokens, size), or of (batch, tokens, heads * size)."""
    source = b.array(o.inputs[0])
    cos, sin = (b.contiguous(b.array(k)) for k in o.inputs[1:3])
    target, written = b.writing(o.outputs[0])
    output = target
    if source.ndim == 3:
        heads = o.attributes.get("num_heads", 0)
        if not heads:
            raise NotFused("RotaryEmbedding without num_heads")
        split = (*source.shape[:2], heads, source.shape[2] // heads)
        source = b.contiguous(source).reshape(split).transpose(0, 2, 1, 3)
        output = target.reshape(split).transpose(0, 2, 1, 3)
    if source.dtype != np.float32 or source.strides[-1] != 4:
        source = b.contiguous(source)
    batch, heads, tokens, size = source.shape
    rotated = o.attributes.get("rotary_embedding_dim", 0) or size
    if cos.shape != (batch, tokens, rotated // 2) or sin.shape != cos.shape:
        raise NotFused(f"RotaryEmbedding with angles {cos.shape}")
    block = turning.Rotary(
        input=address(source),
        output=address(output),
        cos=address(cos),
        sin=address(sin),
        batch=batch,
        heads=heads,
        tokens=tokens,
        size=size,
        half=rotated // 2,
        layout=o.attributes.get("interleaved", 0),
        kind=floats.FLOAT32,
        input_batch=source.strides[0],
        input_head=source.strides[1],
        input_token=source.strides[2],
        output_batch=output.strides[0],
        output_head=output.strides[1],
        output_token=output.strides[2],
        angle_batch=cos.strides[0],
        angle_token=cos.strides[1],
        position=0,
        capacity=0,
        units=heads,
    )
    b.emit(turning.rotary, block, [source, cos, sin], [output])
    written()
