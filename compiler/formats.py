"""Page formats: how a page of a paged cache is stored.

A format is a name, a version and an encoding for K and for V. The constants below are the formats
that this project ships; another one is made of the same vocabulary:

    INT8G = PageFormat("INT8G", key=Encoding(ir.DataType.UINT8, Grouping.TOKEN, 32), value=...)

``PageFormat.layout`` is the one source of sizes and offsets; ``docs/formats.md`` says byte by byte
what they mean. How numbers become codes is not decided here: kernels do it, and are held to
the specification in ``tests/page_specification.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import onnx_ir as ir

from onnx_inplace.compiler import format_messages, page_layout
from onnx_inplace.compiler.encodings import Encoding, Fit, Grouping, Offset
from onnx_inplace.compiler.errors import FormatError
from onnx_inplace.compiler.page_layout import HalfLayout, PageLayout

__all__ = [
    "BFLOAT16",
    "BUILTIN",
    "FLOAT16",
    "FLOAT32",
    "FP8_E4M3",
    "FP8_E5M2",
    "INT2",
    "INT4",
    "INT4T",
    "INT8",
    "Encoding",
    "Fit",
    "FormatError",
    "Grouping",
    "HalfLayout",
    "Offset",
    "PageFormat",
    "PageLayout",
    "read_table",
]


@dataclasses.dataclass(frozen=True, slots=True)
class PageFormat:
    """How a page is stored, complete to the byte.

    Attributes:
        name: unique in a model; what ``quantized_type`` says.
        key: how K is stored.
        value: how V is stored.
        version: of the definition; two versions of one name are two formats.

    Raises:
        FormatError: no name; no version from 1 on; or one half is a float type and the other half
            is not of that type.
    """

    name: str
    key: Encoding
    value: Encoding
    version: int = 1

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise FormatError(self.name, "a name of letters, digits and _ is needed")
        if self.version < 1:
            raise FormatError(self.name, f"version {self.version} is not a version")
        if (self.key.is_float or self.value.is_float) and self.key != self.value:
            raise FormatError(
                self.name,
                f"K is {self.key.storage.name} and V is {self.value.storage.name}: floats are "
                "one plain array, of one type",
            )

    def __str__(self) -> str:
        """The name."""
        return self.name

    @property
    def is_float(self) -> bool:
        """Whether a page is an ordinary array of floats, [2, heads, page_size, head_size]."""
        return self.key.is_float

    @property
    def appendable(self) -> bool:
        """Whether tokens written one by one give what one write of them all gives.

        Formats with scales for channels are best written as a whole page, by conversion: a later
        token that leaves the range of its group makes the encoder widen it and recode the group.
        """
        return Grouping.CHANNEL not in (self.key.grouping, self.value.grouping)

    def layout(self, dims: Sequence[int]) -> PageLayout:
        """Where the bytes of a page of ``dims`` = [2, heads, page_size, head_size] stand.

        Raises:
            FormatError: the format cannot group such a page; the text says which sizes work.
        """
        try:
            return page_layout.compute(self.key, self.value, dims)
        except ValueError as error:
            raise FormatError(self.name, str(error)) from None

    def page_bytes(self, dims: Sequence[int]) -> int:
        """Bytes of a page of ``dims`` = [2, heads, page_size, head_size], all included.

        Proportional to ``heads``.

        Raises:
            FormatError: the format cannot group such a page.
        """
        return self.layout(dims).size

    def bits_per_element(self, dims: Sequence[int]) -> float:
        """Bits per logical element, scales and padding included.

        Raises:
            FormatError: the format cannot group such a page.
        """
        layout = self.layout(dims)
        return 8 * layout.size / (2 * layout.heads * layout.page_size * layout.head_size)

    def to_proto(self) -> Any:
        """The format as a ``schema.QuantizationProto``, every field that says something set."""
        return format_messages.build(self.name, self.version, self.key, self.value)

    @classmethod
    def from_proto(cls, proto: Any) -> PageFormat:
        """The format that a ``schema.QuantizationProto`` describes: ``from_proto(to_proto())``.

        Raises:
            FormatError: a version, field, enum value or combination that is not known here; fields
                that contradict each other; a name of this module with another meaning.
        """
        try:
            read = cls(proto.name, *format_messages.read_encodings(proto), int(proto.version))
            fault = format_messages.difference(proto, read.to_proto())
        except FormatError:
            raise
        except ValueError as error:
            raise FormatError(proto.name, str(error)) from None
        known = BUILTIN.get(read.name)
        if not fault and known is not None and read != known:
            fault = format_messages.difference(proto, known.to_proto())
        if fault:
            raise FormatError(proto.name, fault)
        return known or read


def _plain(name: str, storage: ir.DataType) -> PageFormat:
    return PageFormat(name, Encoding(storage), Encoding(storage))


def _token(storage: ir.DataType, group_size: int, **other: object) -> Encoding:
    """Rotated, a scale and a midpoint for each token and ``group_size`` channels."""
    encoding = Encoding(storage, Grouping.TOKEN, group_size, Offset.MIDPOINT, rotated=True)
    return dataclasses.replace(encoding, **other)  # type: ignore[arg-type]


def _channel(storage: ir.DataType, group_size: int, **other: object) -> Encoding:
    """Rotated, a scale and a midpoint for each channel and ``group_size`` tokens."""
    return _token(storage, group_size, grouping=Grouping.CHANNEL, **other)


FLOAT32: Final = _plain("FLOAT32", ir.DataType.FLOAT)
FLOAT16: Final = _plain("FLOAT16", ir.DataType.FLOAT16)
BFLOAT16: Final = _plain("BFLOAT16", ir.DataType.BFLOAT16)
FP8_E4M3: Final = _plain("FP8_E4M3", ir.DataType.FLOAT8E4M3FN)
FP8_E5M2: Final = _plain("FP8_E5M2", ir.DataType.FLOAT8E5M2)

_SYMMETRIC: Final = Encoding(ir.DataType.UINT8, Grouping.TOKEN, 0, rotated=True)
INT8: Final = PageFormat("INT8", _SYMMETRIC, _SYMMETRIC)
INT4: Final = PageFormat("INT4", _channel(ir.DataType.UINT4, 64), _token(ir.DataType.UINT4, 64))
INT4T: Final = PageFormat(
    "INT4T", _token(ir.DataType.UINT4, 64, channel_offset=True), _token(ir.DataType.UINT4, 64)
)
INT2: Final = PageFormat(
    "INT2",
    _channel(ir.DataType.UINT2, 64, fit=Fit.SEARCH),
    _token(ir.DataType.UINT2, 64, fit=Fit.SEARCH),
)

BUILTIN: Final[Mapping[str, PageFormat]] = MappingProxyType(
    {
        format_.name: format_
        for format_ in (
            FLOAT32,
            FLOAT16,
            BFLOAT16,
            FP8_E4M3,
            FP8_E5M2,
            INT8,
            INT4,
            INT4T,
            INT2,
        )
    }
)


def read_table(protos: Iterable[Any]) -> dict[str, PageFormat]:
    """The formats of ``ModelProto.quantizations``, or of a saved state, by name.

    Raises:
        FormatError: one of them cannot be read, or two have one name.
    """
    table: dict[str, PageFormat] = {}
    for proto in protos:
        page_format = PageFormat.from_proto(proto)
        if page_format.name in table:
            raise FormatError(page_format.name, "declared twice")
        table[page_format.name] = page_format
    return table
