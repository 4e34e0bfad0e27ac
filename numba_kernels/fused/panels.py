"""Weights in the order in which products read them: panels of 32 outputs, one stream of bytes.

A panel of codes is, for each block of 32 inputs:

    codes        2 groups of 16 outputs: vectors of (16 outputs, 4 inputs) uint8; 8 vectors for
                 8 bits; 4 for 4 bits, whose low halves are inputs 0..15 and high halves 16..31
    scales       (32) float32 or float16
    correction   nothing, (32) uint8 zero points, or (32) minimums of the scales' kind

so that ``weight = scale * (code - zero point)`` or ``scale * code + minimum``. A panel of floats is
(inputs, 32). What is missing in the last panel is zeros.

Several matrices with the same inputs become one: their outputs follow one another, or, as a gate
and what it gates, take turns in groups of 16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels.floats import (
    FLOAT16,
    FLOAT32,
    SIZES,
    int64_at,
    uint16_at,
    uint32_at,
)
from onnx_inplace.numba_kernels.memory import address, on_demand

Array = np.ndarray[Any, Any]

PANEL, GROUP, BLOCK = 32, 16, 32
DEFAULT_ZERO_POINT, ZERO_POINTS, MINIMUM = 0, 1, 2
"""Corrections: zero point 2**(bits - 1), a zero point for each block, a minimum for each block."""


@dataclasses.dataclass(frozen=True, slots=True)
class Codes:
    """A matrix of 4- or 8-bit codes with a scale for each block of inputs.

    Attributes:
        bits: 4 or 8.
        codes: (outputs, blocks, block * bits / 8) uint8; with 4 bits, code 2 j is in the low half
            of byte j. The block is 32 or a multiple.
        scales: (outputs, blocks) float32 or float16.
        zero_points: (outputs, blocks) uint8, one a byte; None: 2**(bits - 1).
        minimums: (outputs, blocks) float32 or float16, instead of zero points.
    """

    bits: int
    codes: Array
    scales: Array
    zero_points: Array | None = None
    minimums: Array | None = None

    @property
    def outputs(self) -> int:
        """Rows of the matrix."""
        return int(self.codes.shape[0])

    @property
    def blocks(self) -> int:
        """Blocks of 32 inputs."""
        return int(self.codes.shape[1] * self.codes.shape[2]) // (4 * self.bits)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How repacked weights lie. ``bits`` is 0 for floats.

    Attributes:
        bits: 4, 8, or 0.
        kind: of the scales and minimums, or of the floats: FLOAT32, FLOAT16, BFLOAT16.
        correction: DEFAULT_ZERO_POINT, ZERO_POINTS or MINIMUM; 0 for floats.
        panels: how many.
        steps: blocks of 32 inputs, or inputs.
    """

    bits: int
    kind: int
    correction: int
    panels: int
    steps: int

    @property
    def step_bytes(self) -> int:
        """Bytes of a panel, for a block or for an input."""
        if not self.bits:
            return PANEL * SIZES[self.kind]
        return block_bytes(self.bits, self.kind, self.correction)

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel."""
        return self.steps * self.step_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all panels."""
        return self.panels * self.panel_bytes


