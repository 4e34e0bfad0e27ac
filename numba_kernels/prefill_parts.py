"""The inner loops of prefill attention: a tile of keys and values, products, softmax.

A block of 8 query rows meets a tile of 64 keys. The keys are transposed once for all blocks, so
that both products are of one form: rows times columns, 8 rows by 2 vectors kept in registers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from onnx_inplace.numba_kernels.floats import SIZES
from onnx_inplace.numba_kernels.layout import LOWEST
from onnx_inplace.numba_kernels.pages_layout import E4M3
from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Emitter, Value

BLOCK = 8  # query rows
TILE = 64  # keys
ROWS = 256  # query rows of an item, at most: they share the conversion of every tile
_MANY = 16  # items of so many rows are enough for all threads; else they have half as many
_UNROLLED = 4
LINE = 64  # bytes: vectors that cross the border of a cache line are read in two steps

_I = types.int64


@register_jitable  # the caller's workspace depends on it, too
def item_rows(count: int, heads: int, most: int = ROWS) -> int:
    """Query rows of an item, in whole blocks, where each of ``heads`` kv heads has ``count``."""
    rows = most
    if heads * ((count + rows - 1) // rows) < _MANY:
        rows = most // 2
    return min(rows, (count + BLOCK - 1) // BLOCK * BLOCK)


@intrinsic
def ask(typing_context, place, size):
    """Ask for ``size`` bytes of memory that are read later, from ``place`` on."""

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        place, size = arguments
        with e.loop(e.groups(size, LINE)) as i:
            e.prefetch(e.add(place, e.times(i, LINE)))
        return context.get_dummy_value()

    return types.void(_I, _I), generate


def make_pack(kind: int, size: int, *, keys_only: bool = False) -> Any:
    """``pack(keys, key_stride, values, value_stride, count, to_keys, to_values)``.

    With ``keys_only`` nothing is read at ``values`` and written to ``to_values``.

    Shapes:
        keys, values: (count) rows of ``size`` elements of ``kind``, strides in bytes, count <= TILE
        to_keys:      (size, TILE) float32; behind ``count`` the last key is repeated
        to_values:    (TILE, size) float32; likewise
    """
    item = SIZES[kind]

    def load(e: Emitter, address: Value) -> Value:
        x = e.load(address, kind)
        return e.builder.fmul(x, e.constant(256.0)) if kind == E4M3 else x

    @intrinsic
    def pack(typing_context, keys, key_stride, values, value_stride, count, to_keys, to_values):
        def generate(context, builder, signature, arguments):
            e = Emitter(builder)
            keys, key_stride, values, value_stride, count, to_keys, to_values = arguments
            last = e.add(count, -1)
            with e.loop(e.whole(TILE // LANES)) as g:
                first = e.times(g, LANES)
                tokens = [e.least(e.add(first, j), last) for j in range(LANES)]
                key_rows = [e.add(keys, e.times(t, key_stride)) for t in tokens]
                value_rows = [e.add(values, e.times(t, value_stride)) for t in tokens]
                with e.loop(e.whole(size // LANES)) as c:
                    column = e.times(c, LANES)
                    offset = e.times(column, item)
                    rows = e.transposed([load(e, e.add(row, offset)) for row in key_rows])
                    for j, row in enumerate(rows):
                        place = e.add(e.times(e.add(column, j), TILE), first)
                        e.store(row, e.add(to_keys, e.times(place, 4)))
                    for j, row in enumerate(() if keys_only else value_rows):
                        place = e.add(e.times(e.add(first, j), size), column)
                        e.store(load(e, e.add(row, offset)), e.add(to_values, e.times(place, 4)))
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I, _I, _I), generate

    return pack


def make_product(depth: int, columns: int, keep: bool) -> Any:
    """``product(a, b, c, factors)``: ``c = a @ b``, or with ``keep`` ``c = factors * c + a @ b``.

    Shapes:
        a:       (BLOCK, depth) float32
        b:       (depth, columns) float32
        c:       (BLOCK, columns) float32
        factors: (BLOCK) float32; 0 without ``keep``
    """

    def panel(e: Emitter, a: Value, b: Value, c: Value, factors: Value, vectors: int) -> None:
        """``vectors`` vectors of columns of all rows."""
        builder = e.builder
        kept = {}
        for row in range(BLOCK):
            for v in range(vectors):
                place = e.add(c, (row * columns + v * LANES) * 4)
                kept[row, v] = place, cgutils.alloca_once(builder, VECTOR)
                start = e.constant(0.0)
                if keep:
                    start = builder.fmul(e.load_all(e.add(factors, row * 4)), e.load(place))
                builder.store(start, kept[row, v][1])
        with e.loop(e.whole(depth // _UNROLLED)) as g:
            now = {key: builder.load(variable) for key, (_, variable) in kept.items()}
            for u in range(_UNROLLED):
                d = e.add(e.times(g, _UNROLLED), u)
                line = e.add(b, e.times(d, columns * 4))
                right = [e.load(e.add(line, v * LANES * 4)) for v in range(vectors)]
                for row in range(BLOCK):
                    left = e.load_all(e.add(a, e.add(e.times(d, 4), row * depth * 4)))
                    for v in range(vectors):
                        now[row, v] = e.fma(left, right[v], now[row, v])
            for key, (_, variable) in kept.items():
                builder.store(now[key], variable)
        for place, variable in kept.values():
            e.store(builder.load(variable), place)

    @intrinsic
    def product(typing_context, a, b, c, factors):
        def generate(context, builder, signature, arguments):
            e = Emitter(builder)
            a, b, c, factors = arguments
            pairs, rest = divmod(columns // LANES, 2)
            with e.loop(e.whole(pairs)) as g:
                offset = e.times(g, 2 * LANES * 4)
                panel(e, a, e.add(b, offset), e.add(c, offset), factors, 2)
            if rest:
                offset = 2 * pairs * LANES * 4
                panel(e, a, e.add(b, offset), e.add(c, offset), factors, 1)
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I), generate

    return product


@intrinsic
def soften(typing_context, scores, limits, top, total, factors):
    """``soften(scores, limits, top, total, factors)``: scores of a block become weights.

    Shapes:
        scores:     (BLOCK, TILE) float32, in place
        limits:     (BLOCK, 2) int64: first and one past the last key of the tile that a row sees
        top, total: (BLOCK) float32: largest score and sum of weights until now
        factors:    (BLOCK) float32: becomes what older sums have to be multiplied with
    """

    def generate(context, builder, signature, arguments):
        e = Emitter(builder)
        scores, limits, top, total, factors = arguments
        zero, lowest = e.constant(0.0), e.constant(float(LOWEST))
        lanes = [e.lanes(range(c, c + LANES)) for c in range(0, TILE, LANES)]
        with e.loop(e.whole(BLOCK)) as row:
            line, number = e.add(scores, e.times(row, TILE * 4)), e.times(row, 4)
            first = e.splat_int(e.load_int(e.add(limits, e.times(row, 16))))
            last = e.splat_int(e.load_int(e.add(e.add(limits, e.times(row, 16)), 8)))
            before = e.load_all(e.add(top, number))
            highest, columns = before, []
            for c, lane in enumerate(lanes):
                score = e.load(e.add(line, c * LANES * 4))
                score = e.where_less(lane, last, score, lowest)
                score = e.where_less(lane, first, lowest, score)
                columns.append(score)
                highest = e.maximum(highest, score)
            highest = e.across(e.maximum, highest, LANES)
            shrink = e.weight(builder.fsub(before, highest))
            weights = zero
            for c, (lane, score) in enumerate(zip(lanes, columns, strict=True)):
                weight = e.weight(builder.fsub(score, highest))
                weight = e.where_less(lane, last, weight, zero)
                weight = e.where_less(lane, first, zero, weight)
                e.store(weight, e.add(line, c * LANES * 4))
                weights = builder.fadd(weights, weight)
            weights = e.across(builder.fadd, weights, LANES)
            weights = e.fma(e.load_all(e.add(total, number)), shrink, weights)
            for vector, place in ((highest, top), (weights, total), (shrink, factors)):
                one = builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))
                pointer = builder.inttoptr(e.add(place, number), ir.FloatType().as_pointer())
                builder.store(one, pointer).align = 4
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I, _I), generate
