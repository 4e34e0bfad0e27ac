"""Scores and sums over rows of 8-bit floats by arithmetic in float16, 32 elements at once.

An 8-bit float becomes a float16 in a few instructions, but a float32 only by many more. Products
are summed up in float16 over one row, or over the tokens of a part, and in float32 from there:
the error is one of single roundings to 11 bits, a fraction of what storing 8 bits has cost.

Queries and weights are multiplied by a power of two, so that no sum can leave the range of float16
whatever the codes are. Lanes are those of ``decode_parts``.

Rows are given by a table of offsets: those of a tile come from several places of a page. A vector
of products has half a row of one token and half a row of another one, so that their sums are added
up together. What is read later is asked for while something is computed, a line at a time: a core
has only some requests under way.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.decode_parts import head_lanes
from onnx_inplace.numba_kernels.layout import LOWEST
from onnx_inplace.numba_kernels.pages_bytes_lanes import LINE, WIDE, Halves, split
from onnx_inplace.numba_kernels.pages_layout import E4M3
from onnx_inplace.numba_kernels.vector import LANES, Value

TILE = 64  # tokens of one pass through the three loops
PART = 32  # tokens whose values are summed up in float16: half the conversions of 16
_TOGETHER = 4  # pairs of keys that share each load of the queries
_HEADS = 4  # whose sums are kept in registers at once
_PANEL = 4  # vectors of sums of each of them
_MOST = 65504.0  # of a float16

_I = types.int64


def unit(kind: int) -> float:
    """What a number that ``Halves.widened`` gives has to be multiplied by."""
    return 256.0 if kind == E4M3 else 1.0


def _largest(kind: int) -> float:
    """The largest number as it is read."""
    return 448.0 / 256 if kind == E4M3 else 57344.0


def _power(limit: float) -> float:
    """The largest power of two up to ``limit``."""
    return math.ldexp(1.0, math.floor(math.log2(limit)))


def query_range(kind: int, size: int) -> float:
    """What queries may be at most: half of a row's products is summed up in float16."""
    return _power(_MOST / (size / 2 * _largest(kind)))


def weight_range(kind: int) -> float:
    """What weights are multiplied by: those of a part are summed up in float16."""
    return _power(_MOST / (PART * _largest(kind)))


class _Rows(NamedTuple):
    """What says where the rows of a tile are, and what is asked for meanwhile; int64.

    Rows up to ``near`` ask for what is ``ahead`` bytes behind them, those after it for what is
    ``beyond`` bytes behind.
    """

    base: Value  # address
    offsets: Value  # address of (count) int64: from ``base`` to each row
    count: Value
    near: Value
    ahead: Value
    beyond: Value

    def at(self, e: Halves, first: Value, numbers: range) -> list[Value]:
        """Addresses of rows ``first + numbers``; those that are none are the last one."""
        places = [e.add(self.offsets, e.times(e.add(first, j), 8)) for j in numbers]
        return [e.add(self.base, e.load_int(place)) for place in places]

    def step(self, e: Halves, first: Value) -> Value:
        """From a row to what is asked for."""
        near = e.builder.icmp_signed("<", first, self.near)
        return e.builder.select(near, self.ahead, self.beyond)


