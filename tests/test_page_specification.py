"""The specification of pages against the document's reader, declared errors and simple oracles."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_specification import cast, convert, decode, encode, fit, rotate, unpack, write

from onnx_inplace import formats
from onnx_inplace.compiler.encodings import Fit, Offset
from onnx_inplace.compiler.formats import BUILTIN, PageFormat

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "formats.md"
K8V4 = PageFormat("K8V4", formats.INT8.key, formats.INT4.value)
INTEGERS = [*(f for f in BUILTIN.values() if not f.is_float), K8V4]
ALL = [*BUILTIN.values(), K8V4]
SIZES = [(16, 32), (32, 64), (48, 80), (64, 64), (64, 96), (128, 128)]


def tokens(count: int, head_size: int = 64, heads: int = 2, seed: int = 0) -> np.ndarray:
    """Like keys: channels have means of their own, some are much larger."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, heads, count, head_size), dtype=np.float32)
    return x + 4 * rng.standard_normal((2, heads, 1, head_size), dtype=np.float32)


def dims(page_size: int, head_size: int = 64, heads: int = 2) -> tuple[int, int, int, int]:
    return 2, heads, page_size, head_size


# -- bytes


@pytest.fixture(scope="module")
def reader():
    """The program of the document."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(program, names)
    return names["read"]


@pytest.mark.parametrize("page_format", [f for f in INTEGERS if f is not K8V4], ids=str)
@pytest.mark.parametrize(("page_size", "head_size"), SIZES)
def test_the_reader_of_the_document_reads_pages(
    reader, page_format: PageFormat, page_size: int, head_size: int
) -> None:
    x = tokens(page_size, head_size)
    page = encode(page_format, x, page_size)
    assert page.nbytes == page_format.page_bytes(dims(page_size, head_size))
    read = reader(page.tobytes(), page_format.name, 2, page_size, head_size)
    np.testing.assert_allclose(
        read, decode(page_format, page, dims(page_size, head_size)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("page_format", INTEGERS, ids=str)
@pytest.mark.parametrize(("page_size", "head_size"), SIZES)
def test_the_layout_says_where_everything_is(
    page_format: PageFormat, page_size: int, head_size: int
) -> None:
    """Codes, scales, midpoints and channel offsets at the places that ``PageLayout`` computes."""
    page = encode(page_format, tokens(page_size, head_size), page_size)
    layout = page_format.layout(dims(page_size, head_size))
    float16 = page.view("<f2")
    for half, place in zip(
        unpack(page_format, page, layout.dims), (layout.key, layout.value), strict=True
    ):
        bits, fields = half.encoding.bits, half.encoding.codes_per_byte
        head, token, channel = np.indices((2, page_size, head_size))
        row, column = (channel, token) if half.transposed else (token, channel)
        base = place.offset + head * place.head_stride
        at = base + place.codes + row // 16 * place.tile_stride
        at += column // 4 // fields * 64 + row % 16 * 4 + column % 4
        codes = (page[at] >> (bits * (column // 4 % fields))) & ((1 << bits) - 1)
        np.testing.assert_array_equal(codes, half.codes)

        head, group, item = np.indices((2, place.groups, place.items))
        at = place.offset + head * place.head_stride + place.scales
        at += group * place.group_stride + 2 * item
        np.testing.assert_array_equal(float16[at // 2], half.scales)
        if half.encoding.offset is Offset.MIDPOINT:
            np.testing.assert_array_equal(float16[(at + place.midpoint) // 2], half.midpoints)
        if half.encoding.channel_offset:
            head, channel = np.indices((2, head_size))
            at = place.offset + head * place.head_stride + place.channel_offsets + 2 * channel
            np.testing.assert_array_equal(float16[at // 2], half.channel_offsets)
            assert half.channel_offsets.any()


def test_a_float_page_is_the_array() -> None:
    x = tokens(32)
    np.testing.assert_array_equal(encode(formats.FLOAT32, x, 32).view(np.float32), x.reshape(-1))


def test_heads_do_not_know_each_other() -> None:
    x = tokens(64, heads=3)
    for page_format in INTEGERS:
        whole = encode(page_format, x, 64).reshape(3, -1)
        for head in range(3):
            one = encode(page_format, x[:, head : head + 1], 64)
            np.testing.assert_array_equal(whole[head], one)


# -- numbers


@pytest.mark.parametrize("head_size", [32, 48, 64, 80, 96, 128])
def test_rotation_is_the_hadamard_matrix_and_its_own_inverse(head_size: int) -> None:
    x = tokens(4, head_size)
    block = head_size & -head_size
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix = np.kron(np.eye(head_size // block), matrix / np.sqrt(block))
    np.testing.assert_allclose(rotate(x), x.astype(np.float64) @ matrix, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rotate(rotate(x)), x, rtol=1e-5, atol=1e-5)


def bounds(half) -> np.ndarray:
    """Largest error of a code [heads, page_size, head_size], as the document states it."""
    axis = 1 if half.per_channel else 2

    def spread(part: np.ndarray) -> np.ndarray:
        part = part.astype(np.float64)
        part = part if half.per_channel else part.swapaxes(1, 2)
        return np.repeat(part, half.group_size, axis)[
            :, : half.codes.shape[1], : half.codes.shape[2]
        ]

    scale, midpoint = spread(half.scales), np.abs(spread(half.midpoints))
    levels = half.encoding.highest - half.encoding.lowest
    ends = (levels * scale + midpoint) * 2.0**-11 + (levels + 1) * 2.0**-25
    return np.maximum(0.501 * scale, ends)


@pytest.mark.parametrize("page_format", INTEGERS, ids=str)
@pytest.mark.parametrize("factor", [1e-7, 1e-3, 1, 1e3])
@pytest.mark.parametrize(("page_size", "head_size"), SIZES)
def test_a_code_is_within_its_bound(
    page_format: PageFormat, factor: float, page_size: int, head_size: int
) -> None:
    """Before it is rotated back; a search may clip the ends of a range by 20 %, or more after
    its refit, so it is judged by its mean error elsewhere."""
    x = tokens(page_size, head_size) * np.float32(factor)
    page = encode(page_format, x, page_size)
    for half, values, y in zip(
        unpack(page_format, page, dims(page_size, head_size)),
        x.astype(np.float64),
        decode(page_format, page, dims(page_size, head_size)).astype(np.float64),
        strict=True,
    ):
        if half.encoding.fit is Fit.RANGE:
            error = np.abs(rotate(y - values))
            assert (error <= bounds(half) + 3e-6 * np.abs(values).max()).all()


@pytest.mark.parametrize(
    ("page_format", "key", "value"),
    [
        (formats.FLOAT16, 0.00021, 0.00021),
        (formats.BFLOAT16, 0.0017, 0.0017),
        (formats.FP8_E4M3, 0.027, 0.027),
        (formats.FP8_E5M2, 0.054, 0.054),
        (formats.INT8, 0.0061, 0.0061),
        (formats.INT4, 0.091, 0.091),
        (formats.INT4T, 0.091, 0.091),
        (formats.INT2, 0.33, 0.33),
    ],
    ids=str,
)
def test_errors_of_normal_numbers_are_those_of_the_document(
    page_format: PageFormat, key: float, value: float
) -> None:
    """Root mean square, of numbers with mean 0 and variance 1: stated, and not overstated."""
    x = np.random.default_rng(1).standard_normal((2, 8, 64, 64), dtype=np.float32)
    error = decode(page_format, encode(page_format, x, 64), dims(64, heads=8)) - x
    measured = np.sqrt((error**2).mean(axis=(1, 2, 3)))
    for stated, found in zip((key, value), measured, strict=True):
        assert 0.9 * stated < found <= stated


def test_a_search_is_never_worse_than_the_range() -> None:
    """In the squared error before scale and midpoint are rounded to float16: hence one percent."""
    encoding = formats.INT2.key
    x = np.random.default_rng(2).standard_t(3, (64, 200)).astype(np.float32)

    def error(scale: np.ndarray, midpoint: np.ndarray) -> np.ndarray:
        d, m = scale.astype(np.float32), midpoint.astype(np.float32)
        codes = np.clip(np.rint((x - m) / d + 1.5), 0, 3)
        return (((codes - 1.5) * d + m - x) ** 2).sum(axis=0)

    searched = error(*fit(encoding, x))
    ranged = error(*fit(dataclasses.replace(encoding, fit=Fit.RANGE), x))
    assert (searched <= 1.01 * ranged).all()
    assert searched.mean() < 0.75 * ranged.mean()


# -- extremes


EXTREMES = [65504, -65504, 1e5, -1e5, np.inf, -np.inf, np.nan, 0, -0.0, 6e-8, 1e-40, 3e38]


@pytest.mark.parametrize("page_format", INTEGERS, ids=str)
@pytest.mark.parametrize("everywhere", EXTREMES)
def test_scales_are_finite_whatever_is_written(page_format: PageFormat, everywhere: float) -> None:
    """Case 68. As all of a page, as one element of it, and appended behind ordinary tokens."""
    whole = np.full((2, 2, 64, 64), everywhere, np.float32)
    single = tokens(64)
    single[:, :, 5, 7] = everywhere
    page = encode(page_format, tokens(64), 64)
    appended = write(page_format, page, dims(64), whole[:, :, :1], position=9, fill=10)
    for content in (encode(page_format, whole, 64), encode(page_format, single, 64), appended):
        for half in unpack(page_format, content, dims(64)):
            assert np.isfinite(half.scales).all() and (half.scales >= 0).all()
            assert np.isfinite(half.midpoints).all()
            assert np.isfinite(half.channel_offsets).all()
        assert np.isfinite(decode(page_format, content, dims(64))).all()


@pytest.mark.parametrize("page_format", INTEGERS, ids=str)
@pytest.mark.parametrize("constant", [0.0, 1.0, -3.0, 2.0**-20])
def test_a_constant_is_kept(page_format: PageFormat, constant: float) -> None:
    """Nothing is divided by a scale of 0; V's midpoint is rounded."""
    x = np.full((2, 1, 64, 64), constant, np.float32)
    y = decode(page_format, encode(page_format, x, 64), dims(64, heads=1))
    np.testing.assert_allclose(y, x, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FLOAT32", [65504, 1e5, np.inf, -np.inf, np.nan, 1e-40]),
        ("FLOAT16", [65504, np.inf, np.inf, -np.inf, np.nan, 0]),
        ("BFLOAT16", [65536, 99840, np.inf, -np.inf, np.nan, 1e-40]),
        ("FP8_E4M3", [448, 448, 448, -448, np.nan, 0]),
        ("FP8_E5M2", [57344, 57344, 57344, -57344, np.nan, 0]),
    ],
)
def test_floats_are_cast_as_onnx_casts_them(name: str, expected: list[float]) -> None:
    x = np.tile(np.float32([65504, 1e5, np.inf, -np.inf, np.nan, 1e-40]), (2, 1, 16, 32))
    x = np.ascontiguousarray(x[..., :32])
    y = decode(BUILTIN[name], encode(BUILTIN[name], x, 16), (2, 1, 16, 32))
    np.testing.assert_allclose(y[0, 0, 0, :6], np.float32(expected), rtol=1e-2, atol=1e-41)


