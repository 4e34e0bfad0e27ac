"""Vectors of codes, and of integers in planes of 8 bits, for ``pages_tile_parts``.

Lines of ``aux`` have a lane for each head: what is needed once for each block.

A row of a plane is read by fours, each of which meets four codes. Where whole vectors of 64 bytes
fit, instructions that pack integers leave the fours in an order of their own, see :func:`spot`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from onnx_inplace.numba_kernels import cpu
from onnx_inplace.numba_kernels.fused.dots import Dots
from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Value

LINE = 64  # bytes of a vector
_POWERS = (
    1.3276470126584172e-3,
    9.675540961325169e-3,
    5.550713092088699e-2,
    2.4022120237350464e-1,
    6.931469440460205e-1,
    1.0000001192092896,
)  # of 2**x for x in -0.5 .. 0.5
_LARGEST = {1: 255.0, 2: 32639.0}  # by planes: one has no sign, two hold 127 * 256 + 127
_INTS = ir.VectorType(ir.IntType(32), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_FLAGS = ir.VectorType(ir.IntType(1), LANES)
_LINE_OF_BYTES = ir.VectorType(ir.IntType(8), LINE)
# Elsewhere these instructions do not exist, and LLVM aborts the process when it meets one.
_WIDE = not cpu.missing(cpu.Path.AVX512)
_GALOIS = _WIDE and cpu.has("gfni")


def packs(count: int) -> bool:
    """Whether a row of ``count`` integers becomes planes 64 at a time."""
    return _WIDE and count % LINE == 0


def spot(four: int, count: int) -> int:
    """Where in a row of ``count`` bytes four ``four`` lies, in fours."""
    if not packs(count):
        return four
    return four // LANES * LANES + four % 4 * 4 + four % LANES // 4


def _shorts(number: int) -> Value:
    return ir.Constant(_SHORTS, [number] * 2 * LANES)


class Codes(Dots):
    """Writes what integers of so many planes need.

    Args:
        builder: of LLVM.
        planes: 2 for integers of 16 bits, 1 for those of 8, which are not negative.
    """

    def __init__(self, builder: Value, planes: int) -> None:
        super().__init__(builder, False)
        self.planes = planes

    def ints(self, number: int) -> Value:
        """An int32 in all lanes."""
        return self.lanes([number] * LANES)

    def rounded(self, x: Value) -> Value:
        """Nearest int32."""
        return self._intrinsic(f"llvm.lrint.v{LANES}i32.v{LANES}f32", _INTS, [x])

    def store_any(self, vector: Value, address: Value) -> None:
        """Write a vector of any type."""
        self.builder.store(vector, self._memory(address, vector.type)).align = 1

    def store_lane(self, vector: Value, lane: int, address: Value) -> None:
        """Write one lane."""
        one = self.builder.extract_element(vector, ir.Constant(ir.IntType(32), lane))
        self.builder.store(one, self._memory(address, one.type)).align = 4

    def weight(self, x: Value) -> Value:
        """``Emitter.weight`` in fewer instructions; relative error 3e-7."""
        if not _WIDE:
            return super().weight(x)
        b, least = self.builder, self.constant(-100.0)
        x = b.select(b.fcmp_ordered("<", x, least), least, x)
        whole = self.nearest(x)
        fraction, power = b.fsub(x, whole), self.constant(_POWERS[0])
        for coefficient in _POWERS[1:]:
            power = self.fma(power, fraction, self.constant(coefficient))
        all_, current = ir.Constant(ir.IntType(16), -1), ir.Constant(ir.IntType(32), 4)
        values = [power, whole, power, all_, current]
        return self._intrinsic("llvm.x86.avx512.mask.scalef.ps.512", VECTOR, values)

    def by_head(self, combine: Any, vectors: Sequence[Value]) -> Value:
        """Lane g = ``combine`` over the lanes of ``vectors[g]``; lanes beyond mean nothing."""
        vectors = list(vectors)
        for distance in (1, 2, 4, 8):
            low = [k + LANES if k & distance else k for k in range(LANES)]
            high = [k ^ distance for k in low]
            if len(vectors) % 2:
                vectors.append(vectors[-1])
            vectors = [
                combine(self.shuffle(a, b, low), self.shuffle(a, b, high))
                for a, b in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        return vectors[0]

    def strided(self, address: Value, step: int, count: int) -> Value:
        """Lane g = the float32 ``g * step`` bytes behind an address, for g below ``count``."""
        result = self.constant(0.0)
        for g in range(count):
            one = self.load_all(self.add(address, g * step))
            result = self.builder.select(
                ir.Constant(_FLAGS, [k == g for k in range(LANES)]), one, result
            )
        return result

    def of_head(self, vector: Value, g: int) -> Value:
        """Lane g in all lanes."""
        return self.shuffle(vector, vector, [g] * LANES)

    def store_planes(self, parts: Sequence[Value], at: Value, step: int) -> list[Value]:
        """Integers become uint8, or 256 * high + low, int8 that lie ``step`` bytes apart.

        Args:
            parts: 16 int32 each: four for 64 bytes of a plane, in the order of :func:`spot`, else
                one, for 16 bytes.
            at: address of the first plane.
            step: bytes to the next plane.

        Returns:
            For each plane, sums of some of its numbers by lane, int32: together all of them.
        """
        b = self.builder
        if len(parts) == 1:
            x = parts[0]
            high = b.ashr(b.add(x, self.ints(128)), self.ints(8))  # the low plane is signed
            planes = [x] if self.planes == 1 else [high, b.sub(x, b.shl(high, self.ints(8)))]
            for p, plane in enumerate(planes):
                self.store_any(b.trunc(plane, _BYTES), self.add(at, p * step))
            return planes
        halves = [
            self._intrinsic("llvm.x86.avx512.packssdw.512", _SHORTS, parts[k : k + 2])
            for k in (0, 2)
        ]
        if self.planes == 1:
            packed = [self._intrinsic("llvm.x86.avx512.packuswb.512", _LINE_OF_BYTES, halves)]
        else:
            middle, eight = _shorts(128), _shorts(8)
            high = [b.ashr(b.add(x, middle), eight) for x in halves]
            low = [b.and_(x, _shorts(255)) for x in halves]
            packed = [
                self._intrinsic("llvm.x86.avx512.packsswb.512", _LINE_OF_BYTES, high),
                self._intrinsic("llvm.x86.avx512.packuswb.512", _LINE_OF_BYTES, low),
            ]
        ones, found = self.ints(0x01010101), []
        for p, plane in enumerate(packed):
            self.store_any(plane, self.add(at, p * step))
            fours = b.bitcast(plane, _INTS)
            pair = (fours, ones) if self.planes == 1 else (ones, fours)
            found.append(self.dot(self.ints(0), *pair))
        return found

    def fields(self, vector: Value, bits: int) -> list[Value]:
        """The codes of each byte, one vector for each of its fields."""
        b = self.builder
        if bits == 8:
            return [vector]
        if _GALOIS:
            return [self._field(vector, shift, bits) for shift in range(0, 8, bits)]
        mask = self.ints(sum(((1 << bits) - 1) << byte for byte in (0, 8, 16, 24)))
        return [
            b.and_(b.lshr(vector, self.ints(shift)) if shift else vector, mask)
            for shift in range(0, 8, bits)
        ]

    def _field(self, vector: Value, shift: int, bits: int) -> Value:
        """One field of each byte, times a matrix: bit i is the parity of what row 7 - i chooses."""
        if shift == 0:
            return self.builder.and_(vector, self.ints(((1 << bits) - 1) * 0x01010101))
        matrix = bytes(8 - bits) + bytes(1 << (shift + k) for k in reversed(range(bits)))
        rows = ir.Constant(_LINE_OF_BYTES, list(matrix * 8))
        value = self.builder.bitcast(vector, _LINE_OF_BYTES)
        none = ir.Constant(ir.IntType(8), 0)
        name = "llvm.x86.vgf2p8affineqb.512"
        return self.builder.bitcast(
            self._intrinsic(name, _LINE_OF_BYTES, [value, rows, none]), _INTS
        )

    def times_codes(self, total: Value, codes: Value, numbers: Value) -> Value:
        """Dot products of codes, of less than 8 bits with one plane, and numbers of a plane."""
        if self.planes == 1:
            return self.dot(total, numbers, codes)
        return self.dot(total, codes, numbers)

    def centered(self, sums: Sequence[Value], correction: Value, doubled: bool) -> Value:
        """Sum over codes less their center, times two where the center is not whole.

        ``sums``: one for each plane, over the codes as they are.
        """
        b, total = self.builder, self.joined_planes(sums)
        if doubled:
            total = b.shl(total, self.ints(1))
        return b.sitofp(b.sub(total, correction), VECTOR)

    def integers_of(self, largest: Value) -> tuple[Value, Value]:
        """What numbers up to ``largest`` are multiplied by to become integers, and their unit."""
        b = self.builder
        most = _LARGEST[self.planes]
        return b.fdiv(self.constant(most), largest), b.fmul(largest, self.constant(1 / most))

    def joined_planes(self, sums: Sequence[Value]) -> Value:
        """What numbers of a plane, or of two, stand for."""
        total, b = sums[0], self.builder
        for low in sums[1:]:
            total = b.add(b.shl(total, self.ints(8)), low)
        return total

    def write_lines(
        self, at: Value, unit: Value, totals: Sequence[Value], bases: Sequence[Value], center2: int
    ) -> None:
        """Three lines of ``aux``: unit, correction, base.

        Args:
            at: address of the first line.
            unit: by head.
            totals: for each head the sum of its integers, spread over lanes.
            bases: likewise.
            center2: twice the center of codes.
        """
        b, odd = self.builder, center2 % 2
        self.store(b.fmul(unit, self.constant(0.5 if odd else 1.0)), at)
        total = self.by_head(b.add, totals)
        correction = b.mul(total, self.ints(center2 if odd else center2 // 2))
        self.store_any(correction, self.add(at, LINE))
        self.store(self.by_head(b.fadd, bases), self.add(at, 2 * LINE))

    def ask(self, address: Value, lines: int, part: int = 0, parts: int = 1) -> None:
        """Ask for one of so many equal parts of ``lines`` lines of memory from an address on."""
        for line in range(part * lines // parts, (part + 1) * lines // parts):
            self.prefetch(self.add(address, line * LINE))
