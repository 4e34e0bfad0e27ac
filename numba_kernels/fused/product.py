"""Matrix-vector products: argument block, the walk over panels, what happens to a result.

Weights stand in panels of 32 outputs (``panels``), one after the other. A thread takes neighbouring
panels, whose bytes are one stream. It asks for them some KiB ahead, and at the end of its part for
those that it needs in the next product: the memory never rests between the two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.fused.kernel import reader, share
from onnx_inplace.numba_kernels.fused.lanes import Lanes, make_binary, make_unary

PANEL = 32  # outputs that are computed together
AHEAD = 8704  # bytes between a read and the prefetch before it; 4 to 12 KiB are nearly as good


class Product(NamedTuple):
    """``output = finish(weights @ activations)`` for each of 1 to 4 rows.

    ``finish`` is, in this order: ``+ bias``, ``operation``, ``+ residual``. With ``gate`` the first
    16 outputs of a panel are gates of the last 16: 16 results ``f(gate) * other``.

    Shapes:
        weights:     panels, as the kernel's repacking makes them
        activations: (rows) quantized rows, or (rows, inputs) float32
        output:      (rows, outputs) float32
        bias:        (32 * panels) float32 in the order of the panels, or address 0
        residual:    (rows, outputs) float32, or address 0; may be ``output``
    """

    weights: int
    activations: int
    activation_row: int  # bytes from row to row
    each: int  # bytes between the activations of threads; 0: all read the same ones
    inputs: int
    outputs: int  # results: with a gate, half of the outputs of the panels
    output: int
    output_row: int
    bias: int
    residual: int
    residual_row: int
    operation: int  # of elementwise.One: IDENTITY, SILU, GELU, GELU_TANH, RELU, TANH or SIGMOID
    gate: int  # 0, or of elementwise.Two: SILU_MULTIPLY, GELU_MULTIPLY, GELU_TANH_MULTIPLY
    next_weights: int  # the product that follows, or 0
    next_panels: int
    next_panel_bytes: int


read = reader(Product)

_I = types.int64
_add = make_binary(lambda e, a, b: e.builder.fadd(a, b))
_copy = make_unary(lambda e, x: x)
_silu, _gelu, _gelu_tanh = (
    make_unary(Lanes.silu),
    make_unary(Lanes.gelu),
    make_unary(Lanes.gelu_tanh),
)
_relu = make_unary(Lanes.relu)
_tanh, _sigmoid = make_unary(Lanes.tanh), make_unary(Lanes.sigmoid)
_silu_multiply = make_binary(lambda e, a, b: e.builder.fmul(e.silu(a), b))
_gelu_multiply = make_binary(lambda e, a, b: e.builder.fmul(e.gelu(a), b))
_gelu_tanh_multiply = make_binary(lambda e, a, b: e.builder.fmul(e.gelu_tanh(a), b))


def ask_ahead(e: Lanes, at: Any, size: int, end: Any, following: Any) -> None:
    """Prefetch what will be read ``AHEAD`` bytes after the ``size`` bytes at ``at``.

    What lies behind ``end`` is another thread's; ``following`` is what this one reads then. It goes
    into the first-level cache: a stream is read once, and the core's own prefetcher bears it best.
    """
    b = e.builder
    ahead = e.add(at, AHEAD)
    with b.if_else(b.icmp_signed(">=", ahead, end), likely=False) as (behind, before):
        with behind:
            _ask(e, e.add(ahead, b.sub(following, end)), size)
        with before:
            _ask(e, ahead, size)


def _ask(e: Lanes, address: Any, size: int) -> None:
    for line in range(0, size, 64):
        e.prefetch(e.add(address, line), near=True)


def make_sums(rows: int) -> Any:
    """``sums()``: address of (rows, 32) float32 on the stack of the function that calls it."""

    @intrinsic
    def sums(typing_context):
        def generate(context, builder, signature, arguments):
            lines = ir.ArrayType(ir.VectorType(ir.FloatType(), 16), rows * PANEL // 16)
            return builder.ptrtoint(cgutils.alloca_once(builder, lines), ir.IntType(64))

        return types.int64(), generate

    return sums


@njit
def panel_outputs(x):
    """Results of a panel."""
    return PANEL // 2 if x.gate else PANEL


@njit
def part(x, thread, threads):
    """First, and one past the last panel of a thread."""
    size = panel_outputs(x)
    return share((x.outputs + size - 1) // size, thread, threads)


@njit
def following(x, thread, threads):
    """Address of the first panel of this thread in the next product."""
    first, _ = share(x.next_panels, thread, threads)
    return x.next_weights + first * x.next_panel_bytes


@njit
def finish(x, panel, rows, sums):
    """Results of a panel from ``sums``, (rows, 32) float32, which this overwrites."""
    size = panel_outputs(x)
    begin = panel * size
    count = min(size, x.outputs - begin)
    for r in range(rows):
        row = sums + 4 * PANEL * r
        target = x.output + r * x.output_row + 4 * begin
        if x.bias:
            _add(row, row, x.bias + 4 * PANEL * panel, PANEL, 0, 0)
        if x.gate == 6:
            _silu_multiply(row, row, row + 2 * PANEL, PANEL // 2, 0, 0)
        elif x.gate == 7:
            _gelu_multiply(row, row, row + 2 * PANEL, PANEL // 2, 0, 0)
        elif x.gate == 8:
            _gelu_tanh_multiply(row, row, row + 2 * PANEL, PANEL // 2, 0, 0)
        if x.operation == 8:
            _silu(row, row, PANEL)
        elif x.operation == 11:
            _gelu(row, row, PANEL)
        elif x.operation == 12:
            _gelu_tanh(row, row, PANEL)
        elif x.operation == 5:
            _relu(row, row, PANEL)
        elif x.operation == 9:
            _tanh(row, row, PANEL)
        elif x.operation == 7:
            _sigmoid(row, row, PANEL)
        if x.residual:
            _add(target, row, x.residual + r * x.residual_row + 4 * begin, count, 0, 0)
        else:
            _copy(target, row, count)
