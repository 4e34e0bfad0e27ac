"""Scores and sums over rows of 8-bit floats by arithmetic in float16, 32 elements at once.

An 8-bit float becomes a float16 in a few instructions, but a float32 only by many more. Products
are summed up in float16 over one row, or over the tokens of one tile, and in float32 from there:
the error is one of single roundings to 11 bits, a fraction of what storing 8 bits has cost.

Queries and weights are multiplied by a power of two, so that no sum can leave the range of float16
whatever the codes are. Lanes are those of ``decode_parts``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.decode_parts import head_lanes
from onnx_inplace.numba_kernels.fused.lanes import Lanes
from onnx_inplace.numba_kernels.layout import LOWEST
from onnx_inplace.numba_kernels.pages_layout import E4M3
from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Value

TILE = 16  # tokens whose values are summed up in float16
WIDE = 2 * LANES  # elements of a vector of float16
_TOGETHER = 4  # keys that share each load of the queries
_HEADS = 4  # whose sums are kept in registers at once
_PANEL = 4  # vectors of sums of each of them
_LINE = 64
_MOST = 65504.0  # of a float16

_I = types.int64
_HALF, _SHORT, _INT = ir.HalfType(), ir.IntType(16), ir.IntType(32)
_HALVES, _NARROW = ir.VectorType(_HALF, WIDE), ir.VectorType(_HALF, LANES)
_SHORTS, _INTS = ir.VectorType(_SHORT, LANES), ir.VectorType(_INT, LANES)


def unit(kind: int) -> float:
    """What a number that ``Emitter.halves_of_bytes`` reads has to be multiplied by."""
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
    """What weights are multiplied by: those of a tile are summed up in float16."""
    return _power(_MOST / (TILE * _largest(kind)))


class _Halves(Lanes):
    """Arithmetic on 32 float16."""

    def row(self, address: Value) -> Value:
        """32 float16."""
        value = self.builder.load(self._memory(address, _HALVES))
        value.align = 2
        return value

    def put(self, vector: Value, address: Value) -> None:
        """Store a vector of any type."""
        self.builder.store(vector, self._memory(address, vector.type)).align = 2

    def twice(self, address: Value) -> Value:
        """Two float16 in all lanes."""
        number = self.builder.load(self._memory(address, _INT))
        number.align = 4
        return self.builder.bitcast(self.splat(number, _INTS), _HALVES)

    def multiply_add(self, a: Value, b: Value, c: Value | None) -> Value:
        """``a * b + c``; without ``c`` the product."""
        if c is None:
            return self.builder.fmul(a, b)
        return self._intrinsic(f"llvm.fma.v{WIDE}f16", _HALVES, [a, b, c])

    def narrowed(self, x: Value) -> Value:
        """16 float32 as float16, in the low halves of int32."""
        bits = self.builder.bitcast(self.builder.fptrunc(x, _NARROW), _SHORTS)
        return self.builder.zext(bits, _INTS)

    def parts(self, x: Value) -> list[Value]:
        """The first and the last 16 elements as float32."""
        b = self.builder
        both = [self.lanes(range(first, first + LANES)) for first in (0, LANES)]
        return [b.fpext(b.shuffle_vector(x, x, lanes), VECTOR) for lanes in both]

    def totals(self, vectors: Sequence[Value]) -> Value:
        """Lane i, as float32 = the sum of the lanes of ``vectors[i]``: 15 additions of float16."""
        b, vectors, width = self.builder, list(vectors), LANES
        while width > 1:
            half, kept = width // 2, len(vectors) // 2
            order: list[int] = []
            for s in range(LANES // width):
                first = [s * width + k for k in range(half)]
                order += first + [LANES + k for k in first]
            # neighbours of float16 stay together: lanes of 32 bits are moved by one instruction
            pairs = [b.bitcast(v, _INTS) for v in vectors]
            joined = []
            for x, y in zip(pairs[:kept], pairs[kept:], strict=True):
                moved = [self.shuffle(x, y, [k + d for k in order]) for d in (0, half)]
                joined.append(b.fadd(*(b.bitcast(m, _HALVES) for m in moved)))
            vectors, width = joined, half
        bits = b.bitcast(vectors[0], _INTS)
        neighbours = [bits, b.lshr(bits, self.lanes([16] * LANES))]
        halves = [b.bitcast(b.trunc(n, _SHORTS), _NARROW) for n in neighbours]
        return b.fadd(*(b.fpext(h, VECTOR) for h in halves))


def make_prepare(kind: int, size: int, group: int) -> Any:
    """``prepare(queries, to, units)``: queries become float16 of the range that is safe.

    Shapes:
        queries: (group, size) float32
        to:      (group, size) float16
        units:   (16) float32, by lane of scores: what these have to be multiplied by
    """
    tokens, most = LANES // head_lanes(group), query_range(kind, size)

    @intrinsic
    def prepare(typing_context, queries, to, units):
        def generate(context, builder, signature, arguments):
            e = _Halves(builder)
            queries, to, units = arguments
            unit_of = [e.constant(1.0)] * LANES
            for g in range(group):
                places = [e.add(queries, (g * size + c) * 4) for c in range(0, size, LANES)]
                largest = e.constant(1e-30)
                for place in places:
                    largest = e.maximum(largest, e.absolute(e.load(place)))
                largest = e.across(e.maximum, largest, LANES)
                factor = builder.fdiv(e.constant(most), largest)
                for c, place in enumerate(places):
                    half = builder.fptrunc(builder.fmul(e.load(place), factor), _NARROW)
                    e.put(half, e.add(to, (g * size + c * LANES) * 2))
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
    """``scores(keys, count, queries, units, to, ahead)``: products of keys with all heads.

    Shapes:
        keys:    (count) rows of ``size`` elements of ``kind``
        queries, units: as ``prepare`` leaves them
        to:      (groups of tokens, 16) float32; LOWEST where there is no token
        ahead:   bytes from a key to the one to ask for
    """
    tokens = LANES // head_lanes(group)

    @intrinsic
    def scores(typing_context, keys, count, queries, units, to, ahead):
        def generate(context, builder, signature, arguments):
            e = _Halves(builder)
            keys, count, queries, units, to, ahead = arguments
            last = e.add(count, -1)
            lanes = e.lanes([lane % tokens for lane in range(LANES)])
            zero = ir.Constant(_HALVES, [0.0] * WIDE)
            with e.loop(e.groups(count, tokens)) as g:
                first = e.times(g, tokens)
                rows = [
                    e.add(keys, e.times(e.least(e.add(first, j), last), size))
                    for j in range(tokens)
                ]
                sums: list[Value | None] = [None] * LANES
                for j in range(0, tokens, _TOGETHER):
                    near = range(j, min(tokens, j + _TOGETHER))
                    for c in range(0, size, WIDE):
                        if c % _LINE == 0:
                            for i in near:
                                e.prefetch(e.add(e.add(rows[i], ahead), c), near=True)
                        key = [e.halves_of_bytes(e.add(rows[i], c), kind, WIDE) for i in near]
                        for head in range(group):
                            query = e.row(e.add(queries, (head * size + c) * 2))
                            for i, k in zip(near, key, strict=True):
                                lane = head * tokens + i
                                sums[lane] = e.multiply_add(k, query, sums[lane])
                total = e.totals([zero if x is None else x for x in sums])
                total = builder.fmul(total, e.load(units))
                left = e.splat_int(builder.sub(count, first))
                row = e.where_less(lanes, left, total, e.constant(float(LOWEST)))
                e.store(row, e.add(to, e.times(g, 64)))
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I, _I), generate

    return scores


def make_gather(kind: int, size: int, group: int) -> Any:
    """``gather(values, count, weights, pairs, state, sums, ahead)``: add weighted values.

    Shapes:
        values:  (count) rows of ``size`` elements of ``kind``, at most TILE
        weights: (groups of tokens, 16) float32, as ``decode_parts.make_soften`` leaves them
        pairs:   (groups of tokens, 16, 2) float16, workspace: weights, in the range that is safe
        state:   (3, 16) float32: the last row are the factors for older sums
        sums:    (group, size) float32
        ahead:   bytes from a value to the one to ask for
    """
    tokens = LANES // head_lanes(group)
    safe = weight_range(kind)

    @intrinsic
    def gather(typing_context, values, count, weights, pairs, state, sums, ahead):
        def panel(e: _Halves, heads: range, columns: range, arguments: Any) -> None:
            """Some columns of some heads."""
            builder = e.builder
            values, count, _, pairs, state, sums, ahead = arguments
            last, zero = e.add(count, -1), ir.Constant(_HALVES, [0.0] * WIDE)
            kept = {}
            for key in itertools.product(heads, columns):
                kept[key] = cgutils.alloca_once(builder, _HALVES)
                builder.store(zero, kept[key])
            with e.loop(e.groups(count, tokens)) as g:
                now = {key: builder.load(place) for key, place in kept.items()}
                row = e.add(pairs, e.times(g, 64))
                for j in range(tokens):
                    token = e.least(e.add(e.times(g, tokens), j), last)
                    value = e.add(values, e.times(token, size))
                    for c in columns if heads.start == 0 else ():
                        if c % _LINE == 0:
                            e.prefetch(e.add(e.add(value, ahead), c), near=True)
                    part = {c: e.halves_of_bytes(e.add(value, c), kind, WIDE) for c in columns}
                    for h in heads:
                        weight = e.twice(e.add(row, (h * tokens + j) * 4))
                        for c in columns:
                            now[h, c] = e.multiply_add(weight, part[c], now[h, c])
                for key, place in kept.items():
                    builder.store(now[key], place)
            back = e.constant(unit(kind) / safe)
            for h in heads:
                shrink = e.load_all(e.add(state, 128 + h * tokens * 4))
                for c in columns:
                    for i, x in enumerate(e.parts(builder.load(kept[h, c]))):
                        place = e.add(sums, (h * size + c + i * LANES) * 4)
                        old = builder.fmul(e.load(place), shrink)
                        e.store(e.fma(x, back, old), place)

        def generate(context, builder, signature, arguments):
            e = _Halves(builder)
            _, count, weights, pairs, *_ = arguments
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

        return types.void(_I, _I, _I, _I, _I, _I, _I), generate

    return gather
