"""Codes of integer formats: from rows of bytes to the tiles of a page, and back.

A plane is (tokens, head_size) uint8, one code a byte. Only bits of the named tokens change.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels.floats import uint8_at


@njit
def _bytes(address, count):
    return carray(uint8_at(address), (count,))


@njit
def _pack_key(codes, tile, bits, size, first, count, plane):
    """All codes of a byte are of one token."""
    fields = 8 // bits
    for j in range(count):
        t = first + j
        to, source = codes + (t >> 4) * tile + (t & 15) * 4, plane + j * size
        for v in range(size // (4 * fields)):
            four, codes_ = _bytes(to + v * 64, 4), _bytes(source + 4 * v * fields, 4 * fields)
            for i in range(4):
                byte = codes_[i]
                for f in range(1, fields):
                    byte |= np.uint8(codes_[4 * f + i] << (bits * f))
                four[i] = byte


@njit
def _unpack_key(codes, tile, bits, size, first, count, plane):
    fields = 8 // bits
    mask = np.uint8((1 << bits) - 1)
    for j in range(count):
        t = first + j
        source, to = codes + (t >> 4) * tile + (t & 15) * 4, plane + j * size
        for v in range(size // (4 * fields)):
            four, codes_ = _bytes(source + v * 64, 4), _bytes(to + 4 * v * fields, 4 * fields)
            for f in range(fields):
                for i in range(4):
                    codes_[4 * f + i] = (four[i] >> (bits * f)) & mask


@njit
def _pack_value(codes, tile, bits, size, first, count, plane):
    """A byte has codes of ``8 / bits`` tokens: those of other tokens stay."""
    fields = 8 // bits
    for j in range(count):
        t = first + j
        shift = bits * (t // 4 % fields)
        to, row = codes + t // (4 * fields) * 64 + (t & 3), _bytes(plane + j * size, size)
        kept = np.uint8(255 - (((1 << bits) - 1) << shift))
        for k in range(size >> 4):
            line = _bytes(to + k * tile, 64)
            for i in range(16):
                line[4 * i] = (line[4 * i] & kept) | np.uint8(row[16 * k + i] << shift)


@njit
def _unpack_value(codes, tile, bits, size, first, count, plane):
    fields = 8 // bits
    mask = np.uint8((1 << bits) - 1)
    for j in range(count):
        t = first + j
        shift = bits * (t // 4 % fields)
        source, row = codes + t // (4 * fields) * 64 + (t & 3), _bytes(plane + j * size, size)
        for k in range(size >> 4):
            line = _bytes(source + k * tile, 64)
            for i in range(16):
                row[16 * k + i] = (line[4 * i] >> shift) & mask


@njit
def pack(which, codes, tile, bits, size, first, count, plane):
    """Codes of tokens ``first .. first + count`` of K (``which`` 0) or V (1), from a plane."""
    if which:
        _pack_value(codes, tile, bits, size, first, count, plane)
    else:
        _pack_key(codes, tile, bits, size, first, count, plane)


@njit
def unpack(which, codes, tile, bits, size, first, count, plane):
    """Codes of tokens ``first .. first + count`` of K (``which`` 0) or V (1), as a plane."""
    if which:
        _unpack_value(codes, tile, bits, size, first, count, plane)
    else:
        _unpack_key(codes, tile, bits, size, first, count, plane)