@pytest.mark.parametrize("name", ["FP8_E4M3", "FP8_E5M2", "BFLOAT16", "FLOAT16"])
def test_a_cast_takes_the_nearest_number(name: str) -> None:
    """Against all values that the type has."""
    storage = BUILTIN[name].key.storage
    width = BUILTIN[name].key.bits
    every = np.arange(2**width, dtype=np.uint16).astype(np.uint8 if width == 8 else np.uint16)
    with np.errstate(invalid="ignore"):  # among them are signaling NaNs
        values = every.view(cast(np.zeros(1, np.float32), storage).dtype).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    x = np.random.default_rng(3).standard_normal(500, dtype=np.float32) * np.float32(30)
    nearest = np.abs(values[None] - x[:, None].astype(np.float64)).min(axis=1)
    found = np.abs(cast(x, storage).astype(np.float64) - x)
    np.testing.assert_array_equal(found, nearest)


# -- parts of pages


@pytest.mark.parametrize("page_format", [f for f in ALL if f.appendable], ids=str)
@pytest.mark.parametrize("split", [[64], [1] * 64, [15, 1, 17, 31], [63, 1]], ids=str)
def test_an_appendable_format_does_not_care_how_tokens_came(
    page_format: PageFormat, split: list[int]
) -> None:
    x, at = tokens(64), 0
    whole = write(
        page_format, np.zeros(page_format.page_bytes(dims(64)), np.uint8), dims(64), x, 0, 0
    )
    page = np.zeros_like(whole)
    for count in split:
        page = write(page_format, page, dims(64), x[:, :, at : at + count], at, at)
        at += count
    np.testing.assert_array_equal(page, whole)


