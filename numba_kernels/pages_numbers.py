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
    uint8_at,
    uint16_at,
    widen,
)
from onnx_inplace.numba_kernels.memory import copy
from onnx_inplace.numba_kernels.pages_layout import E4M3, FLOAT32
from onnx_inplace.numba_kernels.pages_narrow import narrow_lanes

LARGEST = np.float32(65504)  # of a float16: integer formats know no infinity


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
def narrow_row(target, count, source, kind, ahead=0):
    """``count`` float32 become elements of a float kind; how many finite ones did not fit it.

    What is too large becomes an infinity; as an 8-bit float, the largest number, and infinities
    count as well. What lies ``ahead`` bytes behind the source is asked for.
    """
    if kind == FLOAT32:
        copy(target, source, 4 * count)
        return 0
    return narrow_lanes(target, count // 16, source, kind, ahead)


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
