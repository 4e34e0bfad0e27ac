"""Vectors of 16 float32 in LLVM code, for functions that numba's optimizer would not find.

An emitter runs while numba compiles an intrinsic: loops of Python unroll, values are LLVM values,
addresses are int64. LLVM splits the vectors where a CPU has shorter registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from onnx_inplace.numba_kernels import cpu
from onnx_inplace.numba_kernels.floats import BFLOAT16, FLOAT16, FLOAT32, SIZES
from onnx_inplace.numba_kernels.pages_layout import E4M3, E5M2

LANES = 16

Value = Any  # llvmlite is not typed

_INT8, _INT16, _INT32, _INT64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
VECTOR = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(_INT32, LANES)


def available() -> bool:
    """Whether the CPU has what the emitted code needs to be fast and right."""
    return not cpu.missing(cpu.Path.AVX2)


class Emitter:
    """Writes instructions at the place of a builder."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def whole(self, number: int) -> Value:
        """An int64."""
        return ir.Constant(_INT64, number)

    def constant(self, number: float) -> Value:
        """A number in all lanes."""
        return ir.Constant(VECTOR, [number] * LANES)

    def add(self, a: Value, b: Value | int) -> Value:
        """Sum of int64."""
        return self.builder.add(a, self.whole(b) if isinstance(b, int) else b)

    def times(self, a: Value, b: Value | int) -> Value:
        """Product of int64."""
        return self.builder.mul(a, self.whole(b) if isinstance(b, int) else b)

    def least(self, a: Value, b: Value) -> Value:
        """The smaller int64."""
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def groups(self, count: Value, size: int) -> Value:
        """How many groups of ``size`` hold ``count``."""
        return self.builder.sdiv(self.add(count, size - 1), self.whole(size))

    @contextmanager
    def loop(self, count: Value) -> Iterator[Value]:
        """The index of a loop."""
        with cgutils.for_range(self.builder, count, intp=_INT64) as loop:
            yield loop.index

    def _memory(self, address: Value, kind: Any) -> Value:
        return self.builder.inttoptr(address, kind.as_pointer())

    def load(self, address: Value, kind: int = FLOAT32) -> Value:
        """16 elements of a kind of ``pages_layout``, as float32; those of E4M3 divided by 256."""
        b = self.builder
        if kind in (E4M3, E5M2):
            return b.fpext(self.halves_of_bytes(address, kind, LANES), VECTOR)
        element = {FLOAT32: _FLOAT, FLOAT16: ir.HalfType(), BFLOAT16: _INT16}[kind]
        value = b.load(self._memory(address, ir.VectorType(element, LANES)))
        value.align = 1
        if kind == FLOAT16:
            return b.fpext(value, VECTOR)
        if kind == BFLOAT16:
            sixteen = ir.Constant(_INTS, [16] * LANES)
            return b.bitcast(b.shl(b.zext(value, _INTS), sixteen), VECTOR)
        return value

    def load_row(self, address: Value, count: int, kind: int = FLOAT32) -> list[Value]:
        """``count`` vectors of 16 neighbours, as by :meth:`load`; bytes are widened 32 at once."""
        vectors: list[Value] = []
        while len(vectors) < count:
            place = self.add(address, len(vectors) * LANES * SIZES[kind])
            if kind in (E4M3, E5M2) and count - len(vectors) >= 2:
                both = self.halves_of_bytes(place, kind, 2 * LANES)
                for first in (0, LANES):
                    lanes = ir.Constant(_INTS, list(range(first, first + LANES)))
                    part = self.builder.shuffle_vector(both, both, lanes)
                    vectors.append(self.builder.fpext(part, VECTOR))
            else:
                vectors.append(self.load(place, kind))
        return vectors

    def halves_of_bytes(self, address: Value, kind: int, count: int) -> Value:
        """8-bit floats as float16; those of E4M3 divided by 256.

        Moved to the exponent and fraction of a float16, an E4M3 is 256 times too small.
        """
        b, shorts = self.builder, ir.VectorType(_INT16, count)
        value = b.load(self._memory(address, ir.VectorType(_INT8, count)))
        value.align = 1

        def all_(number: int) -> Value:
            return ir.Constant(shorts, [number] * count)

        if kind == E5M2:
            bits = b.shl(b.zext(value, shorts), all_(8))
        else:
            # Bit 14 is a copy of the sign. A carry into it comes from NaN alone, all ones, which
            # gets the exponent of a NaN; from all others the copy is taken away.
            moved = b.shl(b.sext(value, shorts), all_(7))
            bits = b.xor(moved, b.and_(b.add(moved, all_(0x80)), all_(0x4000)))
        return b.bitcast(bits, ir.VectorType(ir.HalfType(), count))

    def store(self, vector: Value, address: Value) -> None:
        """Write 16 float32."""
        self.builder.store(vector, self._memory(address, VECTOR)).align = 1

    def load_all(self, address: Value) -> Value:
        """One float32 in all lanes."""
        number = self.builder.load(self._memory(address, _FLOAT))
        number.align = 4
        return self.splat(number, VECTOR)

    def load_int(self, address: Value) -> Value:
        """One int64."""
        number = self.builder.load(self._memory(address, _INT64))
        number.align = 8
        return number

    def splat_int(self, number: Value) -> Value:
        """The low half of an int64 in all lanes."""
        return self.splat(self.builder.trunc(number, _INT32), _INTS)

    def splat(self, number: Value, vector: Any) -> Value:
        """A number in all lanes."""
        nothing = ir.Constant(vector, ir.Undefined)
        first = self.builder.insert_element(nothing, number, ir.Constant(_INT32, 0))
        return self.builder.shuffle_vector(first, nothing, ir.Constant(_INTS, [0] * LANES))

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Lanes 0..15 are those of ``a``, 16..31 those of ``b``."""
        return self.builder.shuffle_vector(a, b, ir.Constant(_INTS, list(lanes)))

    def lanes(self, numbers: Sequence[int]) -> Value:
        """An int32 for each lane."""
        return ir.Constant(_INTS, list(numbers))

    def where_less(self, lanes: Value, limit: Value, a: Value, b: Value) -> Value:
        """``a`` in lanes whose int32 is less than the limit's, ``b`` elsewhere."""
        return self.builder.select(self.builder.icmp_signed("<", lanes, limit), a, b)

    def _intrinsic(self, name: str, result: Any, arguments: Sequence[Value]) -> Value:
        kind = ir.FunctionType(result, [a.type for a in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """``a * b + c``, rounded once."""
        return self._intrinsic(f"llvm.fma.v{LANES}f32", VECTOR, [a, b, c])

    def nearest(self, x: Value) -> Value:
        """Whole numbers, ties to even."""
        return self._intrinsic(f"llvm.nearbyint.v{LANES}f32", VECTOR, [x])

    def maximum(self, a: Value, b: Value) -> Value:
        """The larger numbers; those of ``b`` where ``a`` is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def prefetch(self, address: Value, near: bool = False) -> None:
        """Ask for a line of memory, into the second-level cache; ``near``: into the first one."""
        numbers = [ir.Constant(_INT32, n) for n in (0, 3 if near else 2, 1)]
        pointer = self.builder.inttoptr(address, _INT8.as_pointer())
        self._intrinsic("llvm.prefetch.p0", ir.VoidType(), [pointer, *numbers])

    def exp2(self, x: Value, least: float = -126.0) -> Value:
        """2**x for x <= 0, relative error 2e-7; x below ``least`` counts as it, NaN stays NaN."""
        b = self.builder
        lowest = self.constant(least)
        x = b.select(b.fcmp_ordered("<", x, lowest), lowest, x)
        whole = self.nearest(x)
        fraction = b.fsub(x, whole)
        power = self.constant(1.540353039338161e-4)
        for coefficient in (
            1.3333558146428443e-3,
            9.618129107628477e-3,
            5.550410866482158e-2,
            2.402265069591007e-1,
            6.931471805599453e-1,
            1.0,
        ):
            power = self.fma(power, fraction, self.constant(coefficient))
        exponent = b.shl(b.fptosi(whole, _INTS), self.lanes([23] * LANES))
        return b.bitcast(b.add(b.bitcast(power, _INTS), exponent), VECTOR)

    def weight(self, x: Value) -> Value:
        """2**x for the weight of a score, x <= 0.

        Not below 2**-100, which adds nothing to a weight of 1: times a value or a scale it still
        is a normal number. Arithmetic on subnormal ones takes a hundred times as long.
        """
        return self.exp2(x, -100.0)

    def across(self, combine: Any, x: Value, width: int) -> Value:
        """``combine`` over every ``width`` neighbouring lanes, the result in all of them."""
        distance = 1
        while distance < width:
            x = combine(x, self.shuffle(x, x, [lane ^ distance for lane in range(LANES)]))
            distance *= 2
        return x

    def transposed(self, rows: Sequence[Value]) -> list[Value]:
        """Sixteen vectors of 16, exchanged in pairs at distances 1, 2, 4, 8."""
        rows = list(rows)
        for distance in (1, 2, 4, 8):
            low = [j if not j & distance else LANES + (j ^ distance) for j in range(LANES)]
            high = [j | distance if not j & distance else LANES + j for j in range(LANES)]
            for i in range(LANES):
                if not i & distance:
                    a, b = rows[i], rows[i | distance]
                    rows[i], rows[i | distance] = self.shuffle(a, b, low), self.shuffle(a, b, high)
        return rows

    def sums(self, vectors: Sequence[Value]) -> Value:
        """Lane i = the sum of the lanes of ``vectors[i]``: 15 additions instead of 64."""
        return self.joined(self.builder.fadd, vectors)

    def joined(self, combine: Any, vectors: Sequence[Value]) -> Value:
        """Lane i = ``combine`` over the lanes of ``vectors[i]``, of which there are 16."""
        vectors = list(vectors)
        width = LANES
        while width > 1:
            half, kept = width // 2, len(vectors) // 2
            low = [s * width + k for s in range(LANES // width) for k in range(half)]
            order = []
            for s in range(LANES // width):
                first = low[s * half : (s + 1) * half]
                order += first + [LANES + k for k in first]
            upper = [k + half for k in order]
            vectors = [
                combine(self.shuffle(a, b, order), self.shuffle(a, b, upper))
                for a, b in zip(vectors[:kept], vectors[kept:], strict=True)
            ]
            width = half
        return vectors[0]
