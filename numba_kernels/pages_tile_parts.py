"""The inner loops of attention over pages of integer codes: scores, weights, sums.

Four codes meet four numbers of 8 bits in one instruction. Queries and weights, scales multiplied
in, are integers of 16 bits in two planes of 8, so that codes are never converted. A vector of
scores holds 16 tokens of one head, a vector of sums 16 elements.

Lines of ``aux`` are vectors of 16 equal lanes: what is needed once for each head and block.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import FLOAT16
from onnx_inplace.numba_kernels.fused.dots import Dots
from onnx_inplace.numba_kernels.layout import LOWEST
from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Value

LINE = 64  # bytes of a vector
_LARGEST = 32639.0  # of two planes: 127 * 256 + 127
_INTS = ir.VectorType(ir.IntType(32), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_HEADS = 4  # whose sums are kept in registers at once, in two planes

_I = types.int64


class Codes(Dots):
    """Writes what integers of two planes need."""

    def ints(self, number: int) -> Value:
        """An int32 in all lanes."""
        return self.lanes([number] * LANES)

    def rounded(self, x: Value) -> Value:
        """Nearest int32."""
        nearest = self._intrinsic(f"llvm.nearbyint.v{LANES}f32", VECTOR, [x])
        return self.builder.fptosi(nearest, _INTS)

    def store_any(self, vector: Value, address: Value) -> None:
        """Write a vector of any type."""
        self.builder.store(vector, self._memory(address, vector.type)).align = 1

    def store_one(self, vector: Value, address: Value) -> None:
        """Write the first lane."""
        one = self.builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))
        self.builder.store(one, self._memory(address, one.type)).align = 4

    def store_planes(self, x: Value, high: Value, low: Value) -> None:
        """16 int32 as 256 * high + low, each 16 int8."""
        b = self.builder
        first = b.trunc(x, _BYTES)
        self.store_any(first, low)
        rest = b.ashr(b.sub(x, b.sext(first, _INTS)), self.ints(8))
        self.store_any(b.trunc(rest, _BYTES), high)

    def fields(self, vector: Value, bits: int) -> list[Value]:
        """The codes of each byte, one vector for each of its fields."""
        b = self.builder
        if bits == 8:
            return [vector]
        mask = self.ints(sum(((1 << bits) - 1) << byte for byte in (0, 8, 16, 24)))
        return [
            b.and_(b.lshr(vector, self.ints(shift)) if shift else vector, mask)
            for shift in range(0, 8, bits)
        ]

    def centered(self, high: Value, low: Value, correction: Value, doubled: bool) -> Value:
        """Sum over codes less their center, times two where the center is not whole."""
        b = self.builder
        total = b.add(b.shl(high, self.ints(8)), low)
        if doubled:
            total = b.shl(total, self.ints(1))
        return b.sitofp(b.sub(total, correction), VECTOR)

    def write_planes(
        self, numbers: list[Value], highs: list[Value], lows: list[Value]
    ) -> tuple[Value, Value]:
        """Numbers as integers of two planes; the unit of these, and their sum, in all lanes."""
        b = self.builder
        largest = self.constant(1e-30)
        for x in numbers:
            largest = self.maximum(largest, self.absolute(x))
        largest = self.across(self.maximum, largest, LANES)
        factor, total = b.fdiv(self.constant(_LARGEST), largest), self.ints(0)
        for x, high, low in zip(numbers, highs, lows, strict=True):
            whole = self.rounded(b.fmul(x, factor))
            total = b.add(total, whole)
            self.store_planes(whole, high, low)
        return b.fmul(largest, self.constant(1 / _LARGEST)), self.across(b.add, total, LANES)


def make_fold(size: int, group: int, block: int, center2: int, by_channel: bool) -> Any:
    """``fold(queries, scales, midpoints, planes, aux)``: queries become integers.

    ``by_channel``: the scales of channels are multiplied into them first, and the products with the
    midpoints are known before any token is. ``center2`` is twice the center.

    Shapes:
        queries:           (group, size) float32
        scales, midpoints: (size) float16, with ``by_channel``
        planes:            (2, group, size) int8: high, low
        aux:               (group, blocks, 3) lines: unit, correction (int32), base
    """
    blocks = -(-size // block)

    @intrinsic
    def fold(typing_context, queries, scales, midpoints, planes, aux):
        def generate(context, builder, signature, arguments):
            e = Codes(builder, False)
            queries, scales, midpoints, planes, aux = arguments
            for g in range(group):
                for k in range(blocks):
                    columns = range(k * block, min(size, (k + 1) * block), LANES)
                    base = e.constant(0.0)
                    numbers = []
                    for c in columns:
                        query = e.load(e.add(queries, (g * size + c) * 4))
                        if by_channel:
                            middle = e.load(e.add(midpoints, 2 * c), FLOAT16)
                            base = e.fma(query, middle, base)
                            query = builder.fmul(query, e.load(e.add(scales, 2 * c), FLOAT16))
                        else:
                            base = builder.fadd(base, query)
                        numbers.append(query)
                    highs = [e.add(planes, g * size + c) for c in columns]
                    lows = [e.add(planes, (group + g) * size + c) for c in columns]
                    unit, total = e.write_planes(numbers, highs, lows)
                    if center2 % 2:
                        unit = builder.fmul(unit, e.constant(0.5))
                        correction = builder.mul(total, e.ints(center2))
                    else:
                        correction = builder.mul(total, e.ints(center2 // 2))
                    line = e.add(aux, (g * blocks + k) * 3 * LINE)
                    e.store(unit, line)
                    e.store_any(correction, e.add(line, LINE))
                    e.store(e.across(builder.fadd, base, LANES), e.add(line, 2 * LINE))
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I), generate

    return fold


def make_scores(
    bits: int, size: int, group: int, block: int, center2: int, by_channel: bool, affine: bool
) -> Any:
    """``scores(codes, tiles, scales, step, midpoint, planes, aux, to, ahead)``.

    Shapes:
        codes:  (tiles) tiles of 16 tokens
        scales: float16 of the first token, blocks ``step`` bytes apart; unless ``by_channel``
        to:     (tiles, group, 16) float32
        ahead:  address of what is read next, of the size of all tiles: it is asked for
    """
    blocks = -(-size // block)
    fields = 8 // bits
    tile = size * bits // 8 * LANES

    @intrinsic
    def scores(typing_context, codes, tiles, scales, step, midpoint, planes, aux, to, ahead):
        def generate(context, builder, signature, arguments):
            e = Codes(builder, False)
            codes, tiles, scales, step, midpoint, planes, aux, to, ahead = arguments
            with e.loop(tiles) as i:
                here, soon = e.add(codes, e.times(i, tile)), e.add(ahead, e.times(i, tile))
                for offset in range(0, tile, LINE):
                    e.prefetch(e.add(soon, offset))
                for begin in range(0, group, _HEADS):
                    heads = range(begin, min(group, begin + _HEADS))
                    result = {g: e.constant(0.0) for g in heads}
                    for k in range(blocks):
                        high = {g: e.ints(0) for g in heads}
                        low = {g: e.ints(0) for g in heads}
                        last = min(size, (k + 1) * block)
                        for v in range(k * block // (4 * fields), last // (4 * fields)):
                            parts = e.fields(e.integers(e.add(here, v * LINE)), bits)
                            for f, part in enumerate(parts):
                                c = (v * fields + f) * 4
                                for g in heads:
                                    at = e.add(planes, g * size + c)
                                    high[g] = e.dot(high[g], part, e.integer(at))
                                    at = e.add(planes, (group + g) * size + c)
                                    low[g] = e.dot(low[g], part, e.integer(at))
                        if not by_channel:
                            at = e.add(scales, e.add(e.times(step, k), e.times(i, 2 * LANES)))
                            d = e.load(at, FLOAT16)
                            middle = e.load(e.add(at, midpoint), FLOAT16) if affine else None
                        for g in heads:
                            line = e.add(aux, (g * blocks + k) * 3 * LINE)
                            correction = e.integers(e.add(line, LINE))
                            x = e.centered(high[g], low[g], correction, bool(center2 % 2))
                            unit, base = e.load(line), e.load(e.add(line, 2 * LINE))
                            if by_channel:
                                result[g] = e.fma(x, unit, base)
                                continue
                            result[g] = e.fma(builder.fmul(x, unit), d, result[g])
                            if affine:
                                result[g] = e.fma(base, middle, result[g])
                    for g in heads:
                        e.store(result[g], e.add(to, e.add(e.times(i, group * LINE), g * LINE)))
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I, _I, _I, _I, _I), generate

    return scores


def make_weights(size: int, group: int, block: int, center2: int, affine: bool, row: int) -> Any:
    """``weights(scores, tiles, first, last, states, scales, step, midpoint, planes, aux)``.

    One step of the online softmax, after which the weights, scales multiplied in, are integers.
    Tokens outside ``first .. last`` (of the tiles) weigh nothing, whatever their scales are.

    Shapes:
        scores:  (tiles, group, 16) float32, overwritten
        states:  (group, 2) float32: largest score, sum of weights
        scales:  float16 of the first token, blocks ``step`` bytes apart
        planes:  (blocks, 2, group, row) int8: high, low
        aux:     (group) lines of factors for older sums, then (group, blocks, 3) lines: unit,
                 correction (int32), sum of weights times midpoints
    """
    blocks = -(-size // block)

    @intrinsic
    def weights(typing_context, scores, tiles, first, last, states, scales, step, midpoint,
                planes, aux):  # fmt: skip
        def generate(context, builder, signature, arguments):
            e = Codes(builder, False)
            scores, tiles, first, last, states, scales, step, midpoint, planes, aux = arguments
            heads, zero, lowest = range(group), e.constant(0.0), e.constant(float(LOWEST))
            lanes = e.lanes(range(LANES))

            def variable(value: Value) -> Value:
                return cgutils.alloca_once_value(builder, value)

            def update(place: Value, change: Any) -> None:
                builder.store(change(builder.load(place)), place)

            def place(i: Value, g: int) -> Value:
                return e.add(scores, e.add(e.times(i, group * LINE), g * LINE))

            def masked(i: Value, x: Value, other: Value) -> Value:
                begin = e.times(i, LANES)
                x = e.where_less(lanes, e.splat_int(builder.sub(last, begin)), x, other)
                return e.where_less(lanes, e.splat_int(builder.sub(first, begin)), other, x)

            before = {g: e.load_all(e.add(states, 8 * g)) for g in heads}
            top = {g: variable(before[g]) for g in heads}
            with e.loop(tiles) as i:
                for g in heads:
                    x = masked(i, e.load(place(i, g)), lowest)
                    e.store(x, place(i, g))
                    update(top[g], lambda t, x=x: e.maximum(t, x))
            highest = {g: e.across(e.maximum, builder.load(top[g]), LANES) for g in heads}
            total = {g: variable(zero) for g in heads}
            largest = {g: variable(e.constant(1e-30)) for g in heads}
            middles = {(g, k): variable(zero) for g in heads for k in range(blocks)}
            with e.loop(tiles) as i:
                at = [e.add(scales, e.add(e.times(step, k), e.times(i, 2 * LANES)))
                      for k in range(blocks)]  # fmt: skip
                d = [masked(i, e.load(a, FLOAT16), zero) for a in at]
                m = []
                if affine:
                    m = [masked(i, e.load(e.add(a, midpoint), FLOAT16), zero) for a in at]
                widest = zero
                for x in d:
                    widest = e.maximum(e.absolute(x), widest)
                for g in heads:
                    weight = e.exp2(builder.fsub(e.load(place(i, g)), highest[g]))
                    weight = masked(i, weight, zero)
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
                factor[g] = builder.fdiv(e.constant(_LARGEST), most)
                unit[g] = builder.fmul(most, e.constant(1 / _LARGEST))
                shrink = e.exp2(builder.fsub(before[g], highest[g]))
                e.store(shrink, e.add(aux, g * LINE))
                old = e.load_all(e.add(states, 8 * g + 4))
                new = e.across(builder.fadd, builder.load(total[g]), LANES)
                e.store_one(highest[g], e.add(states, 8 * g))
                e.store_one(e.fma(old, shrink, new), e.add(states, 8 * g + 4))
            with e.loop(tiles) as i:
                for k in range(blocks):
                    at = e.add(scales, e.add(e.times(step, k), e.times(i, 2 * LANES)))
                    d_k = masked(i, e.load(at, FLOAT16), zero)
                    for g in heads:
                        x = builder.fmul(e.load(place(i, g)), factor[g])
                        whole = e.rounded(builder.fmul(x, d_k))
                        update(sums[g, k], lambda t, w=whole: builder.add(t, w))
                        high = e.add(planes, e.add(e.times(i, LANES), (2 * k * group + g) * row))
                        e.store_planes(whole, high, e.add(high, group * row))
            for g in heads:
                for k in range(blocks):
                    line = e.add(aux, (group + (g * blocks + k) * 3) * LINE)
                    all_ = e.across(builder.add, builder.load(sums[g, k]), LANES)
                    half = e.constant(0.5 if center2 % 2 else 1.0)
                    e.store(builder.fmul(unit[g], half), line)
                    twice = center2 if center2 % 2 else center2 // 2
                    e.store_any(builder.mul(all_, e.ints(twice)), e.add(line, LINE))
                    middle = e.across(builder.fadd, builder.load(middles[g, k]), LANES)
                    e.store(middle, e.add(line, 2 * LINE))
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I, _I, _I, _I, _I, _I), generate

    return weights


def make_sums(bits: int, size: int, group: int, block: int, center2: int, page_size: int) -> Any:
    """``sums(codes, first, last, planes, aux, to, ahead)``: weighted values join the sums.

    Shapes:
        codes:       (size / 16) tiles of 16 elements, of V
        first, last: vectors of a tile that have tokens with a weight
        planes, aux: as ``weights`` leaves them, rows of ``page_size``
        to:          (group, size) float32
        ahead:       address of what is read next, of the size of all tiles
    """
    blocks = -(-size // block)
    fields = 8 // bits
    tile = page_size * bits // 8 * LANES

    @intrinsic
    def sums(typing_context, codes, first, last, planes, aux, to, ahead):
        def panel(e: Codes, columns: list[int], begin: int, arguments: Any) -> None:
            """``columns``: numbers of one or two tiles of one block."""
            builder = e.builder
            codes, first, last, planes, aux, to, ahead = arguments
            heads, k = range(begin, min(group, begin + _HEADS)), columns[0] * LANES // block
            keys = [(p, g, c) for p in range(2) for g in heads for c in columns]
            kept = {key: cgutils.alloca_once_value(builder, e.ints(0)) for key in keys}
            with e.loop(builder.sub(last, first)) as j:
                v = e.add(first, j)
                now = {key: builder.load(place) for key, place in kept.items()}
                parts = {}
                for c in columns:
                    at = e.add(e.times(v, LINE), c * tile)
                    if begin == 0:
                        e.prefetch(e.add(ahead, at))
                    parts[c] = e.fields(e.integers(e.add(codes, at)), bits)
                for f in range(fields):
                    token = e.add(e.times(v, 4 * fields), 4 * f)
                    for p, g in ((p, g) for p in range(2) for g in heads):
                        row = ((2 * k + p) * group + g) * page_size
                        weight = e.integer(e.add(planes, e.add(token, row)))
                        for c in columns:
                            now[p, g, c] = e.dot(now[p, g, c], parts[c][f], weight)
                for key, place in kept.items():
                    builder.store(now[key], place)
            for g in heads:
                line = e.add(aux, (group + (g * blocks + k) * 3) * LINE)
                shrink, unit = e.load(e.add(aux, g * LINE)), e.load(line)
                correction, middle = e.integers(e.add(line, LINE)), e.load(e.add(line, 2 * LINE))
                for c in columns:
                    high, low = (builder.load(kept[p, g, c]) for p in range(2))
                    x = e.centered(high, low, correction, bool(center2 % 2))
                    place = e.add(to, (g * size + c * LANES) * 4)
                    x = e.fma(e.load(place), shrink, e.fma(x, unit, middle))
                    e.store(x, place)

        def generate(context, builder, signature, arguments):
            e = Codes(builder, False)
            for k in range(blocks):
                columns = list(range(k * block // LANES, min(size, (k + 1) * block) // LANES))
                for i in range(0, len(columns), 2):
                    for begin in range(0, group, _HEADS):
                        panel(e, columns[i : i + 2], begin, arguments)
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I, _I, _I), generate

    return sums
