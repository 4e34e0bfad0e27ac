"""What every kernel of attention is told: a Layout that depends on shapes, and Places of one call.

All kernels of attention have one signature, so that the caller may choose among them by address
(see ``invoke``).
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import numpy as np
from numba import carray, njit

from onnx_inplace.numba_kernels.floats import float_of_bits, floats, int64_at, uint8_at

LOWEST = np.float32(-1e30)
"""A score below all others that is still a number; a row that has no other one sees nothing."""


class Layout(NamedTuple):
    """What a call of attention is, but for the addresses. Strides are in bytes.

    A kind is one of ``floats.FLOAT32``, ``FLOAT16``, ``BFLOAT16``. A query at position ``p`` sees
    the keys ``p - left .. p + right``, where -1 leaves a side open. ``mask_size`` is 0 (no mask),
    1 (bool, true: may be seen) or 4 (float32, added to the scores); keys from ``mask_keys`` on are
    not seen.
    """

    batch: int
    kv_heads: int
    group: int  # query heads of one kv head
    tokens: int  # queries of one head
    head_size: int
    value_size: int
    query_kind: int
    key_kind: int
    value_kind: int
    output_kind: int
    left: int
    right: int
    at_end: int  # 1: the queries are the last of the valid tokens; 0: they stand at 0 and following
    scale: int  # bits of a float32
    softcap: int  # bits of a float32
    query_batch: int
    query_head: int
    query_token: int
    key_batch: int
    key_head: int
    key_token: int
    value_batch: int
    value_head: int
    value_token: int
    output_batch: int
    output_head: int
    output_token: int
    mask_batch: int
    mask_head: int
    mask_token: int
    mask_size: int
    mask_keys: int


class Places(NamedTuple):
    """Addresses of a call; 0 where there is no mask or no sinks."""

    query: int
    key: int
    value: int
    output: int
    lengths: int  # (batch) int64: valid keys
    mask: int
    sinks: int  # (heads) float32: score of a key without value


@njit
def adjusted(x, score, factor, mask, key):
    """A score (times ``factor``) with softcap and mask; never below LOWEST.

    ``mask``: address of the mask's row, which begins at key 0.
    """
    softcap = float_of_bits(x.softcap)
    if softcap > 0:
        score = factor * softcap * np.float32(math.tanh(score / (factor * softcap)))
    if x.mask_size == 1:
        score = score if carray(uint8_at(mask), (key + 1,))[key] else LOWEST
    elif x.mask_size:
        score += factor * floats(mask, key + 1)[key]
    return max(score, LOWEST)


KERNEL = "void(" + ",".join(["int64"] * 11) + ")"
"""Signature: address of a Layout, the Places, workspace, number of the worker, workers."""


def bits(number: float) -> int:
    """Bits of a float32, as Layout has them."""
    pattern: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return pattern


@njit
def read(address):
    """The Layout at an address."""
    n = carray(int64_at(address), (32,))
    return Layout(
        n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9],
        n[10], n[11], n[12], n[13], n[14], n[15], n[16], n[17], n[18], n[19],
        n[20], n[21], n[22], n[23], n[24], n[25], n[26], n[27], n[28], n[29],
        n[30], n[31],
    )  # fmt: skip


@njit
def visible(x, length, position):
    """First, and one past the last of ``length`` keys that a query at ``position`` sees."""
    low = max(0, position - x.left) if x.left >= 0 else 0
    high = min(length, position + x.right + 1) if x.right >= 0 else length
    return low, max(low, high)


@njit
def extent(x, lengths, b):
    """Valid keys of a row of the batch, and the position of its first query."""
    length = carray(int64_at(lengths), (x.batch,))[b]
    start = length - x.tokens if x.at_end else 0
    return min(length, x.mask_keys) if x.mask_size else length, start
