"""Products of 4- and 8-bit weights in blocks of 32 with quantized activations.

``specialise`` makes copies of this file with other values in the line that says so: bits of a code,
kind of the scales, correction (of ``panels``), planes of the activations, rows of activations, and
1 for code that runs on any CPU.
"""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import SIZES
from onnx_inplace.numba_kernels.fused import product
from onnx_inplace.numba_kernels.fused.dots import Dots
from onnx_inplace.numba_kernels.fused.kernel import KERNEL
from onnx_inplace.numba_kernels.fused.panels import (
    MINIMUM,
    ZERO_POINTS,
    block_bytes,
    default_zero_point,
)
from onnx_inplace.numba_kernels.memory import kernel
from onnx_inplace.numba_kernels.vector import VECTOR

BITS, SCALE, CORRECTION, PLANES, ROWS, PORTABLE = 4, 1, 0, 1, 1, 0  # specialised

BLOCK = 32
BLOCK_BYTES = block_bytes(BITS, SCALE, CORRECTION)
GROUPS = product.PANEL // 16  # vectors of outputs in a panel
_VECTORS = 2 * BITS  # of 64 bytes: codes of 16 outputs in a block
_CODES = 64 * _VECTORS // 2  # bytes

_I = types.int64


@intrinsic
def _multiply(typing_context, weights, blocks, rows, row, sums, end, following):
    """A panel times ``ROWS`` quantized rows, to ``sums``: (ROWS, 32) float32.

    What is asked for ahead is ``AHEAD`` bytes on; behind ``end``, ``following`` goes on.
    """

    def generate(context, builder, signature, arguments):
        e, b = Dots(builder, bool(PORTABLE)), builder
        weights, blocks, rows, row, sums, end, following = arguments
        keys = [(r, g) for r in range(ROWS) for g in range(GROUPS)]
        totals = {key: cgutils.alloca_once(b, VECTOR) for key in keys}
        for place in totals.values():
            b.store(e.constant(0.0), place)
        starts = [e.add(rows, e.times(row, r)) for r in range(ROWS)]
        tables = [e.add(start, e.times(blocks, PLANES * BLOCK)) for start in starts]
        with e.loop(blocks) as index:
            at = e.add(weights, e.times(index, BLOCK_BYTES))
            product.ask_ahead(e, at, BLOCK_BYTES, end, following)
            codes = {g: _load_codes(e, e.add(at, g * _CODES)) for g in range(GROUPS)}
            scales = {
                g: e.scales(e.add(at, GROUPS * _CODES + 16 * g * SIZES[SCALE]), SCALE)
                for g in range(GROUPS)
            }
            behind = e.add(at, GROUPS * (_CODES + 16 * SIZES[SCALE]))
            four, block = e.times(index, 4), e.times(index, BLOCK)
            for r in range(ROWS):
                place = e.add(tables[r], four)
                table = [e.add(place, e.times(blocks, 4 * k)) for k in range(4)]
                scale = e.load_all(table[0])
                products = [
                    _dots(e, codes, e.add(e.add(starts[r], block), e.times(blocks, BLOCK * p)))
                    for p in range(PLANES)
                ]
                for g in range(GROUPS):
                    parts = [products[0][g]]
                    if PLANES == 3:
                        upper = b.add(b.shl(parts[0], e.lanes([8] * 16)), products[1][g])
                        parts = [upper, products[2][g]]
                    if CORRECTION != MINIMUM:
                        zero = e.lanes([default_zero_point(BITS)] * 16)
                        if CORRECTION == ZERO_POINTS:
                            zero = e.bytes_(e.add(behind, 16 * g))
                        numbers = [e.integer(table[2 + k]) for k in range(len(parts))]
                        parts = [
                            b.sub(part, b.mul(zero, number))
                            for part, number in zip(parts, numbers, strict=True)
                        ]
                    whole = e.floats(parts[0])
                    if PLANES == 3:
                        whole = e.fma(whole, e.constant(256.0), e.floats(parts[1]))
                    whole = b.fmul(whole, scales[g])
                    if CORRECTION == MINIMUM:
                        least = e.scales(e.add(behind, 16 * g * SIZES[SCALE]), SCALE)
                        whole = e.fma(least, e.load_all(table[1]), whole)
                    b.store(e.fma(whole, scale, b.load(totals[r, g])), totals[r, g])
        for (r, g), place in totals.items():
            e.store(b.load(place), e.add(sums, 4 * (product.PANEL * r + 16 * g)))
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I, _I, _I, _I), generate


def _load_codes(e, at):
    """Vectors of 16 outputs by 4 inputs, in the order of the inputs."""
    b = e.builder
    vectors = [e.integers(e.add(at, 64 * v)) for v in range(_CODES // 64)]
    if BITS == 8:
        return vectors
    low, four = e.lanes([0x0F0F0F0F] * 16), e.lanes([4] * 16)
    return [b.and_(v, low) for v in vectors] + [b.and_(b.lshr(v, four), low) for v in vectors]


def _dots(e, codes, numbers):
    """For each group of 16 outputs, the sum of 32 products; two sums shorten the chain."""
    totals = {g: [e.lanes([0] * 16)] * 2 for g in codes}
    for v in range(BLOCK // 4):
        four = e.integer(e.add(numbers, 4 * v))
        for g, vectors in codes.items():
            totals[g][v % 2] = e.dot(totals[g][v % 2], vectors[v], four)
    return {g: e.builder.add(*pair) for g, pair in totals.items()}


_sums = product.make_sums(ROWS)


@kernel(KERNEL)
def multiply(arguments, thread, threads):
    """A :class:`product.Product` of ``ROWS`` rows; threads share the panels."""
    x = product.read(arguments)
    blocks = (x.inputs + BLOCK - 1) // BLOCK
    first, last = product.part(x, thread, threads)
    rows = x.activations + thread * x.each
    sums = _sums()
    size = blocks * BLOCK_BYTES
    end, following = x.weights + last * size, product.following(x, thread, threads)
    for panel in range(first, last):
        at = x.weights + panel * size
        _multiply(at, blocks, rows, x.activation_row, sums, end, following)
        product.finish(x, panel, ROWS, sums)
