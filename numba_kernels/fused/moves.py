"""Kernels that move elements: copies with strides and conversion, rows by index, tokens of a cache.

One thread does each of them (``interpreter.FIRST``), but for ``widening``: they are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import (
    FLOAT32,
    SIZES,
    bfloat16_of_float32,
    float16_of_float32,
    float32_of_float16,
    float_of_bits,
    floats,
    int64_at,
    narrow,
    uint16_at,
    widen,
)
from onnx_inplace.numba_kernels.fused.kernel import KERNEL, reader, share
from onnx_inplace.numba_kernels.memory import copy, kernel, load_int32, load_int64, on_demand

AXES = 6
BYTES = 3  # a kind beside those of ``floats``: bytes, which are moved as they are

_INT64 = ir.IntType(64)


class Move(NamedTuple):
    """``target[i, j, ...] = source[i, j, ...]``, converted where the kinds differ.

    ``d``: sizes, ``s`` and ``t``: strides in bytes of source and target, outermost axis first;
    missing axes have size 1. ``item`` is the size of an element where both kinds are BYTES.
    """

    source: int
    target: int
    source_kind: int
    target_kind: int
    item: int
    d0: int
    d1: int
    d2: int
    d3: int
    d4: int
    d5: int
    s0: int
    s1: int
    s2: int
    s3: int
    s4: int
    s5: int
    t0: int
    t1: int
    t2: int
    t3: int
    t4: int
    t5: int


def move_block(
    source: int,
    target: int,
    kinds: tuple[int, int],
    item: int,
    shape: Sequence[int],
    source_strides: Sequence[int],
    target_strides: Sequence[int],
) -> Move:
    """A :class:`Move` whose axes are merged where both sides allow it.

    Raises:
        ValueError: more than ``AXES`` axes are left.
    """
    items = [item if kind == BYTES else SIZES[kind] for kind in kinds]
    axes: list[tuple[int, int, int]] = []
    for d, s, t in zip(shape, source_strides, target_strides, strict=True):
        if d == 1:
            continue
        if axes and axes[-1][1] == d * s and axes[-1][2] == d * t:
            axes[-1] = axes[-1][0] * d, s, t
        else:
            axes.append((d, s, t))
    if len(axes) > AXES:
        raise ValueError(f"a copy over {len(axes)} axes")
    axes = [(1, items[0], items[1])] * (AXES - len(axes)) + axes
    numbers = [n for part in zip(*axes, strict=True) for n in part]
    return Move(source, target, *kinds, item, *numbers)


class Widen(NamedTuple):
    """``target = source`` for ``number`` float16 or bfloat16 (``kind``), as float32.

    Threads share ``units`` of neighbouring numbers.
    """

    source: int
    target: int
    number: int
    kind: int
    units: int  # divides the number


class Rows(NamedTuple):
    """``target[i] = source[indices[i]]`` for rows of ``size`` bytes.

    ``indices``: (number) int64, or int32 where ``wide`` is 0; negative ones count from the end.

    Danger: the caller has checked the indices.
    """

    source: int
    target: int
    indices: int
    wide: int
    number: int  # of indices
    rows: int
    size: int


class Tokens(NamedTuple):
    """New tokens of a cache.

    Shapes:
        cache:    (rows, capacity) tokens of ``token`` bytes, written
        values:   (rows, length) tokens, rows ``values_row`` and tokens ``values_token`` bytes apart
        position: (1) int64, first token written

    ``circular``: positions count modulo the capacity.

    Danger: the caller has checked the position.
    """

    cache: int
    values: int
    position: int
    rows: int
    capacity: int
    length: int
    token: int
    values_row: int
    values_token: int
    circular: int


class Attend(NamedTuple):
    """A call of a kernel of attention, see ``layout.KERNEL``.

    ``workers``: for how many the workspace is laid out; 0: for those that take part.
    """

    function: int
    layout: int
    query: int
    key: int
    value: int
    output: int
    lengths: int
    mask: int
    sinks: int
    space: int
    workers: int


class Begin(NamedTuple):
    """Prepares the workspace of attention: nothing is done yet; into how many splits to cut.

    ``lengths``: (batch) int64. As many splits as give each ``shortest`` tokens, at most ``most``.
    """

    space: int
    lengths: int
    batch: int
    shortest: int
    most: int


_read_move, _read_rows, _read_tokens = reader(Move), reader(Rows), reader(Tokens)
_read_widen = reader(Widen)
_read_attend, _read_begin = reader(Attend), reader(Begin)


@njit
def _load(place, kind):
    if kind == FLOAT32:
        return floats(place, 1)[0]
    bits = carray(uint16_at(place), (1,))[0]
    if kind == 1:
        return float32_of_float16(bits)
    return float_of_bits(np.int64(bits) << np.int64(16))


@njit
def _store(place, kind, number):
    if kind == FLOAT32:
        floats(place, 1)[0] = number
    elif kind == 1:
        carray(uint16_at(place), (1,))[0] = float16_of_float32(number)
    else:
        carray(uint16_at(place), (1,))[0] = bfloat16_of_float32(number)


@njit
def _convert(target, target_step, target_kind, source, source_step, source_kind, count):
    for i in range(count):
        number = _load(source + i * source_step, source_kind)
        _store(target + i * target_step, target_kind, number)


@njit
def _copy_item(target, source, item):
    """One element."""
    if item == 4:
        floats(target, 1)[0] = floats(source, 1)[0]
    elif item == 2:
        carray(uint16_at(target), (1,))[0] = carray(uint16_at(source), (1,))[0]
    else:
        copy(target, source, item)


@njit
def _line(x, target, source):
    """The innermost axis."""
    if x.source_kind == FLOAT32 and x.s5 == 4 and x.t5 == 2 and x.target_kind != BYTES:
        narrow(target, x.d5, source, x.target_kind)
    elif x.target_kind == FLOAT32 and x.t5 == 4 and x.s5 == 2 and x.source_kind != BYTES:
        widen(target, x.d5, source, x.source_kind)
    elif x.source_kind != x.target_kind:
        _convert(target, x.t5, x.target_kind, source, x.s5, x.source_kind, x.d5)
    elif x.s5 == x.item and x.t5 == x.item:
        copy(target, source, x.d5 * x.item)
    else:
        for i in range(x.d5):
            _copy_item(target + i * x.t5, source + i * x.s5, x.item)


@kernel(KERNEL)
def move(arguments, thread, threads):
    """A :class:`Move`."""
    x = _read_move(arguments)
    for i0 in range(x.d0):
        for i1 in range(x.d1):
            for i2 in range(x.d2):
                for i3 in range(x.d3):
                    s = x.source + i0 * x.s0 + i1 * x.s1 + i2 * x.s2 + i3 * x.s3
                    t = x.target + i0 * x.t0 + i1 * x.t1 + i2 * x.t2 + i3 * x.t3
                    for i4 in range(x.d4):
                        _line(x, t + i4 * x.t4, s + i4 * x.s4)


@kernel(KERNEL)
def widening(arguments, thread, threads):
    """A :class:`Widen`."""
    x = _read_widen(arguments)
    first, last = share(x.units, thread, threads)
    each = x.number // x.units
    widen(x.target + 4 * first * each, (last - first) * each, x.source + 2 * first * each, x.kind)


@kernel(KERNEL)
def rows(arguments, thread, threads):
    """A :class:`Rows`."""
    x = _read_rows(arguments)
    for i in range(x.number):
        index = load_int64(x.indices + 8 * i) if x.wide else load_int32(x.indices + 4 * i)
        if index < 0:
            index += x.rows
        copy(x.target + i * x.size, x.source + index * x.size, x.size)


@kernel(KERNEL)
def tokens(arguments, thread, threads):
    """A :class:`Tokens`."""
    x = _read_tokens(arguments)
    position = load_int64(x.position) if x.position else 0
    if x.circular:
        position %= x.capacity
    for r in range(x.rows):
        to = x.cache + r * x.capacity * x.token
        for t in range(x.length):
            place = position + t
            if place >= x.capacity:
                place -= x.capacity
            copy(to + place * x.token, x.values + r * x.values_row + t * x.values_token, x.token)


@intrinsic
def _call(typing_context, function, arguments):
    def generate(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [_INT64] * 11).as_pointer()
        inputs = [builder.extract_value(values[1], k) for k in range(11)]
        builder.call(builder.inttoptr(values[0], kind), inputs)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


@kernel(KERNEL)
def attend(arguments, thread, threads):
    """An :class:`Attend`."""
    x = _read_attend(arguments)
    workers = x.workers if x.workers else threads
    places = x.layout, x.query, x.key, x.value, x.output, x.lengths, x.mask, x.sinks, x.space
    _call(x.function, (*places, thread, workers))


@kernel(KERNEL)
def begin(arguments, thread, threads):
    """A :class:`Begin`."""
    x = _read_begin(arguments)
    lengths, space = carray(int64_at(x.lengths), (x.batch,)), carray(int64_at(x.space), (2,))
    longest = np.int64(0)
    for b in range(x.batch):
        longest = max(longest, lengths[b])
    space[0], space[1] = 0, max(1, min(x.most, longest // x.shortest))


@on_demand("int64(int64,int64,int64)")
def moved(fields, expected, count):
    """The first of ``count`` arrays that is not where it was expected; -1: all are.

    Shapes:
        fields:   (count) int64, ``id(array) + memory.FIELD``
        expected: (count) int64, addresses
    """
    places, addresses = carray(int64_at(fields), (count,)), carray(int64_at(expected), (count,))
    for k in range(count):
        if load_int64(places[k]) != addresses[k]:
            return k
    return -1
