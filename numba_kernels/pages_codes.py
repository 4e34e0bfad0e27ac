"""Codes of integer formats: from rows of bytes to the tiles of a page, and back.

A plane is (tokens, head_size) uint8, one code a byte. Only bits of the named tokens change.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels.floats import uint8_at
from onnx_inplace.numba_kernels.pages_codes_lanes import (
    pack_key,
    pack_value,
    put_key,
    put_value,
    unpack_key,
    unpack_value,
)

_TILE = 16  # tokens


@njit
def _bytes(address, count):
    return carray(uint8_at(address), (count,))


@njit
def _pack_key(codes, tile, bits, size, first, count, plane):
    for j in range(count):
        t = first + j
        put_key(codes + (t >> 4) * tile + (t & 15) * 4, plane + j * size, size, bits)


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
    fields, mask = 8 // bits, (1 << bits) - 1
    for j in range(count):
        t = first + j
        shift = 8 * (t & 3) + bits * (t // 4 % fields)
        put_value(codes + t // (4 * fields) * 64, tile, plane + j * size, size, shift, mask)


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
def _whole_tiles(which, size, first, last):
    """Where the tiles begin and end that vectors can move: all of their tokens are named."""
    begin = min((first + _TILE - 1) // _TILE * _TILE, last)
    if which == 0 and size % 64:
        return last, last
    return begin, max(last // _TILE * _TILE, begin)


@njit
def _pack_some(which, codes, tile, bits, size, first, count, plane):
    if which:
        _pack_value(codes, tile, bits, size, first, count, plane)
    else:
        _pack_key(codes, tile, bits, size, first, count, plane)


@njit
def pack(which, codes, tile, bits, size, first, count, plane):
    """Codes of tokens ``first .. first + count`` of K (``which`` 0) or V (1), from a plane."""
    last = first + count
    begin, end = _whole_tiles(which, size, first, last)
    _pack_some(which, codes, tile, bits, size, first, begin - first, plane)
    for t in range(begin, end, _TILE):
        rows = plane + (t - first) * size
        if which:
            pack_value(codes + t * 2 * bits, tile, rows, size, bits)
        else:
            pack_key(codes + t // _TILE * tile, rows, size, bits)
    rows = plane + (end - first) * size
    _pack_some(which, codes, tile, bits, size, end, last - end, rows)


@njit
def _unpack_some(which, codes, tile, bits, size, first, count, plane):
    if which:
        _unpack_value(codes, tile, bits, size, first, count, plane)
    else:
        _unpack_key(codes, tile, bits, size, first, count, plane)


@njit
def unpack(which, codes, tile, bits, size, first, count, plane):
    """Codes of tokens ``first .. first + count`` of K (``which`` 0) or V (1), as a plane."""
    last = first + count
    begin, end = _whole_tiles(which, size, first, last)
    _unpack_some(which, codes, tile, bits, size, first, begin - first, plane)
    for t in range(begin, end, _TILE):
        rows = plane + (t - first) * size
        if which:
            unpack_value(codes + t * 2 * bits, tile, rows, size, bits)
        else:
            unpack_key(codes + t // _TILE * tile, rows, size, bits)
    rows = plane + (end - first) * size
    _unpack_some(which, codes, tile, bits, size, end, last - end, rows)
