"""Dot products of bytes, and float16: by what instructions the CPU has, else by plain code."""

from __future__ import annotations

from llvmlite import ir

from onnx_inplace.numba_kernels import cpu
from onnx_inplace.numba_kernels.floats import FLOAT16, FLOAT32
from onnx_inplace.numba_kernels.fused.lanes import Lanes
from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Value

_BYTE, _SHORT, _INT = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)


# Elsewhere the instruction does not exist, and LLVM aborts the process when it meets it.
_WIDE = not cpu.missing(cpu.Path.AVX512)
_NARROW = cpu.has("avxvnni")


class Dots(Lanes):
    """Writes products of bytes.

    Args:
        builder: of LLVM.
        portable: use no instruction of a certain CPU.
    """

    def __init__(self, builder: Value, portable: bool) -> None:
        super().__init__(builder)
        self.portable = portable

    def integers(self, address: Value) -> Value:
        """16 int32, that is 64 bytes."""
        value = self.builder.load(self._memory(address, _INTS), typ=_INTS)
        value.align = 4
        return value

    def integer(self, address: Value) -> Value:
        """One int32 in all lanes."""
        number = self.builder.load(self._memory(address, _INT), typ=_INT)
        number.align = 4
        return self.splat(number, _INTS)

    def bytes_(self, address: Value) -> Value:
        """16 uint8, as int32."""
        kind = ir.VectorType(_BYTE, LANES)
        value = self.builder.load(self._memory(address, kind), typ=kind)
        value.align = 1
        return self.builder.zext(value, _INTS)

    def floats(self, integers: Value) -> Value:
        """Int32 as float32."""
        return self.builder.sitofp(integers, VECTOR)

    def scales(self, address: Value, kind: int) -> Value:
        """16 float32 or float16, as float32."""
        if kind == FLOAT32 or not self.portable:
            return self.load(address, kind)
        if kind != FLOAT16:
            return self.load(address, kind)
        b = self.builder
        shorts = ir.VectorType(_SHORT, LANES)
        bits = b.load(self._memory(address, shorts), typ=shorts)
        bits.align = 1
        bits = b.zext(bits, _INTS)
        sign = b.shl(b.and_(bits, self.lanes([0x8000] * LANES)), self.lanes([16] * LANES))
        rest = b.and_(bits, self.lanes([0x7FFF] * LANES))
        # moved to float32's exponent and fraction, the number is 2**112 too small
        moved = b.bitcast(b.shl(rest, self.lanes([13] * LANES)), VECTOR)
        number = b.bitcast(b.fmul(moved, self.constant(2.0**112)), _INTS)
        special = b.icmp_signed(">=", rest, self.lanes([0x7C00] * LANES))
        zero, infinite = self.lanes([0] * LANES), self.lanes([0x7F800000] * LANES)
        number = b.or_(number, b.select(special, infinite, zero))
        return b.bitcast(b.or_(number, sign), VECTOR)

    def dot(self, total: Value, codes: Value, numbers: Value) -> Value:
        """``total[i] + sum over k of codes[i][k] * numbers[i][k]``: 4 uint8 by 4 int8 a lane."""
        b = self.builder
        if _WIDE and not self.portable:
            return self._intrinsic("llvm.x86.avx512.vpdpbusd.512", _INTS, [total, codes, numbers])
        if _NARROW and not self.portable:
            return self._dot_in_halves(total, codes, numbers)
        wide, double = ir.VectorType(_SHORT, 2 * LANES), ir.VectorType(_INT, 2 * LANES)
        codes, numbers = b.bitcast(codes, wide), b.bitcast(numbers, wide)
        eight = ir.Constant(wide, [8] * 2 * LANES)
        low = ir.Constant(wide, [255] * 2 * LANES)
        even = b.and_(codes, low), b.ashr(b.shl(numbers, eight), eight)
        odd = b.lshr(codes, eight), b.ashr(numbers, eight)
        for left, right in (even, odd):  # LLVM knows this as one instruction, pmaddwd
            products = b.mul(b.sext(left, double), b.sext(right, double))
            evens = self.shuffle(products, products, range(0, 2 * LANES, 2))
            odds = self.shuffle(products, products, range(1, 2 * LANES, 2))
            total = b.add(total, b.add(evens, odds))
        return total

    def _dot_in_halves(self, total: Value, codes: Value, numbers: Value) -> Value:
        half = ir.VectorType(_INT, LANES // 2)
        parts = []
        for first in (0, LANES // 2):
            lanes = ir.Constant(half, list(range(first, first + LANES // 2)))
            values = [self.builder.shuffle_vector(v, v, lanes) for v in (total, codes, numbers)]
            parts.append(self._intrinsic("llvm.x86.avx512.vpdpbusd.256", half, values))
        return self.builder.shuffle_vector(*parts, self.lanes(range(LANES)))
