"""Arithmetic on vectors of 32 float16, and how 8-bit floats become them."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from onnx_inplace.numba_kernels import cpu
from onnx_inplace.numba_kernels.fused.lanes import Lanes
from onnx_inplace.numba_kernels.pages_layout import E4M3
from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Value

WIDE = 2 * LANES  # elements of a vector of float16
LINE = 64  # bytes that one access brings from memory

_HALF, _SHORT, _INT = ir.HalfType(), ir.IntType(16), ir.IntType(32)
_HALVES, _NARROW = ir.VectorType(_HALF, WIDE), ir.VectorType(_HALF, LANES)
_SHORTS, _INTS = ir.VectorType(_SHORT, LANES), ir.VectorType(_INT, LANES)
BYTES = ir.VectorType(ir.IntType(8), LINE)
_LOW, _HIGH = (
    [lane + part + i for lane in range(0, LINE, 16) for i in range(8)] for part in (0, 8)
)
"""Bytes of a line in two vectors of 16 bits: eight of every sixteen, as one instruction does it."""


def available(size: int) -> bool:
    """Whether the CPU has what this takes, and heads of ``size`` elements are whole vectors."""
    return size % WIDE == 0 and cpu.has("avx512fp16") and cpu.has("gfni")


def split(numbers: Sequence[int]) -> list[list[int]]:
    """Of every 16 numbers the first eight, and the last eight: the order of :func:`widened`."""
    return [
        [n for first in range(0, len(numbers), 16) for n in numbers[first + part :][:8]]
        for part in (0, 8)
    ]


class Halves(Lanes):
    """Arithmetic on 32 float16."""

    def row(self, address: Value) -> Value:
        """32 float16."""
        value = self.builder.load(self._memory(address, _HALVES))
        value.align = 2
        return value

    def put(self, vector: Value, address: Value) -> None:
        """Store a vector of any type."""
        self.builder.store(vector, self._memory(address, vector.type)).align = 2

    def zero(self) -> Value:
        """32 float16."""
        return ir.Constant(_HALVES, [0.0] * WIDE)

    def twice(self, address: Value) -> Value:
        """Two float16 in all lanes."""
        number = self.builder.load(self._memory(address, _INT))
        number.align = 4
        return self.builder.bitcast(self.splat(number, _INTS), _HALVES)

    def multiply_add(self, a: Value, b: Value, c: Value | None) -> Value:
        """``a * b + c``; without ``c`` the product."""
        if c is None:
            return self.builder.fmul(a, b)
        return self._intrinsic(f"llvm.fma.v{WIDE}f16", _HALVES, [a, b, c])

    def rounded(self, x: Value) -> Value:
        """16 float32 as float16."""
        return self.builder.fptrunc(x, _NARROW)

    def narrowed(self, x: Value) -> Value:
        """16 float32 as float16, in the low halves of int32."""
        return self.builder.zext(self.builder.bitcast(self.rounded(x), _SHORTS), _INTS)

    def picked(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Lanes of ``a``, and behind them of ``b``, vectors of one type."""
        mask = ir.Constant(ir.VectorType(_INT, len(lanes)), list(lanes))
        return self.builder.shuffle_vector(a, b, mask)

    def wide(self, x: Value) -> Value:
        """16 float16 as float32."""
        return self.builder.fpext(x, VECTOR)

    def parts(self, x: Value) -> list[Value]:
        """The first and the last 16 elements as float32."""
        return [self.wide(self.picked(x, x, range(i, i + LANES))) for i in (0, LANES)]

    def line(self, address: Value) -> Value:
        """64 bytes."""
        value = self.builder.load(self._memory(address, BYTES))
        value.align = 1
        return value

    def two_rows(self, first: Value, second: Value) -> Value:
        """32 bytes from one address, and 32 from another one."""
        half = ir.VectorType(ir.IntType(8), WIDE)
        a, b = (self.builder.load(self._memory(at, half)) for at in (first, second))
        a.align = b.align = 1
        return self.picked(a, b, range(LINE))

    def widened(self, codes: Value, kind: int) -> list[Value]:
        """64 codes as two vectors, see ``split``; those of E4M3 divided by 256, NaN lost.

        See :meth:`suspected`.
        """
        b, high, low = self.builder, codes, ir.Constant(BYTES, [0] * LINE)
        if kind == E4M3:
            high = self._high(codes)
            low = self._moved(codes, [0] + [None] * 7)  # the third bit of the fraction
        pairs = [[place for i in lanes for place in (i, LINE + i)] for lanes in (_LOW, _HIGH)]
        return [b.bitcast(self.picked(low, high, lanes), _HALVES) for lanes in pairs]

    def joined_line(self, first: Value, second: Value) -> list[Value]:
        """Two vectors in the order of ``widened``, in that of the codes."""
        order = sorted(range(LINE), key=[*_LOW, *_HIGH].__getitem__)
        return [self.picked(first, second, order[i : i + WIDE]) for i in (0, WIDE)]

    def _high(self, codes: Value) -> Value:
        """Of codes of E4M3: sign, 0, exponent, two bits of the fraction."""
        return self._moved(codes, [7, None, 6, 5, 4, 3, 2, 1])

    def _moved(self, codes: Value, sources: Sequence[int | None]) -> Value:
        """Bytes whose bits, the highest first, are these of a byte; None: 0."""
        matrix = [0 if bit is None else 1 << bit for bit in sources]
        rows, none = ir.Constant(BYTES, matrix * 8), ir.Constant(ir.IntType(8), 0)
        return self._intrinsic("llvm.x86.vgf2p8affineqb.512", BYTES, [codes, rows, none])

    def suspected(self, lines: Sequence[Value], seen: Value) -> Value:
        """``seen``, and bit 6 of a byte where a code of E4M3 is NaN, or 448, its neighbour.

        To tell them apart, too, would take twice the time of this, with every line.
        """
        b, one = self.builder, ir.Constant(BYTES, [1] * LINE)
        for codes in lines:
            seen = b.or_(seen, b.add(self._high(codes), one))
        return seen

    def totals(self, vectors: Sequence[Value]) -> list[Value]:
        """Of 16 vectors: lane i, as float32 = the sum of the first 16 lanes of ``vectors[i]``.

        And of the last 16 lanes. All but the last addition is one of float16.
        """
        b = self.builder
        even, odd = (self._gathered(vectors[first::2]) for first in (0, 1))
        sixteen, low = self.lanes([16] * LANES), self.lanes([0xFFFF] * LANES)
        first = b.or_(b.and_(even, low), b.shl(odd, sixteen))
        second = b.or_(b.lshr(even, sixteen), b.and_(odd, self.lanes([~0xFFFF] * LANES)))
        both = [self.parts(b.bitcast(x, _HALVES)) for x in (first, second)]
        return [b.fadd(x, y) for x, y in zip(*both, strict=True)]

    def _gathered(self, vectors: Sequence[Value]) -> Value:
        """Of 8 vectors, in each half: lane i, an int32 = two float16, sums of ``vectors[i]``."""
        # neighbours of float16 stay together: lanes of 32 bits are moved by one instruction
        b, width = self.builder, LANES // 2
        halves = list(vectors)
        while width > 1:
            half, kept = width // 2, len(halves) // 2
            order: list[int] = []
            for s in range(LANES // width):
                first = [s * width + k for k in range(half)]
                order += first + [LANES + k for k in first]
            pairs = [b.bitcast(v, _INTS) for v in halves]
            joined = []
            for x, y in zip(pairs[:kept], pairs[kept:], strict=True):
                moved = [self.shuffle(x, y, [k + d for k in order]) for d in (0, half)]
                joined.append(b.fadd(*(b.bitcast(m, _HALVES) for m in moved)))
            halves, width = joined, half
        return b.bitcast(halves[0], _INTS)
