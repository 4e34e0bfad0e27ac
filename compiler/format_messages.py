"""Page formats as messages: what a QuantizationProto says, in both directions.

Every number that a reader needs stands in the message, also those that follow from others (bits,
center): a reader that knows this vocabulary needs no table of names. Reading trusts nothing: what
was read is written again and compared field by field.
"""

from __future__ import annotations

from typing import Any, Final

import onnx_ir as ir
from google.protobuf.unknown_fields import UnknownFieldSet

from onnx_inplace.compiler import page_layout, schema
from onnx_inplace.compiler.encodings import TILE, Encoding, Fit, Grouping, Offset

LAYOUT_VERSION: Final = 1  # of what docs/formats.md says about bytes


# -- writing


def build(name: str, version: int, key: Encoding, value: Encoding) -> Any:
    """The QuantizationProto of a format."""
    proto = schema.QuantizationProto(name=name, version=version)
    proto.kind = proto.FLOAT if key.is_float else proto.INTEGER
    _write_encoding(key, proto.key)
    _write_encoding(value, proto.value)
    layout = proto.layout
    layout.version = LAYOUT_VERSION
    layout.high_nibble_first = False
    if key.is_float:
        layout.order, layout.alignment = "rows", 1
        return proto
    layout.order, layout.alignment = "tiles", page_layout.ALIGNMENT
    layout.parameters = layout.BEFORE_CODES
    layout.tokens_per_tile, layout.channels_per_tile = TILE, page_layout.QUAD
    return proto


def _write_encoding(encoding: Encoding, message: Any) -> None:
    message.bits = encoding.bits
    message.storage_type = encoding.storage.value
    message.grouping = message.Grouping.Value(encoding.grouping.value)
    if encoding.is_float:
        return
    message.group_size = encoding.group_size
    message.scale_type = ir.DataType.FLOAT16.value
    message.offset = message.Offset.Value(encoding.offset.value)
    if encoding.offset is not Offset.NONE:
        message.offset_type = ir.DataType.FLOAT16.value
    message.rotation = message.HADAMARD if encoding.rotated else message.UNROTATED
    message.channel_offset = encoding.channel_offset
    message.fit = message.Fit.Value(encoding.fit.value)
    message.center = encoding.center


# -- reading


def read_encodings(proto: Any) -> tuple[Encoding, Encoding]:
    """How K and V are stored, as far as this vocabulary can say it: see ``difference``.

    Raises:
        ValueError: something is said that is not known here.
    """
    _refuse_unknown(proto, "")
    if proto.layout.version != LAYOUT_VERSION:
        raise ValueError(
            f"layout version {proto.layout.version} is not known here (known: {LAYOUT_VERSION})"
        )
    if proto.kind not in (proto.FLOAT, proto.INTEGER):
        raise ValueError(f"kind {proto.Kind.Name(proto.kind)} is not known here")
    return _read_encoding(proto.key, "key"), _read_encoding(proto.value, "value")


def _refuse_unknown(message: Any, path: str) -> None:
    """An enum value that is not declared is such a field too: protobuf shows the default."""
    for field in UnknownFieldSet(message):
        where = f" of {path[:-1]}" if path else ""
        raise ValueError(
            f"field or enum value number {field.field_number}{where} is not known here"
        )
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            _refuse_unknown(value, f"{path}{descriptor.name}.")


def _read_encoding(message: Any, path: str) -> Encoding:
    for name in ("codebook", "matrix"):
        if getattr(message, name):
            raise ValueError(f"{path}.{name}: formats with one are not known here")
    offset = message.Offset.Name(message.offset)
    if offset not in Offset.__members__:
        raise ValueError(f"{path}.offset {offset} is not known here")
    try:
        storage = ir.DataType(message.storage_type)
    except ValueError:
        raise ValueError(f"{path}.storage_type {message.storage_type} is no data type") from None
    try:
        return Encoding(
            storage,
            Grouping(message.Grouping.Name(message.grouping)),
            message.group_size,
            Offset(offset),
            rotated=message.rotation != message.UNROTATED,
            fit=Fit(message.Fit.Name(message.fit)),
            channel_offset=message.channel_offset,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def difference(given: Any, expected: Any, path: str = "") -> str:
    """The first field in which two messages of one type differ; empty: none.

    A field that is not set has its default: other producers need not write zeros.
    """
    for descriptor in expected.DESCRIPTOR.fields:
        ours, theirs = getattr(expected, descriptor.name), getattr(given, descriptor.name)
        if descriptor.message_type is not None:
            inner = difference(theirs, ours, f"{path}{descriptor.name}.")
            if inner:
                return inner
        elif ours != theirs:
            kind = descriptor.enum_type
            names = kind.values_by_number if kind else {}
            shown = [names[v].name if kind else v for v in (theirs, ours)]
            return f"{path}{descriptor.name} is {shown[0]!r}, where it must be {shown[1]!r}"
    return ""
