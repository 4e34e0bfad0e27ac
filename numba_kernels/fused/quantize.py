"""Activations in blocks of 32 integers, as products of 4- and 8-bit weights take them.

A row of ``columns`` float32 becomes ``row_bytes(columns, planes)`` bytes; blocks is the number of
blocks, the last one filled up with zeros:

    codes        planes x (blocks, 32) int8
    scale        (blocks) float32: value = scale * code
    sum          (blocks) float32: scale * (sum of the codes)
    code sum     (blocks) int32: sum of the codes

One plane holds codes from -127 to 127, the scale is the largest absolute value / 127: an error of
at most 1/254 of that value. Two planes hold codes from -32,512 to 32,512 as 256 * first + second,
an error of at most 1/65,024. A block with an infinity or NaN has the scale NaN.
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
LARGEST = (127, 32_512)  # code, by planes - 1

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
    planes: int  # 1 or 2
    each: int  # bytes, or 0


def row_bytes(columns: int, planes: int) -> int:
    """Size of a quantized row, in whole cache lines."""
    blocks = (columns + BLOCK - 1) // BLOCK
    return (blocks * (planes * BLOCK + 12) + 63) // 64 * 64


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
                _block(e, [b.load(v) for v in values], output, blocks, block, scales, planes)
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I, _I), generate

    return quantize


def _block(e, values, output, blocks, block, scales, planes):
    """Codes, scale and sums of 32 numbers."""
    b, zero = e.builder, ir.Constant(_INT32, 0)
    top = e.across(e.maximum, e.maximum(*map(e.absolute, values)), LANES)
    top = e.maximum(top, e.constant(1e-30))  # zeros have a scale, and codes of 0
    largest = e.constant(LARGEST[planes - 1])
    scale, factor = e.over(top, largest), e.over(largest, top)
    # an infinity or NaN less itself is NaN: the scale then says so, whatever the codes are
    odd = b.fcmp_unordered("uno", *[b.fsub(v, v) for v in values])
    odd = b.icmp_signed("!=", b.bitcast(odd, ir.IntType(16)), ir.Constant(ir.IntType(16), 0))
    scale = b.select(odd, e.constant(float("nan")), scale)
    name = f"llvm.nearbyint.v{LANES}f32"
    codes = [b.fptosi(e._intrinsic(name, VECTOR, [b.fmul(v, factor)]), _INTS) for v in values]
    for k, code in enumerate(codes):
        place = e.add(output, e.add(e.times(block, BLOCK), LANES * k))
        if planes == 2:
            first = b.ashr(b.add(code, e.lanes([128] * LANES)), e.lanes([8] * LANES))
            _store_codes(e, first, place)
            second = b.sub(code, b.shl(first, e.lanes([8] * LANES)))
            _store_codes(e, second, e.add(place, e.times(blocks, BLOCK)))
        else:
            _store_codes(e, code, place)
    total = e.across(b.add, b.add(*codes), LANES)
    place = e.add(scales, e.times(block, 4))
    product = b.fmul(b.sitofp(total, VECTOR), scale)
    for number, vector in enumerate((scale, product, total)):
        value = b.extract_element(vector, zero)
        target = e.add(place, e.times(blocks, 4 * number))
        b.store(value, b.inttoptr(target, value.type.as_pointer())).align = 4


def _store_codes(e, codes, address):
    value = e.builder.trunc(codes, _CODES)
    e.builder.store(value, e.builder.inttoptr(address, _CODES.as_pointer())).align = 1


quantize_one, quantize_two = _make(1), _make(2)
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
        if x.planes == 2:
            quantize_two(source, target, blocks, first, last, x.columns)
        else:
            quantize_one(source, target, blocks, first, last, x.columns)
