"""Codes of one token, and of whole tiles of 16 tokens, on their way into a page and out of it.

Bytes of a plane are moved, nothing is computed; every CPU gives the same bytes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.pages_lanes import by_known
from onnx_inplace.numba_kernels.vector import LANES, Emitter, Value

_I = types.int64
BITS = (8, 4, 2)
_LINE = 64  # bytes
_INT = ir.IntType(32)
_BYTES, _INTS = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(_INT, LANES)


class _Bytes(Emitter):
    """Moves vectors of bytes and of int32."""

    def read(self, address: Value, kind: Any) -> Value:
        value = self.builder.load(self._memory(address, kind), typ=kind)
        value.align = 1
        return value

    def write(self, vector: Value, address: Value) -> None:
        self.builder.store(vector, self._memory(address, vector.type)).align = 1

    def all_(self, number: int) -> Value:
        return self.lanes([number] * LANES)

    def join(self, parts: list[tuple[Value, int]]) -> Value:
        """Vectors of int32, each moved up by so many bits."""
        b, result = self.builder, None
        for part, shift in parts:
            moved = b.shl(part, self.all_(shift)) if shift else part
            result = moved if result is None else b.or_(result, moved)
        return result

    def field(self, vector: Value, shift: int, mask: int) -> Value:
        """Bits of every lane, moved down."""
        b = self.builder
        moved = b.lshr(vector, self.all_(shift)) if shift else vector
        return b.and_(moved, self.all_(mask))


def _bytes_of(bits: int) -> int:
    """The same code mask in all bytes of an int32."""
    return sum(((1 << bits) - 1) << byte for byte in (0, 8, 16, 24))


@intrinsic
def put_key(typing_context, to, row, size, bits):
    """One token of K: ``size`` codes, a byte each, to its four bytes of each line from ``to`` on.

    All codes of a byte are of that token.
    """

    def generate(context, builder, signature, arguments):
        e = _Bytes(builder)
        to, row, size, bits = arguments

        def emit(known: int) -> None:
            fields = 8 // known
            with e.loop(builder.sdiv(size, e.whole(4 * fields))) as v:
                place, word = e.add(row, e.times(v, 4 * fields)), None
                for f in range(fields):  # codes have no bits beyond theirs: bytes stay apart
                    part = e.read(e.add(place, 4 * f), _INT)
                    if f:
                        part = builder.shl(part, ir.Constant(_INT, known * f))
                    word = part if word is None else builder.or_(word, part)
                e.write(word, e.add(to, e.times(v, _LINE)))

        by_known(e, bits, BITS, emit)
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I), generate


@intrinsic
def put_value(typing_context, to, tile, row, size, shift, mask):
    """One token of V: ``size`` codes, a byte each, to some bits of each lane of its lines.

    The line at ``to`` is that of the first 16 elements; those that follow are ``tile`` bytes apart.
    The lowest bit of a code in a lane of 32 is ``shift``; ``mask`` is that of one code. All other
    bits of a lane are of other tokens, and stay.
    """

    def generate(context, builder, signature, arguments):
        e = _Bytes(builder)
        to, tile, row, size, shift, mask = arguments
        up = e.splat_int(shift)
        kept = builder.not_(builder.shl(e.splat_int(mask), up))
        with e.loop(builder.sdiv(size, e.whole(LANES))) as k:
            codes = builder.zext(e.read(e.add(row, e.times(k, LANES)), _BYTES), _INTS)
            place = e.add(to, e.times(tile, k))
            line = builder.and_(e.read(place, _INTS), kept)
            e.write(builder.or_(line, builder.shl(codes, up)), place)
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I, _I, _I), generate


@intrinsic
def pack_key(typing_context, to, plane, size, bits):
    """16 tokens of K: plane (16, size) of codes to a tile at ``to``; ``size`` a multiple of 64."""

    def generate(context, builder, signature, arguments):
        e = _Bytes(builder)
        to, plane, size, bits = arguments

        def emit(known: int) -> None:
            fields = 8 // known
            with e.loop(builder.sdiv(size, e.whole(_LINE))) as k:
                place = e.add(plane, e.times(k, _LINE))
                rows = [e.read(e.add(place, e.times(size, t)), _INTS) for t in range(LANES)]
                rows = e.transposed(rows)
                target = e.add(to, e.times(k, LANES // fields * _LINE))
                for v in range(LANES // fields):
                    parts = [(rows[v * fields + f], known * f) for f in range(fields)]
                    e.write(e.join(parts), e.add(target, v * _LINE))

        by_known(e, bits, BITS, emit)
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I), generate


@intrinsic
def unpack_key(typing_context, source, plane, size, bits):
    """The tile at ``source`` as a plane (16, size); ``size`` a multiple of 64."""

    def generate(context, builder, signature, arguments):
        e = _Bytes(builder)
        source, plane, size, bits = arguments

        def emit(known: int) -> None:
            fields, mask = 8 // known, _bytes_of(known)
            with e.loop(builder.sdiv(size, e.whole(_LINE))) as k:
                taken = e.add(source, e.times(k, LANES // fields * _LINE))
                rows = []
                for v in range(LANES // fields):
                    line = e.read(e.add(taken, v * _LINE), _INTS)
                    rows += [e.field(line, known * f, mask) for f in range(fields)]
                place = e.add(plane, e.times(k, _LINE))
                for t, row in enumerate(e.transposed(rows)):
                    e.write(row, e.add(place, e.times(size, t)))

        by_known(e, bits, BITS, emit)
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I), generate


@intrinsic
def pack_value(typing_context, to, tile, plane, size, bits):
    """16 tokens of V: plane (16, size) to their vectors in tiles of 16 elements, ``tile`` apart."""

    def generate(context, builder, signature, arguments):
        e = _Bytes(builder)
        to, tile, plane, size, bits = arguments

        def emit(known: int) -> None:
            fields = 8 // known
            with e.loop(builder.sdiv(size, e.whole(LANES))) as k:
                place = e.add(plane, e.times(k, LANES))
                rows = [e.read(e.add(place, e.times(size, t)), _BYTES) for t in range(LANES)]
                rows = [builder.zext(row, _INTS) for row in rows]
                for v in range(4 // fields):
                    tokens = range(v * 4 * fields, (v + 1) * 4 * fields)
                    parts = [(rows[t], 8 * (t % 4) + known * (t // 4 % fields)) for t in tokens]
                    e.write(e.join(parts), e.add(e.add(to, e.times(tile, k)), v * _LINE))

        by_known(e, bits, BITS, emit)
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I, _I), generate


@intrinsic
def unpack_value(typing_context, source, tile, plane, size, bits):
    """The vectors of 16 tokens at ``source`` as a plane (16, size)."""

    def generate(context, builder, signature, arguments):
        e = _Bytes(builder)
        source, tile, plane, size, bits = arguments

        def emit(known: int) -> None:
            fields, mask = 8 // known, (1 << known) - 1
            with e.loop(builder.sdiv(size, e.whole(LANES))) as k:
                taken, place = e.add(source, e.times(tile, k)), e.add(plane, e.times(k, LANES))
                for v in range(4 // fields):
                    line = e.read(e.add(taken, v * _LINE), _INTS)
                    for t in range(v * 4 * fields, (v + 1) * 4 * fields):
                        shift = 8 * (t % 4) + known * (t // 4 % fields)
                        row = builder.trunc(e.field(line, shift, mask), _BYTES)
                        e.write(row, e.add(place, e.times(size, t)))

        by_known(e, bits, BITS, emit)
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I, _I), generate