@pytest.mark.parametrize("page_format", INTEGERS, ids=str)
def test_a_page_that_is_partly_filled_is_a_page_of_its_tokens(page_format: PageFormat) -> None:
    """What is valid is encoded as if there was nothing else, the rest of the codes is zero."""
    x = tokens(64)
    whole = unpack(page_format, encode(page_format, x, 64), dims(64))
    for count in (1, 15, 16, 17, 63):
        page = encode(page_format, x[:, :, :count], 64)
        error = np.abs(decode(page_format, page, dims(64))[:, :, :count] - x[:, :, :count])
        for half, full, wrong in zip(
            unpack(page_format, page, dims(64)), whole, error, strict=True
        ):
            assert not half.codes[:, count:].any()
            if half.per_channel:
                assert wrong.mean() < full.scales.mean()
                if half.encoding.fit is Fit.RANGE:  # fewer tokens, smaller ranges
                    assert (half.scales <= full.scales * 1.01).all()
            elif not half.encoding.channel_offset:
                np.testing.assert_array_equal(half.codes[:, :count], full.codes[:, :count])


@pytest.mark.parametrize("page_format", ALL, ids=str)
@pytest.mark.parametrize(
    ("position", "count"), [(0, 1), (7, 1), (20, 3), (31, 1), (30, 34), (63, 1)]
)
def test_a_write_leaves_the_codes_of_other_tokens(
    page_format: PageFormat, position: int, count: int
) -> None:
    """Case 77. The other half of a byte, too. Values in the range of their group, which is kept."""
    x = tokens(64)
    page = encode(page_format, x, 64)
    new = np.roll(decode(page_format, page, dims(64)), 1, axis=2)[:, :, position : position + count]
    after = write(page_format, page, dims(64), new, position, fill=64)
    others = [t for t in range(64) if not position <= t < position + count]
    before_tokens, after_tokens = (decode(page_format, p, dims(64)) for p in (page, after))
    np.testing.assert_array_equal(after_tokens[:, :, others], before_tokens[:, :, others])
    assert not np.array_equal(after, page)


