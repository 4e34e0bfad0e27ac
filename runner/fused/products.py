"""Template of products with weights, and of what follows them element by element."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from onnx_inplace.compiler.fused import Operation
from onnx_inplace.numba_kernels import specialise
from onnx_inplace.numba_kernels.fused import product as kernels
from onnx_inplace.numba_kernels.fused import product_codes, product_floats, quantize
from onnx_inplace.numba_kernels.fused.elementwise import One
from onnx_inplace.numba_kernels.memory import OnDemand, address
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.fused import matrices
from onnx_inplace.runner.fused.elementwise import GATES, UNARY
from onnx_inplace.runner.fused.matrices import Packed
from onnx_inplace.runner.fused.table import Builder, NotFused

_EIGHT_BITS = 4  # the accuracy_level that lets activations be rounded to 8 bits


def product(b: Builder, o: Operation) -> None:
    """``Product`` of ``compiler.patterns``."""
    try:
        packed = matrices.pack(b.region, o, b.weights)
    except ValueError as error:
        raise NotFused(str(error)) from None
    source, residual = o.inputs
    x = b.array(source)
    inputs = x.shape[-1]
    rows = x.size // inputs
    added = None if residual is None else b.contiguous(b.array(residual))
    target, written = b.writing(o.outputs[0])
    gate, activation = o.attributes["gate"], o.attributes["activation"]
    outputs = target.shape[-1]
    activations = _activations(b, o, source, x, packed)
    block = kernels.Product(
        weights=address(packed.data),
        activations=address(activations),
        activation_row=activations.nbytes // rows,
        each=0,
        inputs=inputs,
        outputs=outputs,
        output=address(target),
        output_row=4 * outputs,
        bias=0 if packed.bias is None else address(packed.bias),
        residual=0 if added is None else address(added),
        residual_row=4 * outputs,
        operation=UNARY[activation] if activation and not gate else One.IDENTITY,
        gate=GATES[activation] if gate else 0,
        next_weights=0,
        next_panels=0,
        next_panel_bytes=0,
    )
    reads = [activations] + ([] if added is None else [added])
    b.emit(_kernel(packed, _planes(o), rows, b.portable), block, reads, [target], first=False)
    written()
    b.work += float(packed.data.size)
    b.panels[block.weights] = packed.layout.panels, packed.layout.panel_bytes


def _planes(o: Operation) -> int:
    levels = {m.attributes.get("accuracy_level", 0) for m in o.attributes["matrices"]}
    return 1 if levels == {_EIGHT_BITS} else 2


def _activations(b: Builder, o: Operation, source: int | None, x: Array, packed: Packed) -> Array:
    """Rows as the kernel takes them: integers beside codes, float32 beside floats."""
    assert source is not None
    columns, planes = x.shape[-1], _planes(o)
    rows = x.size // columns
    if not packed.layout.bits:
        if x.dtype == np.float32 and x.flags.c_contiguous:
            return x
        return b.derived(source, "float32", x.shape, np.float32, lambda to: b.move(x, to))

    def fill(to: Array) -> None:
        numbers = b.contiguous(x)
        block = quantize.Quantize(
            address(numbers),
            address(to),
            rows,
            columns,
            4 * columns,
            quantize.row_bytes(columns, planes),
            planes,
            0,
        )
        b.emit(quantize.quantize, block, [numbers], [to])

    size = quantize.row_bytes(columns, planes)
    return b.derived(source, f"{planes} planes", (rows, size), np.uint8, fill)


def _kernel(packed: Packed, planes: int, rows: int, portable: bool) -> OnDemand:
    layout, plain = packed.layout, int(portable)
    if layout.bits:
        codes = layout.bits, layout.kind, layout.correction, planes, rows, plain
        found: OnDemand = specialise.specialise(product_codes, *codes).multiply
        return found
    found = specialise.specialise(product_floats, layout.kind, rows, plain).multiply
    return found


def link(b: Builder) -> None:
    """Each product asks for the first weights of the next one while it ends."""
    products = [k for k, i in enumerate(b.instructions) if isinstance(i.block, kernels.Product)]
    for k, after in itertools.pairwise(products):
        following = b.instructions[after]
        block, next_ = b.instructions[k].block, following.block
        assert isinstance(block, kernels.Product) and isinstance(next_, kernels.Product)
        panels, size = b.panels[next_.weights]
        linked = block._replace(
            next_weights=next_.weights, next_panels=panels, next_panel_bytes=size
        )
        b.instructions[k] = dataclasses.replace(b.instructions[k], block=linked)
