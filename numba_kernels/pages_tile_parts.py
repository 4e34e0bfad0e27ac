"""The inner loops of attention over pages of integer codes: scores, weights, sums.

Four codes meet four numbers of 8 bits in one instruction. Queries and weights, scales multiplied
in, are integers of 16 bits in two planes of 8, so that codes are never converted. Weights, which
are not negative, may have one plane: their error is a part of the largest weight. That of a query
is a part of all scores, which outliers make large. A vector of scores holds 16 tokens of one head,
a vector of sums 16 elements.

Memory is asked for up to a page ahead, into the second-level cache, a line or two at a time: a core
has only some loads under way (16 here, and requests into the second cache are among them), and a
burst of requests holds up all that stands behind it (measured: 12 %). It is asked for at two places
in turn, because the CPU then brings more of it by itself (11 %; four places are no better, eight
are worse). Such a request is dropped when too many are under way (one in twenty to a hundred, and
to wait for one of those takes as long as thirty others). So the same lines are asked for again,
into the first-level cache, one step of a loop before they are read; these requests are kept.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import FLOAT16
from onnx_inplace.numba_kernels.pages_tile_lanes import LINE, Asks, Codes, packs, spot
from onnx_inplace.numba_kernels.vector import LANES, Value

_HEADS = 4  # whose sums are kept in registers at once, in all planes
_TILES = 2  # that share each load of the queries
_PLANES = 2  # of queries

_I = types.int64


def make_fold(size: int, group: int, block: int, center2: int, by_channel: bool, asks: Asks) -> Any:
    """``fold(queries, scales, midpoints, planes, aux, soon, later)``: queries become integers.

    ``by_channel``: the scales of channels are multiplied into them first, and the products with the
    midpoints are known before any token is. ``center2`` is twice the center.

    Shapes:
        queries:           (group, size) float32
        scales, midpoints: (size) float16, with ``by_channel``
        planes:            (2, group, size) int8, the high one first
        aux:               (blocks, 3) lines as of ``write_lines``; bases are products with the
                           midpoints, or the sums of queries
        soon, later:       addresses of what is read later: ``asks`` lines of it are asked for

    Blocks of a row of ``planes`` are in the order of ``spot``.
    """
    blocks = -(-size // block)
    heads = range(group)

    @intrinsic
    def fold(typing_context, queries, scales, midpoints, planes, aux, soon, later):
        def generate(context, builder, signature, arguments):
            e = Codes(builder, _PLANES)
            queries, scales, midpoints, planes, aux, *ahead = arguments
            every = 2 * group * size  # products, and then integers

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
                    e.ask(ahead, asks, group * c, every, group * LANES)
                    scale = e.load(e.add(scales, 2 * c), FLOAT16) if by_channel else None
                    middle = e.load(e.add(midpoints, 2 * c), FLOAT16) if by_channel else None
                    for g in heads:
                        query, numbers[c, g] = scaled(c, scale, g)
                        if by_channel:
                            base[g] = e.fma(query, middle, base[g])
                        else:
                            base[g] = builder.fadd(base[g], query)
                        largest[g] = e.larger(numbers[c, g], largest[g])
                factors, unit = e.integers_of(e.by_head(e.maximum, largest))
                step = LINE if packs(end - begin) else LANES
                totals = []
                for g in heads:
                    factor, sums = e.of_head(factors, g), [e.ints(0)] * _PLANES
                    for first in range(begin, end, step):
                        columns = range(first, first + step, LANES)
                        done = group * (size + begin) + g * (end - begin) + first - begin
                        e.ask(ahead, asks, done, every, step)
                        whole = [e.rounded(builder.fmul(numbers[c, g], factor)) for c in columns]
                        at = e.add(planes, g * size + first)
                        sums = e.store_planes(whole, at, group * size, sums)
                    totals.append(e.joined_planes(sums))
                at = e.add(aux, k * 3 * LINE)
                total = e.by_head(builder.fadd, base)
                e.write_lines(at, unit, totals, total, center2 / 2, not by_channel)
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I, _I, _I), generate

    return fold


def make_scores(
    bits: int,
    size: int,
    group: int,
    block: int,
    center2: int,
    by_channel: bool,
    affine: bool,
    asks: Asks,
) -> Any:
    """``scores(codes, tiles, scales, step, midpoint, planes, aux, to, soon, later)``.

    ``planes`` and ``aux`` are what ``fold`` leaves.

    Shapes:
        codes:  (tiles) tiles of 16 tokens
        scales: float16 of the first token, blocks ``step`` bytes apart; unless ``by_channel``
        to:     (tiles, group, 16) float32
        soon, later: addresses of what is read later: each tile asks for ``asks`` lines of it

    Near the end, what lies behind the codes is taken for what is read next.
    """
    blocks = -(-size // block)
    fields = 8 // bits
    tile = size * bits // 8 * LANES

    @intrinsic
    def scores(typing_context, codes, tiles, scales, step, midpoint, planes, aux, to, soon, later):
        def some(e: Codes, arguments: Any, first: Value, together: int) -> None:
            """``together``: so many tiles share each load of the queries."""
            tiles = range(together)
            codes, _, scales, step, midpoint, planes, aux, to, *ahead = arguments
            here = [e.add(codes, e.times(e.add(first, t), tile)) for t in tiles]
            near = e.add(codes, e.times(e.add(first, together), tile))
            ahead, vectors = e.behind(ahead, first, asks), size // (4 * fields)
            lines = asks[0] * together, asks[1] * together
            asking = -(-group // _HEADS) * vectors
            for begin in range(0, group, _HEADS):
                heads = range(begin, min(group, begin + _HEADS))
                pairs = [(t, g) for t in tiles for g in heads]
                result = dict.fromkeys(pairs, e.constant(0.0))
                for k in range(blocks):
                    kept = {pair: [e.ints(0)] * _PLANES for pair in pairs}
                    last = min(size, (k + 1) * block)
                    for v in range(k * block // (4 * fields), last // (4 * fields)):
                        e.ask(ahead, lines, begin // _HEADS * vectors + v, asking)
                        for t in tiles if begin == 0 else ():
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
                            unit, offset = e.load_all(line), e.load_all(e.add(line, LINE))
                            x = e.of_integers(kept[t, g], unit, offset)
                            if by_channel:
                                result[t, g] = x
                                continue
                            result[t, g] = e.fma(x, d, result[t, g])
                            if affine:
                                base = e.load_all(e.add(line, 2 * LINE))
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

        return types.void(*[_I] * 10), generate

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
    asks: Asks,
    nearer: int,
) -> Any:
    """``sums(codes, first, last, planes, aux, to, soon, later, then)``: values join the sums.

    Shapes:
        codes:       (size / 16) tiles of 16 elements, of V
        first, last: vectors of a tile that have tokens with a weight
        planes, aux: as ``weights`` leaves them, rows of ``page_size``, ``count`` planes
        to:          (group, size) float32
        soon, later: addresses of what is read later: ``asks`` lines of it are asked for
        then:        address of what is read next: ``nearer`` lines of it are
    """
    fields = 8 // bits
    tile = page_size * bits // 8 * LANES
    vectors, ordered = page_size // (4 * fields), packs(page_size)
    every = panels(size, group, block)
    next_lines = -(-nearer // vectors)  # for each vector of the last panel

    def share(number: int) -> Asks:
        """Lines that a vector of a panel asks for."""
        first, second = (-(-lines // vectors) + len(every) - 1 - number for lines in asks)
        return first // len(every), second // len(every)

    shares = [share(number) for number in range(len(every))]

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
    def sums(typing_context, codes, first, last, planes, aux, to, soon, later, then):
        def panel(e: Codes, number: int, arguments: Any) -> None:
            """One of ``panels``."""
            builder = e.builder
            columns, begin = every[number]
            following = next((c for c, head in every[number + 1 :] if head == 0), range(0))
            codes, first, last, planes, aux, to, *ahead, then = arguments
            done = [
                sum(lines) * vectors * LINE for lines in zip((0, 0), *shares[:number], strict=True)
            ]
            ahead = [e.add(address, more) for address, more in zip(ahead, done, strict=True)]
            heads, k = range(begin, min(group, begin + _HEADS)), columns[0] * LANES // block
            keys = [(p, g, c) for p in range(count) for g in heads for c in columns]
            kept = {key: cgutils.alloca_once_value(builder, e.ints(0)) for key in keys}
            with e.loop(builder.sub(last, first)) as j:
                v = e.add(first, j)
                e.ask(e.behind(ahead, j, shares[number]), shares[number])
                for c in following if begin == 0 else ():
                    e.prefetch(e.add(codes, e.add(e.times(v, LINE), c * tile)), near=True)
                for n in range(next_lines if number == len(every) - 1 else 0):
                    at = e.add(then, e.times(v, next_lines * LINE))
                    e.prefetch(e.add(at, n * LINE), near=True)
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
                offset = e.load_all(e.add(line, LINE))
                for c in columns:
                    totals = [builder.load(kept[p, g, c]) for p in range(count)]
                    place = e.add(to, (g * size + c * LANES) * 4)
                    x = e.of_integers(totals, unit, offset)
                    e.store(e.fma(e.load(place), shrink, x), place)

        def generate(context, builder, signature, arguments):
            e = Codes(builder, count)
            for number in range(len(every)):
                panel(e, number, arguments)
            return context.get_dummy_value()

        return types.void(*[_I] * 9), generate

    return sums
