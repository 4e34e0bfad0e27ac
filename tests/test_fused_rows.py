"""Norms, rotary embedding, softmax and reductions of the fused step against float64."""

import ml_dtypes
import numpy as np
import pytest
from fused import floats, row, together
from test_fused_quantize import fields

from onnx_inplace.numba_kernels.floats import BFLOAT16, FLOAT16, FLOAT32
from onnx_inplace.numba_kernels.fused import norms, quantize, reductions, rotary
from onnx_inplace.numba_kernels.layout import bits
from onnx_inplace.numba_kernels.memory import address as at

pytestmark = pytest.mark.kernel

DTYPES = {FLOAT32: np.float32, FLOAT16: np.float16, BFLOAT16: ml_dtypes.bfloat16}
COLUMNS = [1, 15, 64, 100, 576]


def block_of(kind, **fields):
    return kind(**(dict.fromkeys(kind._fields, 0) | fields))


def normalized(x, scale, bias, centered, epsilon):
    x = x.astype(np.float64)
    x = x - x.mean(-1, keepdims=True) if centered else x
    result = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale
    return result if bias is None else result + bias


def norm(x, scale, output, threads=1, **more):
    rows, columns = x.shape
    block = block_of(
        norms.Norm,
        **{"input": at(x), "scale": at(scale), "output": at(output), "input_row": row(x)},
        **{"rows": rows, "columns": columns, "output_row": row(output), "epsilon": bits(1e-5)},
        **more,
    )
    together([(norms.norm, block)], threads)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("centered", [0, 1])
@pytest.mark.parametrize("with_bias", [False, True])
def test_norm(guarded, columns, centered, with_bias):
    rng = np.random.default_rng(columns)
    x, scale = 3 + floats(rng, 3, columns), floats(rng, columns)
    bias = floats(rng, columns) if with_bias else None
    output = guarded((3, columns))
    norm(x, scale, output, 2, centered=centered, bias=at(bias) if with_bias else 0)
    expected = normalized(x, scale, bias, centered, 1e-5)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("with_total", [False, True])
def test_norm_of_a_sum(guarded, with_total):
    rng = np.random.default_rng(0)
    x, skip, scale = floats(rng, 2, 80), floats(rng, 2, 80), floats(rng, 80)
    output, total = guarded((2, 80)), guarded((2, 80))
    place = at(total) if with_total else 0
    norm(x, scale, output, skip=at(skip), skip_row=row(skip), total=place, total_row=row(total))
    expected = normalized(x + skip, scale, None, 0, 1e-5)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
    assert (total == x + skip).all() if with_total else np.isnan(total).all()


@pytest.mark.parametrize("planes", [1, 3])
def test_norm_with_codes_for_each_thread(guarded, planes):
    rng = np.random.default_rng(0)
    x, skip, scale = floats(rng, 1, 96), floats(rng, 1, 96), floats(rng, 96)
    each = 96 * 4 + quantize.row_bytes(96, planes)
    own, total = guarded((3, each), np.uint8), guarded((1, 96))
    norm(
        *(x, scale, own[0, : 96 * 4].view(np.float32).reshape(1, 96), 3),
        **{"skip": at(skip), "total": at(total)},
        **{"codes": at(own) + 96 * 4, "planes": planes, "each": each},
    )
    expected = normalized(x + skip, scale, None, 0, 1e-5)[0]
    assert (total == x + skip).all()
    for place in own:
        np.testing.assert_allclose(place[: 96 * 4].view(np.float32), expected, rtol=1e-5)
        codes, scales, *_ = fields(place[96 * 4 :], 96, planes)
        error = np.abs((codes * scales[:, None]).reshape(-1) - expected)
        assert (error <= np.abs(expected).max() / quantize.LARGEST[planes]).all()


def test_norm_may_write_over_its_input():
    rng = np.random.default_rng(0)
    x, scale = floats(rng, 2, 50), floats(rng, 50)
    expected = normalized(x, scale, None, 1, 1e-5)
    norm(x, scale, x, centered=1)
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)


def rotated(x, cos, sin, half, layout):
    """x: (batch, heads, tokens, size); angles: (batch, tokens, half)."""
    x, result = x.astype(np.float64), x.astype(np.float64)
    if layout == rotary.PLAIN:
        return result
    c, s = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    first, second = (slice(0, half), slice(half, 2 * half))
    if layout == 1:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    result[..., first] = x[..., first] * c - x[..., second] * s
    result[..., second] = x[..., first] * s + x[..., second] * c
    return result


