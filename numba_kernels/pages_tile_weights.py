"""Softmax over a page of integer codes: scores become weights that are integers in planes."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import FLOAT16
from onnx_inplace.numba_kernels.layout import LOWEST
from onnx_inplace.numba_kernels.pages_tile_lanes import LINE, Codes
from onnx_inplace.numba_kernels.vector import LANES, Value

_I = types.int64


def make_weights(
    size: int,
    group: int,
    block: int,
    center2: int,
    affine: bool,
    row: int,
    count: int,
    asks: int,
) -> Any:
    """``weights(scores, tiles, first, last, states, scales, step, midpoint, planes, aux, ...)``.

    One step of the online softmax, after which the weights, scales multiplied in, are integers.
    Tokens outside ``first .. last`` (of the tiles) weigh nothing, whatever their scales are.

    Shapes:
        scores:  (tiles, group, 16) float32, overwritten
        states:  (group, 2) float32: largest score, sum of weights
        scales:  float16 of the first token, blocks ``step`` bytes apart
        planes:  (blocks, count, group, row): one of uint8, or two of int8, the high one first
        aux:     (group) lines of factors for older sums, then (group, blocks, 3) lines: unit,
                 correction (int32), sum of weights times midpoints
        soon, later: addresses of what is read next: each tile asks for ``asks`` lines of both
    """
    blocks = -(-size // block)

    @intrinsic
    def weights(typing_context, scores, tiles, first, last, states, scales, step, midpoint,
                planes, aux, soon, later):  # fmt: skip
        def generate(context, builder, signature, arguments):
            e = Codes(builder, count)
            scores, tiles, first, last, states, scales, step, midpoint, *rest = arguments
            planes, aux, soon, later = rest
            heads, zero, lowest = range(group), e.constant(0.0), e.constant(float(LOWEST))
            lanes = e.lanes(range(LANES))

            def variable(value: Value) -> Value:
                return cgutils.alloca_once_value(builder, value)

            def update(place: Value, change: Any) -> None:
                builder.store(change(builder.load(place)), place)

            def place(i: Value, g: int) -> Value:
                return e.add(scores, e.add(e.times(i, group * LINE), g * LINE))

            def inside(i: Value) -> Value:
                """Which tokens of a tile have a weight."""
                begin = e.times(i, LANES)
                low = e.splat_int(builder.sub(first, begin))
                high = e.splat_int(builder.sub(last, begin))
                from_low = builder.icmp_signed(">=", lanes, low)
                return builder.and_(from_low, builder.icmp_signed("<", lanes, high))

            before = {g: e.load_all(e.add(states, 8 * g)) for g in heads}
            top = {g: variable(before[g]) for g in heads}
            with e.loop(tiles) as i:
                valid = inside(i)
                for g in heads:
                    x = builder.select(valid, e.load(place(i, g)), lowest)
                    e.store(x, place(i, g))
                    update(top[g], lambda t, x=x: e.maximum(t, x))
            highest = {g: e.across(e.maximum, builder.load(top[g]), LANES) for g in heads}
            total = {g: variable(zero) for g in heads}
            largest = {g: variable(e.constant(1e-30)) for g in heads}
            middles = {(g, k): variable(zero) for g in heads for k in range(blocks)}
            with e.loop(tiles) as i:
                asked = e.add(soon, e.times(i, asks * LINE))
                valid = inside(i)
                at = [e.add(scales, e.add(e.times(step, k), e.times(i, 2 * LANES)))
                      for k in range(blocks)]  # fmt: skip
                d = [builder.select(valid, e.load(a, FLOAT16), zero) for a in at]
                m = []
                if affine:
                    m = [e.load(e.add(a, midpoint), FLOAT16) for a in at]
                    m = [builder.select(valid, x, zero) for x in m]
                widest = zero
                for x in d:
                    widest = e.maximum(e.absolute(x), widest)
                for g in heads:
                    e.ask(asked, asks, g, group)
                    weight = e.weight(builder.fsub(e.load(place(i, g)), highest[g]))
                    weight = builder.select(valid, weight, zero)
                    e.store(weight, place(i, g))
                    update(total[g], lambda t, w=weight: builder.fadd(t, w))
                    scaled = builder.fmul(weight, widest)
                    update(largest[g], lambda t, w=scaled: e.maximum(t, w))
                    for k, x in enumerate(m):
                        update(middles[g, k], lambda t, w=weight, x=x: e.fma(w, x, t))
            factor, unit = {}, {}
            sums = {(g, k): variable(e.ints(0)) for g in heads for k in range(blocks)}
            for g in heads:
                most = e.across(e.maximum, builder.load(largest[g]), LANES)
                factor[g], unit[g] = e.integers_of(most)
                shrink = e.weight(builder.fsub(before[g], highest[g]))
                e.store(shrink, e.add(aux, g * LINE))
                old = e.load_all(e.add(states, 8 * g + 4))
                new = e.across(builder.fadd, builder.load(total[g]), LANES)
                e.store_one(highest[g], e.add(states, 8 * g))
                e.store_one(e.fma(old, shrink, new), e.add(states, 8 * g + 4))
            with e.loop(tiles) as i:
                asked = e.add(later, e.times(i, asks * LINE))
                valid = inside(i)
                for k in range(blocks):
                    at = e.add(scales, e.add(e.times(step, k), e.times(i, 2 * LANES)))
                    d_k = builder.select(valid, e.load(at, FLOAT16), zero)
                    for g in heads:
                        e.ask(asked, asks, k * group + g, blocks * group)
                        x = builder.fmul(e.load(place(i, g)), factor[g])
                        whole = e.rounded(builder.fmul(x, d_k))
                        update(sums[g, k], lambda t, w=whole: builder.add(t, w))
                        row_at = (count * k * group + g) * row
                        at = e.add(planes, e.add(e.times(i, LANES), row_at))
                        e.store_planes(whole, at, group * row)
            for g in heads:
                for k in range(blocks):
                    line = e.add(aux, (group + (g * blocks + k) * 3) * LINE)
                    total_k, middle = builder.load(sums[g, k]), builder.load(middles[g, k])
                    e.write_line(line, unit[g], total_k, middle, center2)
            return context.get_dummy_value()

        return types.void(*[_I] * 12), generate

    return weights
