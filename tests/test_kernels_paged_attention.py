"""Attention over pages of one format and of several, against float64 on what is stored."""

import ml_dtypes
import numpy as np
import pytest
from paged_tables import FORMATS, Table, oracle

from onnx_inplace.compiler import formats
from onnx_inplace.numba_kernels import cpu
from onnx_inplace.numba_kernels.pages_kernels import Accuracy

pytestmark = pytest.mark.kernel

NAMES = [f.name for f in FORMATS]
PRECISE = 5e-6  # of the largest output: float32 sums
INTEGERS = 3e-4  # queries and weights of 16 bits
FAST = 3e-2  # weights of 8 bits
BYTES = 8e-3  # 8-bit floats where the CPU computes in float16, outliers included; else as PRECISE
SHAPES = [(2, 1, 64, 64), (2, 4, 64, 64), (1, 3, 32, 96), (2, 2, 128, 80), (1, 5, 256, 128)]
"""(kv heads, group, page size, head size)"""
EXTREMES = [(1, 16, 32, 32), (1, 7, 32, 256)]
EVERY_LOOP = ["FLOAT16", "FP8_E4M3", "INT8", "INT4"]  # each is read by other code


def fill(rng, names, dims, lengths, order=None, page_formats=None):
    """Pages of these formats in rows of a block table, NaN beyond what is valid (CASES 52)."""
    table = Table(dims, names, page_formats)
    pages = len(names) // len(lengths)
    order = np.arange(len(names)) if order is None else order
    blocks = np.asarray(order).reshape(len(lengths), pages)
    for b, length in enumerate(lengths):
        for page in blocks[b]:
            table.raw[page][:] = 0xFF  # NaN in every format that knows it, scales included
            table.set_offsets(page, rng.standard_normal(dims[1::2]))
        if length:
            x = rng.standard_normal((2, dims[1], length, dims[3])).astype(np.float32)
            table.write([blocks[b]], x, 0)
    return table, blocks


def queries(rng, batch, heads, count, size, dtype=np.float32):
    return rng.standard_normal((batch, heads, count, size)).astype(dtype)


def check(actual, expected, tolerance=PRECISE):
    assert np.isfinite(actual.astype(np.float32)).all()
    largest = max(np.abs(expected).max(), 1e-6)
    assert np.abs(actual.astype(np.float64) - expected).max() <= tolerance * largest


def fast_tolerance(name):
    """Of one query a head."""
    if name.startswith("FP8"):
        return BYTES if cpu.has("avx512fp16") else PRECISE
    return INTEGERS if name.startswith("INT") else PRECISE


both_paths = pytest.mark.parametrize("portable", [True, False], ids=["portable", "fast"])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@both_paths
def test_decode_over_pages_of_one_format(portable, name, shape):
    heads, group, page_size, size = shape
    rng = np.random.default_rng(1)
    lengths = [3 * page_size - 5]
    dims = 2, heads, page_size, size
    table, blocks = fill(rng, [name] * 3, dims, lengths, page_formats=[formats.BUILTIN[name]])
    q = queries(rng, 1, heads * group, 1, size)
    out = table.attend(q, blocks, lengths, portable=portable)
    check(out, oracle(table, q, blocks, lengths), PRECISE if portable else fast_tolerance(name))


@pytest.mark.parametrize("shape", EXTREMES, ids=str)
@pytest.mark.parametrize("name", EVERY_LOOP)
@pytest.mark.parametrize("length", [0, 1, 33])
def test_the_smallest_and_the_largest_heads_and_groups(name, shape, length):
    heads, group, page_size, size = shape
    rng = np.random.default_rng(9)
    table, blocks = fill(rng, [name] * 2, (2, heads, page_size, size), [length])
    q = queries(rng, 1, heads * group, 1, size)
    expected = oracle(table, q, blocks, [length])
    check(table.attend(q, blocks, [length]), expected, fast_tolerance(name))


@pytest.mark.parametrize("kind", ["key", "value"])
@pytest.mark.parametrize("name", ["FLOAT16", "FP8_E4M3", "FP8_E5M2"])
@both_paths
def test_nan_among_valid_tokens_is_not_lost(portable, name, kind):
    rng = np.random.default_rng(10)
    table = Table((2, 1, 64, 96), [name], [formats.BUILTIN[name]])
    x = rng.standard_normal((2, 1, 40, 96)).astype(np.float32)
    tokens, columns = [7, 8, 35], [3, 50, 90]  # of a tile and behind it, of a line and behind it
    x[int(kind == "value"), 0, tokens, columns] = [np.nan, -np.nan, np.nan]
    table.write([np.arange(1)], x, 0)
    q = queries(rng, 1, 4, 1, 96)
    out = table.attend(q, [np.arange(1)], [40], portable=portable)
    lost = np.isnan(out[0, :, 0]) if kind == "key" else np.isnan(out[0, :, 0][:, columns])
    assert lost.all()
    if kind == "value":
        assert np.isnan(out).sum() == 3 * 4


