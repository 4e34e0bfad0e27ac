"""Weights of products as fused steps keep them: what the plan says of them, and what is made."""

import numpy as np
import onnx_ir as ir
import pytest
from decoders import decoder
from test_fused_decoders import SHAPES

from onnx_inplace import compiler
from onnx_inplace.compiler import matrices as compiled
from onnx_inplace.compiler.fused import Operation
from onnx_inplace.compiler.matrices import ProductWeights
from onnx_inplace.numba_kernels.floats import FLOAT16, FLOAT32
from onnx_inplace.numba_kernels.fused import panels
from onnx_inplace.runner.fused import matrices, weights

pytestmark = pytest.mark.kernel


def product(op_type, *arrays, bias=None, gate=False, **attributes):
    """The weights of one operator."""
    operator = Operation("", op_type, 1, (), (), attributes)
    tensors = tuple(None if a is None else ir.tensor(a) for a in arrays)
    return ProductWeights(
        (operator,), (tensors,), (None if bias is None else ir.tensor(bias),), gate
    )


def quantized(rng, bits, *, scales=np.float32, rest=(), outputs=48, inputs=64, block=32):
    """The weights of a MatMulNBits; ``rest``: its further inputs."""
    blocks = inputs // block
    codes = rng.integers(0, 256, (outputs, blocks, block * bits // 8), dtype=np.uint8)
    numbers = rng.random((outputs, blocks)).astype(scales)
    attributes = {"bits": bits, "block_size": block, "K": inputs, "N": outputs}
    return product("MatMulNBits", codes, numbers, *rest, **attributes)


def made(weight):
    """Layout and bytes of what is made, each part padded to a cache line."""
    found = matrices.read(weight)
    bias = 0 if found.bias is None else found.bias.nbytes
    return found.layout, sum(-(-size // 64) * 64 for size in (found.layout.nbytes, bias))


@pytest.mark.parametrize(("exact", "bits"), [(True, 8), (False, 0)])
def test_large_float32_weights_that_were_codes_are_kept_as_codes(exact, bits):
    rng = np.random.default_rng(0)
    integers = rng.integers(-127, 128, (4096, 256)).astype(np.float32)
    integers[:, ::32] = 127
    weight = product("Gemm", integers * np.float32(0.0625) + (0 if exact else 1e-4), transB=1)
    layout, size = made(weight)
    assert layout.bits == bits
    assert layout.kind == (FLOAT16 if exact else FLOAT32)
    assert weight.outputs == 4096
    assert compiled.padded_bytes(weight) == size


ROWS = np.random.default_rng(7)
CASES = {
    "4 bits": quantized(ROWS, 4),
    "4 bits, float16": quantized(ROWS, 4, scales=np.float16),
    "8 bits, block of 64": quantized(ROWS, 8, block=64),
    "a last panel of 8": quantized(ROWS, 4, outputs=40),
    "usual zero points": quantized(ROWS, 8, rest=[np.full((48, 2), 128, np.uint8)]),
    "other zero points": quantized(ROWS, 8, rest=[np.full((48, 2), 127, np.uint8)]),
    "4-bit zero points": quantized(ROWS, 4, rest=[np.full((48, 1), 0x87, np.uint8)]),
    "float zero points": quantized(ROWS, 4, rest=[ROWS.random((48, 2)).astype(np.float32)]),
    "zero points of float16": quantized(
        ROWS, 4, scales=np.float16, rest=[np.full((48, 2), 7.5, np.float16)]
    ),
    "remainder": quantized(
        ROWS, 4, rest=[None, ROWS.random((2, 48)).astype(np.float32)], scales=np.float16
    ),
    "float32": product("MatMul", ROWS.random((64, 40)).astype(np.float32)),
    "float32 as float16": product("MatMul", np.full((64, 40), 0.5, np.float32)),
    "float16": product("Gemm", ROWS.random((40, 64)).astype(np.float16), transB=1),
    "bias": product("MatMul", ROWS.random((64, 40)).astype(np.float32), bias=ROWS.random(40)),
    "gate": product(
        "MatMul", ROWS.random((8, 64)).astype(np.float32), bias=ROWS.random(64), gate=True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_plan_says_how_large_it_will_be(name):
    _, size = made(CASES[name])
    assert compiled.padded_bytes(CASES[name]) == size


@pytest.mark.parametrize("name", SHAPES)
def test_of_whole_decoders(name):
    fusion = compiler.plan(decoder(SHAPES[name])).fused
    found = weights.load(fusion)
    assert compiled.nbytes(fusion) == found.nbytes
    for one in compiled.distinct(fusion):
        packed = found.packed(one)
        assert matrices.fits(packed.layout, one)
        assert packed.layout.panels == -(-one.outputs // panels.PANEL)


def test_matrices_that_cannot_be_one_take_no_bytes():
    plain = quantized(ROWS, 4).operators[0]
    first, second = quantized(ROWS, 4), CASES["float zero points"]
    both = ProductWeights((plain, plain), first.tensors + second.tensors, (None, None), True)
    with pytest.raises(ValueError, match="minimums"):
        matrices.read(both)
    assert compiled.padded_bytes(both) == 0


def test_one_tensor_in_two_orders_is_two_products():
    square = ir.tensor(ROWS.random((32, 32)).astype(np.float32))
    forms = {
        ProductWeights(
            (Operation("", "Gemm", 1, (), (), {"transB": t}),), ((square,),), (None,), False
        ).form
        for t in (0, 1)
    }
    assert len(forms) == 2
