"""Vectors of codes, and of integers in planes of 8 bits, for ``pages_tile_parts``.

Lines of ``aux`` are vectors of 16 equal lanes: what is needed once for each head and block.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from onnx_inplace.numba_kernels.fused.dots import Dots
from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Value

LINE = 64  # bytes of a vector
_LARGEST = {1: 255.0, 2: 32639.0}  # by planes: one has no sign, two hold 127 * 256 + 127
_INTS = ir.VectorType(ir.IntType(32), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)


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

    def store_one(self, vector: Value, address: Value) -> None:
        """Write the first lane."""
        one = self.builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))
        self.builder.store(one, self._memory(address, one.type)).align = 4

    def store_planes(self, x: Value, at: Value, step: int) -> None:
        """16 int32 as 16 uint8, or as 256 * high + low, int8 that lie ``step`` bytes apart."""
        b = self.builder
        if self.planes == 2:
            self.store_any(b.trunc(x, _BYTES), self.add(at, step))
            x = b.ashr(b.add(x, self.ints(128)), self.ints(8))  # the low plane is signed
        self.store_any(b.trunc(x, _BYTES), at)

    def fields(self, vector: Value, bits: int) -> list[Value]:
        """The codes of each byte, one vector for each of its fields."""
        b = self.builder
        if bits == 8:
            return [vector]
        mask = self.ints(sum(((1 << bits) - 1) << byte for byte in (0, 8, 16, 24)))
        return [
            b.and_(b.lshr(vector, self.ints(shift)) if shift else vector, mask)
            for shift in range(0, 8, bits)
        ]

    def times_codes(self, total: Value, codes: Value, numbers: Value) -> Value:
        """Dot products of codes, of less than 8 bits with one plane, and numbers of a plane."""
        if self.planes == 1:
            return self.dot(total, numbers, codes)
        return self.dot(total, codes, numbers)

    def centered(self, sums: Sequence[Value], correction: Value, doubled: bool) -> Value:
        """Sum over codes less their center, times two where the center is not whole.

        ``sums``: one for each plane, over the codes as they are.
        """
        b = self.builder
        total = sums[0]
        for low in sums[1:]:
            total = b.add(b.shl(total, self.ints(8)), low)
        if doubled:
            total = b.shl(total, self.ints(1))
        return b.sitofp(b.sub(total, correction), VECTOR)

    def integers_of(self, largest: Value) -> tuple[Value, Value]:
        """What numbers up to ``largest`` are multiplied by to become integers, and their unit."""
        b = self.builder
        most = _LARGEST[self.planes]
        return b.fdiv(self.constant(most), largest), b.fmul(largest, self.constant(1 / most))

    def write_line(self, line: Value, unit: Value, total: Value, base: Value, center2: int) -> None:
        """Three lines of ``aux``: unit, correction, base; ``total``: of the integers, by lane."""
        b = self.builder
        odd = center2 % 2
        total = self.across(b.add, total, LANES)
        self.store(b.fmul(unit, self.constant(0.5 if odd else 1.0)), line)
        correction = b.mul(total, self.ints(center2 if odd else center2 // 2))
        self.store_any(correction, self.add(line, LINE))
        self.store(self.across(b.fadd, base, LANES), self.add(line, 2 * LINE))

    def ask(self, address: Value, lines: int, part: int = 0, parts: int = 1) -> None:
        """Ask for one of so many equal parts of ``lines`` lines of memory from an address on."""
        for line in range(part * lines // parts, (part + 1) * lines // parts):
            self.prefetch(self.add(address, line * LINE))
