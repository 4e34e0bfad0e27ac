"""Weights of the products of fused steps: what the model has, read into one form, and their bytes.

A fused step does not multiply by the tensors of the model but by copies in another order
(``numba_kernels.fused.panels``). The compiler runs nothing, so how large a copy will be is said
here beside the kernels' own layout; ``runner.fused.matrices`` makes it, and a test compares. It
depends on numbers as well: what float16 holds exactly is kept in float16, what were 8-bit codes
before are codes again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnx_inplace.compiler import arena, fused
from onnx_inplace.compiler.fused import Fused, Fusion, Operation
from onnx_inplace.compiler.recovered import BLOCK, Codes, recover

Array = npt.NDArray[Any]
Tensor = ir.TensorProtocol

PANEL = 32
"""Outputs that lie together; their number is padded to a multiple."""

FLOATS = ("MatMul", "Gemm")
"""Products whose weights are floats in the model."""

_WORTH_A_SEARCH = 1 << 20  # numbers: smaller float32 weights cost little as they are
_LAYOUT = ("bits", "block_size", "K", "N", "transB")  # attributes that say how numbers lie


@dataclasses.dataclass(frozen=True)
class ProductWeights:
    """What a ``Product`` of ``patterns`` multiplies by and adds.

    Attributes:
        operators: of the model, one, or a gate and what it gates.
        tensors: of each operator, in the order of its inputs; the first one is its matrix.
        biases: one for each operator, or None.
        gate: whether one operator, or two, make a gate and what it gates.
    """

    operators: tuple[Operation, ...]
    tensors: tuple[tuple[Tensor | None, ...], ...]
    biases: tuple[Tensor | None, ...]
    gate: bool

    @property
    def every(self) -> tuple[Tensor | None, ...]:
        """All tensors, in order."""
        return (*(t for tensors in self.tensors for t in tensors), *self.biases)

    @property
    def form(self) -> str:
        """All that decides how the tensors are read and repacked, but for what they hold."""
        operators = "; ".join(
            " ".join([o.op_type, *(f"{a}={o.attributes.get(a)}" for a in _LAYOUT)])
            for o in self.operators
        )
        types = ", ".join(
            "-" if t is None else f"{t.dtype.name}{list(t.shape.numpy())}" for t in self.every
        )
        return f"{operators}; gate={self.gate}; {types}"

    @property
    def are_floats(self) -> bool:
        """Whether the model has floats, not codes."""
        return self.operators[0].op_type in FLOATS

    @property
    def inputs(self) -> int:
        """Numbers in a row of each matrix; of codes, with those that fill the last block."""
        if self.are_floats:
            shape = _numbers(self.tensors[0][0]).shape
            return int(shape[1] if self.operators[0].attributes.get("transB", 0) else shape[0])
        attributes = self.operators[0].attributes
        size: int = attributes["block_size"]
        return -(-int(attributes["K"]) // size) * size

    @property
    def outputs(self) -> int:
        """Rows of all matrices."""
        if not self.are_floats:
            return sum(o.attributes["N"] for o in self.operators)
        return sum(
            _numbers(tensors[0]).shape[0 if o.attributes.get("transB", 0) else 1]
            for o, tensors in zip(self.operators, self.tensors, strict=True)
        )

    def floats(self) -> list[Array]:
        """Matrices (outputs, inputs) of floats, as the model has them."""
        return [
            _numbers(weight) if o.attributes.get("transB", 0) else _numbers(weight).T
            for o, (weight, *_) in zip(self.operators, self.tensors, strict=True)
        ]

    def codes(self) -> list[Codes] | None:
        """Matrices of codes, also those that the model has as floats; None: they are none."""
        if not self.are_floats:
            pairs = zip(self.operators, self.tensors, strict=True)
            return [_codes(o, [None if t is None else t.numpy() for t in ts]) for o, ts in pairs]
        matrices = self.floats()
        if any(m.dtype != np.float32 or m.size < _WORTH_A_SEARCH for m in matrices):
            return None
        found = [c for c in map(recover, matrices) if c is not None]
        return found if len(found) == len(matrices) else None


def of(region: Fused, product: Operation) -> ProductWeights:
    """The weights of a ``Product``."""

    def tensor(index: int | None) -> Tensor | None:
        return None if index is None else region.values[index].constant

    operators: tuple[Operation, ...] = product.attributes["matrices"]
    return ProductWeights(
        operators,
        tuple(
            tuple(tensor(k) for k in o.inputs[1 : 2 if o.op_type in FLOATS else 5])
            for o in operators
        ),
        tuple(tensor(k) for k in product.attributes["biases"]),
        product.attributes["gate"],
    )


def distinct(fusion: Fusion) -> Iterator[ProductWeights]:
    """The weights of all products, each once, in the order in which a run reads them."""
    seen = set()
    for region in fusion.regions:
        for o in region.operations:
            if (o.domain, o.op_type) == (fused.DOMAIN, "Product"):
                weights = of(region, o)
                key = weights.form, tuple(map(id, weights.every))
                if key not in seen:
                    seen.add(key)
                    yield weights


def nbytes(fusion: Fusion) -> int:
    """Bytes of the copies of all weights, each once."""
    return sum(map(padded_bytes, distinct(fusion)))


def padded_bytes(weights: ProductWeights) -> int:
    """Bytes of the copies of one product; 0 where its matrices cannot be one."""
    panels = -(-weights.outputs // PANEL)
    bias = panels * PANEL * 4 if any(b is not None for b in weights.biases) else 0
    codes = weights.codes()
    if codes is None:
        matrices = weights.floats()
        size = matrices[0].dtype.itemsize
        if size == 4 and all(map(_exact_in_float16, matrices)):
            size = 2
        data = panels * PANEL * weights.inputs * size
    elif len({m.minimums is None for m in codes}) > 1:
        return 0  # a run with them is not fused
    else:
        data = panels * (weights.inputs // BLOCK) * _block_bytes(codes)
    return padded(data) + padded(bias)


def _block_bytes(matrices: Sequence[Codes]) -> int:
    """Of ``PANEL`` outputs and 32 inputs: codes, scales, and zero points or minimums."""
    numbers = [m.scales for m in matrices]
    numbers += [m.minimums for m in matrices if m.minimums is not None]
    number = 2 if all(map(_exact_in_float16, numbers)) else 4
    usual = default_zero_point(matrices[0].bits)
    if matrices[0].minimums is not None:
        correction = number
    else:
        given = (m.zero_points for m in matrices)
        correction = int(any(z is not None and bool((z != usual).any()) for z in given))
    return PANEL * (BLOCK * matrices[0].bits // 8 + number + correction)


def _exact_in_float16(numbers: Array) -> bool:
    if numbers.dtype == np.float16:
        return True
    rows = max(1, (1 << 16) // max(1, numbers.shape[1]))  # in the cache, and most end early
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, len(numbers), rows):
            part = numbers[begin : begin + rows]
            if not (part.astype(np.float16).astype(np.float32) == part).all():
                return False
    return True


def padded(size: int) -> int:
    """Bytes of a part of the copies: each begins on a cache line."""
    return -(-size // arena.ALIGNMENT) * arena.ALIGNMENT


def default_zero_point(bits: int) -> int:
    """Zero point of MatMulNBits where none is given."""
    return 1 << (bits - 1)


def _numbers(tensor: Tensor | None) -> Array:
    assert tensor is not None
    array: Array = tensor.numpy()
    return array


def _codes(o: Operation, arrays: list[Array | None]) -> Codes:
    """A matrix of MatMulNBits: zero points, or minimums where they are no integers."""
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
        return Codes(bits, codes, scales, minimums=minimums)
    if zeros is not None and zeros.dtype != np.uint8:
        minimums = -scales.astype(np.float32) * zeros
        return Codes(bits, codes, scales, minimums=minimums)
    return Codes(bits, codes, scales, zeros)


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
    zero = np.float32(default_zero_point(bits)) if zeros is None else zeros.astype(np.float32)
    minimums = (remainder.astype(np.float64) - wide.astype(np.float64) * zero).astype(np.float32)
    with np.errstate(over="ignore"):
        near = minimums.astype(np.float16).astype(np.float32)
    if np.array_equal(near + wide * zero, remainder):
        return near
    return minimums
