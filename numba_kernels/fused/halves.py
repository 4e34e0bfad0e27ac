"""Rotation by tables of whole heads, as graphs write it in slices; ``rotary`` has half tables."""

from __future__ import annotations

from typing import NamedTuple

from numba import types
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.fused.kernel import KERNEL, reader, share
from onnx_inplace.numba_kernels.fused.lanes import Lanes
from onnx_inplace.numba_kernels.memory import kernel

_I = types.int64


class Turn(NamedTuple):
    """``output = x * cos + turned(x) * sin``: the halves (a, b) of a row are turned to (-b, a).

    Shapes, all float32, rows contiguous, steps in bytes:
        input, output: (batch, heads, tokens, 2 * half); not the same memory
        cos, sin:      likewise; a step of 0 repeats
    """

    input: int
    output: int
    cos: int
    sin: int
    batch: int
    heads: int
    tokens: int
    half: int
    input_batch: int
    input_head: int
    input_token: int
    output_batch: int
    output_head: int
    output_token: int
    cos_batch: int
    cos_head: int
    cos_token: int
    sin_batch: int
    sin_head: int
    sin_token: int


@intrinsic
def _turn(typing_context, target, source, cos, sin, half):
    """One row."""

    def generate(context, builder, signature, arguments):
        e = Lanes(builder)
        target, source, cos, sin, half = arguments
        behind = e.times(half, 4)

        def body(offset, lanes):
            a, b, c, d, s, t = (
                e.read(place, lanes)
                for start in (source, cos, sin)
                for place in (e.add(start, offset), e.add(e.add(start, offset), behind))
            )
            place = e.add(target, offset)
            first = builder.fsub(builder.fmul(a, c), builder.fmul(b, s))
            e.write(first, place, lanes)
            e.write(e.fma(a, t, builder.fmul(b, d)), e.add(place, behind), lanes)

        e.rows(half, body)
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I, _I), generate


_read = reader(Turn)


@kernel(KERNEL)
def turn(arguments, thread, threads):
    """A :class:`Turn`; threads share the heads."""
    x = _read(arguments)
    first, last = share(x.heads, thread, threads)
    for b in range(x.batch):
        for h in range(first, last):
            for t in range(x.tokens):
                source = x.input + b * x.input_batch + h * x.input_head + t * x.input_token
                to = x.output + b * x.output_batch + h * x.output_head + t * x.output_token
                cos = x.cos + b * x.cos_batch + h * x.cos_head + t * x.cos_token
                sin = x.sin + b * x.sin_batch + h * x.sin_head + t * x.sin_token
                _turn(to, source, cos, sin, x.half)
