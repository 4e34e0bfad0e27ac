"""Ranges of numbers, and the scales and midpoints made of them, for 16 groups at once.

Every lane does what the specification says for one group, in its order: vectors change no bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels import cpu
from onnx_inplace.numba_kernels.floats import FLOAT16
from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Emitter, Value

_I = types.int64
_INT, _SHORT = ir.IntType(32), ir.IntType(16)
_INTS, _SHORTS = ir.VectorType(_INT, LANES), ir.VectorType(_SHORT, LANES)
_VECTOR_BYTES = 4 * LANES
_AT_ONCE = 4  # numbers of a channel that are compared with four partial results

_NORMAL = 2.0**-14  # the smallest float16 that has all bits of its fraction

RANGES = 2 * LANES * _VECTOR_BYTES
"""Bytes of workspace of :func:`ranges_of_tokens`."""

SETTLED = 3 * _VECTOR_BYTES
"""Bytes that :func:`settle` writes: 16 float32 inverses and midpoints, 2 x 16 float16."""


def _smaller(e: Emitter, a: Value, b: Value) -> Value:
    return e.builder.select(e.builder.fcmp_ordered("<", a, b), a, b)


def _range_by_lane(e: Emitter, row: Value, vectors: Value) -> tuple[Value, Value]:
    """The smallest and largest numbers of a row's vectors of 16, lane by lane."""
    b = e.builder
    least, most = (cgutils.alloca_once(b, VECTOR) for _ in range(2))
    for place in (least, most):
        b.store(e.load(row), place)
    with e.loop(vectors) as i:
        x = e.load(e.add(row, e.times(i, _VECTOR_BYTES)))
        b.store(_smaller(e, b.load(least), x), least)
        b.store(e.maximum(b.load(most), x), most)
    return b.load(least), b.load(most)


