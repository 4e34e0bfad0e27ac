"""The contract's messages and fields, as a table. ``schema`` makes protobuf classes of it.

Numbers and names are a promise to every file on disk: a field is never renumbered or reused.
"""

from __future__ import annotations

import dataclasses
from typing import Final

FIRST, LAST = 1050, 1099  # the field numbers of this extension; 1000-1049 belong to another one


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A field; ``type`` is a scalar, or the name of an enum or a message."""

    type: str
    name: str
    number: int
    comment: str = ""
    repeated: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Enum:
    """An enum; its values are numbered from 0."""

    name: str
    values: tuple[str, ...]
    comment: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """A message of ours, or, where onnx has a message of that name, what we add to it."""

    name: str
    fields: tuple[Field, ...] = ()
    enums: tuple[Enum, ...] = ()
    messages: tuple[Declared, ...] = ()
    comment: str = ""


# How one of the two halves of a page, K or V, is stored. A code is an integer of `bits` bits, or a
# float. What an offset means:
#   ZERO_POINT: scale * (code - offset)
#   MINIMUM:    scale * code + offset
#   MIDPOINT:   scale * (code - (2^bits - 1) / 2) + offset
#   NONE:       scale * (code - center)
_ENCODING = Declared(
    "Encoding",
    comment="How K or V of a page is stored.",
    enums=(
        Enum("Grouping", ("WHOLE", "TOKEN", "CHANNEL"), "What shares one scale (and one offset)."),
        Enum(
            "Offset",
            ("NONE", "ZERO_POINT", "MINIMUM", "MIDPOINT"),
            "What is stored beside the scale.",
        ),
        Enum(
            "Rotation",
            ("UNROTATED", "HADAMARD", "MATRIX"),
            "Applied along head_size before grouping.",
        ),
        Enum("Fit", ("RANGE", "SEARCH"), "How an encoder chooses scales; decoding needs it not."),
    ),
    fields=(
        Field("int32", "bits", 1, "of one code"),
        Field("int32", "storage_type", 2, "TensorProto.DataType of one code"),
        Field("Grouping", "grouping", 3, "TOKEN: elements along head_size; CHANNEL: tokens"),
        Field("int64", "group_size", 4, "0: the whole axis"),
        Field("int32", "scale_type", 5, "TensorProto.DataType; UNDEFINED: codes are not scaled"),
        Field(
            "Offset",
            "offset",
            6,
            "zero point, or value of code 0, or of the middle between the codes",
        ),
        Field("int32", "offset_type", 7, "TensorProto.DataType of the stored offset"),
        Field(
            "float",
            "codebook",
            8,
            "value of each code, before scaling; empty: the code itself",
            repeated=True,
        ),
        Field("Rotation", "rotation", 9, "orthonormal: decoding applies the transpose"),
        Field(
            "float",
            "matrix",
            10,
            "[head_size, head_size], row-major, for rotation MATRIX",
            repeated=True,
        ),
        Field(
            "bool",
            "channel_offset",
            11,
            "one more per channel and page, subtracted before rotation",
        ),
        Field("Fit", "fit", 12),
        Field("float", "center", 13, "code that decodes to the midpoint, or to 0"),
    ),
)

MESSAGES: Final = (
    Declared(
        "ValueAliasProto",
        comment="Output `output_index` shares the storage of input `input_index`, guaranteed.",
        enums=(Enum("Kind", ("UNDEFINED", "MUST_ALIAS")),),
        fields=(
            Field("int32", "output_index", 1),
            Field("int32", "input_index", 2),
            Field("Kind", "kind", 3),
        ),
    ),
    Declared(
        "QuantizedTensorProto",
        comment="One page: also the unit of saved state.",
        fields=(
            Field("int64", "dims", 1, "logical shape", repeated=True),
            Field("bytes", "raw_data", 2, "little-endian, in the layout of the page format"),
            Field("string", "quantized_type", 4, "name of a QuantizationProto"),
            Field("string", "name", 5),
            Field("StringStringEntryProto", "external_data", 6, repeated=True),
            Field("fixed32", "crc32", 7, "of raw_data"),
        ),
    ),
    Declared(
        "QuantizationProto",
        comment="A page format: all that is needed to decode a page and to know its size.",
        enums=(Enum("Kind", ("UNDEFINED", "FLOAT", "INTEGER", "CODEBOOK"), "What a code is."),),
        messages=(
            _ENCODING,
            Declared(
                "Layout",
                comment="Where the bytes of a page stand. All numbers are little-endian.",
                enums=(
                    Enum(
                        "Parameters",
                        ("AFTER_CODES", "BEFORE_CODES", "BEFORE_GROUP"),
                        "Where scales and offsets stand.",
                    ),
                ),
                fields=(
                    Field(
                        "string",
                        "order",
                        1,
                        'of codes: "rows" ([K/V, head, token, channel]), "tiles"',
                    ),
                    Field("Parameters", "parameters", 2),
                    Field("int64", "alignment", 3, "[bytes] of every part of the page"),
                    Field("int64", "tokens_per_tile", 4, "of K; of V these two are exchanged"),
                    Field("int64", "channels_per_tile", 5, "that stand side by side in a lane"),
                    Field("bool", "high_nibble_first", 6, "of codes that share a byte"),
                    Field("int64", "version", 7, "a reader refuses versions that it does not know"),
                ),
            ),
        ),
        fields=(
            Field("string", "name", 1, "unique in a model"),
            Field("int64", "version", 2, "of the format's definition"),
            Field("Kind", "kind", 3),
            Field("Encoding", "key", 4),
            Field("Encoding", "value", 5),
            Field("Layout", "layout", 6),
        ),
    ),
    Declared(
        "SavedPageProto",
        comment="A page of a saved cache.",
        fields=(
            Field("int64", "id", 1),
            Field("int32", "fill", 2, "[tokens] one more than the last one written"),
            Field("int32", "owners", 3, "who counts on the page: at least 1"),
            Field("QuantizedTensorProto", "tensor", 4),
        ),
    ),
    Declared(
        "PagedCacheProto",
        comment="A paged cache with all that is needed to read it.",
        fields=(
            Field("string", "name", 1),
            Field("TypeProto", "type", 2, "as of a paged input of a model"),
            Field(
                "QuantizationProto", "quantizations", 3, "that the pages may have", repeated=True
            ),
            Field("SavedPageProto", "pages", 4, "by id, ascending", repeated=True),
        ),
    ),
    Declared(
        "SavedArrayProto",
        comment="An array of a saved state.",
        fields=(
            Field(
                "TensorProto", "tensor", 1, "name, type and dims; the bytes stand behind the head"
            ),
            Field("fixed32", "crc32", 2, "of the bytes, little-endian"),
        ),
    ),
    Declared(
        "SavedStateProto",
        comment="Head of a file of saved state. Names are unique.",
        fields=(
            Field("SavedArrayProto", "arrays", 1, repeated=True),
            Field("PagedCacheProto", "caches", 2, repeated=True),
        ),
    ),
    Declared(
        "NodeProto",
        fields=(
            Field(
                "ValueAliasProto",
                "output_alias",
                1050,
                "one per output that shares storage",
                repeated=True,
            ),
        ),
    ),
    Declared(
        "FunctionProto",
        fields=(
            Field("ValueAliasProto", "output_alias", 1050, "contract of every call", repeated=True),
        ),
    ),
    Declared(
        "ValueInfoProto",
        enums=(
            Enum("Access", ("READ_ONLY", "READ_WRITE"), "What a callee may do with a parameter."),
        ),
        fields=(
            Field(
                "Access",
                "access",
                1050,
                "of a graph input, or a parameter in FunctionProto.value_info",
            ),
            Field("string", "alias_of", 1051, "the value that this value shares storage with"),
        ),
    ),
    Declared(
        "TypeProto",
        messages=(
            Declared(
                "QuantizedTensor",
                comment="The page type of a paged cache, carried by a sequence of uint8 tensors.",
                fields=(
                    Field(
                        "string",
                        "allowed_quantized_type",
                        1,
                        "names; empty: any declared",
                        repeated=True,
                    ),
                    Field("int32", "elem_type", 2, "logical element type that all pages decode to"),
                    Field("TensorShapeProto", "shape", 3, "logical page shape"),
                    Field("bool", "sparse_ids", 4, "any int64 is a page id"),
                ),
            ),
        ),
        fields=(Field("QuantizedTensor", "quantized_tensor", 1050, "beside the oneof"),),
    ),
    Declared(
        "ModelProto",
        fields=(
            Field(
                "QuantizationProto",
                "quantizations",
                1050,
                "page formats, names unique",
                repeated=True,
            ),
        ),
    ),
)
