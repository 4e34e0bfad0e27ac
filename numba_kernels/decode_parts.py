"""The three inner loops of decode attention: scores, softmax, sum of values.

The query heads of a kv head are done together, so that a key is converted once for all of them. A
vector of 16 lanes holds the scores of ``16 // lanes`` tokens for each head: lane
``head * tokens + token``; ``lanes`` is the number of heads, rounded up to a power of two.

Rows of a tile come from several places (``streams``): row r is ``r // streams`` rows of the cache
(``down`` bytes each) behind the one ``r % streams`` times ``across`` bytes behind the first. Each
place is a stream of its own for the CPU's prefetcher, which stops at the end of each 4 KiB: with
one stream of keys and one of values a core waits there, with several of each it has other requests
under way.

Scores are in base 2: the caller has multiplied the queries by log2(e).
"""

from __future__ import annotations

import itertools
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import SIZES
from onnx_inplace.numba_kernels.layout import LOWEST
from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Emitter, Value

TILE = 32  # tokens of one pass through the three loops: best of 16 to 256
_REGISTERS = 16  # accumulators that are kept at once
_HEADS = 8  # heads that share each load of the values
_TOGETHER = 4  # keys that share each load of the queries

_LINE = 64  # bytes that one access brings from memory

_I = types.int64


def head_lanes(group: int) -> int:
    """Heads, rounded up to a power of two."""
    return 1 << (group - 1).bit_length()


def streams(kind: int, size: int) -> int:
    """Places that rows of ``size`` elements of ``kind`` are read from, a power of two.

    The best of 1 to 16: 8 for rows of 256 bytes and more, read from memory; 4 for those of
    SmolLM2-135M, 128 bytes, which are in the last cache of a CPU at times.
    """
    return 8 if size * SIZES[kind] >= 256 else 4


def _row(e: Emitter, base: Value, down: Value, across: Value, row: Value, count: int) -> Value:
    """Address of a row of a tile that comes from ``count`` places."""
    b = e.builder
    stream = b.and_(row, e.whole(count - 1))
    step = b.ashr(row, e.whole(count.bit_length() - 1))
    return e.add(base, e.add(e.times(step, down), e.times(stream, across)))


def make_scores(kind: int, size: int, group: int) -> Any:
    """``scores(keys, down, across, count, queries, to, ahead)``: products of keys with all heads.

    Shapes:
        keys:    (count) rows of ``size`` elements of ``kind``
        queries: (group, size) float32
        to:      (groups of tokens, 16) float32; LOWEST where there is no token
        ahead:   bytes from a key to the one to ask for
    """
    tokens, places = LANES // head_lanes(group), streams(kind, size)

    @intrinsic
    def scores(typing_context, keys, down, across, count, queries, to, ahead):
        def generate(context, builder, signature, arguments):
            e = Emitter(builder)
            keys, down, across, count, queries, to, ahead = arguments
            last = e.add(count, -1)
            lanes = e.lanes([lane % tokens for lane in range(LANES)])
            with e.loop(e.groups(count, tokens)) as g:
                first = e.times(g, tokens)
                rows = [
                    _row(e, keys, down, across, e.least(e.add(first, j), last), places)
                    for j in range(tokens)
                ]
                sums = [e.constant(0.0)] * LANES
                for j in range(0, tokens, _TOGETHER):
                    near = range(j, min(tokens, j + _TOGETHER))
                    for c in range(0, size, 2 * LANES):
                        width, offset = min(2, (size - c) // LANES), c * SIZES[kind]
                        for at in range(offset, offset + width * LANES * SIZES[kind], LANES):
                            if at % _LINE == 0:
                                for i in near:
                                    e.prefetch(e.add(e.add(rows[i], ahead), at), near=True)
                        key = [e.load_row(e.add(rows[i], offset), width, kind) for i in near]
                        for head, v in itertools.product(range(group), range(width)):
                            query = e.load(e.add(queries, (head * size + c + v * LANES) * 4))
                            for i, k in zip(near, key, strict=True):
                                lane = head * tokens + i
                                sums[lane] = e.fma(k[v], query, sums[lane])
                left = e.splat_int(builder.sub(count, first))
                row = e.where_less(lanes, left, e.sums(sums), e.constant(float(LOWEST)))
                e.store(row, e.add(to, e.times(g, 64)))
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I, _I, _I), generate

    return scores


def make_ask(kind: int, size: int) -> Any:
    """``ask(rows, down, across)``: ask for the rows of a tile."""

    @intrinsic
    def ask(typing_context, rows, down, across):
        def generate(context, builder, signature, arguments):
            e = Emitter(builder)
            rows, down, across = arguments
            with e.loop(e.whole(TILE)) as r:
                row = _row(e, rows, down, across, r, streams(kind, size))
                for at in range(0, size * SIZES[kind], _LINE):
                    e.prefetch(e.add(row, at))
            return context.get_dummy_value()

        return types.void(_I, _I, _I), generate

    return ask


