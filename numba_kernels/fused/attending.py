"""Decode attention by the threads of a fused step: one new token over caches.

A thread does the same kv heads in every call, so that it may read what it has just written without
a barrier (``rotary``). Where the keys are many, they are split as well, and the threads meet inside
of the kernel, before and behind: how many splits there are depends on the lengths alone, so that
results do not depend on the number of threads.

``specialise`` makes copies of this file with other values in the line that says so.
"""

from typing import NamedTuple

from numba import carray

from onnx_inplace.numba_kernels import decode, layout, specialise
from onnx_inplace.numba_kernels.floats import int64_at
from onnx_inplace.numba_kernels.fused import barrier
from onnx_inplace.numba_kernels.fused.kernel import KERNEL, reader, share
from onnx_inplace.numba_kernels.memory import kernel

KIND, SIZE, GROUP = 0, 64, 3  # specialised

SHORTEST = 64  # keys of a split: below, meeting costs more than sharing gives

_parts = specialise.specialise(decode, KIND, SIZE, GROUP)
_split, _join, _keys = _parts.split, _parts.join, _parts.keys
_SCRATCH, _PARTIAL = _parts.SCRATCH, _parts.PARTIAL


class Attend(NamedTuple):
    """A ``layout.Layout`` with ``tokens`` 1, ``layout.Places``, and what threads share."""

    layout: int
    query: int
    key: int
    value: int
    output: int
    lengths: int
    mask: int
    sinks: int
    space: int  # ``workspace_size`` bytes, on a cache line
    state: int  # of the barriers of the run (``interpreter.control``)
    splits: int  # at most


def workspace_size(rows: int, splits: int, threads: int) -> int:
    """Bytes for so many pairs (batch, kv head)."""
    scratch = (_SCRATCH + 63) // 64 * 64
    size: int = threads * scratch + rows * splits * _PARTIAL
    return size


_read = reader(Attend)


@kernel(KERNEL)
def attend(arguments, thread, threads):
    """An :class:`Attend`; threads share the kv heads, or splits of them."""
    a = _read(arguments)
    x = layout.read(a.layout)
    at = layout.Places(a.query, a.key, a.value, a.output, a.lengths, a.mask, a.sinks)
    lengths = carray(int64_at(a.lengths), (x.batch,))
    longest = lengths[0]
    for b in range(1, x.batch):
        longest = max(longest, lengths[b])
    splits = max(1, min(a.splits, longest // SHORTEST))
    stride = (_SCRATCH + 63) // 64 * 64
    scratch, results = a.space + thread * stride, a.space + threads * stride
    rows = x.batch * x.kv_heads
    if splits > 1:  # what another thread wrote for its heads is read here as well
        barrier.meet(a.state, threads)
    first, last = share(rows * splits, thread, threads)
    for item in range(first, last):
        b, h = item // splits // x.kv_heads, item // splits % x.kv_heads
        low, high = _keys(x, a.lengths, b, item % splits, splits)
        _split(x, at, b, h, low, high, scratch, results + item * _PARTIAL)
    if splits > 1:
        barrier.meet(a.state, threads)
        first, last = share(rows, thread, threads)
    _join(x, at, splits, results, scratch, first, last)
