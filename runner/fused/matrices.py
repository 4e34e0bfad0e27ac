"""Weights of products, as the kernels read them: from the tensors of a model's operators."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from onnx_inplace.compiler.matrices import ProductWeights
from onnx_inplace.compiler.recovered import BLOCK, Codes
from onnx_inplace.numba_kernels import floats
from onnx_inplace.numba_kernels.fused import panels
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.attend import KINDS


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """Repacked weights of one product.

    Attributes:
        layout: of ``data``.
        data: (layout.nbytes) uint8.
        bias: in the order of the panels, float32, or None.
    """

    layout: panels.Layout
    data: Array
    bias: Array | None


@dataclasses.dataclass(frozen=True, slots=True)
class Unpacked:
    """Weights of one product that are read, and not yet repacked.

    Attributes:
        layout: that they will have.
        write: repacks them into (``layout.nbytes``) uint8.
        bias: in the order of the panels, float32, or None.
    """

    layout: panels.Layout
    write: Callable[[Array], None]
    bias: Array | None


def read(weights: ProductWeights) -> Unpacked:
    """Read the weights of a ``Product``, and decide how they will lie.

    Raises:
        ValueError: its matrices cannot be one.
    """
    biases = [
        None if b is None else b.numpy().reshape(-1).astype(np.float32) for b in weights.biases
    ]
    codes, gate = weights.codes(), weights.gate
    if codes is not None:
        if gate and len(codes) == 1:
            codes = _halves(codes[0])
        matrices = [panels.Codes(*_fields(c)) for c in codes]
        layout = panels.layout_codes(matrices)
        write = functools.partial(panels.pack_codes, matrices, layout, gate=gate)
        return Unpacked(layout, write, _bias(biases, [m.outputs for m in matrices], gate))
    numbers = weights.floats()
    if gate and len(numbers) == 1:
        half = len(numbers[0]) // 2
        numbers = [numbers[0][:half], numbers[0][half:]]
    kind = KINDS[numbers[0].dtype]
    if kind == floats.BFLOAT16:
        numbers = [m.view(np.uint16) for m in numbers]
    layout = panels.layout_floats(numbers, kind)
    write = functools.partial(panels.pack_floats, numbers, layout, gate=gate)
    return Unpacked(layout, write, _bias(biases, [len(m) for m in numbers], gate))


def fits(layout: panels.Layout, weights: ProductWeights) -> bool:
    """Whether weights of this layout are as many as a product reads."""
    if layout.bits not in (0, 4, 8) or layout.kind not in KINDS.values() or layout.correction > 2:
        return False
    steps = weights.inputs // BLOCK if layout.bits else weights.inputs
    return (layout.panels, layout.steps) == (-(-weights.outputs // panels.PANEL), steps)


def _fields(codes: Codes) -> tuple[int, Array, Array, Array | None, Array | None]:
    return codes.bits, codes.codes, codes.scales, codes.zero_points, codes.minimums


def _bias(biases: Sequence[Array | None], outputs: Sequence[int], gate: bool) -> Array | None:
    if all(b is None for b in biases):
        return None
    if len(biases) < len(outputs):  # one product, whose halves are gate and what it gates
        (whole,) = biases
        assert whole is not None
        biases = [whole[: outputs[0]], whole[outputs[0] :]]
    return panels.pack_bias(biases, outputs, gate)


def _halves(codes: Codes) -> list[Codes]:
    half = len(codes.codes) // 2

    def part(array: Array | None, where: slice) -> Array | None:
        return None if array is None else array[where]

    return [
        Codes(
            codes.bits,
            codes.codes[where],
            codes.scales[where],
            part(codes.zero_points, where),
            part(codes.minimums, where),
        )
        for where in (slice(half), slice(half, None))
    ]
