"""Attention over pages of any formats in one call: several sequences, grouped heads, windows.

An item of work is a block of query rows of one kv head and a part of the pages. Values of rotated
formats are summed up as they are stored, in sums and an online softmax of their own, and rotated
back once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, njit
from numba.extending import register_jitable

from onnx_inplace.numba_kernels import layout, pages_items, pages_join, pages_layout, pages_task
from onnx_inplace.numba_kernels.floats import (
    exp2,
    float32_at,
    float_of_bits,
    floats,
    int32_at,
    int64_at,
    narrow,
    widen,
)
from onnx_inplace.numba_kernels.memory import call, copy, fetch_add, kernel
from onnx_inplace.numba_kernels.pages_lanes import rotate
from onnx_inplace.numba_kernels.pages_layout import read_half

TOKENS = 64
"""Bytes of workspace that hold a counter of items, the number of splits, and Tables; behind them
are ``pages_join.Words``."""
HEADER = TOKENS + -(-8 * pages_join.Words.END // 64) * 64  # bytes: all of these
LOG2_E = np.float32(1.4426950408889634)


class PagesLayout(NamedTuple):
    """What a call is, but for the addresses. Strides are in bytes; see ``layout.Layout``.

    The queries are the last of the valid tokens of their sequence.
    """

    batch: int
    kv_heads: int
    group: int  # query heads of one kv head
    tokens: int  # queries of one head
    head_size: int
    page_size: int
    blocks: int  # [pages] of a row of the block table
    formats: int  # descriptions
    query_kind: int
    output_kind: int
    left: int  # a query sees so many tokens before its own; -1: all
    right: int  # and so many behind it; -1: all
    scale: int  # bits of a float32
    softcap: int  # bits of a float32
    query_batch: int
    query_head: int
    query_token: int
    output_batch: int
    output_head: int
    output_token: int
    # what pages_kernels fills in
    rows: int  # query rows of an item: ``group``, or as many as a page kernel takes
    scratch: int  # bytes that a page kernel needs
    prepared: int  # bytes that a page kernel keeps for a format
    worker_bytes: int  # workspace of a worker, see :func:`worker_bytes`


class Tables(NamedTuple):
    """Addresses of what all sequences share; the pages of all have the same dims."""

    addresses: int  # (pages) int64
    formats: int  # (pages) int32: rows of the two tables that follow
    descriptions: int  # (formats, pages_layout.WORDS) int64
    kernels: int  # (formats) int64: addresses of page kernels
    blocks: int  # (batch, PagesLayout.blocks) int64: places in the first two arrays


def worker_bytes(x: PagesLayout) -> int:
    """Queries, sums and states, each plain and rotated; limits; task; workspace of page kernels."""
    numbers = x.rows * (4 * x.head_size + 4) * 4
    words = x.rows * 2 + pages_task.WORDS + x.formats
    return (numbers + 8 * words + x.scratch + x.formats * x.prepared + 63) // 64 * 64


@register_jitable  # kernels count them, too
def items(x: PagesLayout) -> int:
    """Items of a sequence that is not split: its kv heads, in pieces of ``rows``."""
    return x.kv_heads * -(-x.group * x.tokens // x.rows)


def workspace_size(x: PagesLayout, splits: int, workers: int) -> int:
    """Bytes of workspace. Its first two int64 have to be 0 and the number of splits."""
    partial = x.rows * (x.head_size + 2) * 4 if splits > 1 else 0
    results: int = x.batch * items(x) * splits * partial
    return HEADER + workers * x.worker_bytes + results


@njit
def _read(address):
    n = carray(int64_at(address), (24,))
    return PagesLayout(
        n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13],
        n[14], n[15], n[16], n[17], n[18], n[19], n[20], n[21], n[22], n[23],
    )  # fmt: skip


@njit
def _tables(address):
    n = carray(int64_at(address), (5,))
    return Tables(n[0], n[1], n[2], n[3], n[4])


@njit
def _row(x, h, row):
    """Token and query head of a row: rows of a kv head run over its group, then over tokens."""
    return row // x.group, h * x.group + row % x.group


@njit
def _begin(x, query, b, h, row, rows, queries, rotated, sums, states):
    """Scale and rotate the queries of an item; nothing is summed up."""
    size = x.head_size
    factor = float_of_bits(x.scale) * LOG2_E
    for r in range(rows):
        t, head = _row(x, h, row + r)
        source = query + b * x.query_batch + head * x.query_head + t * x.query_token
        widen(queries + r * size * 4, size, source, x.query_kind)
    q, turned = floats(queries, rows * size), floats(rotated, rows * size)
    for i in range(rows * size):
        q[i] *= factor
        turned[i] = q[i]
    rotate(rotated, rows * size, size & -size)
    o = floats(sums, 2 * x.rows * size)
    for i in range(2 * x.rows * size):
        o[i] = 0
    state = carray(float32_at(states), (2 * x.rows, 2))
    for r in range(2 * x.rows):
        state[r, 0], state[r, 1] = layout.LOWEST, 0


@njit
def _join(x, rows, sums, states):
    """Rotate back, and join what rotated and other pages have given, into the first sums."""
    size = x.head_size
    rotated = sums + x.rows * size * 4
    for r in range(rows):
        state = floats(states + r * 8, 2)
        other = floats(states + (x.rows + r) * 8, 2)
        if other[1] == 0:
            continue
        rotate(rotated + r * size * 4, size, size & -size)
        o, turned = floats(sums + r * size * 4, size), floats(rotated + r * size * 4, size)
        top = max(state[0], other[0])
        a, b = exp2(state[0] - top), exp2(other[0] - top)
        for i in range(size):
            o[i] = a * o[i] + b * turned[i]
        state[0], state[1] = top, a * state[1] + b * other[1]


@njit
def _places(at, format_, h):
    """Where K and V of a head begin in pages of a format; 1 if V is rotated."""
    description = at.descriptions + 8 * pages_layout.WORDS * format_
    key, value = read_half(description, 0), read_half(description, 1)
    return key.at + h * key.head, value.at + h * value.head, 1 if value.rotation else 0


@njit
def _first_page(x, at, lengths, splits, number):
    """Where K and V begin in the first page of an item; 0, 0: it has none, or there is no item."""
    if number >= x.batch * items(x) * splits:
        return np.int64(0), np.int64(0)
    i = pages_items.part_of(x, lengths, splits, number)
    if i.low >= i.high:
        return np.int64(0), np.int64(0)
    place = i.b * x.blocks + i.low // x.page_size
    page, format_ = _page(at, carray(int64_at(at.blocks + 8 * place), (1,))[0])
    key, value, _ = _places(at, format_, i.h)
    return page + key, page + value


@njit
def _attend(x, at, query, tokens, i, lengths, space, own):
    """Sum up an item, a ``Part``, in workspace ``own``; where sums and states are, the next item.

    Row ``t * group + g`` is token t in head g. The next item is taken before the last page of this
    one is read, which asks for its first page meanwhile: nobody else would.
    """
    size, page_size, h, rows = x.head_size, x.page_size, i.h, i.rows
    sums = own
    states = sums + 2 * x.rows * size * 4
    queries = states + 2 * x.rows * 2 * 4
    rotated = queries + x.rows * size * 4
    limits = rotated + x.rows * size * 4
    task = limits + x.rows * 16
    prepared = task + pages_task.WORDS * 8
    scratch = prepared + x.formats * 8
    stores = scratch + x.scratch

    _begin(x, query, i.b, h, i.row, rows, queries, rotated, sums, states)
    known = carray(int64_at(prepared), (x.formats,))
    for f in range(x.formats):
        known[f] = 0
    blocks = carray(int64_at(at.blocks + 8 * i.b * x.blocks), (x.blocks,))
    n = carray(int64_at(task), (pages_task.WORDS,))
    n[4], n[7], n[8], n[11], n[12], n[13] = rows, queries, rotated, limits, x.softcap, scratch
    end = (i.high + page_size - 1) // page_size
    joined = end - 1 if tokens != 0 and i.low < i.high == i.length else np.int64(-1)
    all_low, all_high = pages_items.seen_by_all(x, i)
    # What stays from page to page is written once: a page is a third of a microsecond.
    format_, whole, number = np.int64(-1), False, np.int64(-1)
    key = value = kernel_ = np.int64(0)
    for block in range(i.low // page_size, end):
        begin = block * page_size
        if block == joined:
            pages_join.join(tokens, i.b, h, (scratch + 63) // 64 * 64)
        if all_low <= begin and begin + page_size <= all_high:
            first, last = 0, page_size
            if not whole:
                pages_items.all_tokens(rows, page_size, limits)
            whole = True
        else:
            whole = False
            first, last = pages_items.limits(x, i, begin, limits)
            if first >= last:
                continue
        page, found = _page(at, blocks[block])
        if found != format_:
            format_ = found
            key, value, turned = _places(at, format_, h)
            kernel_ = carray(int64_at(at.kernels + 8 * format_), (1,))[0]
            n[0] = at.descriptions + 8 * pages_layout.WORDS * format_
            n[9] = sums + turned * x.rows * size * 4
            n[10] = states + turned * x.rows * 8
            n[14] = stores + format_ * x.prepared
        n[1], n[2] = page + key, page + value
        if block + 1 < end:
            following, other = _page(at, blocks[block + 1])
            next_key, next_value = key, value
            if other != format_:
                next_key, next_value, _ = _places(at, other, h)
            n[3], n[16] = following + next_key, following + next_value
        else:
            number = fetch_add(space, 1)
            n[3], n[16] = _first_page(x, at, lengths, carray(int64_at(space), (2,))[1], number)
        n[5], n[6], n[15] = first, last, 1 - known[format_]
        known[format_] = 1
        call(kernel_, task)
    _join(x, rows, sums, states)
    if number < 0:  # the last page is seen by no row, or there is none
        number = fetch_add(space, 1)
    return sums, states, number


@njit
def _page(at, place):
    """Address and format of a page."""
    page = carray(int64_at(at.addresses + 8 * place), (1,))[0]
    return page, np.int64(carray(int32_at(at.formats + 4 * place), (1,))[0])


@njit
def _finish(x, output, sinks, b, h, row, rows, sums, states, parts, step):
    """Write the output of rows; ``parts`` of sums and states lie ``step`` bytes apart."""
    size = x.head_size
    for r in range(rows):
        t, head = _row(x, h, row + r)
        top = layout.LOWEST
        for p in range(parts):
            top = max(top, floats(states + p * step + r * 8, 2)[0])
        total = np.float32(0)
        if sinks:
            sink = floats(sinks, head + 1)[head] * LOG2_E
            top = max(top, sink)
            total = exp2(sink - top)
        for p in range(parts):
            state = floats(states + p * step + r * 8, 2)
            total += exp2(state[0] - top) * state[1]
        # a row that sees nothing is a row of zeros
        inverse = np.float32(1) / total if total != 0 else np.float32(0)
        o = floats(sums + r * size * 4, size)
        factor = exp2(floats(states + r * 8, 2)[0] - top) * inverse
        for i in range(size):
            o[i] *= factor
        for p in range(1, parts):
            factor = exp2(floats(states + p * step + r * 8, 2)[0] - top) * inverse
            more = floats(sums + p * step + r * size * 4, size)
            for i in range(size):
                o[i] += factor * more[i]
        target = output + b * x.output_batch + head * x.output_head + t * x.output_token
        narrow(target, size, sums + r * size * 4, x.output_kind)


@njit
def _merge(x, output, sinks, splits, results):
    """Join the parts of every item that was split."""
    blocks = (x.group * x.tokens + x.rows - 1) // x.rows
    step = x.rows * (x.head_size + 2) * 4
    for item in range(x.batch * x.kv_heads * blocks):
        row = item % blocks * x.rows
        b, h = item // blocks // x.kv_heads, item // blocks % x.kv_heads
        rows = min(x.rows, x.group * x.tokens - row)
        sums = results + item * splits * step
        states = sums + x.rows * x.head_size * 4
        _finish(x, output, sinks, b, h, row, rows, sums, states, splits, step)


@kernel(layout.KERNEL)
def attend(layout_at, query, tables, tokens, output, lengths, mask, sinks, space, worker, workers):
    """Part of a worker: it takes items until none is left. A single worker joins the parts as well.

    ``tables``: address of Tables as int64. ``tokens``: address of ``pages_join.Words`` of tokens
    that are ``pages_join.apart`` and not yet written, with one query row for each query head; or 0.
    ``mask``: 0. ``space``: workspace whose first two int64 are 0 and the number of splits, see
    :func:`workspace_size`. Otherwise as ``layout.Places``.

    Danger: pages, lengths and block tables are not checked here.
    """
    x, at = _read(layout_at), _tables(tables)
    splits = carray(int64_at(space), (2,))[1]
    own = space + HEADER + worker * x.worker_bytes
    results = space + HEADER + workers * x.worker_bytes
    size, every = x.head_size, x.batch * items(x) * splits
    step = x.rows * (size + 2) * 4
    number = fetch_add(space, 1)
    while number < every:
        i = pages_items.part_of(x, lengths, splits, number)
        sums, states, number = _attend(x, at, query, tokens, i, lengths, space, own)
        if splits == 1:
            _finish(x, output, sinks, i.b, i.h, i.row, i.rows, sums, states, 1, 0)
            continue
        result = results + i.place * step
        copy(result, sums, i.rows * size * 4)
        copy(result + x.rows * size * 4, states, i.rows * 8)
    if workers == 1 and splits > 1:
        _merge(x, output, sinks, splits, results)


@kernel(layout.KERNEL)
def merge(layout_at, query, tables, unused, output, lengths, mask, sinks, space, worker, workers):
    """What is left to do when several ``workers`` have taken part and there are splits."""
    x = _read(layout_at)
    splits = carray(int64_at(space), (2,))[1]
    _merge(x, output, sinks, splits, space + HEADER + workers * x.worker_bytes)