@pytest.mark.parametrize("kind", ["key", "value"])
def test_the_largest_number_of_e4m3_is_told_from_its_neighbour_nan(kind):
    rng = np.random.default_rng(15)
    table = Table((2, 1, 64, 128), ["FP8_E4M3"], [formats.BUILTIN["FP8_E4M3"]])
    x = rng.standard_normal((2, 1, 50, 128)).astype(np.float32)
    x[int(kind == "value"), 0, [7, 40], [3, 100]] = [448, -448]
    table.write([np.arange(1)], x, 0)
    q = queries(rng, 1, 4, 1, 128)
    expected = oracle(table, q, [np.arange(1)], [50])
    check(table.attend(q, [np.arange(1)], [50]), expected, fast_tolerance("FP8_E4M3"))


@pytest.mark.parametrize("name", ["FP8_E4M3", "FP8_E5M2"])
def test_every_code_of_8_bits_is_read_as_what_it_is(name):
    table = Table((2, 1, 64, 32), [name], [formats.BUILTIN[name]])
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    table.raw[0].reshape(2, 1, 64, 32)[1, 0, :8] = codes
    table.fill[0] = 8
    q = np.zeros((1, 4, 1, 32), np.float32)
    numbers = codes.view(formats.BUILTIN[name].key.storage.numpy()).astype(np.float64)
    for token in range(8):  # one token: its weight is 1
        out = table.attend(q, [np.arange(1)], [token + 1], left=0)
        np.testing.assert_array_equal(out[0, 2, 0].astype(np.float64), numbers[token])


@pytest.mark.parametrize("name", ["FP8_E4M3", "FP8_E5M2"])
def test_a_prompt_reads_every_number_of_8_bits_as_what_it_is(name):
    table = Table((2, 1, 16, 32), [name], [formats.BUILTIN[name]])
    kind = formats.BUILTIN[name].key.storage.numpy()
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    codes = np.where(np.isfinite(codes.view(kind).astype(np.float32)), codes, 0)
    table.raw[0].reshape(2, 1, 16, 32)[1, 0, :8] = codes
    table.fill[0] = 8
    q = np.zeros((1, 4, 8, 32), np.float32)
    out = table.attend(q, [np.arange(1)], [8], left=0)  # each token sees itself alone
    numbers = codes.astype(np.uint8).view(kind).astype(np.float64)
    np.testing.assert_array_equal(out[0, 2].astype(np.float64), numbers)


def with_outliers(name, group=4, page_size=64, size=64):
    """8 pages but for some tokens, a query, and attention in float64."""
    rng, length = np.random.default_rng(8), 8 * page_size - 12
    table = Table((2, 2, page_size, size), [name] * 8, [formats.BUILTIN[name]])
    x = rng.standard_normal((2, 2, length, size)).astype(np.float32)
    x[0, :, :, 5] *= 30  # a channel of K
    x[1, :, 17] *= 30  # a token of V
    x[0, :, 0] *= 4  # a sink
    table.write([np.arange(8)], x, 0)
    q = queries(rng, 1, 2 * group, 1, size)
    return table, q, length, oracle(table, q, [np.arange(8)], [length])


@pytest.mark.parametrize(
    "name", ["FLOAT16", "FP8_E4M3", "FP8_E5M2", "INT8", "INT4", "INT4T", "INT2"]
)
def test_outliers_cost_no_more_than_the_stated_error(name):
    table, q, length, expected = with_outliers(name)
    check(table.attend(q, [np.arange(8)], [length]), expected, fast_tolerance(name))


@pytest.mark.parametrize("factors", [(0, 1, 1e4), (1e4, 0, 1), (1, 1e-4, 0)], ids=str)
@pytest.mark.parametrize("name", ["INT8", "INT4", "INT4T", "INT2"])
def test_values_of_one_page_may_be_zeros_and_those_of_another_large(name, factors):
    rng = np.random.default_rng(12)
    table = Table((2, 2, 64, 64), [name] * 3, [formats.BUILTIN[name]])
    x = rng.standard_normal((2, 2, 180, 64)).astype(np.float32)
    x[1] *= np.repeat(np.float32(factors), 64)[:180, np.newaxis]
    table.write([np.arange(3)], x, 0)
    q = queries(rng, 1, 8, 1, 64)
    found = table.attend(q, [np.arange(3)], [180])
    check(found, oracle(table, q, [np.arange(3)], [180]), fast_tolerance(name))


