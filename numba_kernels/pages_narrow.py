"""Rows of float32 become elements of a float format, in vectors of 16 lanes, and are counted.

Nearest, ties to even, as ``docs/formats.md`` says; every CPU gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels import cpu
from onnx_inplace.numba_kernels.pages_lanes import by_known
from onnx_inplace.numba_kernels.pages_layout import BFLOAT16, E4M3, E5M2, FLOAT16, ITEM
from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Emitter, Value

_I = types.int64
_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)
_INFINITY = 0x7F800000


class _Kind(NamedTuple):
    """A kind of float, by bits of the float32 magnitudes that it is made of."""

    shift: int  # [bits] that its fraction is shorter
    normal: int  # the smallest normal number
    rounding: float  # added to a smaller one, it leaves the rounded fraction in the low bits
    too_large: int  # what rounds beyond the largest number
    largest: int  # the code of what is too large
    nan: int  # code
    saturates: bool  # infinity is clipped too


_KINDS = {
    FLOAT16: _Kind(13, 0x38800000, 0.5, 0x477FF000, 0x7C00, 0x7E00, False),
    BFLOAT16: _Kind(16, 0, 0.0, 0x7F7F8000, 0x7F80, 0x7FC0, False),
    E4M3: _Kind(20, 0x3C800000, 2.0**14, 0x43E00001, 0x7E, 0x7F, True),
    E5M2: _Kind(21, 0x38800000, 2.0**7, 0x47600001, 0x7B, 0x7E, True),
}


class _Narrow:
    """Emits the conversion of magnitudes, the bits of positive float32."""

    def __init__(self, e: Emitter, kind: _Kind) -> None:
        self._e, self._b, self._kind = e, e.builder, kind

    def _all(self, number: int) -> Value:
        return self._e.lanes([number] * LANES)

    def _moved(self, size: Value) -> Value:
        """Rounded, and moved to the exponent of the kind: right for normal numbers."""
        b, kind = self._b, self._kind
        bias = kind.normal - (1 << 23) if kind.normal else 0
        odd = b.and_(b.lshr(size, self._all(kind.shift)), self._all(1))
        half = self._all((1 << (kind.shift - 1)) - 1 - bias)
        return b.lshr(b.add(b.add(size, half), odd), self._all(kind.shift))

    def codes(self, size: Value) -> Value:
        """Codes without sign."""
        b, kind = self._b, self._kind
        result = self._moved(size)
        if kind.normal:
            base = int(np.float32(kind.rounding).view(np.int32))
            moved = b.fadd(b.bitcast(size, VECTOR), self._e.constant(kind.rounding))
            small = b.sub(b.bitcast(moved, _INTS), self._all(base))
            result = b.select(b.icmp_signed("<", size, self._all(kind.normal)), small, result)
        large = b.icmp_signed(">=", size, self._all(kind.too_large))
        result = b.select(large, self._all(kind.largest), result)
        nan = b.icmp_signed(">", size, self._all(_INFINITY))
        return b.select(nan, self._all(kind.nan), result)

    def halves(self, size: Value) -> Value:
        """Like :meth:`codes`, by the instruction of the CPU for float16."""
        b = self._b
        half = b.fptrunc(b.bitcast(size, VECTOR), ir.VectorType(ir.HalfType(), LANES))
        result = b.zext(b.bitcast(half, ir.VectorType(ir.IntType(16), LANES)), _INTS)
        nan = b.icmp_signed(">", size, self._all(_INFINITY))
        return b.select(nan, self._all(self._kind.nan), result)

    def clipped(self, size: Value) -> Value:
        """-1 in lanes of numbers that do not fit, 0 elsewhere."""
        b, kind = self._b, self._kind
        end = _INFINITY + (1 if kind.saturates else 0)
        above = b.sub(size, self._all(kind.too_large))
        found = b.icmp_unsigned("<", above, self._all(end - kind.too_large))
        return b.sext(found, _INTS)


@intrinsic
def narrow_lanes(typing_context, target, vectors, source, kind, ahead):
    """16 * ``vectors`` float32 become elements of a kind; how many finite ones did not fit it.

    What is too large becomes an infinity; as an 8-bit float, the largest number, and infinities
    count as well. What lies ``ahead`` bytes behind the source is asked for.
    """

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        target, vectors, source, kind, ahead = arguments
        none = ir.Constant(_INTS, [0] * LANES)
        changed = cgutils.alloca_once_value(builder, none)
        builder.store(none, changed)

        def emit(known: int) -> None:
            narrow, bits = _Narrow(e, _KINDS[known]), 8 * ITEM[known]
            elements = ir.VectorType(ir.IntType(bits), LANES)
            convert = narrow.codes
            if known == FLOAT16 and cpu.has("f16c"):
                convert = narrow.halves
            with e.loop(vectors) as i:
                place = e.add(source, e.times(i, 4 * LANES))
                e.prefetch(e.add(place, ahead), near=True)
                x = builder.bitcast(e.load(place), _INTS)
                size = builder.and_(x, e.lanes([0x7FFFFFFF] * LANES))
                sign = builder.lshr(builder.xor(x, size), e.lanes([32 - bits] * LANES))
                code = builder.trunc(builder.or_(convert(size), sign), elements)
                to = e.add(target, e.times(i, ITEM[known] * LANES))
                builder.store(code, builder.inttoptr(to, elements.as_pointer())).align = 1
                lost = builder.sub(builder.load(changed), narrow.clipped(size))
                builder.store(lost, changed)

        by_known(e, kind, tuple(_KINDS), emit)
        total = e.across(builder.add, builder.load(changed), LANES)
        first = builder.extract_element(total, ir.Constant(_INT, 0))
        return builder.sext(first, ir.IntType(64))

    return types.int64(_I, _I, _I, _I, _I), generate