def block_bytes(bits: int, kind: int, correction: int) -> int:
    """Bytes of 32 outputs for 32 inputs."""
    corrections = (0, 1, SIZES[kind])
    return PANEL * (BLOCK * bits // 8 + SIZES[kind] + corrections[correction])


def default_zero_point(bits: int) -> int:
    """Zero point where none is given."""
    return 1 << (bits - 1)


def layout_codes(matrices: Sequence[Codes]) -> Layout:
    """How :func:`pack_codes` lays out these matrices.

    Scales and minimums are kept as float16 where that changes none of them.

    Raises:
        ValueError: they differ in bits or inputs, or one but the last has outputs that are no
            multiple of 16.
    """
    first = matrices[0]
    if any((m.bits, m.blocks) != (first.bits, first.blocks) for m in matrices):
        raise ValueError("matrices of different bits or inputs cannot be one")
    with_minimums = {m.minimums is not None for m in matrices}
    if len(with_minimums) > 1:
        raise ValueError("matrices with and without minimums cannot be one")
    numbers = [m.scales for m in matrices]
    numbers += [m.minimums for m in matrices if m.minimums is not None]
    kind = FLOAT16 if all(map(exact_in_float16, numbers)) else FLOAT32
    usual = default_zero_point(first.bits)
    if with_minimums == {True}:
        correction = MINIMUM
    elif any(m.zero_points is not None and (m.zero_points != usual).any() for m in matrices):
        correction = ZERO_POINTS
    else:
        correction = DEFAULT_ZERO_POINT
    return Layout(
        first.bits, kind, correction, _panels([m.outputs for m in matrices]), first.blocks
    )


def layout_floats(matrices: Sequence[Array], kind: int = FLOAT32) -> Layout:
    """How :func:`pack_floats` lays out matrices (outputs, inputs) of ``kind``.

    float32 is kept as float16 where that changes no number.

    Raises:
        ValueError: they differ in inputs, or one but the last has outputs that are no multiple of
            16.
    """
    inputs = matrices[0].shape[1]
    if any(m.shape[1] != inputs for m in matrices):
        raise ValueError("matrices of different inputs cannot be one")
    if kind == FLOAT32 and all(map(exact_in_float16, matrices)):
        kind = FLOAT16
    return Layout(0, kind, 0, _panels([m.shape[0] for m in matrices]), inputs)


def _panels(outputs: Sequence[int]) -> int:
    if any(n % GROUP for n in outputs[:-1]):
        raise ValueError(f"only the last matrix may have outputs beside groups of {GROUP}")
    return (sum(outputs) + PANEL - 1) // PANEL


def exact_in_float16(numbers: Array) -> bool:
    """Whether float16 holds every one of these numbers."""
    if numbers.dtype == np.float16:
        return True
    flat = numbers.reshape(-1)
    for begin in range(0, flat.size, 1 << 16):  # in the cache, and most end early
        part = flat[begin : begin + (1 << 16)]
        with np.errstate(over="ignore", invalid="ignore"):
            if not (part.astype(np.float16).astype(np.float32) == part).all():
                return False
    return True


def pack_codes(matrices: Sequence[Codes], layout: Layout, out: Array, gate: bool = False) -> None:
    """Write matrices of codes as panels to ``out``, (``layout.nbytes``) uint8.

    With ``gate`` there are two, and a panel has 16 outputs of each.
    """
    size, code_bytes = layout.step_bytes, GROUP * BLOCK * layout.bits // 8
    blocks = out[: layout.nbytes].reshape(layout.panels, layout.steps, size)
    number = np.float16 if layout.kind == FLOAT16 else np.float32
    scale_bytes = SIZES[layout.kind]
    if sum(m.outputs for m in matrices) % PANEL:
        blocks[-1] = 0
    pack = {4: pack_four, 8: pack_eight}[layout.bits].ready()
    for matrix, groups in zip(matrices, _groups([m.outputs for m in matrices], gate), strict=True):
        codes = np.ascontiguousarray(matrix.codes)
        places = np.array([_place(g, layout.panel_bytes, code_bytes) for g in groups], np.int64)
        pack(address(codes), matrix.outputs, layout.steps, address(out), address(places), size)
        begin = 2 * code_bytes
        _fill(blocks, begin, groups, _each_block(matrix.scales, layout), number)
        begin += PANEL * scale_bytes
        if layout.correction == MINIMUM:
            _fill(blocks, begin, groups, _each_block(matrix.minimums, layout), number)
        elif layout.correction == ZERO_POINTS:
            points = matrix.zero_points
            if points is None:
                points = np.full_like(matrix.scales, default_zero_point(layout.bits), np.uint8)
            _fill(blocks, begin, groups, _each_block(points, layout), np.uint8)


def pack_floats(matrices: Sequence[Array], layout: Layout, out: Array, gate: bool = False) -> None:
    """Write matrices (outputs, inputs) of floats as panels to ``out``, uint8.

    bfloat16 comes as its bits, uint16; float32 and float16 are converted to the layout's kind.
    """
    kinds = (np.float32, np.float16, np.uint16)
    numbers = out[: layout.nbytes].view(kinds[layout.kind])
    panels = numbers.reshape(layout.panels, layout.steps, 2, GROUP)
    if sum(m.shape[0] for m in matrices) % PANEL:
        panels[-1] = 0
    for matrix, groups in zip(matrices, _groups([m.shape[0] for m in matrices], gate), strict=True):
        _spread(panels, groups, matrix)


def pack_bias(biases: Sequence[Array | None], outputs: Sequence[int], gate: bool = False) -> Array:
    """Biases (outputs) in the order of the panels, float32; zeros where there is none."""
    result = np.zeros((_panels(outputs) * 2, GROUP), np.float32)
    for bias, groups in zip(biases, _groups(outputs, gate), strict=True):
        if bias is not None:
            for k, group in enumerate(groups):
                part = bias[GROUP * k : GROUP * (k + 1)]
                result[group, : part.size] = part
    return result.reshape(-1)


def _groups(outputs: Sequence[int], gate: bool) -> list[range]:
    """Where the groups of 16 outputs of each matrix go."""
    if gate:
        if len(outputs) != 2 or outputs[0] != outputs[1] or outputs[0] % GROUP:
            raise ValueError("a gate and what it gates have the same outputs, a multiple of 16")
        return [range(k, 2 * outputs[0] // GROUP, 2) for k in range(2)]
    result, begin = [], 0
    for count in outputs:
        end = begin + (count + GROUP - 1) // GROUP
        result.append(range(begin, end))
        begin = end
    return result


def _place(group: int, panel_bytes: int, code_bytes: int) -> int:
    """Where the codes of a group begin."""
    return group // 2 * panel_bytes + group % 2 * code_bytes


def _each_block(numbers: Array | None, layout: Layout) -> Array:
    """A number for each block of 32, where one stands for a larger block."""
    assert numbers is not None
    return np.repeat(numbers, layout.steps // numbers.shape[1], axis=1)


def _fill(blocks: Array, begin: int, groups: range, numbers: Array, dtype: Any) -> None:
    """(outputs, blocks) numbers into the blocks' bytes from ``begin`` on."""
    size = np.dtype(dtype).itemsize
    panels, steps, stride = blocks.shape
    strides = steps * stride, stride, GROUP * size, size
    place: Array = np.ndarray((panels, steps, 2, GROUP), dtype, blocks, begin, strides)
    _spread(place, groups, numbers)


def _spread(panels: Array, groups: range, rows: Array) -> None:
    """Rows (outputs, steps) into their groups of panels (panels, steps, 2, 16)."""
    if rows.shape[0] % GROUP:
        rows = np.pad(rows, ((0, -rows.shape[0] % GROUP), (0, 0)))
    blocks = rows.reshape(len(groups), GROUP, -1).transpose(0, 2, 1)
    for half in range(2):
        some = [k for k, group in enumerate(groups) if group % 2 == half]
        if some:  # every one or every other of the groups, in neighbouring panels
            first, step = groups[some[0]] // 2, 1 if groups.step == 2 else 2
            panels[first : first + len(some), :, half] = blocks[some[0] :: step]


@njit
def _four_bytes(nibbles):
    """The nibbles of a uint16 as the bytes of a uint32."""
    x = np.uint32(nibbles)
    x = (x | (x << np.uint32(8))) & np.uint32(0x00FF00FF)
    return (x | (x << np.uint32(4))) & np.uint32(0x0F0F0F0F)


@on_demand("void(int64,int64,int64,int64,int64,int64)")
def pack_four(codes, outputs, blocks, target, places, size):
    """Codes (outputs, blocks, 16) of 4 bits into blocks of ``size`` bytes."""
    place = carray(int64_at(places), ((outputs + GROUP - 1) // GROUP,))
    for output in range(outputs):
        begin = target + place[output // GROUP] + 4 * (output % GROUP)
        for block in range(blocks):
            source = carray(uint16_at(codes + (output * blocks + block) * 16), (8,))
            words = carray(uint32_at(begin + block * size), (3 * GROUP + 1,))
            for v in range(4):
                high = _four_bytes(source[4 + v]) << np.uint32(4)
                words[GROUP * v] = _four_bytes(source[v]) | high


@on_demand("void(int64,int64,int64,int64,int64,int64)")
def pack_eight(codes, outputs, blocks, target, places, size):
    """Codes (outputs, blocks, 32) of 8 bits into blocks of ``size`` bytes."""
    place = carray(int64_at(places), ((outputs + GROUP - 1) // GROUP,))
    for output in range(outputs):
        begin = target + place[output // GROUP] + 4 * (output % GROUP)
        for block in range(blocks):
            source = carray(uint32_at(codes + (output * blocks + block) * 32), (8,))
            words = carray(uint32_at(begin + block * size), (7 * GROUP + 1,))
            for v in range(8):
                words[GROUP * v] = source[v]
