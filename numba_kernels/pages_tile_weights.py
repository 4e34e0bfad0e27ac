"""Softmax over a page of integer codes: scores become weights that are integers in planes."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import FLOAT16
from onnx_inplace.numba_kernels.layout import LOWEST
from onnx_inplace.numba_kernels.pages_tile_lanes import LINE, Codes, packs
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
        aux:     a line of factors for older sums, then (blocks, 3) lines: unit, correction (int32),
                 sum of weights times midpoints
        soon, later: addresses of what is read next: each tile asks for ``asks`` lines of both

    Rows of ``planes`` are in the order of ``spot``; where ``packs(row)``, tiles come by four.
    """
    blocks = -(-size // block)
    together = LINE // LANES if packs(row) else 1  # tiles

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

            top = {g: variable(e.load_all(e.add(states, 8 * g))) for g in heads}
            with e.loop(tiles) as i:
                valid = inside(i)
                for g in heads:
                    x = builder.select(valid, e.load(place(i, g)), lowest)
                    e.store(x, place(i, g))
                    update(top[g], lambda t, x=x: e.maximum(t, x))
            highest = e.by_head(e.maximum, [builder.load(top[g]) for g in heads])
            most = [e.of_head(highest, g) for g in heads]
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
                    weight = e.weight(builder.fsub(e.load(place(i, g)), most[g]))
                    weight = builder.select(valid, weight, zero)
                    e.store(weight, place(i, g))
                    update(total[g], lambda t, w=weight: builder.fadd(t, w))
                    scaled = builder.fmul(weight, widest)
                    update(largest[g], lambda t, w=scaled: e.maximum(t, w))
                    for k, x in enumerate(m):
                        update(middles[g, k], lambda t, w=weight, x=x: e.fma(w, x, t))
            factors, unit = e.integers_of(
                e.by_head(e.maximum, [builder.load(largest[g]) for g in heads])
            )
            factor = [e.of_head(factors, g) for g in heads]
            before, old = (e.strided(e.add(states, at), 8, group) for at in (0, 4))
            shrink = e.weight(builder.fsub(before, highest))
            e.store(shrink, aux)
            new = e.by_head(builder.fadd, [builder.load(total[g]) for g in heads])
            new = e.fma(old, shrink, new)
            for g in heads:
                e.store_lane(highest, g, e.add(states, 8 * g))
                e.store_lane(new, g, e.add(states, 8 * g + 4))
            sums = {
                (g, k, p): variable(e.ints(0))
                for g in heads
                for k in range(blocks)
                for p in range(count)
            }
            with e.loop(builder.sdiv(tiles, e.whole(together))) as j:
                i = e.times(j, together)
                asked = e.add(later, e.times(i, asks * LINE))
                some = [e.add(i, t) for t in range(together)]
                valid = [inside(t) for t in some]
                for k in range(blocks):
                    start = e.add(scales, e.times(step, k))
                    d_k = [e.load(e.add(start, e.times(t, 2 * LANES)), FLOAT16) for t in some]
                    d_k = [builder.select(v, d, zero) for v, d in zip(valid, d_k, strict=True)]
                    for g in heads:
                        e.ask(asked, asks * together, k * group + g, blocks * group)
                        whole = []
                        for t, d in zip(some, d_k, strict=True):
                            x = builder.fmul(e.load(place(t, g)), factor[g])
                            whole.append(e.rounded(builder.fmul(x, d)))
                        row_at = (count * k * group + g) * row
                        at = e.add(planes, e.add(e.times(i, LANES), row_at))
                        for p, found in enumerate(e.store_planes(whole, at, group * row)):
                            update(sums[g, k, p], lambda t, w=found: builder.add(t, w))
            for k in range(blocks):
                totals = [
                    e.joined_planes([builder.load(sums[g, k, p]) for p in range(count)])
                    for g in heads
                ]
                bases = [builder.load(middles[g, k]) for g in heads]
                e.write_lines(e.add(aux, (1 + 3 * k) * LINE), unit, totals, bases, center2)
            return context.get_dummy_value()

        return types.void(*[_I] * 12), generate

    return weights