@pytest.mark.parametrize("page_format", [formats.INT4, formats.INT2], ids=str)
def test_a_token_outside_the_range_widens_its_channels_only(page_format: PageFormat) -> None:
    x = tokens(64)
    page = encode(page_format, x[:, :, :40], 64)
    rotated = rotate(x)
    rotated[0, 1, 40, 3] += 100  # one channel of one head of K
    after = write(page_format, page, dims(64), rotate(rotated[:, :, 40:41]), 40, 40)
    (before_half, _), (half, _) = (unpack(page_format, p, dims(64)) for p in (page, after))
    changed = half.scales[:, 0] != before_half.scales[:, 0]
    assert changed[1, 3]
    # Other channels grow only where their own new value asks for it.
    d, m = (
        before_half.scales[:, 0].astype(np.float64),
        before_half.midpoints[:, 0].astype(np.float64),
    )
    reach = d * (half.encoding.highest - half.encoding.center + 0.5)
    outside = np.abs(rotate(rotate(rotated[0, :, 40])) - m) > reach
    np.testing.assert_array_equal(changed, outside)
    same = np.broadcast_to(~changed[:, None], (2, 40, 64))
    np.testing.assert_array_equal(half.codes[:, :40][same], before_half.codes[:, :40][same])


def test_widening_costs_at_most_what_the_document_says() -> None:
    """Token by token, INT4's K: at most 1.7 times the error of the whole page at once."""
    for seed in range(4):
        x = tokens(64, seed=seed)
        page = np.zeros(formats.INT4.page_bytes(dims(64)), np.uint8)
        for t in range(64):
            page = write(formats.INT4, page, dims(64), x[:, :, t : t + 1], t, t)
        whole = encode(formats.INT4, x, 64)
        appended, at_once = (
            np.sqrt(((decode(formats.INT4, p, dims(64)) - x)[0] ** 2).mean()) for p in (page, whole)
        )
        assert at_once < appended < 1.7 * at_once


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_errors_of_old_tokens_stay_bounded(data: st.DataObject) -> None:
    """Case 79. However often a channel is recoded: six steps of its scale, rounded midpoints."""
    scale = data.draw(st.lists(st.sampled_from([0.01, 1.0, 2.0, 50.0]), min_size=32, max_size=32))
    x = tokens(32, 32, heads=1, seed=data.draw(st.integers(0, 99)))
    x = x * np.float32(scale)[:, None]
    page = np.zeros(formats.INT4.page_bytes(dims(32, 32, 1)), np.uint8)
    for t in range(32):
        page = write(formats.INT4, page, dims(32, 32, 1), x[:, :, t : t + 1], t, t)
    half = unpack(formats.INT4, page, dims(32, 32, 1))[0]
    error = np.abs(rotate(decode(formats.INT4, page, dims(32, 32, 1))[0] - x[0]))
    d, largest = half.scales[:, 0].astype(np.float64), np.abs(x).max() * np.sqrt(32)
    assert (error <= 6 * d[:, None] + largest * 2.0**-8).all()


