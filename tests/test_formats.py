"""Page formats: declarations and layouts. Bytes of real pages: ``test_page_specification``."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest

from onnx_inplace import formats
from onnx_inplace.compiler import schema
from onnx_inplace.compiler.encodings import Encoding, Fit, Grouping, Offset
from onnx_inplace.compiler.errors import FormatError, InplaceError
from onnx_inplace.compiler.page_layout import HalfLayout, rotation_size

ALL = pytest.mark.parametrize("page_format", formats.BUILTIN.values(), ids=str)
SIZES = [(1, 16, 32), (2, 32, 48), (3, 64, 64), (2, 128, 80), (1, 256, 96), (2, 64, 256)]
CODE = Encoding(ir.DataType.UINT4, Grouping.TOKEN, 64, Offset.MIDPOINT)


def pieces(half: HalfLayout, encoding: Encoding, rows: int, columns: int, head: int):
    """(start, end) of everything that a layout says is in the region of a head."""
    base = half.offset + head * half.head_stride
    if encoding.is_float:
        token = columns * encoding.bits // 8
        assert half.row_stride == token
        yield from ((base + row * token, base + (row + 1) * token) for row in range(rows))
        return
    for group in range(half.groups):
        at = base + half.scales + group * half.group_stride
        yield at, at + 2 * half.items
        if half.midpoint:
            yield at + half.midpoint, at + half.midpoint + 2 * half.items
    if half.channel_offsets:
        yield base + half.channel_offsets, base + half.channel_offsets + 2 * columns  # only K's
    for tile in range(rows // 16):
        at = base + half.codes + tile * half.tile_stride
        assert at % 64 == 0
        yield at, at + columns * 16 * encoding.bits // 8


@ALL
@pytest.mark.parametrize(("heads", "page_size", "head_size"), SIZES)
def test_nothing_in_a_page_overlaps_and_nothing_is_outside(
    page_format: formats.PageFormat, heads: int, page_size: int, head_size: int
) -> None:
    """Case 73. A byte belongs to one scale, midpoint or vector of codes; all are inside."""
    layout = page_format.layout((2, heads, page_size, head_size))
    owned = np.zeros(layout.size, np.uint8)
    transposed = (page_size, head_size) if page_format.is_float else (head_size, page_size)
    for half, encoding, (rows, columns) in (
        (layout.key, page_format.key, (page_size, head_size)),
        (layout.value, page_format.value, transposed),
    ):
        for head in range(heads):
            for start, end in pieces(half, encoding, rows, columns, head):
                assert 0 <= start < end <= layout.size
                owned[start:end] += 1
    assert owned.max() == 1
    if page_format.is_float:
        assert owned.min() == 1
    else:
        assert layout.size - owned.sum() < 2 * heads * 64  # alignment before codes, no more


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("FLOAT32", 32),
        ("FLOAT16", 16),
        ("BFLOAT16", 16),
        ("FP8_E4M3", 8),
        ("FP8_E5M2", 8),
        ("INT8", 8.25),
        ("INT4", 4.5),
        ("INT4T", 4.625),
        ("INT2", 2.5),
    ],
)
def test_bits_per_element_of_a_page_of_64_tokens(name: str, bits: float) -> None:
    page_format = formats.BUILTIN[name]
    assert page_format.bits_per_element((2, 3, 64, 64)) == bits
    assert page_format.page_bytes((2, 3, 64, 64)) == bits * 2 * 3 * 64 * 64 / 8


@ALL
def test_bytes_are_proportional_to_heads(page_format: formats.PageFormat) -> None:
    one = page_format.page_bytes((2, 1, 64, 80))
    assert [page_format.page_bytes((2, n, 64, 80)) for n in (2, 7)] == [2 * one, 7 * one]


def test_a_float_page_is_a_plain_array() -> None:
    layout = formats.BFLOAT16.layout((2, 3, 32, 48))
    assert layout.size == 2 * 3 * 32 * 48 * 2
    assert (layout.key.offset, layout.value.offset) == (0, 3 * 32 * 48 * 2)
    assert layout.key.head_stride == 32 * 48 * 2


@pytest.mark.parametrize(
    ("head_size", "block"), [(32, 32), (48, 16), (64, 64), (80, 16), (96, 32), (128, 128)]
)
def test_a_rotation_covers_the_largest_power_of_two_that_divides(
    head_size: int, block: int
) -> None:
    assert rotation_size(head_size) == block
    assert formats.INT8.layout((2, 1, 32, head_size)).key.rotation == block
    assert formats.FLOAT16.layout((2, 1, 32, head_size)).key.rotation == 0


def test_the_last_group_along_the_head_may_be_shorter() -> None:
    value = formats.INT4.layout((2, 1, 64, 80)).value
    assert (value.groups, value.group_size, value.items) == (2, 64, 64)


def test_a_page_of_less_than_64_tokens_is_one_group() -> None:
    key = formats.INT4.layout((2, 1, 48, 64)).key
    assert (key.groups, key.group_size, key.items) == (1, 48, 64)
    key = formats.INT4.layout((2, 1, 192, 64)).key
    assert (key.groups, key.group_size, key.items) == (3, 64, 64)


# -- what cannot be stored


@ALL
@pytest.mark.parametrize("head_size", [0, 15, 16, 40, 272])
def test_a_head_size_that_no_kernel_takes_is_refused(
    page_format: formats.PageFormat, head_size: int
) -> None:
    """Cases 70, 77: 15 is refused; 80 is stored, see ``SIZES``."""
    with pytest.raises(FormatError, match="multiples of 16 from 32 to 256") as caught:
        page_format.page_bytes((2, 1, 64, head_size))
    assert caught.value.format == page_format.name
    assert isinstance(caught.value, InplaceError)


@ALL
@pytest.mark.parametrize("page_size", [-16, 0, 8, 24, 272])
def test_a_page_size_that_no_format_takes_is_refused(
    page_format: formats.PageFormat, page_size: int
) -> None:
    with pytest.raises(FormatError, match="multiples of 16 from 16 to 256"):
        page_format.layout((2, 1, page_size, 64))


@pytest.mark.parametrize("page_size", [80, 96, 160])
def test_a_page_that_has_no_whole_groups_is_refused_with_what_works(page_size: int) -> None:
    with pytest.raises(FormatError, match="what works: 16, 32, 48, 64, 128, 192, 256"):
        formats.INT4.layout((2, 1, page_size, 64))
    assert formats.INT8.page_bytes((2, 1, page_size, 64)) > 0


@pytest.mark.parametrize("dims", [(), (2, 1, 64), (1, 1, 64, 64), (2, 0, 64, 64), (2, -1, 64, 64)])
def test_dims_are_those_of_a_page(dims: tuple[int, ...]) -> None:
    with pytest.raises(FormatError):
        formats.FLOAT16.page_bytes(dims)


def test_a_dim_is_an_integer() -> None:
    assert formats.INT8.page_bytes(np.array([2, 1, 64, 64])) == 64 * 64 * 2 + 64 * 2 * 2
    with pytest.raises(TypeError):
        formats.INT8.page_bytes((2, 1, 64.0, 64))


# -- declarations


@ALL
def test_names_are_the_ones_of_the_constants(page_format: formats.PageFormat) -> None:
    assert getattr(formats, page_format.name) is page_format
    assert page_format.name in formats.__all__


def test_appendable_are_formats_without_scales_for_channels() -> None:
    best_whole = {name for name, f in formats.BUILTIN.items() if not f.appendable}
    assert best_whole == {"INT4", "INT2"}


@pytest.mark.parametrize(
    "change",
    [
        {"storage": ir.DataType.INT8},
        {"storage": ir.DataType.FLOAT16},
        {"grouping": Grouping.WHOLE},
        {"group_size": 24},
        {"group_size": -16},
        {"offset": Offset.NONE, "fit": Fit.SEARCH},
        {"grouping": Grouping.CHANNEL, "channel_offset": True},
    ],
    ids=str,
)
def test_an_encoding_without_a_meaning_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(CODE, **change)


def test_a_format_of_floats_has_one_type() -> None:
    half, single = Encoding(ir.DataType.FLOAT16), Encoding(ir.DataType.FLOAT)
    with pytest.raises(FormatError):
        formats.PageFormat("MIXED", half, single)
    with pytest.raises(FormatError):
        formats.PageFormat("MIXED", half, CODE)


def test_versions_count_from_one() -> None:
    assert formats.PageFormat("MINE", CODE, CODE, version=2) != formats.PageFormat(
        "MINE", CODE, CODE
    )
    with pytest.raises(FormatError, match="version 0"):
        formats.PageFormat("MINE", CODE, CODE, version=0)


@pytest.mark.parametrize("name", ["", "4BIT", "INT 4"])
def test_a_format_has_a_name(name: str) -> None:
    with pytest.raises(FormatError):
        formats.PageFormat(name, CODE, CODE)


def test_a_user_mixes_encodings() -> None:
    mixed = formats.PageFormat("K8V4", formats.INT8.key, formats.INT4.value)
    layout = mixed.layout((2, 2, 64, 64))
    assert layout.key.size == formats.INT8.layout((2, 2, 64, 64)).key.size
    assert layout.value.size == formats.INT4.layout((2, 2, 64, 64)).value.size
    assert mixed.page_bytes((2, 2, 64, 64)) == 2 * (layout.key.size + layout.value.size)


# -- as messages

GROUPED = formats.PageFormat("INT8G", dataclasses.replace(formats.INT8.key, group_size=32), CODE)


@pytest.mark.parametrize("page_format", [*formats.BUILTIN.values(), GROUPED], ids=str)
def test_a_format_survives_its_message(page_format: formats.PageFormat) -> None:
    data = page_format.to_proto().SerializeToString()
    read = formats.PageFormat.from_proto(schema.QuantizationProto.FromString(data))
    assert read == page_format
    assert formats.BUILTIN.get(page_format.name) in (None, read)


@ALL
def test_every_field_of_a_message_matters(page_format: formats.PageFormat) -> None:
    """Changing any field gives another format or a refusal, never the same format."""
    message = page_format.to_proto()
    for path in scalar_fields(message):
        changed = schema.QuantizationProto.FromString(message.SerializeToString())
        target = changed
        for name in path[:-1]:
            target = getattr(target, name)
        before = getattr(target, path[-1])
        setattr(
            target, path[-1], f"{before}X" if isinstance(before, str) else type(before)(not before)
        )
        try:
            assert formats.PageFormat.from_proto(changed) != page_format, path
        except FormatError:
            continue


def scalar_fields(message, path=()):
    """Paths of the fields of a message that hold one number, text or enum."""
    for descriptor in message.DESCRIPTOR.fields:
        if descriptor.message_type is not None:
            yield from scalar_fields(getattr(message, descriptor.name), (*path, descriptor.name))
        elif descriptor.name not in ("codebook", "matrix"):
            yield (*path, descriptor.name)


def test_defaults_need_not_be_written() -> None:
    """Other producers may leave out fields that are zero."""
    message = formats.FLOAT16.to_proto()
    message.layout.ClearField("high_nibble_first")
    message.key.ClearField("grouping")
    assert formats.PageFormat.from_proto(message) is formats.FLOAT16


def change(which: str, **fields: object):
    message = formats.BUILTIN[which].to_proto()
    for path, value in fields.items():
        *parents, last = path.split("__")
        target = message
        for parent in parents:
            target = getattr(target, parent)
        if isinstance(value, list):
            getattr(target, last).extend(value)
        else:
            setattr(target, last, value)
    return message


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (change("INT4", version=2), "version is 2, where it must be 1"),
        (change("INT4", version=0), "version 0"),
        (change("INT4", layout__version=2), "layout version 2"),
        (change("INT4", kind=0), "UNDEFINED"),
        (change("INT4", kind=3), "CODEBOOK"),
        (change("INT4", kind=1), "kind is 'FLOAT'"),
        (change("INT4", key__bits=5), "key.bits is 5, where it must be 4"),
        (change("INT4", key__group_size=32), "key.group_size is 32, where it must be 64"),
        (change("INT4", key__center=8.0), "key.center is 8.0, where it must be 7.5"),
        (change("INT4", value__offset=2), "value.offset MINIMUM"),
        (change("INT4", value__offset_type=1), "value.offset_type is 1, where it must be 10"),
        (change("INT4", value__scale_type=16), "value.scale_type is 16"),
        (change("INT4", key__storage_type=99), "key.storage_type 99"),
        (change("INT4", key__storage_type=3), "INT8 is not one of"),
        (change("INT4", key__matrix=[1.0]), "key.matrix"),
        (change("INT4", key__codebook=[1.0]), "key.codebook"),
        (change("INT4", key__rotation=2), "key.rotation is 'MATRIX'"),
        (change("INT4", layout__order="rows"), "layout.order is 'rows', where it must be 'tiles'"),
        (change("INT4", layout__alignment=32), "layout.alignment is 32"),
        (change("INT4", layout__high_nibble_first=True), "layout.high_nibble_first is True"),
        (change("INT4", name=""), "name"),
        (change("FLOAT16", key__bits=8), "key.bits is 8, where it must be 16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_message_that_is_not_understood_is_refused(message, reason: str) -> None:
    with pytest.raises(FormatError) as caught:
        formats.PageFormat.from_proto(message)
    assert reason in caught.value.reason


def test_an_unknown_enum_value_is_refused() -> None:
    """proto2 hides it: the field reads as its default."""
    message = formats.FLOAT16.to_proto()
    data = bytearray(message.key.SerializeToString())
    grouping = message.key.DESCRIPTOR.fields_by_name["grouping"].number
    message.key.ParseFromString(bytes(data) + bytes([grouping << 3, 99]))
    assert message.key.grouping == 0
    with pytest.raises(FormatError, match=f"number {grouping} of key"):
        formats.PageFormat.from_proto(message)


def test_an_unknown_field_is_refused() -> None:
    message = formats.FLOAT16.to_proto()
    message.MergeFromString(bytes([15 << 3, 1]))
    with pytest.raises(FormatError, match="number 15 is not known"):
        formats.PageFormat.from_proto(message)


def test_names_of_a_table_are_unique() -> None:
    protos = [page_format.to_proto() for page_format in (formats.INT8, GROUPED, formats.INT4)]
    assert list(formats.read_table(protos).values()) == [formats.INT8, GROUPED, formats.INT4]
    with pytest.raises(FormatError, match="INT8: declared twice"):
        formats.read_table([*protos, formats.INT8.to_proto()])
