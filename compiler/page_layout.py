"""Where the bytes of a page stand, as plain ints: the one source of sizes.

Allocator, kernels, plan and saved states take every offset from here; ``docs/formats.md`` says
the same in words. A page has the logical dims [2, heads, page_size, head_size] (0: K, 1: V).

Two orders:

rows:   floats; the plain array in C order, nothing else.
tiles:  integers; for each head one region of K and one of V: scales first, then codes in vectors
        of 64 bytes, so that one dot-product instruction takes four codes in each of 16 lanes.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

from onnx_inplace.compiler.encodings import TILE, Encoding, Grouping, Offset

ALIGNMENT = 64  # [bytes] of regions and of their codes
VECTOR = 64  # [bytes]: TILE lanes of QUAD bytes
QUAD = 4  # codes of a lane
PARAMETER = 2  # [bytes]: float16

HEAD_SIZES = range(32, 256 + 1, TILE)
PAGE_SIZES = range(16, 256 + 1, TILE)


@dataclasses.dataclass(frozen=True, slots=True)
class HalfLayout:
    """Where K, or V, of a page stands. Everything in bytes unless another unit is named.

    rows: element (token, channel) of a head is at
        ``offset + head * head_stride + token * row_stride + channel * element size``

    tiles: with (row, column) = (token, channel) in K and (channel, token) in V, and F codes a byte,
    quad = column // 4, the code is in the byte at
        ``offset + head * head_stride + codes + row // 16 * tile_stride
        + quad // F * 64 + row % 16 * 4 + column % 4``
    in its bits ``bits * (quad % F)`` and up. The scale of group g and item i is the float16 at
        ``offset + head * head_stride + scales + g * group_stride + 2 * i``
    its midpoint ``midpoint`` bytes further. TOKEN: g = channel // group_size, i = token; CHANNEL:
    g = token // group_size, i = channel.

    Attributes:
        offset: of the first head's region in the page.
        head_stride: from one head's region to the next one's.
        size: of a region.
        row_stride: rows: of one token. tiles: 0.
        codes: in a region; 0 for rows.
        tile_stride: tiles: of 16 rows.
        scales: in a region. Scales of a half come first: 0.
        group_stride: from group to group.
        midpoint: from a scale to its midpoint; 0: there is none.
        groups: number of groups; 0: codes are not scaled.
        group_size: [channels] (TOKEN) or [tokens] (CHANNEL). The last group may be shorter.
        items: scales of a group: page_size (TOKEN) or head_size (CHANNEL).
        channel_offsets: of head_size float16 in a region; 0: there are none.
        rotation: channels that one Hadamard matrix covers, a power of two; 0: not rotated.
    """

    offset: int
    head_stride: int
    size: int
    row_stride: int = 0
    codes: int = 0
    tile_stride: int = 0
    scales: int = 0
    group_stride: int = 0
    midpoint: int = 0
    groups: int = 0
    group_size: int = 0
    items: int = 0
    channel_offsets: int = 0
    rotation: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PageLayout:
    """A page of logical dims [2, heads, page_size, head_size].

    Attributes:
        size: [bytes] of the page, all included.
        key: where K stands.
        value: where V stands.
    """

    heads: int
    page_size: int
    head_size: int
    size: int
    key: HalfLayout
    value: HalfLayout

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """The logical dims."""
        return 2, self.heads, self.page_size, self.head_size


def check(key: Encoding, value: Encoding, dims: Sequence[int]) -> tuple[int, int, int]:
    """(heads, page_size, head_size) of ``dims``.

    Raises:
        ValueError: dims are not [2, heads, page_size, head_size], or cannot be grouped.
        TypeError: a dim is not an integer.
    """
    sizes = [operator.index(dim) for dim in dims]
    if len(sizes) != 4 or sizes[0] != 2:
        raise ValueError(f"dims {sizes} are not [2, heads, page_size, head_size]")
    _, heads, page_size, head_size = sizes
    if heads < 1:
        raise ValueError(f"a page of {heads} heads holds nothing")
    if head_size not in HEAD_SIZES:
        raise ValueError(f"head_size {head_size}: {_range(HEAD_SIZES)} work")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page_size {page_size}: {_range(PAGE_SIZES)} work")
    for encoding in (key, value):
        group = encoding.group_size
        if encoding.grouping is Grouping.CHANNEL and 0 < group < page_size and page_size % group:
            works = [size for size in PAGE_SIZES if size <= group or size % group == 0]
            raise ValueError(
                f"page_size {page_size} has no whole groups of {group} tokens; what works: "
                f"{', '.join(map(str, works))}"
            )
    return heads, page_size, head_size


def _range(sizes: range) -> str:
    return f"multiples of {sizes.step} from {sizes[0]} to {sizes[-1]}"


def compute(key: Encoding, value: Encoding, dims: Sequence[int]) -> PageLayout:
    """The layout of a page of ``dims`` whose halves are stored as ``key`` and ``value``.

    Raises:
        ValueError, TypeError: as ``check``.
    """
    heads, page_size, head_size = check(key, value, dims)
    if key.is_float:
        row = head_size * key.bits // 8
        half = heads * page_size * row
        first = HalfLayout(0, page_size * row, page_size * row, row_stride=row)
        second = dataclasses.replace(first, offset=half)
        return PageLayout(heads, page_size, head_size, 2 * half, first, second)
    first = _region(key, page_size, head_size, page_size, head_size)
    second = _region(value, page_size, head_size, head_size, page_size)
    stride = first.size + second.size
    return PageLayout(
        heads,
        page_size,
        head_size,
        heads * stride,
        dataclasses.replace(first, head_stride=stride),
        dataclasses.replace(second, head_stride=stride, offset=first.size),
    )


def _region(
    encoding: Encoding, page_size: int, head_size: int, rows: int, columns: int
) -> HalfLayout:
    """One head's half: scales, channel offsets, padding, codes. ``rows`` are tiled by 16."""
    axis, items = (
        (head_size, page_size) if encoding.grouping is Grouping.TOKEN else (page_size, head_size)
    )
    group_size = min(encoding.group_size or axis, axis)
    groups = -(-axis // group_size)
    midpoint = items * PARAMETER if encoding.offset is Offset.MIDPOINT else 0
    group_stride = items * PARAMETER + midpoint
    parameters = groups * group_stride
    channel_offsets = 0
    if encoding.channel_offset:
        channel_offsets = parameters
        parameters += head_size * PARAMETER
    codes = -(-parameters // ALIGNMENT) * ALIGNMENT
    tile_stride = columns // QUAD // encoding.codes_per_byte * VECTOR
    return HalfLayout(
        offset=0,
        head_stride=0,
        size=codes + rows // TILE * tile_stride,
        codes=codes,
        tile_stride=tile_stride,
        group_stride=group_stride,
        midpoint=midpoint,
        groups=groups,
        group_size=group_size,
        items=items,
        channel_offsets=channel_offsets,
        rotation=rotation_size(head_size) if encoding.rotated else 0,
    )


def rotation_size(head_size: int) -> int:
    """The largest power of two that divides ``head_size``: 64 of 64, 16 of 80, 32 of 96."""
    return head_size & -head_size
