"""The inner loops of attention over pages of integer codes: scores, weights, sums.

Four codes meet four numbers of 8 bits in one instruction. Queries and weights, scales multiplied
in, are integers of 16 bits in two planes of 8, so that codes are never converted. Weights, which
are not negative, may have one plane: their error is a part of the largest weight. That of a query
is a part of all scores, which outliers make large. A vector of scores holds 16 tokens of one head,
a vector of sums 16 elements.

Memory is asked for half a page ahead, into the second-level cache, a line or two at a time: a core
has only some loads under way, and a burst of requests holds up all that stands behind it (measured:
12 %). Such a request is dropped when too many are under way (one in twenty to a hundred, and to
wait for one of those takes as long as thirty others). So the same lines are asked for again, into
the first-level cache, one step of a loop before they are read; these requests are kept.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import FLOAT16
from onnx_inplace.numba_kernels.pages_tile_lanes import LINE, Codes, packs, spot
from onnx_inplace.numba_kernels.vector import LANES, Value

_HEADS = 4  # whose sums are kept in registers at once, in all planes
_AGAIN = 8  # bits of the codes that are asked for twice: fewer bits wait for arithmetic instead
_TILES = 2  # that share each load of the queries
_PLANES = 2  # of queries

_I = types.int64


def make_fold(size: int, group: int, block: int, center2: int, by_channel: bool) -> Any:
    """``fold(queries, scales, midpoints, planes, aux)``: queries become integers.

    ``by_channel``: the scales of channels are multiplied into them first, and the products with the
    midpoints are known before any token is. ``center2`` is twice the center.

    Shapes:
        queries:           (group, size) float32
        scales, midpoints: (size) float16, with ``by_channel``
        planes:            (2, group, size) int8, the high one first
        aux:               (blocks, 3) lines: unit, correction (int32), base

    Blocks of a row of ``planes`` are in the order of ``spot``.
    """
    blocks = -(-size // block)
    heads = range(group)

    @intrinsic
    def fold(typing_context, queries, scales, midpoints, planes, aux):
        def generate(context, builder, signature, arguments):
            e = Codes(builder, _PLANES)
            queries, scales, midpoints, planes, aux = arguments

            def scaled(c: int, scale: Value, g: int) -> tuple[Value, Value]:
                """16 elements of a query, and what they are times their scales."""
                query = e.load(e.add(queries, (g * size + c) * 4))
                return query, query if scale is None else builder.fmul(query, scale)

            for k in range(blocks):
                begin, end = k * block, min(size, (k + 1) * block)
                base = [e.constant(0.0)] * group
                largest = [e.constant(1e-30)] * group
                numbers: dict[tuple[int, int], Value] = {}
                for c in range(begin, end, LANES):
                    scale = e.load(e.add(scales, 2 * c), FLOAT16) if by_channel else None
                    middle = e.load(e.add(midpoints, 2 * c), FLOAT16) if by_channel else None
                    for g in heads:
                        query, x = scaled(c, scale, g)
                        if by_channel:
                            base[g] = e.fma(query, middle, base[g])
                        else:
                            base[g] = builder.fadd(base[g], query)
                        largest[g] = e.maximum(largest[g], e.absolute(x))
                        numbers[c, g] = x
                factors, unit = e.integers_of(e.by_head(e.maximum, largest))
                step = LINE if packs(end - begin) else LANES
                totals = []
                for g in heads:
                    factor, sums = e.of_head(factors, g), [e.ints(0)] * _PLANES
                    for first in range(begin, end, step):
                        columns = range(first, first + step, LANES)
                        whole = [e.rounded(builder.fmul(numbers[c, g], factor)) for c in columns]
                        at = e.add(planes, g * size + first)
                        found = e.store_planes(whole, at, group * size)
                        sums = [builder.add(x, y) for x, y in zip(sums, found, strict=True)]
                    totals.append(e.joined_planes(sums))
                e.write_lines(e.add(aux, k * 3 * LINE), unit, totals, base, center2)
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I), generate

    return fold


def make_scores(
    bits: int,
    size: int,
    group: int,
    block: int,
    center2: int,
    by_channel: bool,
    affine: bool,
    asks: int,
) -> Any:
    """``scores(codes, tiles, scales, step, midpoint, planes, aux, to, ahead)``.

    ``planes`` and ``aux`` are what ``fold`` leaves.

    Shapes:
        codes:  (tiles) tiles of 16 tokens
        scales: float16 of the first token, blocks ``step`` bytes apart; unless ``by_channel``
        to:     (tiles, group, 16) float32
        ahead:  address of what is read later: each tile asks for ``asks`` lines of it
    """
    blocks = -(-size // block)
    fields = 8 // bits
    tile = size * bits // 8 * LANES

    @intrinsic
    def scores(typing_context, codes, tiles, scales, step, midpoint, planes, aux, to, ahead):
        def some(e: Codes, arguments: Any, first: Value, together: int) -> None:
            """``together``: so many tiles share each load of the queries."""
            builder, tiles = e.builder, range(together)
            codes, _, scales, step, midpoint, planes, aux, to, ahead = arguments
            here = [e.add(codes, e.times(e.add(first, t), tile)) for t in tiles]
            following = e.least(e.add(first, together), e.add(arguments[1], -together))
            near = e.add(codes, e.times(following, tile))
            soon, vectors = e.add(ahead, e.times(first, asks * LINE)), size // (4 * fields)
            asking = -(-group // _HEADS) * vectors
            for begin in range(0, group, _HEADS):
                heads = range(begin, min(group, begin + _HEADS))
                pairs = [(t, g) for t in tiles for g in heads]
                result = dict.fromkeys(pairs, e.constant(0.0))
                for k in range(blocks):
                    kept = {pair: [e.ints(0)] * _PLANES for pair in pairs}
                    last = min(size, (k + 1) * block)
                    for v in range(k * block // (4 * fields), last // (4 * fields)):
                        e.ask(soon, asks * together, begin // _HEADS * vectors + v, asking)
                        for t in tiles if begin == 0 and bits == _AGAIN else ():
                            e.prefetch(e.add(near, t * tile + v * LINE), near=True)
                        parts = [e.fields(e.integers(e.add(x, v * LINE)), bits) for x in here]
                        for f in range(fields):
                            c = k * block + 4 * spot(
                                v * fields + f - k * block // 4, last - k * block
                            )
                            for g, p in ((g, p) for g in heads for p in range(_PLANES)):
                                query = e.integer(e.add(planes, (p * group + g) * size + c))
                                for t in tiles:
                                    kept[t, g][p] = e.dot(kept[t, g][p], parts[t][f], query)
                    for t in tiles:
                        if not by_channel:
                            offset = e.times(e.add(first, t), 2 * LANES)
                            at = e.add(scales, e.add(e.times(step, k), offset))
                            d = e.load(at, FLOAT16)
                            middle = e.load(e.add(at, midpoint), FLOAT16) if affine else None
                        for g in heads:
                            line = e.add(aux, k * 3 * LINE + 4 * g)
                            correction = e.integer(e.add(line, LINE))
                            x = e.centered(kept[t, g], correction, bool(center2 % 2))
                            unit, base = e.load_all(line), e.load_all(e.add(line, 2 * LINE))
                            if by_channel:
                                result[t, g] = e.fma(x, unit, base)
                                continue
                            result[t, g] = e.fma(builder.fmul(x, unit), d, result[t, g])
                            if affine:
                                result[t, g] = e.fma(base, middle, result[t, g])
                for t, g in pairs:
                    place = e.add(e.times(e.add(first, t), group * LINE), g * LINE)
                    e.store(result[t, g], e.add(to, place))

        def generate(context, builder, signature, arguments):
            e = Codes(builder, _PLANES)
            tiles = arguments[1]
            whole = builder.sdiv(tiles, e.whole(_TILES))
            with e.loop(whole) as i:
                some(e, arguments, e.times(i, _TILES), _TILES)
            done = e.times(whole, _TILES)
            with e.loop(builder.sub(tiles, done)) as i:
                some(e, arguments, e.add(done, i), 1)
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I, _I, _I, _I, _I), generate

    return scores


def panels(size: int, group: int, block: int) -> list[tuple[range, int]]:
    """What ``sums`` does at once: one or two tiles of 16 columns of one block, the first head."""
    blocks = [range(k // LANES, min(size, k + block) // LANES) for k in range(0, size, block)]
    pairs = [tiles[i : i + 2] for tiles in blocks for i in range(0, len(tiles), 2)]
    return [(tiles, head) for tiles in pairs for head in range(0, group, _HEADS)]


def make_sums(
    bits: int,
    size: int,
    group: int,
    block: int,
    center2: int,
    page_size: int,
    count: int,
    lines: int,
) -> Any:
    """``sums(codes, first, last, planes, aux, to, ahead)``: weighted values join the sums.

    Shapes:
        codes:       (size / 16) tiles of 16 elements, of V
        first, last: vectors of a tile that have tokens with a weight
        planes, aux: as ``weights`` leaves them, rows of ``page_size``, ``count`` planes
        to:          (group, size) float32
        ahead:       address of what is read later: ``lines`` lines of it are asked for
    """
    fields = 8 // bits
    tile = page_size * bits // 8 * LANES
    vectors, ordered = page_size // (4 * fields), packs(page_size)
    every = panels(size, group, block)
    whole, more = divmod(-(-lines // vectors), len(every))
    shares = [whole + (number < more) for number in range(len(every))]  # lines for each vector

    def four(e: Codes, v: Value) -> Value:
        """Where the weights of the first tokens of vector ``v`` lie, as :func:`spot` says."""
        number = e.times(v, fields)
        if not ordered:
            return number
        b, three = e.builder, e.whole(3)
        upper = b.and_(number, e.whole(-LANES))
        lane = b.shl(b.and_(number, three), e.whole(2))
        part = b.and_(b.lshr(number, e.whole(2)), three)
        return e.add(e.add(upper, lane), part)

    @intrinsic
    def sums(typing_context, codes, first, last, planes, aux, to, ahead):
        def panel(e: Codes, number: int, arguments: Any) -> None:
            """One of ``panels``."""
            builder = e.builder
            columns, begin = every[number]
            following = next((c for c, head in every[number + 1 :] if head == 0), range(0))
            codes, first, last, planes, aux, to, ahead = arguments
            heads, k = range(begin, min(group, begin + _HEADS)), columns[0] * LANES // block
            keys = [(p, g, c) for p in range(count) for g in heads for c in columns]
            kept = {key: cgutils.alloca_once_value(builder, e.ints(0)) for key in keys}
            with e.loop(builder.sub(last, first)) as j:
                v = e.add(first, j)
                asked = sum(shares[:number]) * vectors * LINE
                e.ask(e.add(ahead, e.add(e.times(j, shares[number] * LINE), asked)), shares[number])
                for c in following if begin == 0 and bits == _AGAIN else ():
                    e.prefetch(e.add(codes, e.add(e.times(v, LINE), c * tile)), near=True)
                now = {key: builder.load(place) for key, place in kept.items()}
                parts = {}
                for c in columns:
                    at = e.add(e.times(v, LINE), c * tile)
                    parts[c] = e.fields(e.integers(e.add(codes, at)), bits)
                for f in range(fields):
                    token = e.add(e.times(four(e, v), 4), 4 * f * (4 if ordered else 1))
                    for p, g in ((p, g) for p in range(count) for g in heads):
                        row = ((count * k + p) * group + g) * page_size
                        weight = e.integer(e.add(planes, e.add(token, row)))
                        for c in columns:
                            now[p, g, c] = e.times_codes(now[p, g, c], parts[c][f], weight)
                for key, place in kept.items():
                    builder.store(now[key], place)
            for g in heads:
                line = e.add(aux, (1 + k * 3) * LINE + 4 * g)
                shrink, unit = e.load_all(e.add(aux, 4 * g)), e.load_all(line)
                correction = e.integer(e.add(line, LINE))
                middle = e.load_all(e.add(line, 2 * LINE))
                for c in columns:
                    totals = [builder.load(kept[p, g, c]) for p in range(count)]
                    x = e.centered(totals, correction, bool(center2 % 2))
                    place = e.add(to, (g * size + c * LANES) * 4)
                    x = e.fma(e.load(place), shrink, e.fma(x, unit, middle))
                    e.store(x, place)

        def generate(context, builder, signature, arguments):
            e = Codes(builder, count)
            for number in range(len(every)):
                panel(e, number, arguments)
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I, _I, _I), generate

    return sums
