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
    1.3534167781472206e-2,
    5.2011460065841675e-2,
    0.2414427548646927,
    0.6930038332939148,
    1.0000026226043701,
)  # of 2**x for x in 0 .. 1
Asks = tuple[int, int]
"""Lines of memory that are asked for, of what is read soon and later: see ``pages_tile_parts``."""
LARGEST = {1: 255.0, 2: 32639.0}
"""The largest integer, by planes: one has no sign, two hold 127 * 256 + 127."""
_LOG_ERROR = 0.0861  # of the logarithm to base 2 that the bits of a float32 are
_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)
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

    def share(self, x: Value) -> Value:
        """2**x for the weight of a token, relative error 3e-6; x below -100 counts as -100."""
        least = self.constant(-100.0)
        if not _WIDE:
            return self.exp2(x, -100.0)
        x = self.builder.select(self.builder.fcmp_ordered("<", x, least), least, x)
        all_, current = ir.Constant(ir.IntType(16), -1), ir.Constant(_INT, 4)
        down = ir.Constant(_INT, 9)
        fraction = self._intrinsic(
            "llvm.x86.avx512.mask.reduce.ps.512", VECTOR, [x, down, x, all_, current]
        )
        power = self.constant(_POWERS[0])
        for coefficient in _POWERS[1:]:
            power = self.fma(power, fraction, self.constant(coefficient))
        values = [power, x, power, all_, current]  # 2 to the whole number below x
        return self._intrinsic("llvm.x86.avx512.mask.scalef.ps.512", VECTOR, values)

    def logarithm_above(self, x: Value) -> Value:
        """What is up to 0.09 above the logarithm to base 2 of x > 0; -40 for 0."""
        bits = self.builder.sitofp(self.builder.bitcast(x, _INTS), VECTOR)
        result = self.fma(bits, self.constant(2.0**-23), self.constant(_LOG_ERROR + 1e-3 - 127))
        return self.maximum(result, self.constant(-40.0))

    def larger(self, a: Value, b: Value) -> Value:
        """The larger magnitudes, without sign; where one is NaN, the other."""
        if not _WIDE:
            return self.maximum(self.absolute(a), self.absolute(b))
        all_, current = ir.Constant(ir.IntType(16), -1), ir.Constant(_INT, 4)
        values = [a, b, ir.Constant(_INT, 11), a, all_, current]
        return self._intrinsic("llvm.x86.avx512.mask.range.ps.512", VECTOR, values)

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

    def store_planes(
        self, parts: Sequence[Value], at: Value, step: int, sums: Sequence[Value]
    ) -> list[Value]:
        """Integers become uint8, or 256 * high + low, int8 that lie ``step`` bytes apart.

        Args:
            parts: 16 int32 each: four for 64 bytes of a plane, in the order of :func:`spot`, else
                one, for 16 bytes.
            at: address of the first plane.
            step: bytes to the next plane.
            sums: of integers that were stored before, for each plane, spread over lanes.

        Returns:
            Sums that these integers have joined.
        """
        b = self.builder
        if len(parts) == 1:
            x = parts[0]
            high = b.ashr(b.add(x, self.ints(128)), self.ints(8))  # the low plane is signed
            planes = [x] if self.planes == 1 else [high, b.sub(x, b.shl(high, self.ints(8)))]
            for p, plane in enumerate(planes):
                self.store_any(b.trunc(plane, _BYTES), self.add(at, p * step))
            return [b.add(x, y) for x, y in zip(sums, planes, strict=True)]
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
        ones, result = self.ints(0x01010101), []
        for p, (plane, total) in enumerate(zip(packed, sums, strict=True)):
            self.store_any(plane, self.add(at, p * step))
            fours = b.bitcast(plane, _INTS)
            pair = (fours, ones) if self.planes == 1 else (ones, fours)
            result.append(self.dot(total, *pair))
        return result

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

    def of_integers(self, sums: Sequence[Value], unit: Value, offset: Value) -> Value:
        """``unit * total + offset``; ``sums``: one for each plane."""
        return self.fma(self.builder.sitofp(self.joined_planes(sums), VECTOR), unit, offset)

    def integers_of(self, largest: Value) -> tuple[Value, Value]:
        """What numbers up to ``largest`` are multiplied by to become integers, and their unit."""
        b = self.builder
        most = LARGEST[self.planes]
        return b.fdiv(self.constant(most), largest), b.fmul(largest, self.constant(1 / most))

    def joined_planes(self, sums: Sequence[Value]) -> Value:
        """What numbers of a plane, or of two, stand for."""
        total, b = sums[0], self.builder
        for low in sums[1:]:
            total = b.add(b.shl(total, self.ints(8)), low)
        return total

    def write_lines(
        self,
        at: Value,
        unit: Value,
        totals: Sequence[Value],
        base: Value,
        center: float,
        apart: bool,
    ) -> None:
        """Lines of ``aux``: unit, offset, and where ``apart``, base, which else joins the offset.

        Args:
            at: address of the first line.
            unit: of the integers, by head.
            totals: for each head the sum of its integers, spread over lanes.
            base: by head.
            center: of codes; the offset is what it takes from sums of integers times codes.
            apart: whether offset and base are multiplied by different numbers.
        """
        b = self.builder
        total = b.sitofp(self.by_head(b.add, totals), VECTOR)
        offset = b.fmul(b.fmul(total, self.constant(-center)), unit)
        self.store(unit, at)
        self.store(offset if apart else b.fadd(offset, base), self.add(at, LINE))
        if apart:
            self.store(base, self.add(at, 2 * LINE))

    def ask(
        self,
        addresses: Sequence[Value],
        lines: Asks,
        part: int = 0,
        parts: int = 1,
        step: int = 1,
    ) -> None:
        """Ask for lines of memory at two places, or for some of so many equal parts of them."""
        for address, count in zip(addresses, lines, strict=True):
            for line in range(part * count // parts, (part + step) * count // parts):
                self.prefetch(self.add(address, line * LINE))

    def behind(self, addresses: Sequence[Value], i: Value, lines: Asks) -> list[Value]:
        """Where the lines lie that step i asks for, after as many of each step before it."""
        pairs = zip(addresses, lines, strict=True)
        return [self.add(address, self.times(i, count * LINE)) for address, count in pairs]
