"""Products of repacked weights against float64: every kind of weight, shape, finish and thread."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from fused import ONE, TWO, floats, together

from onnx_inplace.numba_kernels import specialise, vector
from onnx_inplace.numba_kernels.floats import BFLOAT16, FLOAT16, FLOAT32
from onnx_inplace.numba_kernels.fused import (
    panels,
    product,
    product_codes,
    product_floats,
    quantize,
)
from onnx_inplace.numba_kernels.fused.elementwise import One, Two
from onnx_inplace.numba_kernels.memory import address as at

pytestmark = pytest.mark.kernel

FAST = int(not vector.available())  # 1 where only portable code can run


def codes(rng, outputs, inputs, bits, *, scale=np.float16, correction=None, block=32):
    """(Codes, the same weights as float64)."""
    blocks = inputs // block
    numbers = rng.integers(0, 1 << bits, (outputs, blocks, block), dtype=np.uint8)
    scales = (0.01 + 0.05 * rng.random((outputs, blocks))).astype(scale)
    packed = numbers if bits == 8 else numbers[..., ::2] | numbers[..., 1::2] << 4
    points = minimums = None
    if correction == panels.ZERO_POINTS:
        points = rng.integers(0, 1 << bits, (outputs, blocks), dtype=np.uint8)
    elif correction == panels.MINIMUM:
        minimums = (-8 * scales * (1 + rng.random(scales.shape))).astype(scale)
    wide = scales.astype(np.float64)[..., None]
    if minimums is not None:
        weights = numbers * wide + minimums.astype(np.float64)[..., None]
    else:
        zero = panels.default_zero_point(bits) if points is None else points[..., None]
        weights = (numbers.astype(np.float64) - zero) * wide
    matrix = panels.Codes(bits, packed, scales, points, minimums)
    return matrix, weights.reshape(outputs, inputs)


def packed(matrices, layout, gate=False, floats=False):
    raw = np.full(layout.nbytes + 64, 0xA5, np.uint8)
    out = raw[-raw.ctypes.data % 64 :][: layout.nbytes]
    (panels.pack_floats if floats else panels.pack_codes)(matrices, layout, out, gate)
    return out


def multiply(guarded, layout, data, x, outputs, *, planes=1, threads=1, portable=FAST, **more):
    """The product by a kernel, (rows, outputs)."""
    rows, inputs = x.shape
    given, row = x, x.strides[0]
    if layout.bits:
        given = guarded((rows, quantize.row_bytes(inputs, planes)), np.uint8)
        row = given.strides[0]
        block = quantize.Quantize(at(x), at(given), rows, inputs, x.strides[0], row, planes, 0)
        together([(quantize.quantize, block)], 1)
        constants = (layout.bits, layout.kind, layout.correction, planes, rows, portable)
        kernel = specialise.specialise(product_codes, *constants).multiply
    else:
        kernel = specialise.specialise(product_floats, layout.kind, rows, portable).multiply
    output = more.pop("output", None)
    output = guarded((rows, outputs)) if output is None else output
    fields = dict.fromkeys(product.Product._fields, 0) | {
        "weights": at(data),
        "activations": at(given),
        "activation_row": row,
        "inputs": inputs,
        "outputs": outputs,
        "output": at(output),
        "output_row": output.strides[0],
    }
    residual = more.pop("residual", None)
    if residual is not None:
        fields |= {"residual": at(residual), "residual_row": residual.strides[0]}
    if "bias" in more:
        fields["bias"] = at(more["bias"])
        more.pop("bias")
    together([(kernel, product.Product(**(fields | more)))], threads)
    return output


def bound(x, weights, layout, planes):
    """Largest error of a sum: half a step of each activation, and the rounding of float32."""
    blocks = np.zeros((x.shape[0], math.ceil(x.shape[1] / 32) * 32))
    blocks[:, : x.shape[1]] = np.abs(x)
    tops = np.repeat(blocks.reshape(x.shape[0], -1, 32).max(2), 32, 1)[:, : x.shape[1]]
    size = np.abs(weights)
    rounding = 2e-6 * (tops @ size.T)
    if not layout.bits:
        return rounding
    return tops @ size.T / (2 * quantize.LARGEST[planes]) * 1.02 + rounding


CORRECTIONS = [panels.DEFAULT_ZERO_POINT, panels.ZERO_POINTS, panels.MINIMUM]
KINDS = [
    *itertools.product((4, 8), (np.float16,), CORRECTIONS, (1, 3), (1,)),
    (4, np.float32, panels.MINIMUM, 1, 1),
    (4, np.float32, panels.ZERO_POINTS, 3, 3),
    (8, np.float32, panels.DEFAULT_ZERO_POINT, 1, 4),
    (4, np.float16, panels.MINIMUM, 1, 2),
]


@pytest.mark.parametrize(("bits", "scale", "correction", "planes", "rows"), KINDS)
@pytest.mark.parametrize("portable", sorted({FAST, 1}))
def test_codes(guarded, bits, scale, correction, planes, rows, portable):
    rng = np.random.default_rng(bits)
    outputs, inputs = 80, 192
    matrix, weights = codes(rng, outputs, inputs, bits, scale=scale, correction=correction)
    layout = panels.layout_codes([matrix])
    assert layout.kind == (FLOAT16 if scale is np.float16 else FLOAT32)
    assert layout.correction == correction
    x = floats(rng, rows, inputs)
    data = packed([matrix], layout)
    result = multiply(
        guarded, layout, data, x, outputs, planes=planes, portable=portable, threads=2
    )
    expected = x.astype(np.float64) @ weights.T
    assert (np.abs(result - expected) <= bound(x, weights, layout, planes)).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_portable_code_gives_the_same_integers(guarded, bits):
    """What differs is how float32 is rounded, where a CPU has no fused multiplication."""
    rng = np.random.default_rng(0)
    matrix, _ = codes(rng, 64, 320, bits, correction=panels.MINIMUM)
    layout = panels.layout_codes([matrix])
    x, data = floats(rng, 1, 320), packed([matrix], layout)
    fast, plain = (multiply(guarded, layout, data, x, 64, planes=3, portable=p) for p in (FAST, 1))
    np.testing.assert_allclose(fast, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("outputs", [1, 16, 33, 48, 95])
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_any_number_of_outputs_and_threads(guarded, outputs, threads):
    rng = np.random.default_rng(outputs)
    matrix, weights = codes(rng, outputs, 64, 4)
    layout = panels.layout_codes([matrix])
    x, data = floats(rng, 1, 64), packed([matrix], layout)
    result = multiply(guarded, layout, data, x, outputs, threads=threads)
    assert (np.abs(result - x @ weights.T) <= bound(x, weights, layout, 1)).all()
    assert (result == multiply(guarded, layout, data, x, outputs, threads=1)).all()


def test_a_scale_may_stand_for_several_blocks(guarded):
    rng = np.random.default_rng(0)
    matrix, weights = codes(rng, 32, 256, 4, block=128, correction=panels.ZERO_POINTS)
    layout = panels.layout_codes([matrix])
    assert layout.steps == 8
    x = floats(rng, 1, 256)
    result = multiply(guarded, layout, packed([matrix], layout), x, 32)
    assert (np.abs(result - x @ weights.T) <= bound(x, weights, layout, 1)).all()


def test_inputs_may_end_inside_of_the_last_block(guarded):
    """The weights of what is missing do not matter."""
    rng = np.random.default_rng(0)
    matrix, weights = codes(rng, 32, 64, 4, correction=panels.MINIMUM)
    layout = panels.layout_codes([matrix])
    x = floats(rng, 1, 40)
    result = multiply(guarded, layout, packed([matrix], layout), x, 32)
    assert (np.abs(result - x @ weights[:, :40].T) <= bound(x, weights[:, :40], layout, 1)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("portable", sorted({FAST, 1}))
def test_floats(guarded, dtype, rows, portable):
    rng = np.random.default_rng(rows)
    weights = floats(rng, 70, 75).astype(dtype)
    kind = {np.float32: FLOAT32, np.float16: FLOAT16}.get(dtype, BFLOAT16)
    given = weights.view(np.uint16) if kind == BFLOAT16 else weights
    layout = panels.layout_floats([given], kind)
    assert layout.kind == kind
    x, data = floats(rng, rows, 75), packed([given], layout, floats=True)
    result = multiply(guarded, layout, data, x, 70, threads=2, portable=portable)
    weights = weights.astype(np.float64)
    assert (np.abs(result - x @ weights.T) <= bound(x, weights, layout, 1)).all()


def test_float32_that_fits_is_kept_as_float16(guarded):
    weights = floats(np.random.default_rng(0), 40, 32).astype(np.float16).astype(np.float32)
    assert panels.layout_floats([weights]).kind == FLOAT16
    weights[39, 31] = 1 / 3
    assert panels.layout_floats([weights]).kind == FLOAT32


def test_several_matrices_become_one(guarded):
    rng = np.random.default_rng(0)
    made = [codes(rng, n, 64, 4, correction=panels.ZERO_POINTS) for n in (48, 16, 20)]
    matrices, weights = [m for m, _ in made], np.concatenate([w for _, w in made])
    layout = panels.layout_codes(matrices)
    x = floats(rng, 1, 64)
    result = multiply(guarded, layout, packed(matrices, layout), x, 84)
    assert (np.abs(result - x @ weights.T) <= bound(x, weights, layout, 1)).all()


def test_one_matrix_without_zero_points_beside_one_with(guarded):
    rng = np.random.default_rng(0)
    made = [codes(rng, 16, 64, 8, correction=c) for c in (panels.ZERO_POINTS, None)]
    matrices, weights = [m for m, _ in made], np.concatenate([w for _, w in made])
    layout = panels.layout_codes(matrices)
    x = floats(rng, 1, 64)
    result = multiply(guarded, layout, packed(matrices, layout), x, 32)
    assert (np.abs(result - x @ weights.T) <= bound(x, weights, layout, 1)).all()


@pytest.mark.parametrize("of_floats", [False, True])
@pytest.mark.parametrize("gate", [Two.SILU_MULTIPLY, Two.GELU_MULTIPLY, Two.GELU_TANH_MULTIPLY])
def test_a_gate_and_what_it_gates(guarded, gate, of_floats):
    rng = np.random.default_rng(0)
    if of_floats:
        matrices = weights = [floats(rng, 48, 64) for _ in range(2)]
        layout = panels.layout_floats(matrices)
    else:
        made = [codes(rng, 48, 64, 4) for _ in range(2)]
        matrices, weights = ([pair[k] for pair in made] for k in range(2))
        layout = panels.layout_codes(matrices)
    x = floats(rng, 1, 64)
    biases = [floats(rng, 48), None]
    bias = panels.pack_bias(biases, [48, 48], gate=True)
    data = packed(matrices, layout, gate=True, floats=of_floats)
    result = multiply(guarded, layout, data, x, 48, planes=3, gate=gate, bias=bias, threads=2)
    left, right = (x.astype(np.float64) @ w.T for w in weights)
    expected = TWO[gate](left + biases[0], right)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "operation",
    [One.IDENTITY, One.SILU, One.GELU, One.GELU_TANH, One.RELU, One.TANH, One.SIGMOID],
)
def test_finish(guarded, operation):
    rng = np.random.default_rng(0)
    weights, x = floats(rng, 50, 24), floats(rng, 2, 24)
    layout = panels.layout_floats([weights])
    bias, stream = floats(rng, 50), guarded((2, 50))
    stream[:] = before = floats(rng, 2, 50)
    multiply(
        guarded,
        layout,
        packed([weights], layout, floats=True),
        *(x, 50),
        operation=operation,
        bias=panels.pack_bias([bias], [50]),
        residual=stream,
        output=stream,
    )
    expected = ONE[operation](x.astype(np.float64) @ weights.T + bias) + before
    np.testing.assert_allclose(stream, expected, rtol=1e-5, atol=1e-5)


def test_matrices_that_cannot_be_one():
    rng = np.random.default_rng(0)
    four, eight = codes(rng, 16, 64, 4)[0], codes(rng, 16, 64, 8)[0]
    with pytest.raises(ValueError, match="bits"):
        panels.layout_codes([four, eight])
    with pytest.raises(ValueError, match="minimums"):
        panels.layout_codes([four, codes(rng, 16, 64, 4, correction=panels.MINIMUM)[0]])
    with pytest.raises(ValueError, match="groups of 16"):
        panels.layout_codes([codes(rng, 20, 64, 4)[0], four])
    with pytest.raises(ValueError, match="inputs"):
        panels.layout_floats([np.zeros((16, 4), np.float32), np.zeros((16, 5), np.float32)])


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("infinity", [np.inf, -np.inf])
def test_an_infinite_activation_gives_infinities_of_the_sign_of_weights(
    guarded, infinity, planes, correction
):
    matrix, weights = codes(np.random.default_rng(0), 32, 64, 4, correction=correction)
    layout = panels.layout_codes([matrix])
    x = floats(np.random.default_rng(1), 1, 64)
    x[0, 3] = infinity
    result = multiply(guarded, layout, packed([matrix], layout), x, 32, planes=planes)
    with np.errstate(invalid="ignore"):  # infinity times a weight of 0
        np.testing.assert_array_equal(result, infinity * weights[:, 3][None])


def test_infinities_of_one_block_that_cancel_are_no_number(guarded):
    matrix, _ = codes(np.random.default_rng(0), 32, 64, 4)
    layout = panels.layout_codes([matrix])
    x = floats(np.random.default_rng(1), 1, 64)
    x[0, [3, 9]] = np.inf, -np.inf
    assert np.isnan(multiply(guarded, layout, packed([matrix], layout), x, 32)).all()
