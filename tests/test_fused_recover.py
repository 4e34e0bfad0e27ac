"""Codes that are found again in float weights, and weights in which there are none."""

import numpy as np
import pytest
from fused import floats

from onnx_inplace.compiler.recovered import recover


def quantized(rng, outputs, inputs):
    """What an exporter writes: float16 scale times integers of which one is 127 or -127."""
    integers = rng.integers(-127, 128, (outputs, inputs // 32, 32))
    integers[..., 5] = rng.choice([-127, 127], integers.shape[:2])
    scales = rng.random((outputs, inputs // 32, 1)).astype(np.float16).astype(np.float32)
    scales[0, 0] = 0  # a block of zeros
    return (integers * scales).astype(np.float32).reshape(outputs, inputs)


@pytest.mark.parametrize("outputs", [1, 255, 600])
def test_codes_are_the_same_numbers(outputs):
    weights = quantized(np.random.default_rng(outputs), outputs, 96)
    found = recover(weights)
    assert found is not None and (found.bits, found.codes.shape) == (8, (outputs, 3, 32))
    values = (found.codes.astype(np.float32) - 128) * found.scales[..., None]
    assert (values.reshape(outputs, 96) == weights).all()


def test_one_other_number_is_enough():
    weights = quantized(np.random.default_rng(0), 600, 64)
    weights[599, 63] *= 1.001
    assert recover(weights) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_is_no_code(bad):
    weights = quantized(np.random.default_rng(0), 4, 64)
    weights[3, 7] = bad
    assert recover(weights) is None


def test_other_weights_and_shapes():
    rng = np.random.default_rng(0)
    assert recover(floats(rng, 8, 64)) is None
    assert recover(floats(rng, 8, 40)) is None
    assert recover(np.zeros((0, 64), np.float32)) is None
