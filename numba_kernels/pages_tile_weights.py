"""Softmax over a page of integer codes: scores become weights that are integers in planes."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import FLOAT16
from onnx_inplace.numba_kernels.layout import LOWEST
from onnx_inplace.numba_kernels.pages_tile_lanes import LARGEST, LINE, Asks, Codes, packs
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
    asks: Asks,
) -> Any:
    """``weights(scores, tiles, first, last, states, scales, step, midpoint, ready, planes, ...)``.

    One step of the online softmax, after which the weights, scales multiplied in, are integers.
    Tokens outside ``first .. last`` (of the tiles) weigh nothing, whatever their scales are.

    A page has a reference for each head: 2 to what a score is above it, times the scales of the
    token, is below 1, and near 1 for one token, so that the integers are known as soon as the
    weights are. It takes the place of the largest score in the states; it is at most 40 below.

    Shapes:
        scores:  (tiles, group, 16) float32, overwritten
        states:  (group, 2) float32: reference, sum of weights
        scales:  float16 of the first token, blocks ``step`` bytes apart
        ready:   (tiles, blocks, 2, 16) float32: what scales and midpoints become
        planes:  (blocks, count, group, row): one of uint8, or two of int8, the high one first
        aux:     a line of factors for older sums, then (blocks, 3) lines as of ``write_lines``,
                 bases are sums of weights times midpoints
        soon, later: addresses of what is read later: each tile asks for ``asks`` lines of it

    Rows of ``planes`` are in the order of ``spot``; where ``packs(row)``, tiles come by four.
    """
    blocks = -(-size // block)
    together = LINE // LANES if packs(row) else 1  # tiles

    @intrinsic
    def weights(typing_context, scores, tiles, first, last, states, scales, step, midpoint,
                ready, planes, aux, soon, later):  # fmt: skip
        def generate(context, builder, signature, arguments):
            e = Codes(builder, count)
            scores, tiles, first, last, states, scales, step, midpoint, *rest = arguments
            ready, planes, aux, *ahead = rest
            heads, zero, lowest = range(group), e.constant(0.0), e.constant(float(LOWEST))
            most = LARGEST[count]

            def variable(value: Value) -> Value:
                return cgutils.alloca_once_value(builder, value)

            def update(place: Value, change: Any) -> None:
                builder.store(change(builder.load(place)), place)

            def place(i: Value, g: int) -> Value:
                return e.add(scores, e.add(e.times(i, group * LINE), g * LINE))

            def prepared(i: Value, k: int, which: int) -> Value:
                """Scales (0) or midpoints (1) of block k."""
                return e.add(ready, e.add(e.times(i, 2 * blocks * LINE), (2 * k + which) * LINE))

            def clear(i: Value) -> None:
                """Tokens without weight have neither scores, scales nor midpoints."""
                begin = e.times(i, LANES)
                low, high = builder.sub(first, begin), builder.sub(last, begin)
                some = builder.icmp_signed(">", low, e.whole(0))
                some = builder.or_(some, builder.icmp_signed("<", high, e.whole(LANES)))
                with builder.if_then(some, likely=False):
                    lanes = e.lanes(range(LANES))
                    from_low = builder.icmp_signed(">=", lanes, e.splat_int(low))
                    below = builder.icmp_signed("<", lanes, e.splat_int(high))
                    valid = builder.and_(from_low, below)
                    kept = [(place(i, g), lowest) for g in heads]
                    kept += [(prepared(i, k, n), zero) for k in range(blocks)
                             for n in range(1 + affine)]  # fmt: skip
                    for at, other in kept:
                        e.store(builder.select(valid, e.load(at), other), at)

            references = {g: variable(lowest) for g in heads}
            with e.loop(tiles) as i:
                widest = zero
                for k in range(blocks):
                    at = e.add(scales, e.add(e.times(step, k), e.times(i, 2 * LANES)))
                    d = e.load(at, FLOAT16)
                    widest = e.larger(d, widest)
                    e.store(builder.fmul(d, e.constant(most)), prepared(i, k, 0))
                    if affine:
                        e.store(e.load(e.add(at, midpoint), FLOAT16), prepared(i, k, 1))
                clear(i)
                above = e.logarithm_above(widest)
                for g in heads:
                    x = builder.fadd(e.load(place(i, g)), above)
                    update(references[g], lambda t, x=x: e.maximum(t, x))
            reference = e.by_head(e.maximum, [builder.load(references[g]) for g in heads])
            own = [e.of_head(reference, g) for g in heads]
            total = {g: variable(zero) for g in heads}
            middles = {(g, k): variable(zero) for g in heads for k in range(blocks)}
            sums = {
                (g, k, p): variable(e.ints(0))
                for g in heads
                for k in range(blocks)
                for p in range(count)
            }
            with e.loop(builder.sdiv(tiles, e.whole(together))) as j:
                i = e.times(j, together)
                asked = e.behind(ahead, i, asks)
                lines = asks[0] * together, asks[1] * together
                some = [e.add(i, t) for t in range(together)]
                for g in heads:
                    w = [e.share(builder.fsub(e.load(place(t, g)), own[g])) for t in some]
                    for x in w:
                        update(total[g], lambda t, x=x: builder.fadd(t, x))
                    for k in range(blocks):
                        e.ask(asked, lines, g * blocks + k, group * blocks)
                        whole = []
                        for t, x in zip(some, w, strict=True):
                            if affine:
                                m = e.load(prepared(t, k, 1))
                                update(middles[g, k], lambda t, x=x, m=m: e.fma(x, m, t))
                            whole.append(e.rounded(builder.fmul(x, e.load(prepared(t, k, 0)))))
                        row_at = (count * k * group + g) * row
                        at = e.add(planes, e.add(e.times(i, LANES), row_at))
                        places = [sums[g, k, p] for p in range(count)]
                        before = [builder.load(place) for place in places]
                        found = e.store_planes(whole, at, group * row, before)
                        for value, where in zip(found, places, strict=True):
                            builder.store(value, where)
            old, before = (e.strided(e.add(states, at), 8, group) for at in (4, 0))
            highest = e.maximum(before, reference)
            shrink = e.weight(builder.fsub(before, highest))
            share = e.weight(builder.fsub(reference, highest))  # of this page
            e.store(shrink, aux)
            new = e.by_head(builder.fadd, [builder.load(total[g]) for g in heads])
            new = e.fma(old, shrink, builder.fmul(new, share))
            for g in heads:
                e.store_lane(highest, g, e.add(states, 8 * g))
                e.store_lane(new, g, e.add(states, 8 * g + 4))
            unit = builder.fmul(share, e.constant(1 / most))
            for k in range(blocks):
                totals = [
                    e.joined_planes([builder.load(sums[g, k, p]) for p in range(count)])
                    for g in heads
                ]
                base = e.by_head(builder.fadd, [builder.load(middles[g, k]) for g in heads])
                base = builder.fmul(base, share)
                at = e.add(aux, (1 + 3 * k) * LINE)
                e.write_lines(at, unit, totals, base, center2 / 2, False)
            return context.get_dummy_value()

        return types.void(*[_I] * 13), generate

    return weights