@intrinsic
def ranges_of_tokens(typing_context, rows, size, vectors, count, to, space):
    """The smallest and largest numbers, none of them NaN, of ``count`` rows: one a lane.

    Shapes:
        rows:  (count) of 16 * ``vectors`` float32, ``size`` float32 apart; count <= 16
        to:    (2, 16) float32; lanes behind ``count`` mean nothing
        space: RANGES bytes
    """

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        rows, size, vectors, count, to, space = arguments
        with e.loop(count) as j:
            row = e.add(rows, e.times(e.times(size, 4), j))
            own = e.add(space, e.times(j, 2 * _VECTOR_BYTES))
            for k, x in enumerate(_range_by_lane(e, row, vectors)):
                e.store(x, e.add(own, k * _VECTOR_BYTES))
        for k, combine in enumerate((lambda a, b: _smaller(e, a, b), e.maximum)):
            rows_ = [e.load(e.add(space, (2 * j + k) * _VECTOR_BYTES)) for j in range(LANES)]
            e.store(e.joined(combine, rows_), e.add(to, k * _VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I, _I, _I), generate


@intrinsic
def range_of_token(typing_context, row, vectors, to):
    """What :func:`ranges_of_tokens` gives for one row, in all lanes; zeros have the same sign.

    Shapes:
        row: 16 * ``vectors`` float32
        to:  (2, 16) float32
    """

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        row, vectors, to = arguments
        for k, x in enumerate(_range_by_lane(e, row, vectors)):
            for distance in (8, 4, 2, 1):  # lane 0 is the result, by the order of ``joined``
                other = e.shuffle(x, x, [(lane + distance) % LANES for lane in range(LANES)])
                x = e.maximum(x, other) if k else _smaller(e, x, other)
            e.store(e.shuffle(x, x, [0] * LANES), e.add(to, k * _VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(_I, _I, _I), generate


@intrinsic
def ranges_of_channels(typing_context, rows, stride, count, to):
    """The smallest and largest numbers, none of them NaN, of 16 neighbouring columns.

    Shapes:
        rows: (count) vectors of 16 float32, ``stride`` bytes apart
        to:   (2, 16) float32
    """

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        rows, stride, count, to = arguments
        first, last = e.load(rows), e.add(count, -1)
        least, most = (
            [cgutils.alloca_once(builder, VECTOR) for _ in range(_AT_ONCE)] for _ in range(2)
        )
        for place in least + most:
            builder.store(first, place)
        with e.loop(e.groups(count, _AT_ONCE)) as i:
            for k in range(_AT_ONCE):  # the last row may be compared again
                j = e.least(e.add(e.times(i, _AT_ONCE), k), last)
                x = e.load(e.add(rows, e.times(j, stride)))
                builder.store(_smaller(e, builder.load(least[k]), x), least[k])
                builder.store(e.maximum(builder.load(most[k]), x), most[k])
        low, high = builder.load(least[0]), builder.load(most[0])
        for k in range(1, _AT_ONCE):
            low = _smaller(e, low, builder.load(least[k]))
            high = e.maximum(high, builder.load(most[k]))
        e.store(low, to)
        e.store(high, e.add(to, _VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I), generate


def _half(e: Emitter, x: Value) -> tuple[Value, Value]:
    """A number, not NaN, limited to float16 and rounded to nearest even: its bits, and as float32.

    Without instructions for it, as ``floats.float16_of_float32`` says.
    """
    b = e.builder
    for limit, sign in ((65504.0, ">"), (-65504.0, "<")):
        most = e.constant(limit)
        x = b.select(b.fcmp_ordered(sign, x, most), most, x)
    if cpu.has("f16c"):
        half = b.fptrunc(x, ir.VectorType(ir.HalfType(), LANES))
        return b.bitcast(half, _SHORTS), b.fpext(half, VECTOR)

    def all_(number: int) -> Value:
        return e.lanes([number] * LANES)

    bits = b.bitcast(x, _INTS)
    sign_bit = b.and_(bits, all_(-0x80000000))
    rest = b.xor(bits, sign_bit)
    moved = b.fadd(b.bitcast(rest, VECTOR), e.constant(0.5))
    small = b.sub(b.bitcast(moved, _INTS), all_(0x3F000000))
    odd = b.and_(b.lshr(rest, all_(13)), all_(1))
    normal = b.lshr(b.add(b.add(b.sub(rest, all_(0x38000000)), all_(0xFFF)), odd), all_(13))
    half = b.select(b.icmp_signed("<", rest, all_(0x38800000)), small, normal)
    # moved to float32's exponent and fraction, the number is 2**112 too small, subnormal or not
    wide = b.fmul(b.bitcast(b.shl(half, all_(13)), VECTOR), e.constant(2.0**112))
    wide = b.bitcast(b.or_(b.bitcast(wide, _INTS), sign_bit), VECTOR)
    return b.trunc(b.or_(half, b.lshr(sign_bit, all_(16))), _SHORTS), wide


def _wide(e: Emitter, address: Value) -> Value:
    """16 float16 as float32. Without instructions for it, as ``floats.float32_of_float16`` says."""
    if cpu.has("f16c"):
        return e.load(address, FLOAT16)
    b = e.builder

    def all_(number: int) -> Value:
        return e.lanes([number] * LANES)

    halves = b.load(b.inttoptr(address, _SHORTS.as_pointer()))
    halves.align = 1
    bits = b.zext(halves, _INTS)
    rest = b.and_(bits, all_(0x7FFF))
    number = b.fmul(b.bitcast(b.shl(rest, all_(13)), VECTOR), e.constant(2.0**112))
    special = b.select(b.icmp_signed(">=", rest, all_(0x7C00)), all_(0x7F800000), all_(0))
    sign = b.shl(b.and_(bits, all_(0x8000)), all_(16))
    return b.bitcast(b.or_(b.or_(b.bitcast(number, _INTS), special), sign), VECTOR)


@intrinsic
def read_channels(typing_context, scales, midpoint, size, to):
    """What the scales of channels are for numbers that are coded.

    Shapes:
        scales:   (size) float16; midpoints are ``midpoint`` bytes behind them, if that is not 0
        to:       (3, size) float32: becomes steps, 1 / step, or 0 for a step of 0; midpoints, or 0
    """

    def generate(context, builder, signature, arguments):
        e, b = Emitter(builder), builder
        scales, midpoint, size, to = arguments
        zero, one, row = e.constant(0.0), e.constant(1.0), e.times(size, 4)
        has = b.icmp_signed("!=", midpoint, e.whole(0))
        with e.loop(b.sdiv(size, e.whole(LANES))) as i:
            place = e.add(scales, e.times(i, 2 * LANES))
            step, middle = _wide(e, place), _wide(e, e.add(place, midpoint))
            inverse = b.select(b.fcmp_ordered("==", step, zero), zero, b.fdiv(one, step))
            target = e.add(to, e.times(i, _VECTOR_BYTES))
            e.store(step, target)
            e.store(inverse, e.add(target, row))
            e.store(b.select(has, middle, zero), e.add(target, e.times(row, 2)))
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I), generate


@intrinsic
def outside(typing_context, rows, count, size, channels, reach):
    """Whether a number is more than ``reach`` steps from the midpoint of its channel.

    Shapes:
        rows:     (count, size) float32
        channels: (3, size) float32, see :func:`read_channels`
    """

    def generate(context, builder, signature, arguments):
        e, b = Emitter(builder), builder
        rows, count, size, channels, reach = arguments
        none, reach = ir.Constant(_INTS, [0] * LANES), e.splat(reach, VECTOR)
        found = cgutils.alloca_once_value(builder, none)
        b.store(none, found)
        with e.loop(b.sdiv(size, e.whole(LANES))) as i:
            place = e.add(channels, e.times(i, _VECTOR_BYTES))
            most = b.fmul(e.load(place), reach)
            middle = e.load(e.add(place, e.times(size, 8)))
            with e.loop(count) as j:
                x = e.load(e.add(rows, e.times(e.add(e.times(j, size), e.times(i, LANES)), 4)))
                distance = b.call(_absolute(e), [b.fsub(x, middle)])
                far = b.sext(b.fcmp_ordered(">", distance, most), _INTS)
                b.store(b.or_(b.load(found), far), found)
        total = e.across(b.or_, b.load(found), LANES)
        first = b.extract_element(total, ir.Constant(_INT, 0))
        return b.icmp_signed("!=", first, ir.Constant(_INT, 0))

    return types.boolean(_I, _I, _I, _I, types.float32), generate


@intrinsic
def steps_of_ranges(typing_context, at, midpoint, center, highest):
    """Ranges become steps and the numbers that the lowest code is for, before they are rounded.

    ``at``: (2, 16) float32, the smallest and largest numbers; becomes steps, lows. ``midpoint``: 0
    where ranges are symmetric.
    """

    def generate(context, builder, signature, arguments):
        e, b = Emitter(builder), builder
        at, midpoint, center, highest = arguments
        least, most = e.load(at), e.load(e.add(at, _VECTOR_BYTES))
        has = b.icmp_signed("!=", midpoint, e.whole(0))
        low, high = (b.call(_absolute(e), [x]) for x in (least, most))
        width = b.select(has, b.fsub(most, least), e.maximum(low, high))
        parts = b.select(has, highest, b.fsub(highest, center))
        e.store(b.fdiv(width, e.splat(parts, VECTOR)), at)
        e.store(least, e.add(at, _VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(_I, _I, types.float32, types.float32), generate


def _absolute(e: Emitter) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR])
    return cgutils.get_or_insert_function(e.builder.module, kind, f"llvm.fabs.v{LANES}f32")


@intrinsic
def settle(typing_context, at, midpoint, center, to):
    """Round steps and midpoints to float16; the midpoint fits the rounded step.

    Shapes:
        at: (2, 16) float32: steps, and the numbers that code 0 is for
        to: (2, 16) float32: 1 / step, or 0 for a step of 0; midpoints, 0 where ``midpoint`` is 0.
            Behind them (2, 16) float16: steps and midpoints as they are stored
    """

    def generate(context, builder, signature, arguments):
        e, b = Emitter(builder), builder
        at, midpoint, center, to = arguments
        bits, step = _half(e, e.load(at))
        low = e.load(e.add(at, _VECTOR_BYTES))
        middle_bits, middle = _half(e, b.fadd(low, b.fmul(step, e.splat(center, VECTOR))))
        zero = e.constant(0.0)
        has = b.icmp_signed("!=", midpoint, e.whole(0))
        inverse = b.fdiv(e.constant(1.0), step)
        flat = b.fcmp_ordered("==", step, zero)
        e.store(b.select(flat, zero, inverse), to)
        e.store(b.select(has, middle, zero), e.add(to, _VECTOR_BYTES))
        for k, halves in enumerate((bits, middle_bits)):
            place = e.add(to, 2 * _VECTOR_BYTES + k * 2 * LANES)
            pointer = b.inttoptr(place, _SHORTS.as_pointer())
            b.store(halves, pointer).align = 1
        return context.get_dummy_value()

    return types.void(_I, _I, types.float32, _I), generate


@intrinsic
def settle_magnitudes(typing_context, magnitudes, parts, limit, to, halves):
    """Scales of 16 rows whose codes are symmetric, rounded to float16; whether they are plain.

    They are where all numbers are within ``limit`` and all scales normal float16: then no code
    needs to be clipped. Otherwise what is written means nothing.

    Shapes:
        magnitudes: (16, 16) int32, bits of float32: the largest of a row's lanes is the row's
        parts:      steps from the center to the highest code
        to:         (16) float32: becomes 1 / step
        halves:     (16) float16: becomes the steps
    """

    def generate(context, builder, signature, arguments):
        e, b = Emitter(builder), builder
        magnitudes, parts, limit, to, halves = arguments
        rows = [e.load(e.add(magnitudes, j * _VECTOR_BYTES)) for j in range(LANES)]

        def larger(x: Value, y: Value) -> Value:
            """Of magnitudes, in the order of their bits: NaN is the largest."""
            x, y = b.bitcast(x, _INTS), b.bitcast(y, _INTS)
            return b.bitcast(b.select(b.icmp_signed(">", x, y), x, y), VECTOR)

        largest = e.joined(larger, rows)
        bits, step = _half(e, b.fdiv(largest, e.splat(parts, VECTOR)))
        e.store(b.fdiv(e.constant(1.0), step), to)
        b.store(bits, b.inttoptr(halves, _SHORTS.as_pointer())).align = 1
        small = b.fcmp_ordered("<=", largest, e.splat(limit, VECTOR))
        plain = b.and_(small, b.fcmp_ordered(">=", step, e.constant(_NORMAL)))
        lanes = b.bitcast(plain, ir.IntType(LANES))
        return b.zext(b.icmp_signed("==", lanes, ir.Constant(lanes.type, -1)), ir.IntType(64))

    return types.int64(_I, types.float32, types.float32, _I, _I), generate
