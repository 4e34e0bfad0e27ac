"""Elementwise kernels of the fused step against float64: every length, sharing and broadcast."""

import numpy as np
import pytest
from fused import ONE, TWO, floats, row, together

from onnx_inplace.numba_kernels.fused import elementwise
from onnx_inplace.numba_kernels.fused.elementwise import One, Two
from onnx_inplace.numba_kernels.memory import address as at

pytestmark = pytest.mark.kernel

COUNTS = [1, 15, 16, 33, 576]


def close(result, expected, relative=1e-6, absolute=1e-6):
    np.testing.assert_allclose(result, expected, rtol=relative, atol=absolute)


def test_every_operation_has_an_oracle():
    assert set(ONE) == set(One) and set(TWO) == set(Two)


@pytest.mark.parametrize("operation", One)
@pytest.mark.parametrize("count", COUNTS)
def test_unary(guarded, operation, count):
    rng = np.random.default_rng(count)
    x = 4 * floats(rng, count)
    x = np.abs(x) if operation is One.SQUARE_ROOT else x
    output = guarded(count)
    block = elementwise.Unary(operation, at(x), at(output), count)
    together([(elementwise.unary, block)], 3)
    close(output, ONE[operation](x.astype(np.float64)), 4e-6)


@pytest.mark.parametrize("operation", One)
def test_unary_far_from_zero(operation):
    x = np.array([0, 1e-20, 1e-3, 0.2499, 0.25, 0.2501, 12, 60, 80], np.float32)
    x = x[1:] if operation is One.RECIPROCAL else x
    x = x if operation is One.SQUARE_ROOT else np.concatenate([x, -x])
    output = np.full_like(x, np.nan)
    block = elementwise.Unary(operation, at(x), at(output), x.size)
    together([(elementwise.unary, block)], 1)
    close(output, ONE[operation](x.astype(np.float64)), 1e-5)


@pytest.mark.parametrize("operation", [One.TANH, One.SILU, One.GELU_TANH, One.EXP])
def test_small_results_are_relatively_right(operation):
    """What would cancel does not."""
    x = np.float32([1e-6, 1e-3, 0.1, -1e-4, -3, -5])
    output = np.empty_like(x)
    block = elementwise.Unary(operation, at(x), at(output), x.size)
    together([(elementwise.unary, block)], 1)
    close(output, ONE[operation](x.astype(np.float64)), 3e-6, 0)


@pytest.mark.parametrize("operation", One)
def test_numbers_beyond_all_bounds_and_nan(operation):
    x = np.float32([np.nan, np.inf, -np.inf, 87.5, 88.5, 89, 1e30, -87.5, -110, -1e30])
    output = np.empty_like(x)
    block = elementwise.Unary(operation, at(x), at(output), x.size)
    together([(elementwise.unary, block)], 1)
    with np.errstate(over="ignore", invalid="ignore"):  # of SiLU: -inf times 0
        expected = ONE[operation](x.astype(np.float64)).astype(np.float32)
    close(output, expected, 2e-5, 1e-36)


@pytest.mark.parametrize("operation", Two)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("a_columns", "b_columns"), [(0, 0), (1, 0), (0, 1)])
def test_binary(guarded, operation, count, a_columns, b_columns):
    rng = np.random.default_rng(count)
    a, b = floats(rng, 3, a_columns or count), floats(rng, 3, b_columns or count)
    output = guarded((3, count))
    block = elementwise.Binary(
        *(operation, at(a), at(b), at(output), 3, count),
        *(row(a), row(b), row(output), a_columns, b_columns),
    )
    together([(elementwise.binary, block)], 2)
    close(output, TWO[operation](a.astype(np.float64), b.astype(np.float64)), 3e-6)


def test_binary_repeats_a_row_and_writes_over_its_input(guarded):
    rng = np.random.default_rng(0)
    a, bias = guarded((4, 50)), floats(rng, 50)
    a[:] = before = floats(rng, 4, 50)
    block = elementwise.Binary(Two.ADD, at(a), at(bias), at(a), 4, 50, row(a), 0, row(a), 0, 0)
    together([(elementwise.binary, block)], 4)
    assert (a == before + bias).all()


def test_more_threads_than_lines(guarded):
    x, output = np.arange(20, dtype=np.float32), guarded(20)
    together([(elementwise.unary, elementwise.Unary(One.NEGATE, at(x), at(output), 20))], 9)
    assert (output == -x).all()
