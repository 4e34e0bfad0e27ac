"""Numbers on their way into pages and out of them: 8-bit floats, rotation, scales and codes.

All arithmetic is float32 in a stated order, without contraction, so that a page has the same bytes
whoever writes it: the specification in ``docs/formats.md`` says the same in words.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels.floats import (
    bits_of_float,
    float16_of_float32,
    float32_of_float16,
    float_of_bits,
    floats,
    narrow,
    uint8_at,
    uint16_at,
    widen,
)
from onnx_inplace.numba_kernels.pages_layout import BFLOAT16, E4M3, FLOAT16

LARGEST = np.float32(65504)  # of a float16: integer formats know no infinity
_ZERO = np.float32(0)


@njit
def e4m3_of_float32(number):
    """Rounded to nearest even, at most 448; NaN stays NaN."""
    bits = bits_of_float(number)
    sign, rest = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    if rest > 0x7F800000:
        code = 0x7F
    elif rest >= 0x43E00000:  # 448
        code = 0x7E
    elif rest < 0x3C800000:  # below 2**-6: the sum has the rounded fraction in its low bits
        code = bits_of_float(float_of_bits(rest) + np.float32(2.0**14)) - 0x46800000
    else:
        code = (rest - 0x3C000000 + 0x7FFFF + ((rest >> 20) & 1)) >> 20
    return np.uint8(sign | code)


@njit
def e5m2_of_float32(number):
    """Rounded to nearest even, at most 57,344; NaN stays NaN."""
    bits = bits_of_float(number)
    sign, rest = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    if rest > 0x7F800000:
        code = 0x7E
    elif rest >= 0x47600000:  # 57,344
        code = 0x7B
    elif rest < 0x38800000:  # below 2**-14
        code = bits_of_float(float_of_bits(rest) + np.float32(2.0**7)) - 0x43000000
    else:
        code = (rest - 0x38000000 + 0xFFFFF + ((rest >> 21) & 1)) >> 21
    return np.uint8(sign | code)


@njit
def float32_of_e4m3(code):
    """Exact."""
    sign, rest = np.int64(code & 0x80) << 24, np.int64(code & 0x7F)
    if rest == 0x7F:
        return float_of_bits(sign | 0x7FC00000)
    # moved to float32's exponent and fraction, the number is 2**120 too small, subnormal or not
    number = float_of_bits(rest << 20) * np.float32(2.0**120)
    return float_of_bits(bits_of_float(number) | sign)


@njit
def widen_row(target, count, source, kind):
    """``count`` elements of a float kind become float32."""
    if kind < E4M3:
        widen(target, count, source, kind)
        return
    numbers, bytes_ = floats(target, count), carray(uint8_at(source), (count,))
    if kind == E4M3:
        for i in range(count):
            numbers[i] = float32_of_e4m3(bytes_[i])
    else:  # the upper half of a float16
        for i in range(count):
            numbers[i] = float32_of_float16(np.int64(bytes_[i]) << 8)


@njit
def narrow_row(target, count, source, kind):
    """``count`` float32 become elements of a float kind; how many finite ones did not fit it.

    What is too large becomes an infinity; as an 8-bit float, the largest number.
    """
    numbers, clipped = floats(source, count), 0
    # the smallest number that rounds beyond the largest one
    limit = np.float32(np.inf)
    if kind == FLOAT16:
        limit = np.float32(65520)
    elif kind == BFLOAT16:
        limit = float_of_bits(0x7F7F8000)
    elif kind >= E4M3:
        limit = np.float32(448 if kind == E4M3 else 57344)
    for i in range(count):
        size = abs(numbers[i])
        if kind >= E4M3:
            clipped += size > limit
        else:
            clipped += size >= limit and size < np.inf
    if kind < E4M3:
        narrow(target, count, source, kind)
        return clipped
    bytes_ = carray(uint8_at(target), (count,))
    if kind == E4M3:
        for i in range(count):
            bytes_[i] = e4m3_of_float32(numbers[i])
    else:
        for i in range(count):
            bytes_[i] = e5m2_of_float32(numbers[i])
    return clipped


@njit
def limited(x):
    """A number in the range of float16."""
    return min(max(x, -LARGEST), LARGEST)


@njit
def half_at(address):
    """The float16 at an address, as float32."""
    return float32_of_float16(np.int64(carray(uint16_at(address), (1,))[0]))


@njit
def set_half(address, number):
    """Store a float32, limited, as float16; the number that is stored."""
    bits = float16_of_float32(limited(number))
    carray(uint16_at(address), (1,))[0] = bits
    return float32_of_float16(np.int64(bits))
