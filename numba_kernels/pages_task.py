"""What a page kernel is told: attention of some query rows of one kv head over a part of one page.

Attention over pages is a driver (``pages_attention``) that calls, for each page, the kernel of the
page's format by its address. A mixture of formats therefore costs what its pages cost. The portable
kernel serves every format.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import carray, njit

from onnx_inplace.numba_kernels.floats import int64_at

KERNEL = "void(int64)"
"""Signature of a page kernel: the address of a Task."""


class Task(NamedTuple):
    """Addresses and numbers of one call, int64.

    Scores are in base 2: the queries have been multiplied by scale * log2(e). Rows of queries and
    sums are (rows, head_size) float32; states are (rows, 2) float32: the reference of weights until
    now, which is the largest score, or up to 40 below or 17 above it, and the sum of weights;
    limits are (rows, 2) int64: the first token of the page that a row sees, and one past the last;
    all are within ``first .. last``.
    """

    description: int  # of the page's format
    key: int  # this head's K in the page
    value: int
    next: int  # this head's K in the page that follows; 0: none
    rows: int
    first: int
    last: int
    queries: int
    rotated: int  # the queries, rotated
    sums: int  # over values as they are stored
    states: int
    limits: int
    softcap: int  # bits of a float32
    scratch: int  # workspace
    prepared: int  # workspace that is kept between the pages of one format
    fresh: int  # 1: nothing has been prepared
    next_value: int  # this head's V in the page that follows


WORDS = len(Task._fields)


@njit
def read_task(address):
    """The Task at an address."""
    n = carray(int64_at(address), (WORDS,))
    return Task(
        n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13],
        n[14], n[15], n[16],
    )  # fmt: skip
