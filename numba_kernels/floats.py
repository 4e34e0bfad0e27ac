"""Rows of float32, float16 and bfloat16 at an address, as float32, by plain integer arithmetic.

numba knows neither 16-bit type. The bits are converted by hand, so that no CPU feature is needed;
the loops are simple enough for LLVM to use the vectors that the CPU has.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2  # the ``kind`` of elements at an address
SIZES = (4, 2, 2, 1, 1)  # bytes of an element, by kind; the last two: see ``pages_layout``


def _pointer(element, number):
    """An intrinsic ``pointer(address)`` to elements of one type, for ``carray``."""

    @intrinsic
    def pointer(typing_context, place):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], element.as_pointer())

        return types.CPointer(number)(types.int64), generate

    return pointer


float64_at = _pointer(ir.DoubleType(), types.float64)
float32_at = _pointer(ir.FloatType(), types.float32)
uint32_at = _pointer(ir.IntType(32), types.uint32)
uint16_at = _pointer(ir.IntType(16), types.uint16)
uint8_at = _pointer(ir.IntType(8), types.uint8)
int32_at = _pointer(ir.IntType(32), types.int32)
int64_at = _pointer(ir.IntType(64), types.int64)


@intrinsic
def float_of_bits(typing_context, bits):
    """The float32 whose bits are the low half of an int64."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.trunc(arguments[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.int64), generate


@intrinsic
def bits_of_float(typing_context, number):
    """The bits of a float32, 0 <= bits < 2**32."""

    def generate(context, builder, signature, arguments):
        return builder.zext(builder.bitcast(arguments[0], ir.IntType(32)), ir.IntType(64))

    return types.int64(types.float32), generate


@njit
def float32_of_float16(bits):
    """Exact, for subnormal numbers, infinities and NaN too."""
    sign, rest = (bits & 0x8000) << 16, bits & 0x7FFF
    # moved to float32's exponent and fraction, the number is 2**112 too small, subnormal or not
    number = float_of_bits(rest << 13) * np.float32(2.0**112)
    special = 0x7F800000 if rest >= 0x7C00 else 0
    return float_of_bits(bits_of_float(number) | special | sign)


@njit
def float16_of_float32(number):
    """Rounded to nearest even; what is too large becomes infinity, NaN stays NaN."""
    bits = bits_of_float(number)
    sign, rest = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if rest > 0x7F800000:
        result = 0x7E00
    elif rest >= 0x477FF000:  # rounds to 65,536 or more
        result = 0x7C00
    elif rest < 0x38800000:  # below 2**-14: the sum has the rounded fraction in its low bits
        result = bits_of_float(float_of_bits(rest) + np.float32(0.5)) - 0x3F000000
    else:
        result = (rest - 0x38000000 + 0xFFF + ((rest >> 13) & 1)) >> 13
    return np.uint16(sign | result)


@njit
def bfloat16_of_float32(number):
    """Rounded to nearest even; NaN stays NaN."""
    bits = bits_of_float(number)
    if bits & 0x7FFFFFFF > 0x7F800000:
        return np.uint16((bits >> 16) | 0x40)
    return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@njit
def floats(address, count):
    """``count`` float32 at an address.

    A loop over an array from its first element on becomes vectors; one over ``array[begin + i]``
    does not, since numba lets negative indices count from the end.
    """
    return carray(float32_at(address), (count,))


@njit
def widen(target, count, source, kind):
    """``count`` elements of ``kind`` at address ``source`` become float32 at ``target``."""
    result = floats(target, count)
    if kind == FLOAT32:
        numbers = floats(source, count)
        for i in range(count):
            result[i] = numbers[i]
        return
    bits = carray(uint16_at(source), (count,))
    if kind == FLOAT16:
        for i in range(count):
            result[i] = float32_of_float16(bits[i])
    else:
        for i in range(count):
            result[i] = float_of_bits(np.int64(bits[i]) << np.int64(16))


@njit
def narrow(target, count, source, kind):
    """``count`` float32 at address ``source`` become elements of ``kind`` at ``target``."""
    numbers = floats(source, count)
    if kind == FLOAT32:
        result = floats(target, count)
        for i in range(count):
            result[i] = numbers[i]
        return
    bits = carray(uint16_at(target), (count,))
    if kind == FLOAT16:
        for i in range(count):
            bits[i] = float16_of_float32(numbers[i])
    else:
        for i in range(count):
            bits[i] = bfloat16_of_float32(numbers[i])


@njit
def exp2(x):
    """2**x for x <= 0, relative error 2e-7; 0 below -126."""
    if x < np.float32(-126):
        return np.float32(0)
    whole = np.rint(x)
    f = x - whole
    p = np.float32(1.540353039338161e-4)
    p = p * f + np.float32(1.3333558146428443e-3)
    p = p * f + np.float32(9.618129107628477e-3)
    p = p * f + np.float32(5.550410866482158e-2)
    p = p * f + np.float32(2.402265069591007e-1)
    p = p * f + np.float32(6.931471805599453e-1)
    p = p * f + np.float32(1)
    return float_of_bits(bits_of_float(p) + (np.int64(np.int32(whole)) << np.int64(23)))
