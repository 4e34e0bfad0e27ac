"""Activations as integers: codes, scales and sums, to the stated error."""

import numpy as np
import pytest
from fused import floats, together

from onnx_inplace.numba_kernels.fused import quantize
from onnx_inplace.numba_kernels.memory import address as at

pytestmark = pytest.mark.kernel


def fields(row, columns, planes):
    """(codes, scales, sums as float32, sums as integers) of a quantized row."""
    blocks = (columns + 31) // 32
    size = 32 * blocks
    digits = row[: planes * size].view(np.int8).astype(np.int64).reshape(planes, blocks, 32)
    count = 3 if planes == 1 else 4
    numbers = row[planes * size :][: 4 * count * blocks].reshape(count, 4 * blocks)
    scales, sums = (numbers[k].view(np.float32) for k in range(2))
    whole = [numbers[k].view(np.int32).astype(np.int64) for k in range(2, count)]
    if planes == 1:
        return digits[0], scales, sums, whole[0]
    codes = (digits[0] * 256 + digits[1]) * 256 + digits[2]
    return codes, scales, sums, whole[0] * 256 + whole[1]


def quantized(guarded, x, planes, threads=1, each=0):
    rows, columns = x.shape
    output = guarded((rows, quantize.row_bytes(columns, planes)), np.uint8)
    block = quantize.Quantize(
        *(at(x), at(output), rows, columns, x.strides[0], output.strides[0], planes, each)
    )
    together([(quantize.quantize, block)], threads)
    return output


@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("columns", [1, 16, 31, 32, 40, 72, 576])
def test_codes_are_right_to_half_a_step(guarded, columns, planes):
    rng = np.random.default_rng(columns)
    x = floats(rng, 3, columns) * np.exp(3 * floats(rng, 3, columns))
    for row, numbers in zip(quantized(guarded, x, planes, 3), x, strict=True):
        codes, scales, sums, code_sums = fields(row, columns, planes)
        padded = np.zeros(codes.size)
        padded[:columns] = numbers
        padded = padded.reshape(codes.shape)
        top = np.abs(padded).max(1, keepdims=True)
        error = np.abs(codes * scales[:, None].astype(float) - padded)
        step = top / quantize.LARGEST[planes]
        rounding = 2e-7 * np.abs(padded)  # of a scale and a quotient
        assert (error <= step / 2 * 1.01 + rounding).all()
        assert np.abs(codes).max() <= quantize.LARGEST[planes]
        assert (code_sums == codes.sum(1)).all()
        np.testing.assert_allclose(sums, codes.sum(1), rtol=2e-7)


@pytest.mark.parametrize("planes", [1, 3])
def test_zeros_are_zeros(guarded, planes):
    codes, scales, sums, _ = fields(
        quantized(guarded, np.zeros((1, 64), np.float32), planes)[0], 64, planes
    )
    assert not codes.any() and (scales > 0).all() and not sums.any()


@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("bad", [[np.nan], [np.inf, np.inf], [np.inf, -np.inf], [np.nan, np.inf]])
def test_what_is_no_number_stays_none(guarded, bad, planes):
    """In its block; the others are as they were."""
    x = floats(np.random.default_rng(0), 1, 96)
    x[0, 40 : 40 + 9 * len(bad) : 9] = bad
    _, scales, sums, _ = fields(quantized(guarded, x, planes)[0], 96, planes)
    assert np.isnan(scales).tolist() == [False, True, False] and np.isfinite(sums).all()


@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("infinity", [np.inf, -np.inf])
def test_one_infinity_is_what_counts_in_its_block(guarded, infinity, planes):
    x = floats(np.random.default_rng(0), 1, 96)
    x[0, 50] = infinity
    codes, scales, _, sums = fields(quantized(guarded, x, planes)[0], 96, planes)
    assert np.isinf(scales).tolist() == [False, True, False]
    assert (codes[1, 18] > 0) == (infinity > 0) and np.flatnonzero(codes[1]).tolist() == [18]
    assert sums[1] == codes[1, 18]


def test_every_thread_may_have_its_own_copy(guarded):
    x = floats(np.random.default_rng(0), 1, 96)
    size = quantize.row_bytes(96, 1)
    output = guarded((3, size), np.uint8)
    block = quantize.Quantize(at(x), at(output), 1, 96, 0, 0, 1, size)
    together([(quantize.quantize, block)], 3)
    expected = quantized(guarded, x, 1)[0]
    used = 96 + 36
    assert (output[:, :used] == expected[:used]).all()