def make_soften(group: int) -> Any:
    """``soften(scores, count, state)``: scores become weights, and the state takes them in.

    Shapes:
        scores: (groups of tokens, 16) float32, in place
        state:  (3, 16) float32: largest score, sum of weights by lane, factor for older sums
    """
    tokens = LANES // head_lanes(group)

    @intrinsic
    def soften(typing_context, scores, count, state):
        def generate(context, builder, signature, arguments):
            e = Emitter(builder)
            scores, count, state = arguments
            groups = e.groups(count, tokens)
            before = e.load(state)
            top = cgutils.alloca_once_value(builder, before)
            builder.store(before, top)
            with e.loop(groups) as g:
                row = e.load(e.add(scores, e.times(g, 64)))
                builder.store(e.maximum(builder.load(top), row), top)
            highest = e.across(e.maximum, builder.load(top), tokens)
            shrink = e.weight(builder.fsub(before, highest))
            # a tile is summed up by itself: roundings of a long sum would add up
            total = cgutils.alloca_once(builder, VECTOR)
            builder.store(e.constant(0.0), total)
            with e.loop(groups) as g:
                place = e.add(scores, e.times(g, 64))
                weight = e.weight(builder.fsub(e.load(place), highest))
                e.store(weight, place)
                builder.store(builder.fadd(builder.load(total), weight), total)
            e.store(highest, state)
            sums = e.fma(e.load(e.add(state, 64)), shrink, builder.load(total))
            e.store(sums, e.add(state, 64))
            e.store(shrink, e.add(state, 128))
            return context.get_dummy_value()

        return types.void(_I, _I, _I), generate

    return soften


def make_gather(kind: int, size: int, group: int) -> Any:
    """``gather(values, down, across, count, weights, state, sums, ahead)``: add weighted values.

    A part of the columns is summed up for all heads, so that each value is converted once.

    Shapes:
        values:  (count) rows of ``size`` elements of ``kind``
        weights: (groups of tokens, 16) float32, as ``soften`` leaves them
        sums:    (group, size) float32
        ahead:   bytes from a value to the one to ask for
    """
    tokens = LANES // head_lanes(group)
    heads_at_once = min(group, _HEADS)
    width = max(1, _REGISTERS // heads_at_once) * LANES  # elements that are summed up at once

    @intrinsic
    def gather(typing_context, values, down, across, count, weights, state, sums, ahead):
        def panel(e: Emitter, heads: range, columns: range, arguments: Any) -> None:
            """Some columns of some heads."""
            builder = e.builder
            values, down, across, count, weights, state, sums, ahead = arguments
            last = e.add(count, -1)
            places = {(h, c): e.add(sums, (h * size + c) * 4) for h in heads for c in columns}
            kept = {key: cgutils.alloca_once(builder, VECTOR) for key in places}
            for place in kept.values():
                builder.store(e.constant(0.0), place)
            with e.loop(e.groups(count, tokens)) as g:
                now = {key: builder.load(place) for key, place in kept.items()}
                row = e.add(weights, e.times(g, 64))
                for j in range(tokens):
                    token = e.least(e.add(e.times(g, tokens), j), last)
                    value = _row(e, values, down, across, token, streams(kind, size))
                    for c in columns if heads.start == 0 else ():
                        if c * SIZES[kind] % _LINE == 0:
                            e.prefetch(e.add(e.add(value, ahead), c * SIZES[kind]), near=True)
                    begin = e.add(value, columns.start * SIZES[kind])
                    parts = dict(zip(columns, e.load_row(begin, len(columns), kind), strict=True))
                    for h in heads:
                        weight = e.load_all(e.add(row, (h * tokens + j) * 4))
                        for c in columns:
                            now[h, c] = e.fma(weight, parts[c], now[h, c])
                for key, place in kept.items():
                    builder.store(now[key], place)
            for h in heads:  # a tile is summed up by itself, see ``make_soften``
                shrink = e.load_all(e.add(state, 128 + h * tokens * 4))
                for c in columns:
                    older, place = e.load(places[h, c]), places[h, c]
                    e.store(e.fma(older, shrink, builder.load(kept[h, c])), place)

        def generate(context, builder, signature, arguments):
            e = Emitter(builder)
            for first in range(0, group, heads_at_once):
                heads = range(first, min(group, first + heads_at_once))
                for c in range(0, size, width):
                    panel(e, heads, range(c, min(size, c + width), LANES), arguments)
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I, _I, _I, _I), generate

    return gather
