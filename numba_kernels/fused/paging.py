"""Pages in a fused step: new tokens, and attention of few queries over them.

Where pages are may change between runs: both kernels read it from memory that the caller keeps up
to date (:class:`Table`, ``pages_attention.Tables``), not from their argument blocks.

Danger: nothing is checked here. The caller has checked pages, formats, positions and lengths.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import int64_at
from onnx_inplace.numba_kernels.fused import barrier
from onnx_inplace.numba_kernels.fused.kernel import KERNEL, reader
from onnx_inplace.numba_kernels.memory import kernel, load_int64, store_int64
from onnx_inplace.numba_kernels.pages import write_tokens

_INT64 = ir.IntType(64)


class Table(NamedTuple):
    """Where the pages of a cache are, as int64; see ``pages.write_tokens``."""

    descriptions: int
    addresses: int
    formats: int
    fills: int
    blocks: int


class Write(NamedTuple):
    """A call of ``pages.write_tokens``.

    ``clipped``: one int64, to which the numbers are added that were clipped.
    """

    table: int  # of a Table
    layout: int
    values: int
    positions: int
    space: int
    clipped: int


class Calls(NamedTuple):
    """What attention calls, as int64: kernels of ``pages_attention``, and what they are told."""

    attend: int
    merge: int
    layout: int  # of a PagesLayout as int64
    space: int  # ``pages_attention.workspace_size`` bytes for all threads


class Begin(NamedTuple):
    """Prepares the workspace of attention: nothing is done yet; into how many splits to cut.

    ``lengths``: (batch) int64. As many splits as give each ``shortest`` tokens, at most ``most``.
    """

    calls: int  # of a Calls
    lengths: int
    batch: int
    shortest: int
    most: int


class Attend(NamedTuple):
    """Attention over pages, behind a :class:`Begin`."""

    calls: int  # of a Calls
    query: int
    tables: int  # of pages_attention.Tables
    output: int
    lengths: int
    state: int  # of the barriers of the run (``interpreter.control``)


_read_table, _read_write, _read_calls = reader(Table), reader(Write), reader(Calls)
_read_begin, _read_attend = reader(Begin), reader(Attend)


@kernel(KERNEL)
def write(arguments, thread, threads):
    """A :class:`Write`; one thread does all of it."""
    x = _read_write(arguments)
    at = _read_table(x.table)
    clipped = write_tokens(
        at.descriptions,
        x.layout,
        x.values,
        at.addresses,
        at.formats,
        at.fills,
        at.blocks,
        x.positions,
        x.space,
    )
    store_int64(x.clipped, load_int64(x.clipped) + clipped)


@intrinsic
def _call(typing_context, function, arguments):
    """Call a kernel of attention, see ``layout.KERNEL``."""

    def generate(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [_INT64] * 11).as_pointer()
        inputs = [builder.extract_value(values[1], k) for k in range(11)]
        builder.call(builder.inttoptr(values[0], kind), inputs)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


@kernel(KERNEL)
def begin(arguments, thread, threads):
    """A :class:`Begin`; one thread does it."""
    x = _read_begin(arguments)
    lengths = carray(int64_at(x.lengths), (x.batch,))
    longest = lengths[0]
    for b in range(1, x.batch):
        longest = max(longest, lengths[b])
    space = _read_calls(x.calls).space
    store_int64(space, 0)
    store_int64(space + 8, max(1, min(x.most, longest // x.shortest)))


@kernel(KERNEL)
def attend(arguments, thread, threads):
    """An :class:`Attend`; threads take items until none is left."""
    x = _read_attend(arguments)
    calls = _read_calls(x.calls)
    tail = x.output, x.lengths, 0, 0, calls.space, thread, threads
    places = (calls.layout, x.query, x.tables, 0, *tail)
    _call(calls.attend, places)
    if threads > 1 and load_int64(calls.space + 8) > 1:  # a single thread has joined the parts
        barrier.meet(x.state, threads)
        if thread == 0:
            _call(calls.merge, places)