def rotate(x, output, cos, sin, half, layout, kind=FLOAT32, threads=1, **more):
    batch, heads, tokens, size = x.shape
    block = rotary.Rotary(
        *(at(x), at(output), at(cos), at(sin), batch, heads, tokens, size, half, layout, kind),
        *x.strides[:3],
        *output.strides[:3],
        *cos.strides[:2],
        *(more.get("position", 0), more.get("capacity", 0), more.get("units", heads)),
    )
    together([(rotary.rotary, block)], threads)


@pytest.mark.parametrize("layout", [0, 1, rotary.PLAIN])
@pytest.mark.parametrize(("size", "half"), [(64, 32), (64, 16), (20, 10), (80, 13)])
@pytest.mark.parametrize("kind", DTYPES)
def test_rotary(guarded, layout, size, half, kind):
    rng = np.random.default_rng(size)
    x = floats(rng, 2, 3, 6, size).transpose(0, 2, 1, 3)  # (batch, heads, tokens, size)
    angles = rng.random((2, 3, half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    output = guarded((2, 6, 3, size), DTYPES[kind])
    rotate(x, output, cos, sin, half, layout, kind, threads=4, units=3)
    expected = rotated(x, cos, sin, half, layout)
    tolerance = {FLOAT32: 1e-6, FLOAT16: 1e-3, BFLOAT16: 8e-3}[kind]
    np.testing.assert_allclose(output.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", [0, 1])
def test_rotary_in_place(layout):
    rng = np.random.default_rng(0)
    x, angles = floats(rng, 1, 2, 1, 64), rng.random((1, 1, 32))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    expected = rotated(x, cos, sin, 32, layout)
    rotate(x, x, cos, sin, 32, layout)
    np.testing.assert_allclose(x, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("position", "capacity"), [(3, 0), (7, 9), (17, 9)])
@pytest.mark.parametrize("kind", [FLOAT32, FLOAT16])
def test_rotary_into_a_cache(position, capacity, kind):
    """Two tokens at a position, modulo the capacity of a circular cache; others stay."""
    rng = np.random.default_rng(0)
    x, angles = floats(rng, 1, 2, 2, 32), rng.random((1, 2, 16))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    cache = np.full((1, 2, 9, 32), 7, DTYPES[kind])
    at_position = np.array(position)
    rotate(
        *(x, cache, cos, sin, 16, 0, kind), position=at(at_position), capacity=capacity, threads=2
    )
    expected = np.full((1, 2, 9, 32), 7, np.float64)
    for t in range(2):
        expected[:, :, (position + t) % 9] = rotated(x, cos, sin, 16, 0)[:, :, t]
    np.testing.assert_allclose(cache.astype(np.float64), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("operation", reductions.Of)
def test_reduce(guarded, columns, operation):
    x = floats(np.random.default_rng(columns), 5, columns) - 3
    output = guarded(5)
    block = reductions.Reduce(operation, at(x), at(output), 5, columns, row(x))
    together([(reductions.reduce, block)], 2)
    name = {0: np.sum, 1: np.mean, 2: np.max, 3: np.min}[operation]
    np.testing.assert_allclose(output, name(x.astype(np.float64), 1), rtol=1e-6)


@pytest.mark.parametrize("place", [0, 15, 16, 20, 39])
@pytest.mark.parametrize("operation", reductions.Of)
def test_what_is_reduced_with_nan_is_nan(operation, place):
    x = floats(np.random.default_rng(0), 2, 40)
    x[1, place] = np.nan
    output = np.zeros(2, np.float32)
    block = reductions.Reduce(operation, at(x), at(output), 2, 40, row(x))
    together([(reductions.reduce, block)], 1)
    assert np.isnan(output).tolist() == [False, True]


@pytest.mark.parametrize("columns", [1, 17, 256, 300, 49_152])
def test_largest_is_the_first_one(guarded, columns):
    rng = np.random.default_rng(columns)
    x = rng.integers(-columns, columns // 8 + 2, (4, columns)).astype(np.float32)
    x[3] = -np.inf
    output = guarded(4, np.int64)
    block = reductions.Largest(at(x), at(output), 4, columns, row(x))
    together([(reductions.largest, block)], 3)
    assert (output == x.argmax(1)).all()


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("in_place", [False, True])
def test_softmax(guarded, columns, in_place):
    x = 10 * floats(np.random.default_rng(columns), 3, columns) + 200
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    expected = e / e.sum(1, keepdims=True)
    output = x if in_place else guarded((3, columns))
    block = reductions.Softmax(at(x), at(output), 3, columns, row(x), row(output))
    together([(reductions.softmax, block)], 2)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-7)