@pytest.mark.parametrize("shape", [(4, 64, 64), (3, 128, 128), (1, 32, 96)], ids=str)
@pytest.mark.parametrize("name", ["INT4", "INT4T", "INT2"])
def test_weights_of_8_bits_cost_the_error_that_is_stated(name, shape):
    table, q, length, expected = with_outliers(name, *shape)
    out = table.attend(q, [np.arange(8)], [length], accuracy=Accuracy.BYTES)
    check(out, expected, FAST)
    with pytest.raises(AssertionError):  # else nothing was gained
        check(out, expected, INTEGERS)


@pytest.mark.parametrize("name", ["FLOAT16", "FP8_E4M3", "INT8"])
def test_formats_of_8_bits_and_more_ignore_that_less_accuracy_is_allowed(name):
    table, q, length, _ = with_outliers(name)
    found = [table.attend(q, [np.arange(8)], [length], accuracy=level) for level in Accuracy]
    assert np.array_equal(*found)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("options", [{}, {"left": 40}, {"softcap": 2.0}], ids=str)
def test_a_mixture_with_weights_of_8_bits(options, workers):
    rng = np.random.default_rng(2)
    lengths = [90, 64 * 9, 131]
    table, blocks = fill(rng, rng.permutation(NAMES * 3), (2, 2, 64, 64), lengths)
    q = queries(rng, 3, 6, 1, 64)
    found = table.attend(
        q, blocks, lengths, splits=3, workers=workers, accuracy=Accuracy.BYTES, **options
    )
    check(found, oracle(table, q, blocks, lengths, **options), FAST)


@both_paths
@pytest.mark.parametrize("count", [1, 7, 90])
@pytest.mark.parametrize(
    "options", [{}, {"left": 40}, {"softcap": 2.0}, {"causal": False}], ids=str
)
def test_a_mixture_with_windows_and_softcap(options, count, portable):  # CASES 82
    rng = np.random.default_rng(2)
    lengths = [90, 64 * 9, 131]
    names = rng.permutation(NAMES * 3)
    order = rng.permutation(27)
    table, blocks = fill(rng, names, (2, 2, 64, 64), lengths, order)
    q = queries(rng, 3, 6, count, 64)
    out = table.attend(q, blocks, lengths, portable=portable, **options)
    expected = oracle(table, q, blocks, lengths, **options)
    check(out, expected, PRECISE if portable else BYTES if count == 1 else INTEGERS)


def test_lengths_of_zero_and_shorter_than_the_queries():  # CASES 65
    rng = np.random.default_rng(3)
    lengths = [0, 3, 20]
    table, blocks = fill(rng, ["INT8", "INT4", "FLOAT16"], (2, 2, 64, 64), lengths)
    q = queries(rng, 3, 4, 5, 64)
    out = table.attend(q, blocks, lengths)
    assert not out[0].any() and not out[1, :, :2].any()
    check(out, oracle(table, q, blocks, lengths))


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("splits", [2, 5, 40])
@pytest.mark.parametrize("workers", [1, 2])
def test_splits_and_threads(workers, splits, count):
    rng = np.random.default_rng(4)
    lengths = [40, 64 * 8 + 3, 0]
    table, blocks = fill(rng, NAMES * 3, (2, 2, 64, 64), lengths)
    sinks = rng.standard_normal(6).astype(np.float32)
    q = queries(rng, 3, 6, count, 64)
    out = table.attend(q, blocks, lengths, splits=splits, workers=workers, sinks=sinks)
    expected = oracle(table, q, blocks, lengths, sinks=sinks)
    check(out, expected, BYTES if count == 1 else INTEGERS)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_queries_of_16_bits(dtype):
    rng = np.random.default_rng(5)
    table, blocks = fill(rng, ["INT8", "BFLOAT16"], (2, 2, 64, 64), [100])
    q = queries(rng, 1, 4, 2, 64, dtype)
    check(table.attend(q, blocks, [100]), oracle(table, q, blocks, [100]), 5e-3)


def test_queries_and_output_packed_by_token():
    rng = np.random.default_rng(6)
    table, blocks = fill(rng, ["INT8", "INT4"], (2, 2, 64, 64), [100])
    q = queries(rng, 1, 3, 4, 64).transpose(0, 2, 1, 3)  # (batch, heads = 4, tokens = 3, size)
    check(table.attend(q, blocks, [100]), oracle(table, q, blocks, [100]))


@pytest.mark.parametrize("name", NAMES)
def test_a_shared_page_is_read_by_every_sequence(name):
    rng = np.random.default_rng(7)
    table, blocks = fill(rng, [name] * 3, (2, 1, 64, 64), [64, 64, 64])
    blocks = np.array([[0, 1], [0, 2]])
    q = queries(rng, 2, 2, 1, 64)
    expected = oracle(table, q, blocks, [128, 100])
    check(table.attend(q, blocks, [128, 100]), expected, fast_tolerance(name))
