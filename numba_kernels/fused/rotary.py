"""Rotary embedding of heads, written where it is needed: also into a cache, in its type."""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import FLOAT32, floats, narrow
from onnx_inplace.numba_kernels.fused.kernel import KERNEL, reader, share
from onnx_inplace.numba_kernels.fused.lanes import Lanes
from onnx_inplace.numba_kernels.memory import copy, kernel, load_int64
from onnx_inplace.numba_kernels.vector import LANES

LARGEST_HEAD = 1024  # numbers
PLAIN = 2
"""``layout`` of rows that are not rotated, only moved and converted."""

_I = types.int64


class Rotary(NamedTuple):
    """Rotate each row (batch, head, token) of ``size`` float32 by its angles.

    The first ``2 * half`` numbers are pairs, ``i`` and ``half + i``, or ``2 i`` and ``2 i + 1``
    where ``layout`` is 1; the others stay. With ``layout`` 2 nothing is rotated.

    Threads share ``units`` of neighbouring heads, all batches and tokens of them: with as many
    units as the kernel of attention has kv heads, no barrier is needed between the two.

    Shapes:
        input:    (batch, heads, tokens, size) float32, rows contiguous
        output:   (batch, heads, tokens, size) of ``kind``, rows contiguous; may be ``input``
        cos, sin: (batch, tokens, half) float32
        position: () int64, or address 0. Moves the output by so many tokens; ``capacity`` > 0:
                  token positions count modulo the capacity.
    """

    input: int
    output: int
    cos: int
    sin: int
    batch: int
    heads: int
    tokens: int
    size: int
    half: int
    layout: int
    kind: int
    input_batch: int  # bytes
    input_head: int
    input_token: int
    output_batch: int
    output_head: int
    output_token: int
    angle_batch: int
    angle_token: int
    position: int
    capacity: int
    units: int  # divides the heads


@intrinsic
def _halves(typing_context, target, source, cos, sin, half):
    """Pairs ``i`` and ``half + i``."""

    def generate(context, builder, signature, arguments):
        e = Lanes(builder)
        target, source, cos, sin, half = arguments
        behind = e.times(half, 4)

        def body(offset, lanes):
            place = e.add(source, offset)
            a, b = e.read(place, lanes), e.read(e.add(place, behind), lanes)
            c, s = e.read(e.add(cos, offset), lanes), e.read(e.add(sin, offset), lanes)
            first, second = _rotated(e, a, b, c, s)
            place = e.add(target, offset)
            e.write(first, place, lanes)
            e.write(second, e.add(place, behind), lanes)

        e.rows(half, body)
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I, _I), generate


@intrinsic
def _neighbours(typing_context, target, source, cos, sin, half):
    """Pairs ``2 i`` and ``2 i + 1``; ``half`` is a multiple of 16."""

    def generate(context, builder, signature, arguments):
        e = Lanes(builder)
        target, source, cos, sin, half = arguments
        even, odd = range(0, 2 * LANES, 2), range(1, 2 * LANES, 2)
        low = [k // 2 + k % 2 * LANES for k in range(LANES)]
        with e.loop(builder.sdiv(half, e.whole(LANES))) as index:
            offset = e.times(index, 4 * LANES)
            place = e.add(source, e.times(offset, 2))
            x, y = e.load(place), e.load(e.add(place, 4 * LANES))
            a, b = e.shuffle(x, y, even), e.shuffle(x, y, odd)
            c, s = e.load(e.add(cos, offset)), e.load(e.add(sin, offset))
            first, second = _rotated(e, a, b, c, s)
            place = e.add(target, e.times(offset, 2))
            e.store(e.shuffle(first, second, low), place)
            high = [k + LANES // 2 for k in low]
            e.store(e.shuffle(first, second, high), e.add(place, 4 * LANES))
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I, _I), generate


def _rotated(e, a, b, c, s):
    """(a c - b s, a s + b c)."""
    m = e.builder.fmul
    return e.builder.fsub(m(a, c), m(b, s)), e.fma(a, s, m(b, c))


@intrinsic
def _place(typing_context):
    """Address of ``LARGEST_HEAD`` float32 on the stack."""

    def generate(context, builder, signature, arguments):
        numbers = ir.ArrayType(ir.FloatType(), LARGEST_HEAD)
        return builder.ptrtoint(cgutils.alloca_once(builder, numbers), ir.IntType(64))

    return types.int64(), generate


@njit
def _rotate(x, target, source, cos, sin):
    """One row, both float32."""
    if x.layout == 0:
        _halves(target, source, cos, sin, x.half)
    elif x.half % LANES == 0:
        _neighbours(target, source, cos, sin, x.half)
    else:
        a, b = floats(source, 2 * x.half), floats(target, 2 * x.half)
        c, s = floats(cos, x.half), floats(sin, x.half)
        for i in range(x.half):
            first, second = a[2 * i], a[2 * i + 1]
            b[2 * i] = first * c[i] - second * s[i]
            b[2 * i + 1] = first * s[i] + second * c[i]


_read = reader(Rotary)


@kernel(KERNEL)
def rotary(arguments, thread, threads):
    """A :class:`Rotary`; ``size`` is at most ``LARGEST_HEAD``."""
    x = _read(arguments)
    first, last = share(x.units, thread, threads)
    heads = x.heads // x.units
    start = load_int64(x.position) if x.position else 0
    if x.capacity:
        start %= x.capacity
    work, turned = _place(), 2 * x.half
    for b in range(x.batch):
        for h in range(first * heads, last * heads):
            for t in range(x.tokens):
                source = x.input + b * x.input_batch + h * x.input_head + t * x.input_token
                place = start + t
                if x.capacity and place >= x.capacity:
                    place -= x.capacity
                to = x.output + b * x.output_batch + h * x.output_head + place * x.output_token
                angle = b * x.angle_batch + t * x.angle_token
                if x.layout == PLAIN:
                    narrow(to, x.size, source, x.kind)
                    continue
                target = to if x.kind == FLOAT32 else work
                _rotate(x, target, source, x.cos + angle, x.sin + angle)
                if target != source and turned < x.size:
                    copy(target + 4 * turned, source + 4 * turned, 4 * (x.size - turned))
                if x.kind != FLOAT32:
                    narrow(to, x.size, work, x.kind)
