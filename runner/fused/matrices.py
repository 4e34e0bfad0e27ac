"""Weights of products, as the kernels read them: from the tensors of a model's operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from onnx_inplace.compiler.fused import Fused, Operation
from onnx_inplace.numba_kernels import floats
from onnx_inplace.numba_kernels.fused import panels, recover
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.attend import KINDS
from onnx_inplace.runner.fused.buffers import aligned
from onnx_inplace.runner.fused.weights import Weights

FLOATS = ("MatMul", "Gemm")
_WORTH_A_SEARCH = 1 << 20  # numbers: smaller float32 weights cost little as they are


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """Repacked weights of one product.

    ``bias``: in the order of the panels, or None.
    """

    layout: panels.Layout
    data: Array
    bias: Array | None
    outputs: int  # of all matrices

    @property
    def nbytes(self) -> int:
        """Bytes of weights and bias."""
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)


def pack(region: Fused, product: Operation, weights: Weights) -> Packed:
    """The weights of a ``Product``, made once for a session.

    Raises:
        ValueError: its matrices cannot be one.
    """
    matrices: tuple[Operation, ...] = product.attributes["matrices"]
    biases: tuple[int | None, ...] = product.attributes["biases"]
    gate: bool = product.attributes["gate"]
    indices = [k for o in matrices for k in o.inputs[1:]] + list(biases)
    tensors = [None if k is None else region.values[k].constant for k in indices]
    form = f"product {gate} " + " ".join(o.op_type for o in matrices)

    def numbers(index: int | None) -> Array | None:
        if index is None:
            return None
        tensor = region.values[index].constant
        assert tensor is not None
        return tensor.numpy()

    def make() -> Packed:
        rows = [None if b is None else _row(numbers(b)) for b in biases]
        if matrices[0].op_type in FLOATS:
            return _floats([_matrix(o, numbers(o.inputs[1])) for o in matrices], rows, gate)
        codes = [_codes(o, [numbers(k) for k in o.inputs[1:5]]) for o in matrices]
        return _of_codes(codes, rows, gate)

    return weights.made(form, tensors, make)


def _of_codes(codes: list[panels.Codes], biases: list[Array | None], gate: bool) -> Packed:
    if gate and len(codes) == 1:
        codes = _halves(codes[0])
    layout = panels.layout_codes(codes)
    data = aligned(layout.nbytes)
    panels.pack_codes(codes, layout, data, gate)
    outputs = [c.outputs for c in codes]
    return Packed(layout, data, _bias(biases, outputs, gate), sum(outputs))


def _floats(matrices: list[Array], biases: list[Array | None], gate: bool) -> Packed:
    if all(m.dtype == np.float32 and m.size >= _WORTH_A_SEARCH for m in matrices):
        found = [recover.codes(m) for m in matrices]
        codes = [c for c in found if c is not None]
        if len(codes) == len(matrices):
            return _of_codes(codes, biases, gate)
    if gate and len(matrices) == 1:
        half = len(matrices[0]) // 2
        matrices = [matrices[0][:half], matrices[0][half:]]
    kind = KINDS[matrices[0].dtype]
    if kind == floats.BFLOAT16:
        matrices = [m.view(np.uint16) for m in matrices]
    layout = panels.layout_floats(matrices, kind)
    data = aligned(layout.nbytes)
    panels.pack_floats(matrices, layout, data, gate)
    outputs = [len(m) for m in matrices]
    return Packed(layout, data, _bias(biases, outputs, gate), sum(outputs))


def _bias(biases: Sequence[Array | None], outputs: Sequence[int], gate: bool) -> Array | None:
    if all(b is None for b in biases):
        return None
    if len(biases) < len(outputs):  # one product, whose halves are gate and what it gates
        (whole,) = biases
        assert whole is not None
        biases = [whole[: outputs[0]], whole[outputs[0] :]]
    return panels.pack_bias(biases, outputs, gate)


def _row(bias: Array | None) -> Array:
    assert bias is not None
    return bias.reshape(-1).astype(np.float32)


def _matrix(o: Operation, weight: Array | None) -> Array:
    """(outputs, inputs)."""
    assert weight is not None
    return weight if o.attributes.get("transB", 0) else weight.T


def _codes(o: Operation, arrays: list[Array | None]) -> panels.Codes:
    """A matrix of MatMulNBits: zero points, or minima where they are no integers."""
    bits, size, outputs = o.attributes["bits"], o.attributes["block_size"], o.attributes["N"]
    blocks = -(-o.attributes["K"] // size)
    arrays += [None] * (4 - len(arrays))
    codes, scales, zeros, remainder = arrays
    assert codes is not None and scales is not None
    codes = codes.reshape(outputs, blocks, size * bits // 8)
    scales = scales.reshape(outputs, blocks)
    if zeros is not None and zeros.dtype == np.uint8:
        zeros = _unpacked(zeros.reshape(outputs, -1), bits)[:, :blocks]
    elif zeros is not None:
        zeros = zeros.reshape(outputs, blocks).astype(np.float32)
    if remainder is not None:
        minimums = _minimums(scales, zeros, remainder.T, bits)
        return panels.Codes(bits, codes, scales, minimums=minimums)
    if zeros is not None and zeros.dtype != np.uint8:
        minimums = -scales.astype(np.float32) * zeros
        return panels.Codes(bits, codes, scales, minimums=minimums)
    return panels.Codes(bits, codes, scales, zeros)


def _unpacked(zeros: Array, bits: int) -> Array:
    if bits == 8:
        return zeros
    return np.stack([zeros & 15, zeros >> 4], axis=-1).reshape(len(zeros), -1)


def _minimums(scales: Array, zeros: Array | None, remainder: Array, bits: int) -> Array:
    """``scale * (q - zero) + remainder = scale * q + minimum``.

    The remainder of a minimum that was stored in float16 has been rounded to float32; where the
    float16 beside the difference gives the same remainder, it is what was meant.
    """
    wide = scales.astype(np.float32)
    zero: Array | np.float32
    zero = (
        np.float32(panels.default_zero_point(bits)) if zeros is None else zeros.astype(np.float32)
    )
    minimums = (remainder.astype(np.float64) - wide.astype(np.float64) * zero).astype(np.float32)
    with np.errstate(over="ignore"):
        near = minimums.astype(np.float16).astype(np.float32)
    if np.array_equal(near + wide * zero, remainder):
        return near
    return minimums


def _halves(codes: panels.Codes) -> list[panels.Codes]:
    half = codes.outputs // 2

    def part(array: Array | None, where: slice) -> Array | None:
        return None if array is None else array[where]

    return [
        panels.Codes(
            codes.bits,
            codes.codes[where],
            codes.scales[where],
            part(codes.zero_points, where),
            part(codes.minimums, where),
        )
        for where in (slice(half), slice(half, None))
    ]