def test_a_write_beyond_the_fill_writes_zeros_between() -> None:
    for page_format in ALL:
        x = tokens(64)
        page = encode(page_format, x[:, :, :10], 64)
        after = write(page_format, page, dims(64), x[:, :, 20:22], 20, 10)
        values = np.concatenate([np.zeros_like(x[:, :, 10:20]), x[:, :, 20:22]], axis=2)
        np.testing.assert_array_equal(after, write(page_format, page, dims(64), values, 10, 10))


def test_tokens_beyond_the_fill_do_not_count() -> None:
    """A page that was truncated: what stands behind its fill is not in the range of any group."""
    x = tokens(64)
    x[:, :, 30:] *= 1000
    page = encode(formats.INT4, x, 64)
    after = write(formats.INT4, page, dims(64), x[:, :, :30], 0, 0)
    for half, alone in zip(
        unpack(formats.INT4, after, dims(64)),
        unpack(formats.INT4, encode(formats.INT4, x[:, :, :30], 64), dims(64)),
        strict=True,
    ):
        np.testing.assert_array_equal(half.codes[:, :30], alone.codes[:, :30])
    np.testing.assert_array_equal(
        unpack(formats.INT4, after, dims(64))[0].scales,
        unpack(formats.INT4, encode(formats.INT4, x[:, :, :30], 64), dims(64))[0].scales,
    )


# -- conversion


@pytest.mark.parametrize(
    ("source", "target"), list(itertools.permutations(ALL, 2)), ids=lambda f: f.name
)
def test_a_conversion_encodes_what_the_page_decodes_to(
    source: PageFormat, target: PageFormat
) -> None:
    x = tokens(32, 32)
    page = encode(source, x[:, :, :27], 32)
    converted = convert(source, target, page, dims(32, 32), fill=27)
    stored = decode(source, page, dims(32, 32))[:, :, :27]
    np.testing.assert_array_equal(converted, encode(target, stored, 32))
    error = decode(target, converted, dims(32, 32))[:, :, :27] - stored
    direct = (
        decode(target, encode(target, x[:, :, :27], 32), dims(32, 32))[:, :, :27] - x[:, :, :27]
    )
    assert (error**2).mean() <= 2 * (direct**2).mean() + 1e-6
