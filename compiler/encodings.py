"""How one half of a page, K or V, is stored: the vocabulary that page formats are made of.

Decides which combinations have a meaning. What they mean in numbers is written in
``docs/formats.md``; where the bytes stand is decided in ``page_layout``.
"""

from __future__ import annotations

import dataclasses
import enum

import onnx_ir as ir

TILE = 16  # tokens (K) or channels (V) of a tile, and what sizes and groups are multiples of


class Grouping(enum.Enum):
    """Which codes share one scale and one offset."""

    WHOLE = "WHOLE"  # nothing is scaled: floats
    TOKEN = "TOKEN"  # a token and head; groups along head_size
    CHANNEL = "CHANNEL"  # a channel and head; groups of consecutive tokens


class Offset(enum.Enum):
    """What is stored beside a scale."""

    NONE = "NONE"  # scale * (code - center)
    MIDPOINT = "MIDPOINT"  # scale * (code - center) + midpoint


class Fit(enum.Enum):
    """How an encoder chooses scale and midpoint. Decoding does not depend on it."""

    RANGE = "RANGE"  # from the largest magnitude, or from the smallest and largest value
    SEARCH = "SEARCH"  # least squared error over clipped ranges, each refitted


_FLOATS = {
    ir.DataType.FLOAT,
    ir.DataType.FLOAT16,
    ir.DataType.BFLOAT16,
    ir.DataType.FLOAT8E4M3FN,
    ir.DataType.FLOAT8E5M2,
}
_INTEGERS = {ir.DataType.UINT8, ir.DataType.UINT4, ir.DataType.UINT2}


@dataclasses.dataclass(frozen=True, slots=True)
class Encoding:
    """How K, or V, of a page is stored.

    Attributes:
        storage: type of a code: a float type (then nothing else is said), or UINT8, UINT4, UINT2.
        grouping: which codes share a scale.
        group_size: TOKEN: channels, CHANNEL: tokens, multiples of 16; 0: the whole axis.
        offset: what is stored beside the scale. Scales and midpoints are float16.
        rotated: by an orthonormal Hadamard matrix along head_size, before grouping.
        fit: how scales are chosen.
        channel_offset: one float16 per head and channel, subtracted before rotation.

    Raises:
        ValueError: the combination has no meaning.
    """

    storage: ir.DataType
    grouping: Grouping = Grouping.WHOLE
    group_size: int = 0
    offset: Offset = Offset.NONE
    rotated: bool = False
    fit: Fit = Fit.RANGE
    channel_offset: bool = False

    def __post_init__(self) -> None:
        fault = _fault(self)
        if fault:
            raise ValueError(fault)

    @property
    def is_float(self) -> bool:
        """Whether codes are floats, without scales."""
        return self.storage in _FLOATS

    @property
    def bits(self) -> int:
        """Of a code."""
        return int(self.storage.bitwidth)

    @property
    def codes_per_byte(self) -> int:
        """1, 2 or 4; 1 for floats of any size."""
        return max(1, 8 // self.bits)

    @property
    def center(self) -> float:
        """The code that decodes to the midpoint, or to 0: 128, or 127.5, 7.5, 1.5.

        A half-integer where a midpoint is stored: codes lie evenly on both sides of it.
        """
        if self.is_float:
            return 0.0
        if self.offset is Offset.MIDPOINT:
            return ((1 << self.bits) - 1) / 2
        return float(1 << (self.bits - 1))

    @property
    def lowest(self) -> int:
        """Smallest code that an encoder writes: 0, or 1 where codes are symmetric."""
        return 0 if self.is_float or self.offset is Offset.MIDPOINT else 1

    @property
    def highest(self) -> int:
        """Largest code."""
        return 0 if self.is_float else (1 << self.bits) - 1


def _fault(encoding: Encoding) -> str:
    """Why an encoding has no meaning; empty: it has one."""
    if encoding.is_float:
        plain = Encoding.__dataclass_fields__
        extra = [
            name
            for name, field in plain.items()
            if name != "storage" and getattr(encoding, name) != field.default
        ]
        return f"{encoding.storage.name} is stored as it is, without {extra[0]}" if extra else ""
    if encoding.storage not in _INTEGERS:
        known = ", ".join(sorted(t.name for t in _FLOATS | _INTEGERS))
        return f"storage {encoding.storage.name} is not one of {known}"
    if encoding.grouping is Grouping.WHOLE:
        return "integer codes need a scale for each token or each channel"
    if encoding.group_size < 0 or encoding.group_size % TILE:
        return f"group_size {encoding.group_size} is not a multiple of {TILE}"
    if encoding.fit is Fit.SEARCH and encoding.offset is Offset.NONE:
        return "a search fits scale and midpoint: offset must be MIDPOINT"
    if encoding.channel_offset and encoding.grouping is Grouping.CHANNEL:
        return "channels that have scales of their own need no channel_offset"
    return ""
