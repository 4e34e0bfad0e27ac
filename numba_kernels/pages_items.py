"""What an item of attention over pages is: which rows, over which tokens, and what each sees.

``x`` is a ``pages_attention.PagesLayout``.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import carray, njit

from onnx_inplace.numba_kernels import layout
from onnx_inplace.numba_kernels.floats import int64_at


class Part(NamedTuple):
    """An item of work: some query rows of a kv head of a sequence, over some of its tokens."""

    b: int  # sequence
    h: int  # kv head
    row: int  # the first of the rows
    rows: int
    low: int  # tokens low .. high
    high: int
    length: int  # of the sequence
    place: int  # among the results of all parts


@njit
def part_of(x, lengths, splits, number):
    """The ``Part`` that item ``number`` is."""
    count = x.group * x.tokens
    blocks = (count + x.rows - 1) // x.rows
    part, rest = number % splits, number // splits
    # the later rows of a causal prompt see more keys
    row = (blocks - 1 - rest % blocks) * x.rows
    b, h = rest // blocks // x.kv_heads, rest // blocks % x.kv_heads
    rows = min(x.rows, count - row)
    length = carray(int64_at(lengths), (x.batch,))[b]
    start = length - x.tokens
    low, _ = layout.visible(x, length, start + row // x.group)
    _, high = layout.visible(x, length, start + (row + rows - 1) // x.group)
    first = low // x.page_size
    pages = (high + x.page_size - 1) // x.page_size - first
    chunk = (pages + splits - 1) // splits * x.page_size
    first = first * x.page_size + part * chunk
    place = (rest - rest % blocks + row // x.rows) * splits + part
    return Part(b, h, row, rows, max(low, first), min(high, first + chunk), length, place)


@njit
def limits(x, i, begin, to):
    """What each row of a ``Part`` sees of the page that begins at token ``begin``, and the hull.

    ``to``: (rows, 2) int64: the first token of the page, and one past the last.
    """
    limit, start = carray(int64_at(to), (i.rows, 2)), i.length - x.tokens
    first, last = x.page_size, 0
    for r in range(i.rows):
        from_, until = layout.visible(x, i.length, start + (i.row + r) // x.group)
        from_, until = max(from_, i.low) - begin, min(until, i.high) - begin
        from_, until = max(from_, 0), min(until, x.page_size)
        if from_ >= until:
            from_ = until = 0
        else:
            first, last = min(first, from_), max(last, until)
        limit[r, 0], limit[r, 1] = from_, until
    return first, last


@njit
def seen_by_all(x, i):
    """First, and one past the last of the tokens of a ``Part`` that all of its rows see."""
    low, high, start = i.low, i.high, i.length - x.tokens
    for r in range(i.rows):
        from_, until = layout.visible(x, i.length, start + (i.row + r) // x.group)
        low, high = max(low, from_), min(high, until)
    return low, high


@njit
def all_tokens(rows, page_size, to):
    """``limits`` of rows that see a whole page."""
    limit = carray(int64_at(to), (rows, 2))
    for r in range(rows):
        limit[r, 0], limit[r, 1] = 0, page_size
