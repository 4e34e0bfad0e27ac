"""Numbers become codes, in vectors of 16 lanes.

Every lane does what the specification says for one number, in its order: vectors change no bit.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.pages_codes_lanes import BITS
from onnx_inplace.numba_kernels.pages_lanes import by_known
from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Emitter, Value

_I, _F = types.int64, types.float32
_INTS = ir.VectorType(ir.IntType(32), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_ROUNDING = 12582912.0
"""1.5 * 2**23: a float32 with it added is rounded to even, its code in the lowest byte."""
_ROUNDED = 0x4B400000  # its bits


class _Coder:
    """Makes vectors of int32 whose low byte is a code, and the other bytes those of _ROUNDED."""

    def __init__(self, e: Emitter, center: Value, lowest: Value, highest: Value) -> None:
        self._e = e
        self._center, self._lowest, self._highest = (
            e.splat(number, VECTOR) for number in (center, lowest, highest)
        )

    def code(self, x: Value, inverse: Value, middle: Value) -> Value:
        """Rounding keeps the order of numbers, and the limits are whole: they come first here."""
        b = self._e.builder
        number = b.fadd(b.fmul(b.fsub(x, middle), inverse), self._center)
        number = b.select(b.fcmp_ordered(">", number, self._lowest), number, self._lowest)
        number = b.select(b.fcmp_ordered("<", number, self._highest), number, self._highest)
        return b.bitcast(b.fadd(number, self._e.constant(_ROUNDING)), _INTS)


def _write_bytes(e: Emitter, codes: Value, address: Value) -> None:
    place = e.builder.inttoptr(address, _BYTES.as_pointer())
    e.builder.store(e.builder.trunc(codes, _BYTES), place).align = 1


@intrinsic
def code(typing_context, x, vectors, inverse, middle, center, lowest, highest, to):
    """Codes of 16 * ``vectors`` float32 that share a scale: one byte each."""

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        x, vectors, inverse, middle, *limits, to = arguments
        coder, inverse, middle = (
            _Coder(e, *limits),
            e.splat(inverse, VECTOR),
            e.splat(middle, VECTOR),
        )
        with e.loop(vectors) as i:
            number = e.load(e.add(x, e.times(i, 4 * LANES)))
            _write_bytes(e, coder.code(number, inverse, middle), e.add(to, e.times(i, LANES)))
        return context.get_dummy_value()

    return types.void(_I, _I, _F, _F, _F, _F, _F, _I), generate


@intrinsic
def code_each(typing_context, x, vectors, inverses, middles, center, lowest, highest, to):
    """Like :func:`code`, for numbers with scales of their own: addresses of float32."""

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        x, vectors, inverses, middles, *limits, to = arguments
        coder = _Coder(e, *limits)
        with e.loop(vectors) as i:
            offset = e.times(i, 4 * LANES)
            number, inverse, middle = (e.load(e.add(a, offset)) for a in (x, inverses, middles))
            _write_bytes(e, coder.code(number, inverse, middle), e.add(to, e.times(i, LANES)))
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I, _F, _F, _F, _I), generate


@intrinsic
def code_value(typing_context, x, size, vectors, scales, center, lowest, highest, to, tile, bits):
    """16 tokens of V that share no byte with others: from rows to their vectors in tiles.

    Shapes:
        x:      (16) of 16 * ``vectors`` float32, ``size`` float32 apart
        scales: (2, 16) float32: inverses and midpoints of the tokens
        to:     of the first 16 elements; those that follow are ``tile`` bytes apart
    """

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        x, size, vectors, scales, *limits, to, tile, bits = arguments
        coder = _Coder(e, *limits)

        def emit(known: int) -> None:
            b, fields = builder, 8 // known
            with e.loop(vectors) as k:
                place, target = e.add(x, e.times(k, 4 * LANES)), e.add(to, e.times(tile, k))
                for v in range(4 // fields):
                    line, base = None, 0
                    for t in range(v * 4 * fields, (v + 1) * 4 * fields):
                        number = e.load(e.add(place, e.times(size, 4 * t)))
                        inverse = e.load_all(e.add(scales, 4 * t))
                        middle = e.load_all(e.add(scales, 4 * (LANES + t)))
                        codes = coder.code(number, inverse, middle)
                        shift = 8 * (t % 4) + known * (t // 4 % fields)
                        if shift:
                            codes = b.shl(codes, e.lanes([shift] * LANES))
                        line = codes if line is None else b.add(line, codes)
                        base += _ROUNDED << shift  # what the codes stand on adds up as well
                    base = (base & 0xFFFFFFFF) - (1 << 32 if base & 0x80000000 else 0)
                    pointer = b.inttoptr(e.add(target, 64 * v), _INTS.as_pointer())
                    b.store(b.sub(line, e.lanes([base] * LANES)), pointer).align = 1

        by_known(e, bits, BITS, emit)
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I, _F, _F, _F, _I, _I, _I), generate


def _plain_codes(e: Emitter, x: Value, inverse: Value, center: Value) -> Value:
    """Like :meth:`_Coder.code`, for numbers around 0 whose codes need no clipping."""
    b = e.builder
    number = b.fadd(b.fmul(x, inverse), center)
    return b.bitcast(b.fadd(number, e.constant(_ROUNDING)), _INTS)


def _joined_bytes(e: Emitter, codes: list[Value]) -> Value:
    """Byte k of every lane: of vector k of four that :func:`_plain_codes` gave."""
    b, line = e.builder, codes[0]
    for k, code_ in enumerate(codes[1:], 1):
        line = b.add(line, b.shl(code_, e.lanes([8 * k] * LANES)))
    base = sum(_ROUNDED << (8 * k) for k in range(4)) & 0xFFFFFFFF  # what the codes stand on
    return b.sub(line, e.lanes([base - (base >> 31 << 32)] * LANES))


def _ask(e: Emitter, asked: Value, step: Value, row: int, size: Value, element: Value) -> None:
    """Ask for a part of the second half of a row of float32.

    ``element``: from 0 to ``size``, a line for each 32. The rotation asked for the first half:
    requests are spread over all that is done with a tile.
    """
    begin = e.add(e.add(asked, e.times(step, row)), e.times(size, 2))
    e.prefetch(e.add(begin, e.times(element, 2)), near=True)


@intrinsic
def code_bytes_of_key(typing_context, x, size, inverses, center, to, asked, step):
    """16 tokens of K, whose codes are bytes and need no clipping, become a tile.

    Shapes:
        x:        (16, size) float32; ``size`` a multiple of 64
        inverses: (16) float32, of the scales of tokens
        to:       of the tile
        asked:    (16, size) float32, rows ``step`` bytes apart: their second halves are asked for
    """

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        x, size, inverses, center, to, asked, step = arguments
        center = e.splat(center, VECTOR)
        # four bytes that stand 16 elements apart in a lane become four neighbours
        order = [16 * (k // 16) + 4 * (k % 4) + k // 4 % 4 for k in range(4 * LANES)]
        neighbours = ir.Constant(ir.VectorType(ir.IntType(32), 4 * LANES), order)
        line_bytes = ir.VectorType(ir.IntType(8), 4 * LANES)
        with e.loop(builder.sdiv(size, e.whole(4 * LANES))) as k:
            rows = []
            for t in range(LANES):
                row = e.add(e.add(x, e.times(size, 4 * t)), e.times(k, 16 * LANES))
                inverse = e.load_all(e.add(inverses, 4 * t))
                numbers = [e.load(e.add(row, 4 * LANES * j)) for j in range(4)]
                line = _joined_bytes(e, [_plain_codes(e, n, inverse, center) for n in numbers])
                line = builder.bitcast(line, line_bytes)
                line = builder.shuffle_vector(line, line, neighbours)
                rows.append(builder.bitcast(line, _INTS))
                for offset in (0, 2 * LANES):
                    _ask(e, asked, step, t, size, e.add(e.times(k, 4 * LANES), offset))
            target = e.add(to, e.times(k, 4 * LANES * LANES))
            for i, row in enumerate(e.transposed(rows)):  # 4 elements from 16 * (i % 4) + i // 4
                pointer = e.add(target, 4 * LANES * (4 * (i % 4) + i // 4))
                builder.store(row, builder.inttoptr(pointer, _INTS.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _F, _I, _I, _I), generate


@intrinsic
def code_bytes_of_value(typing_context, x, size, inverses, center, to, tile, asked, step):
    """16 tokens of V, whose codes are bytes and need no clipping, to their places in tiles.

    Shapes:
        x:        (16, size) float32
        inverses: (16) float32, of the scales of tokens
        to:       of the first 16 elements; those that follow are ``tile`` bytes apart
        asked:    (16, size) float32, rows ``step`` bytes apart: their second halves are asked for
    """

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        x, size, inverses, center, to, tile, asked, step = arguments
        center = e.splat(center, VECTOR)
        with e.loop(builder.sdiv(size, e.whole(LANES))) as k:
            column, target = e.add(x, e.times(k, 4 * LANES)), e.add(to, e.times(tile, k))
            for v in range(0, LANES, 4):
                codes = []
                for t in range(v, v + 4):
                    number = e.load(e.add(column, e.times(size, 4 * t)))
                    inverse = e.load_all(e.add(inverses, 4 * t))
                    codes.append(_plain_codes(e, number, inverse, center))
                    _ask(e, asked, step, t, size, e.times(k, LANES))
                pointer = builder.inttoptr(e.add(target, 16 * v), _INTS.as_pointer())
                builder.store(_joined_bytes(e, codes), pointer).align = 1
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _F, _I, _I, _I, _I), generate
