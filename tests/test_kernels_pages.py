"""Kernels that write, read and convert pages: bytes against the reader of docs/formats.md."""

import pathlib
import re

import ml_dtypes
import numpy as np
import page_specification as spec
import pytest
from paged_tables import FORMATS, Table

from onnx_inplace.compiler import formats

pytestmark = pytest.mark.kernel

DIMS = [(2, 2, 64, 64), (2, 3, 128, 80), (2, 1, 32, 96), (2, 2, 16, 32), (2, 1, 256, 256)]
INTEGERS = [f.name for f in FORMATS if not f.is_float]
NAMES = [f.name for f in FORMATS]
every_format = pytest.mark.parametrize("name", NAMES)
every_shape = pytest.mark.parametrize("dims", DIMS, ids=str)


def tokens(dims, count=None, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, dims[1], count or dims[2], dims[3])).astype(dtype)


@pytest.fixture(scope="module")
def documented():
    """The reader that docs/formats.md shows."""
    text = (pathlib.Path(__file__).parent.parent / "docs" / "formats.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.S).group(1), names)
    return names["read"]


@every_shape
@pytest.mark.parametrize("name", INTEGERS)
def test_the_documented_reader_reads_what_is_written(documented, name, dims):
    table = Table(dims, [name])
    table.write([0], tokens(dims), 0)
    expected = documented(table.raw[0].tobytes(), name, *dims[1:])
    np.testing.assert_allclose(table.read(0), expected, rtol=0, atol=4e-6)
    assert table.guards_intact()


FLOATS = {
    "FLOAT32": np.float32,
    "FLOAT16": np.float16,
    "BFLOAT16": ml_dtypes.bfloat16,
    "FP8_E4M3": ml_dtypes.float8_e4m3fn,
    "FP8_E5M2": ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize(("name", "dtype"), FLOATS.items())
@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_floats_are_rounded_as_by_ml_dtypes(name, dtype, source):
    dims = (2, 2, 16, 32)
    x = tokens(dims, seed=1) * np.exp2(np.arange(32) - 26).astype(np.float32)
    x = x.astype(source)
    table = Table(dims, [name])
    assert table.write([0], x, 0) == 0
    page = table.raw[0].view(dtype).reshape(dims)
    expected = x.astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(page.view(np.uint8), expected.view(np.uint8))
    np.testing.assert_array_equal(table.read(0), expected.astype(np.float32))


SPECIAL = np.array([65504, -65504, 1e5, -1e5, np.inf, -np.inf, np.nan, 449, 60000], np.float32)
STORED = {
    "FLOAT32": [65504, -65504, 1e5, -1e5, np.inf, -np.inf, np.nan, 449, 60000],
    "FLOAT16": [65504, -65504, np.inf, -np.inf, np.inf, -np.inf, np.nan, 449, 60000],
    "BFLOAT16": [65536, -65536, 99840, -99840, np.inf, -np.inf, np.nan, 448, 59904],
    "FP8_E4M3": [448, -448, 448, -448, 448, -448, np.nan, 448, 448],
    "FP8_E5M2": [57344, -57344, 57344, -57344, 57344, -57344, np.nan, 448, 57344],
}
CLIPPED = {"FLOAT32": 0, "FLOAT16": 2, "BFLOAT16": 0, "FP8_E4M3": 8, "FP8_E5M2": 7}


@pytest.mark.parametrize("name", STORED)
def test_what_a_float_cannot_say_is_saturated_and_counted(name):  # CASES 68
    dims = (2, 1, 16, 32)
    x = np.zeros((2, 1, 1, 32), np.float32)
    x[0, 0, 0, : len(SPECIAL)] = SPECIAL
    table = Table(dims, [name])
    assert table.write([0], x, 3) == CLIPPED[name]
    np.testing.assert_array_equal(table.read(0)[0, 0, 3, : len(SPECIAL)], STORED[name])


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("number", [1e5, -1e5, np.inf, -np.inf, np.nan])
def test_integers_stay_finite_whatever_comes_and_count_it(name, number):  # CASES 68, 80
    dims = (2, 1, 64, 64)
    x = tokens(dims, seed=2)
    x[:, :, 5, 7] = number
    table = Table(dims, [name])
    assert table.write([0], x, 0) == 2
    assert np.isfinite(table.read(0)).all()
    cleaned = x.copy()
    cleaned[:, :, 5, 7] = np.nan_to_num(np.clip(number, -65504, 65504))
    same = Table(dims, [name])
    assert same.write([0], cleaned, 0) == 0
    assert (same.raw[0] == table.raw[0]).all()


@every_format
def test_a_constant_is_stored_exactly(name):  # scales of 0
    dims = (2, 2, 64, 64)
    table = Table(dims, [name])
    assert table.write([0], np.zeros(dims, np.float32), 0) == 0
    assert (table.read(0) == 0).all()


@every_shape
@pytest.mark.parametrize("name", [f.name for f in FORMATS if f.appendable])
def test_tokens_appended_one_by_one_give_the_bytes_of_one_write(name, dims):
    x = tokens(dims, seed=3)
    whole, single = Table(dims, [name]), Table(dims, [name])
    whole.write([0], x, 0)
    for t in range(dims[2]):
        single.write([0], x[:, :, t : t + 1], t)
    assert (whole.raw[0] == single.raw[0]).all()


@every_shape
@every_format
def test_only_the_written_tokens_change(name, dims):  # CASES 77: single tokens at odd positions
    table = Table(dims, [name])
    table.write([0], tokens(dims, seed=4), 0)
    before = table.read(0)
    small = tokens(dims, 1, seed=5) * np.float32(0.01)  # no range grows
    for position in (0, 1, 7, dims[2] - 1):
        table.write([0], small, position)
        now = table.read(0)
        others = np.arange(dims[2]) != position
        assert (now[:, :, others] == before[:, :, others]).all()
        before = now
    assert table.guards_intact()


@pytest.mark.parametrize("name", ["INT4", "INT2"])
def test_a_token_beyond_the_range_widens_it(name):
    dims = (2, 1, 64, 64)
    table = Table(dims, [name])
    x = tokens(dims, seed=6)
    table.write([0], x[:, :, :40], 0)
    x[:, :, 40:] *= 4
    for t in range(40, 64):
        table.write([0], x[:, :, t : t + 1], t)
    whole = Table(dims, [name])
    whole.write([0], x, 0)
    error, best = (np.sqrt(np.mean((t.read(0)[0] - x[0]) ** 2)) for t in (table, whole))
    assert best < error < 2.5 * best


@pytest.mark.parametrize("name", INTEGERS)
def test_repeated_writes_of_the_same_token_drift_no_other(name):  # CASES 79
    dims = (2, 2, 64, 64)
    table = Table(dims, [name])
    table.write([0], tokens(dims, seed=7), 0)
    last = table.read(0, first=63)
    before = table.raw[0].copy()
    for _ in range(100):
        table.write([0], last, 63)
    others = slice(0, 63)
    again = Table(dims, [name])
    again.raw[0][:] = before
    assert (table.read(0)[:, :, others] == again.read(0)[:, :, others]).all()


@every_format
def test_a_gap_is_filled_with_zeros(name):
    dims = (2, 1, 64, 64)
    table = Table(dims, [name])
    table.raw[0][:] = 0xA5  # for INT4T also the offsets of the channels: -0.022
    table.write([0], tokens(dims, 10), 20)
    coarse = {"INT4": 0.3, "INT2": 0.5, "INT4T": 0.001}  # their zeros share a scale with tokens
    assert np.abs(table.read(0)[:, :, :20]).max() <= coarse.get(name, 0)
    assert table.fill[0] == 30


def test_one_write_spans_pages_of_different_formats():  # CASES 83
    dims = (2, 2, 64, 64)
    names = ["FLOAT16", "INT8", "INT4", "FP8_E4M3", "INT2"]
    together, apart = Table(dims, names), Table(dims, names)
    x = tokens(dims, 5 * 64 - 20 - 7, seed=8)
    order = [3, 1, 4, 0, 2]
    together.write([order], x, 20)
    done = 0
    for block, page in enumerate(order):
        first = 20 if block == 0 else 0
        count = min(64 - first, x.shape[2] - done)
        apart.write([page], x[:, :, done : done + count], first)
        done += count
    for a, b in zip(together.raw, apart.raw, strict=True):
        assert (a == b).all()
    assert together.fill.tolist() == apart.fill.tolist() == [64, 64, 57, 64, 64]
    assert together.guards_intact()


def test_rows_of_a_batch_have_positions_of_their_own():
    dims = (2, 2, 32, 64)
    names = ["INT8", "INT4", "FLOAT16", "INT8"]
    together, apart = Table(dims, names), Table(dims, names)
    x = np.stack([tokens(dims, 8, seed=9), tokens(dims, 8, seed=10)], axis=1)
    together.write([[0, 1], [2, 3]], x, [28, 3])
    apart.write([[0, 1]], x[:, 0], 28)
    apart.write([[2, 3]], x[:, 1], 3)
    for a, b in zip(together.raw, apart.raw, strict=True):
        assert (a == b).all()


@every_format
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_values_of_16_bits_mean_the_same_numbers(name, dtype):  # CASES 74
    dims = (2, 2, 64, 64)
    x = tokens(dims, seed=11, dtype=dtype)
    narrow, wide = Table(dims, [name]), Table(dims, [name])
    narrow.write([0], x, 0)
    wide.write([0], x.astype(np.float32), 0)
    assert (narrow.raw[0] == wide.raw[0]).all()


def test_values_may_be_a_view_with_strides():
    dims = (2, 2, 64, 64)
    x = tokens((2, 2, 64, 192), seed=12).transpose(0, 2, 1, 3)  # (2, tokens, heads, 3 * size)
    view = x[..., 64:128].transpose(0, 2, 1, 3)
    table, plain = Table(dims, ["INT8"]), Table(dims, ["INT8"])
    table.write([0], view, 0)
    plain.write([0], np.ascontiguousarray(view), 0)
    assert (table.raw[0] == plain.raw[0]).all()


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("source", ["FLOAT16", "INT8", "INT4"])
def test_conversion_writes_what_was_stored(source, target):
    dims = (2, 2, 64, 64)
    table = Table(dims, [source, target, target])
    table.raw[1][:] = 0xA5
    table.write([0], tokens(dims, 50, seed=13), 0)
    stored = table.read(0, count=50)
    table.convert(0, 1)
    if target != "INT4T":  # a conversion stores offsets, a write finds them
        table.write([2], stored, 0)
        assert (table.raw[1] == table.raw[2]).all()
    else:
        error = np.abs(table.read(1, count=50) - stored)
        assert error.max() < 0.5
    assert table.guards_intact()


def test_offsets_of_channels_help_keys_that_are_far_from_zero():
    dims = (2, 1, 64, 64)
    x = tokens(dims, seed=14)
    x[0] += np.linspace(-40, 40, 64, dtype=np.float32)
    table = Table(dims, ["FLOAT32", "INT4T", "INT4T"])
    table.write([0], x, 0)
    table.write([2], x, 0)
    table.convert(0, 1)
    with_offsets, without = (np.abs(table.read(p)[0] - x[0]).mean() for p in (1, 2))
    assert with_offsets < without / 4


@pytest.mark.parametrize("before", ["FLOAT16", "INT4T", "INT2"])
def test_an_empty_page_takes_its_offsets_from_the_page_before(before):
    dims = (2, 2, 64, 64)
    x = tokens(dims, 2 * 64, seed=15) + np.linspace(-9, 9, 64, dtype=np.float32)
    first, second = formats.BUILTIN[before], formats.INT4T
    for split in (128, 64, 1):  # written at once, page by page, token by token
        table = Table(dims, [before, "INT4T"])
        for start in range(0, 128, split):
            table.write([0, 1], x[:, :, start : start + split], start)
        page = spec.start_page(second, dims, first, table.raw[0], 64)
        expected = spec.write(second, page, dims, x[:, :, 64:], 0, 0)
        np.testing.assert_array_equal(table.raw[1], expected)
        assert np.abs(page).any()


def test_a_page_whose_predecessor_is_missing_or_empty_has_no_offsets():
    dims = (2, 2, 64, 64)
    x = tokens(dims, seed=16)
    alone = Table(dims, ["INT4T"])
    alone.write([0], x, 0)
    for blocks in ([-1, 1], [0, 1]):
        table = Table(dims, ["FLOAT16", "INT4T"])
        table.write(blocks, x, 64)
        np.testing.assert_array_equal(table.raw[1], alone.raw[0])


def draw(rng, dims, count):
    """Tokens of one of several kinds: gaussian, with strong channels, tiny, large, constant."""
    x = rng.standard_normal((2, dims[1], count, dims[3])).astype(np.float32)
    kind = rng.integers(6)
    if kind == 1:
        x[..., rng.integers(dims[3], size=3)] *= 50
    if kind == 2:
        x *= np.exp2(rng.integers(-24, -2)).astype(np.float32)
    if kind == 3:
        x *= np.float32(3e4)
    if kind == 4:
        x[:] = x[0, 0, 0, 0]
    if kind == 5:
        x += np.linspace(-8, 8, dims[3], dtype=np.float32)
    return x


@pytest.mark.parametrize("seed", range(3))
@every_shape
@every_format
def test_writes_give_the_bytes_of_the_specification(name, dims, seed):
    """Writes of any length anywhere, on what earlier ones left, then each conversion."""
    rng = np.random.default_rng(seed)
    page_format = formats.BUILTIN[name]
    table = Table(dims, [name, *NAMES])
    expected, fill = table.raw[0].copy(), 0
    for _ in range(8):
        position = int(rng.integers(min(fill + 20, dims[2])))
        count = int(rng.integers(1, dims[2] - position + 1))
        if rng.random() < 0.2:
            position, count = 0, dims[2]
        x = draw(rng, dims, count)
        table.write([0], x, position)
        expected = spec.write(page_format, expected, dims, x, position, fill)
        fill = max(fill, position + count)
        np.testing.assert_array_equal(table.raw[0], expected)
        assert table.fill[0] == fill
    np.testing.assert_array_equal(table.read(0), spec.decode(page_format, expected, dims))
    for page, target in enumerate(NAMES, 1):
        table.convert(0, page)
        converted = spec.convert(page_format, formats.BUILTIN[target], expected, dims, fill)
        np.testing.assert_array_equal(table.raw[page], converted, target)
    assert table.guards_intact()


STRANGE = {
    "zeros": 0.0,
    "scales that are subnormal": 2.0**-8,
    "scales that round to 0": 2.0**-20,
    "as large as it gets": 65504.0,
    "too large": 1e30,
    "infinite": np.inf,
    "not a number": np.nan,
}


@pytest.mark.parametrize("number", STRANGE.values(), ids=STRANGE)
@pytest.mark.parametrize("every", [1, 5], ids=["whole tokens", "single numbers"])
@pytest.mark.parametrize("name", INTEGERS)
def test_a_strange_token_in_a_tile_gives_the_bytes_of_the_specification(name, every, number):
    """One token of 16 that are coded together; its neighbours are as any."""
    dims = (2, 2, 64, 128)
    x = tokens(dims, seed=3)
    signs = np.where(np.arange(dims[3]) % 3, 1, -1)[::every]
    x[0, 1, 21, ::every] = number * signs
    x[1, 0, 47, ::every] = number * signs
    table = Table(dims, [name])
    table.write([0], x, 0)
    page = np.zeros_like(table.raw[0])
    expected = spec.write(formats.BUILTIN[name], page, dims, x, 0, 0)
    np.testing.assert_array_equal(table.raw[0], expected)
    assert table.guards_intact()
