"""Template of products with weights, and of what follows them element by element."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from onnx_inplace.compiler import fused
from onnx_inplace.compiler import matrices as compiled
from onnx_inplace.compiler.fused import Fused, Operation
from onnx_inplace.numba_kernels import specialise
from onnx_inplace.numba_kernels.fused import product as kernels
from onnx_inplace.numba_kernels.fused import product_codes, product_floats, quantize
from onnx_inplace.numba_kernels.fused.elementwise import One
from onnx_inplace.numba_kernels.memory import OnDemand, address
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.fused.elementwise import ACTIVATIONS, GATES
from onnx_inplace.runner.fused.matrices import Packed
from onnx_inplace.runner.fused.table import Builder, NotFused
from onnx_inplace.runner.fused.template import Loading, template
from onnx_inplace.runner.fused.weights import Weights

_EIGHT_BITS = 4  # the accuracy_level that lets activations be rounded to 8 bits; others get 24


def _kernels(loading: Loading, o: Operation) -> Iterator[OnDemand]:
    """Those of the packed weights, for each number of rows."""
    packed = _pack(loading.region, o, loading.weights)
    if packed.layout.bits:
        yield quantize.quantize
    for rows in loading.rows(o.inputs[0]):
        yield _kernel(packed, _planes(o), rows, loading.portable)


def _pack(region: Fused, o: Operation, weights: Weights) -> Packed:
    try:
        return weights.packed(compiled.of(region, o))
    except ValueError as error:
        raise NotFused(str(error)) from None


@template(_kernels)
def product(b: Builder, o: Operation) -> None:
    """``Product`` of ``compiler.patterns``."""
    packed = _pack(b.region, o, b.weights)
    source, residual = o.inputs
    assert source is not None
    shape = b.shape(source)
    inputs, rows = shape[-1], math.prod(shape[:-1])
    added = None if residual is None else b.contiguous(b.array(residual))
    target, written = b.writing(o.outputs[0])
    gate, activation = o.attributes["gate"], o.attributes["activation"]
    outputs = target.shape[-1]
    activations, row, each, reads = _activations(b, o, source, packed)
    block = kernels.Product(
        weights=address(packed.data),
        activations=activations,
        activation_row=row,
        each=each,
        inputs=inputs,
        outputs=outputs,
        output=address(target),
        output_row=4 * outputs,
        bias=0 if packed.bias is None else address(packed.bias),
        residual=0 if added is None else address(added),
        residual_row=4 * outputs,
        operation=ACTIVATIONS[activation] if activation and not gate else One.IDENTITY,
        gate=GATES[activation] if gate else 0,
        next_weights=0,
        next_panels=0,
        next_panel_bytes=0,
    )
    reads += [] if added is None else [added]
    kernel = _kernel(packed, _planes(o), rows, b.portable)
    b.emit(kernel, block, reads, [target], first=False, streamed=packed.data.nbytes)
    written()
    b.panels[block.weights] = packed.layout.panels, packed.layout.panel_bytes


def _planes(o: Operation) -> int:
    levels = {m.attributes.get("accuracy_level", 0) for m in o.attributes["matrices"]}
    return 1 if levels == {_EIGHT_BITS} else 3


def planes_of(b: Builder, index: int | None) -> int | None:
    """Planes of a value that only products read, as integers; None: others read it, too."""
    found = set()
    if index is None or index in b.leaving:
        return None
    for o in b.region.operations:
        if index in o.inputs:
            codes = o.domain == fused.DOMAIN and o.op_type == "Product" and o.inputs[1] != index
            codes = codes and o.attributes["matrices"][0].op_type not in compiled.FLOATS
            found.add(_planes(o) if codes else None)
    return found.pop() if len(found) == 1 else None


def _activations(
    b: Builder, o: Operation, source: int | None, packed: Packed
) -> tuple[int, int, int, list[Array]]:
    """Address of rows as the kernel takes them, bytes of a row, ``each``, what others may write.

    Integers beside codes: every thread makes them for itself, which costs less than to wait for
    another one. Float32 beside floats.
    """
    assert source is not None
    planes = _planes(o)
    columns = b.shape(source)[-1]
    row = quantize.row_bytes(columns, planes)
    if not packed.layout.bits:
        x = b.array(source)
        if x.dtype != np.float32 or not x.flags.c_contiguous:
            x = b.derived(source, "float32", x.shape, np.float32, lambda to: b.move(x, to))
        return address(x), 4 * columns, 0, [x]
    codes = b.codes(source, planes)
    if codes is None:
        x = b.contiguous(b.array(source))
        rows = x.size // columns
        codes = b.private(source, planes, 0, rows * row)
        block = quantize.Quantize(
            input=address(x),
            output=codes.place,
            rows=rows,
            columns=columns,
            input_row=4 * columns,
            output_row=row,
            planes=planes,
            each=codes.each,
        )
        b.emit(quantize.quantize, block, [x], [], first=False)
    return codes.place, row, codes.each, []


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
