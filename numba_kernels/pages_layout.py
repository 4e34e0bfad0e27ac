"""How the pages of a cache are stored, as numbers that every kernel of pages reads.

A page has logical dims (2, heads, page_size, head_size): half 0 is K, half 1 is V. What a format
stores, and where, is one row of int64: a :class:`Page` and a :class:`Half` for K and for V. Kernels
have no code for a format, only for what formats are made of. Two arrangements exist.

Float formats are plain rows: half, head, token, element.

Integer formats have a region for each head and half: scales, midpoints (float16), then codes of
8, 4 or 2 bits in tiles, for which a dot product of four bytes needs no shuffle. Let row and column
be token and element in K, element and token in V, and F = 8 / bits codes in a byte. A code is in
the byte ``row // 16 * tile + column // (4 * F) * 64 + row % 16 * 4 + column % 4`` of the codes, in
its bits ``bits * (column // 4 % F)`` and up.

A group shares a scale d: value = d * (code - center), plus a midpoint where the format has one.
Groups run along the elements of a token (scale of block b and token t at ``b * step + 2 * t``), or
along the tokens of a channel (scale of group g and channel c at ``g * step + 2 * c``). The center
is (2**bits - 1) / 2 with midpoints, 2**(bits - 1) without.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from numba import carray, njit

from onnx_inplace.numba_kernels.floats import int64_at

FLOAT32, FLOAT16, BFLOAT16, E4M3, E5M2, INTEGER = range(6)
"""The ``kind`` of a page; the first three are those of ``floats``."""

ITEM = (4, 2, 2, 1, 1)  # bytes of an element, by kind of float

BY_TOKEN, BY_CHANNEL = 0, 1


class Half(NamedTuple):
    """K or V of a format. Everything in bytes unless another unit is named.

    Of a float format only ``at`` and ``head`` mean something.
    """

    at: int  # of head 0 in the page
    head: int  # from one head to the next
    bits: int  # [bits] of a code
    grouping: int  # BY_TOKEN or BY_CHANNEL
    group: int  # [elements] or [tokens] that share a scale; the last group may be shorter
    step: int  # from the scales of one group to those of the next
    midpoint: int  # from a scale to its midpoint; 0: there is none
    searched: int  # 1: scales and midpoints are searched for the least squared error
    codes: int  # of the codes in a head
    tile: int  # from one tile of 16 rows of codes to the next
    offsets: (
        int  # of head_size float16 in a head, subtracted before the rotation; 0: there are none
    )
    rotation: int  # [elements] of a Hadamard matrix; 0: not rotated


class Page(NamedTuple):
    """One format at given dims."""

    kind: int
    size: int  # [bytes] of a page
    heads: int
    page_size: int  # [tokens]
    head_size: int  # [elements]


HEADER, HALF = len(Page._fields), len(Half._fields)

WORDS = HEADER + 2 * HALF


class Formats(enum.IntEnum):
    """What pages may be stored as, in int64: descriptions come and go, these words stay."""

    KEY = 0
    """The same number for the same formats in the same order."""
    DESCRIPTIONS = 1
    """Address of (formats, WORDS) int64."""
    END = 2


"""int64 of a description: a Page, the Half of K, the Half of V."""


def description(page: Page, key: Half, value: Half) -> tuple[int, ...]:
    """The numbers of a format, one row of the table (formats, WORDS) of int64 that kernels read."""
    return (*page, *key, *value)


@njit
def read_page(address):
    """The Page at an address."""
    n = carray(int64_at(address), (HEADER,))
    return Page(n[0], n[1], n[2], n[3], n[4])


@njit
def read_half(address, half):
    """K (0) or V (1) of the description at an address."""
    n = carray(int64_at(address + 8 * (HEADER + half * HALF)), (HALF,))
    return Half(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11])
