"""Vectors of codes, and of integers of 16 bits in two planes of 8, for ``pages_tile_parts``.

Lines of ``aux`` are vectors of 16 equal lanes: what is needed once for each head and block.
"""

from __future__ import annotations

from llvmlite import ir

from onnx_inplace.numba_kernels.fused.dots import Dots
from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Value

LINE = 64  # bytes of a vector
_LARGEST = 32639.0  # of two planes: 127 * 256 + 127
_INTS = ir.VectorType(ir.IntType(32), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)


class Codes(Dots):
    """Writes what integers of two planes need."""

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

    def store_planes(self, x: Value, high: Value, low: Value) -> None:
        """16 int32 as 256 * high + low, each 16 int8."""
        b = self.builder
        self.store_any(b.trunc(x, _BYTES), low)
        rest = b.ashr(b.add(x, self.ints(128)), self.ints(8))  # the low plane is signed
        self.store_any(b.trunc(rest, _BYTES), high)

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

    def centered(self, high: Value, low: Value, correction: Value, doubled: bool) -> Value:
        """Sum over codes less their center, times two where the center is not whole."""
        b = self.builder
        total = b.add(b.shl(high, self.ints(8)), low)
        if doubled:
            total = b.shl(total, self.ints(1))
        return b.sitofp(b.sub(total, correction), VECTOR)

    def integers_of(self, largest: Value) -> tuple[Value, Value]:
        """What numbers up to ``largest`` are multiplied by to become integers, and their unit."""
        b = self.builder
        factor = b.fdiv(self.constant(_LARGEST), largest)
        return factor, b.fmul(largest, self.constant(1 / _LARGEST))

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
