"""Activations in blocks of 32 integers, as products of 4- and 8-bit weights take them.

A row of ``columns`` float32 becomes ``row_bytes(columns, planes)`` bytes; blocks is the number of
blocks, the last one filled up with zeros:

    codes        planes x (blocks, 32) int8
    scale        (blocks) float32: value = scale * code
    sum          (blocks) float32: sum of the codes
    upper sum    (blocks) int32: sum of the codes; of three planes, of the first two
    lower sum    (blocks) int32: sum of the third plane, where there is one

One plane holds codes from -127 to 127, the scale is the largest absolute value / 127: an error of
at most 1/254 of that value. Three planes hold 24 bits, 65,536 * first + 256 * second + third: an
error of at most 1/16,646,144, as float32 itself has. The planes are digits from -128 to 127.

Infinities: a block with a single one, and no NaN, has an infinite scale and a code of its sign, all
other codes are 0; so each product is what it is of float32. A block with more of them or with a
NaN has the scale NaN.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.fused.kernel import KERNEL, reader, share
from onnx_inplace.numba_kernels.fused.lanes import Lanes
from onnx_inplace.numba_kernels.memory import kernel
from onnx_inplace.numba_kernels.vector import LANES, VECTOR

BLOCK = 32  # numbers that share a scale
LARGEST = {1: 127, 3: 127 << 16}  # code, by planes

_NUMBERS = {1: 3, 3: 4}  # beside the codes of a block, by planes
_DIGITS = 0x808080  # makes three digits from -128 to 127 the bytes of a number, each plus 128

_I = types.int64
_INT64, _INT32 = ir.IntType(64), ir.IntType(32)
_INTS = ir.VectorType(_INT32, LANES)
_CODES = ir.VectorType(ir.IntType(8), LANES)


class Quantize(NamedTuple):
    """Rows of float32 become rows of codes.

    With ``each``, every thread does all of it, for itself: its output begins
    ``each`` * (number of the thread) bytes behind ``output``. Else threads share the blocks.
    """

    input: int
    output: int
    rows: int
    columns: int
    input_row: int  # bytes from row to row
    output_row: int
    planes: int  # 1 or 3
    each: int  # bytes, or 0


def row_bytes(columns: int, planes: int) -> int:
    """Size of a quantized row, in whole cache lines."""
    blocks = (columns + BLOCK - 1) // BLOCK
    return (blocks * (planes * BLOCK + 4 * _NUMBERS[planes]) + 63) // 64 * 64


def _make(planes):
    """``quantize(input, output, blocks, first, last, columns)``: some blocks of a row."""

    @intrinsic
    def quantize(typing_context, input, output, blocks, first, last, columns):
        def generate(context, builder, signature, arguments):
            e, b = Lanes(builder), builder
            input, output, blocks, first, last, columns = arguments
            scales = e.add(output, e.times(blocks, planes * BLOCK))
            values = [cgutils.alloca_once(b, VECTOR) for _ in range(2)]
            with e.loop(b.sub(last, first)) as index:
                block = e.add(first, index)
                source = e.add(input, e.times(block, 4 * BLOCK))
                left = b.sub(columns, e.times(block, BLOCK))
                with b.if_else(b.icmp_signed(">=", left, e.whole(BLOCK))) as (whole, part):
                    with whole:
                        for k in range(2):
                            b.store(e.load(e.add(source, 64 * k)), values[k])
                    with part:
                        for k in range(2):
                            count = e.least(e.whole(LANES), e.add(left, -LANES * k))
                            count = b.select(
                                b.icmp_signed("<", count, e.whole(0)), e.whole(0), count
                            )
                            b.store(e.part(e.add(source, 64 * k), count), values[k])
                _block(e, values, output, blocks, block, scales, planes)
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I, _I), generate

    return quantize


def _block(e, places, output, blocks, block, scales, planes):
    """Codes, scale and sums of the 32 numbers at ``places``, two vectors."""
    b = e.builder
    special = _infinities(e, places)
    values = [b.load(place) for place in places]
    top = e.across(e.maximum, e.maximum(*map(e.absolute, values)), LANES)
    top = e.maximum(top, e.constant(1e-30))  # zeros have a scale, and codes of 0
    largest = e.constant(LARGEST[planes])
    scale, factor = e.over(top, largest), e.over(largest, top)
    codes = [b.fptosi(e.nearest(b.fmul(v, factor)), _INTS) for v in values]
    digits = _planes(e, codes, planes)
    for number, plane in enumerate(digits):
        for k, vector in enumerate(plane):
            at = e.add(output, e.add(e.times(block, BLOCK), LANES * k))
            at = e.add(at, e.times(blocks, BLOCK * number))
            b.store(b.trunc(vector, _CODES), b.inttoptr(at, _CODES.as_pointer())).align = 1
    sums = [e.across(b.add, b.add(*plane), LANES) for plane in digits]
    if planes == 3:
        sums = [b.add(b.shl(sums[0], e.lanes([8] * LANES)), sums[1]), sums[2]]
    total = b.sitofp(sums[0], VECTOR)
    if planes == 3:
        total = e.fma(total, e.constant(256.0), b.sitofp(sums[1], VECTOR))
    place = e.add(scales, e.times(block, 4))
    for number, vector in enumerate((b.fadd(scale, b.load(special)), total, *sums)):
        value = b.extract_element(vector, ir.Constant(_INT32, 0))
        target = e.add(place, e.times(blocks, 4 * number))
        b.store(value, b.inttoptr(target, value.type.as_pointer())).align = 4


def _infinities(e, places):
    """What to add to a scale: 0, infinity, or NaN; in the last two cases numbers become signs."""
    b = e.builder
    special = cgutils.alloca_once(b, VECTOR)
    b.store(e.constant(0.0), special)
    values = [b.load(place) for place in places]
    # an infinity or NaN less itself is NaN
    odd = b.fcmp_unordered("uno", *[b.fsub(v, v) for v in values])
    bits = ir.IntType(LANES)
    odd = b.icmp_unsigned("!=", b.bitcast(odd, bits), ir.Constant(bits, 0))
    with b.if_then(odd, likely=False):
        zero, one, infinity = (e.constant(n) for n in (0.0, 1.0, float("inf")))
        found = [b.fcmp_ordered("==", e.absolute(v), infinity) for v in values]
        for value, is_infinite, place in zip(values, found, places, strict=True):
            b.store(b.select(is_infinite, e.with_sign(one, value), zero), place)
        counts = [b.select(is_infinite, one, zero) for is_infinite in found]
        counts += [b.select(b.fcmp_unordered("uno", v, v), e.constant(LANES), zero) for v in values]
        count = e.across(b.fadd, b.fadd(b.fadd(*counts[:2]), b.fadd(*counts[2:])), LANES)
        single = b.fcmp_ordered("==", count, one)
        b.store(b.select(single, infinity, e.constant(float("nan"))), special)
    return special


def _planes(e, codes, planes):
    """Digits of codes, the first ones count most: int32 from -128 to 127."""
    b = e.builder
    if planes == 1:
        return [codes]
    shifted = [b.add(code, e.lanes([_DIGITS] * LANES)) for code in codes]
    low, half = e.lanes([255] * LANES), e.lanes([128] * LANES)
    return [
        [b.sub(b.and_(b.lshr(n, e.lanes([bits] * LANES)), low), half) for n in shifted]
        for bits in (16, 8, 0)
    ]


quantize_one, quantize_three = _make(1), _make(3)
"""``(input, output, blocks, first, last, columns)``: the blocks ``first .. last`` of a row."""

_read = reader(Quantize)


@kernel(KERNEL)
def quantize(arguments, thread, threads):
    """A :class:`Quantize`."""
    x = _read(arguments)
    blocks = (x.columns + BLOCK - 1) // BLOCK
    first, last = (0, blocks) if x.each else share(blocks, thread, threads)
    for r in range(x.rows):
        source, target = x.input + r * x.input_row, x.output + thread * x.each + r * x.output_row
        if x.planes == 3:
            quantize_three(source, target, blocks, first, last, x.columns)
        else:
            quantize_one(source, target, blocks, first, last, x.columns)