def make_prepare(kind: int, size: int, group: int) -> Any:
    """``prepare(queries, to, units)``: queries become float16 of the range that is safe.

    Shapes:
        queries: (group, size) float32
        to:      (group, size / 32, 2, 2, 16) float16: 32 elements as ``pages_bytes_lanes.split``
                 orders them, each part twice
        units:   (16) float32, by lane of scores: what these have to be multiplied by
    """
    tokens, most = LANES // head_lanes(group), query_range(kind, size)

    @intrinsic
    def prepare(typing_context, queries, to, units):
        def generate(context, builder, signature, arguments):
            e = Halves(builder)
            queries, to, units = arguments
            unit_of = [e.constant(1.0)] * LANES
            for g in range(group):
                places = [e.add(queries, (g * size + c) * 4) for c in range(0, size, LANES)]
                largest = e.constant(1e-30)
                for place in places:
                    largest = e.maximum(largest, e.absolute(e.load(place)))
                largest = e.across(e.maximum, largest, LANES)
                factor = builder.fdiv(e.constant(most), largest)
                halves = [e.rounded(builder.fmul(e.load(place), factor)) for place in places]
                for c in range(0, size, WIDE):
                    both = halves[c // LANES : c // LANES + 2]
                    for part, lanes in enumerate(split(range(WIDE))):
                        twice = e.picked(both[0], both[1], lanes * 2)
                        e.put(twice, e.add(to, ((g * size + c) * 2 + part * WIDE) * 2))
                mine = builder.fmul(largest, e.constant(unit(kind) / most))
                unit_of[g * tokens : (g + 1) * tokens] = [mine] * tokens
            row = unit_of[0]
            for lane in range(1, LANES):
                order = [LANES + i if i == lane else i for i in range(LANES)]
                row = e.shuffle(row, unit_of[lane], order)
            e.store(row, units)
            return context.get_dummy_value()

        return types.void(_I, _I, _I), generate

    return prepare


def make_scores(kind: int, size: int, group: int) -> Any:
    """``scores(keys, offsets, count, queries, units, to, seen, near, ahead, beyond)``.

    Shapes:
        keys, offsets, count, near, ahead, beyond: rows of ``size`` elements of ``kind``, see _Rows
        queries, units: as ``prepare`` leaves them
        to:   (groups of tokens, 16) float32, an even number of groups; LOWEST where there is no
              token
        seen: a line, see ``Halves.suspected``: of keys
    """
    tokens = LANES // head_lanes(group)

    @intrinsic
    def scores(typing_context, keys, offsets, count, queries, units, to, seen, near, ahead, beyond):
        def generate(context, builder, signature, arguments):
            e = Halves(builder)
            keys, offsets, count, queries, units, to, seen, *asked = arguments
            rows = _Rows(keys, offsets, count, *asked)
            lanes = e.lanes([lane % tokens for lane in range(LANES)])
            suspects = cgutils.alloca_once_value(builder, e.line(seen))
            with e.loop(e.groups(count, 2 * tokens)) as g:
                first = e.times(g, 2 * tokens)
                place, step = rows.at(e, first, range(2 * tokens)), rows.step(e, first)
                sums: list[Value | None] = [None] * LANES
                for j in range(0, tokens, _TOGETHER):
                    near = range(j, min(tokens, j + _TOGETHER))
                    for c in range(0, size, WIDE):
                        if c % LINE == 0:
                            for i in (*near, *(tokens + i for i in near)):
                                e.prefetch(e.add(e.add(place[i], step), c), near=True)
                        codes = [
                            e.two_rows(e.add(place[i], c), e.add(place[tokens + i], c))
                            for i in near
                        ]
                        if kind == E4M3:
                            builder.store(e.suspected(codes, builder.load(suspects)), suspects)
                        key = [e.widened(x, kind) for x in codes]
                        for head, part in itertools.product(range(group), range(2)):
                            at = ((head * size + c) * 2 + part * WIDE) * 2
                            query = e.row(e.add(queries, at))
                            for i, k in zip(near, key, strict=True):
                                lane = head * tokens + i
                                sums[lane] = e.multiply_add(k[part], query, sums[lane])
                found = e.totals([e.zero() if x is None else x for x in sums])
                for half, total in enumerate(found):
                    scaled = builder.fmul(total, e.load(units))
                    left = e.splat_int(builder.sub(count, e.add(first, half * tokens)))
                    row = e.where_less(lanes, left, scaled, e.constant(float(LOWEST)))
                    e.store(row, e.add(to, e.add(e.times(g, 128), half * 64)))
            e.put(builder.load(suspects), seen)
            return context.get_dummy_value()

        return types.void(*[_I] * 10), generate

    return scores


def make_gather(kind: int, size: int, group: int) -> Any:
    """``gather(values, offsets, count, weights, pairs, state, sums, seen, near, ahead, beyond)``.

    Shapes:
        values, offsets, count, near, ahead, beyond: rows of ``size`` elements of ``kind``, see
                 _Rows, at most PART
        weights: (groups of tokens, 16) float32, as ``decode_parts.make_soften`` leaves them
        pairs:   (groups of tokens, 16, 2) float16, workspace: weights, in the range that is safe
        state:   (3, 16) float32: the last row are the factors for older sums
        sums:    (group, size) float32
        seen:    a line, see ``Halves.suspected``: of values in whole lines; NaN of others stay
    """
    tokens = LANES // head_lanes(group)
    safe = weight_range(kind)

    @intrinsic
    def gather(
        typing_context, values, offsets, count, weights, pairs, state, sums, seen, near, ahead,
        beyond,
    ):  # fmt: skip
        def panel(e: Halves, heads: range, columns: range, arguments: Any) -> None:
            """Some columns of some heads."""
            builder = e.builder
            values, offsets, count, _, pairs, state, sums, seen, *asked = arguments
            rows = _Rows(values, offsets, count, *asked)
            kept = {key: cgutils.alloca_once(builder, e.zero().type)
                    for key in itertools.product(heads, columns)}  # fmt: skip
            for place in kept.values():
                builder.store(e.zero(), place)
            lines = [c for c in range(columns.start, columns.stop - WIDE, LINE)]
            looks = kind == E4M3 and heads.start == 0
            suspects = cgutils.alloca_once_value(builder, e.line(seen))
            with e.loop(e.groups(count, tokens)) as g:
                now = {key: builder.load(place) for key, place in kept.items()}
                row, first = e.add(pairs, e.times(g, 64)), e.times(g, tokens)
                step = rows.step(e, first)
                for j, value in enumerate(rows.at(e, first, range(tokens))):
                    for c in columns if heads.start == 0 else ():
                        if c % LINE == 0:
                            e.prefetch(e.add(e.add(value, step), c), near=True)
                    part, codes = {}, {c: e.line(e.add(value, c)) for c in lines}
                    if looks:
                        found = e.suspected(list(codes.values()), builder.load(suspects))
                        builder.store(found, suspects)
                    for c, line in codes.items():
                        part[c], part[c + WIDE] = e.widened(line, kind)
                    if columns.stop % LINE:
                        c = columns.stop - WIDE
                        part[c] = e.halves_of_bytes(e.add(value, c), kind, WIDE)
                    for h in heads:
                        weight = e.twice(e.add(row, (h * tokens + j) * 4))
                        for c in columns:
                            now[h, c] = e.multiply_add(weight, part[c], now[h, c])
                for key, place in kept.items():
                    builder.store(now[key], place)
            if looks:
                e.put(builder.load(suspects), seen)
            back = e.constant(unit(kind) / safe)
            for h in heads:
                shrink = e.load_all(e.add(state, 128 + h * tokens * 4))
                total = {c: builder.load(kept[h, c]) for c in columns}
                for c in lines:
                    total[c], total[c + WIDE] = e.joined_line(total[c], total[c + WIDE])
                for c in columns:
                    for i, x in enumerate(e.parts(total[c])):
                        place = e.add(sums, (h * size + c + i * LANES) * 4)
                        old = builder.fmul(e.load(place), shrink)
                        e.store(e.fma(x, back, old), place)

        def generate(context, builder, signature, arguments):
            e = Halves(builder)
            _, _, count, weights, pairs, *_ = arguments
            lanes = e.lanes([lane % tokens for lane in range(LANES)])
            with e.loop(e.groups(count, tokens)) as g:
                offset = e.times(g, 64)
                one = builder.fmul(e.load(e.add(weights, offset)), e.constant(safe))
                bits = e.narrowed(one)
                # a row that stands for no token is read: its weight is not 0, times infinity NaN
                left = e.splat_int(builder.sub(count, e.times(g, tokens)))
                bits = e.where_less(lanes, left, bits, e.lanes([1] * LANES))
                both = builder.or_(bits, builder.shl(bits, e.lanes([16] * LANES)))
                e.put(both, e.add(pairs, offset))
            for first in range(0, group, _HEADS):
                heads = range(first, min(group, first + _HEADS))
                for c in range(0, size, _PANEL * WIDE):
                    panel(e, heads, range(c, min(size, c + _PANEL * WIDE), WIDE), arguments)
            return context.get_dummy_value()

        return types.void(*[_I] * 11), generate

    return gather
