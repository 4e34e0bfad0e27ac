"""Template of attention over caches: the kernels of ``runner.attend``, called by address."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from onnx_inplace.compiler import errors
from onnx_inplace.compiler.fused import Operation
from onnx_inplace.numba_kernels import cpu, layout, specialise
from onnx_inplace.numba_kernels.fused import attending, moves
from onnx_inplace.numba_kernels.memory import OnDemand, address
from onnx_inplace.runner import attend, operators_attention
from onnx_inplace.runner.actions import Array, Settings
from onnx_inplace.runner.fused import heads
from onnx_inplace.runner.fused.buffers import aligned
from onnx_inplace.runner.fused.table import Bound, Builder, NotFused
from onnx_inplace.runner.fused.template import Loading, template

SHORTEST = 64  # tokens of a split
SPLITS = 8  # at most, whatever the number of threads: results must not depend on it


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """What attention reads and writes, as ``layout.Places`` has it.

    Attributes:
        facts: a ``layout.Layout`` as int64.
        lengths: (batch) int64.
    """

    facts: Array
    query: Array
    key: Array
    value: Array
    output: Array
    lengths: Array
    mask: Array | None = None
    sinks: Array | None = None


def kernels_of(loading: Loading, shape: attend.Shape) -> Iterator[OnDemand]:
    """Those for one token and for several; for caches of these types and sizes, where known."""
    fast = _ready(shape, loading.portable)
    yield from (moves.begin, moves.attend)
    if fast.decode is not None:
        yield from heads.KERNELS
        yield specialise.specialise(attending, *dataclasses.astuple(shape)).attend


def _kernels(loading: Loading, o: Operation) -> Iterator[OnDemand]:
    query, key = (loading.value(k) for k in o.inputs[:2])
    yield from kernels_of(loading, operators_attention.shape(o.attributes, query, key))


def _ready(shape: attend.Shape, portable: bool) -> attend.Kernels:
    return attend.Kernels(Settings(1, cpu.Path.PORTABLE) if portable else Settings(1), shape)


@template(_kernels)
def attention(b: Builder, o: Operation) -> None:
    """Attention with ``nonpad_kv_seqlen``, over the valid part of caches."""
    inputs = (*o.inputs, *[None] * (7 - len(o.inputs)))
    query, key, value = b.array(inputs[0]), b.array(inputs[1]), b.array(inputs[2])
    query, mask = b.contiguous(query, query.dtype), mask_of(b, inputs[3])
    target = b.result(o.outputs[0])
    lengths_at = inputs[6]
    assert lengths_at is not None
    lengths = b.array(lengths_at)
    try:
        problem = operators_attention.problem(o.attributes, query, key, value, mask, True)
    except errors.StorageMismatch as error:
        raise NotFused(str(error)) from None
    if problem.shape != target.shape or lengths.shape != (problem.batch,):
        raise NotFused(f"Attention of {query.shape} to {target.shape}")
    name = b.value(inputs[1] or 0)
    root, capacity = name.root or name.name, problem.capacity

    def fail(numbers: Array) -> None:
        attend.longest_length(root, numbers, problem.batch, capacity)

    b.bounds.append(Bound(lengths_at, 0, capacity + 1, fail))
    facts = b.lasting(attend.facts(problem))
    attend_to(b, problem, Operands(facts, query, key, value, target, lengths, mask))


def mask_of(b: Builder, index: int | None) -> Array | None:
    """What kernels take as a mask, made once for all layers: bool, or float32 to add."""
    if index is None:
        return None
    mask = b.array(index)
    kind = np.dtype(np.bool_ if mask.dtype == np.bool_ else np.float32)
    if mask.dtype == kind and mask.flags.c_contiguous:
        return mask
    return b.derived(index, "mask", mask.shape, kind, lambda to: b.move(mask, to))


def attend_to(b: Builder, problem: attend.Problem, x: Operands) -> None:
    """Instructions of attention; the caller has seen to it that lengths are checked."""
    shape = attend.Shape(problem.kinds[1], problem.head_size, problem.heads // problem.kv_heads)
    kernels = _ready(shape, b.portable)
    arrays = x.query, x.key, x.value, x.output, x.lengths, x.mask, x.sinks
    places = layout.Places(*(0 if array is None else address(array) for array in arrays))
    optional = [array for array in (x.mask, x.sinks) if array is not None]
    reads = [x.query, x.key, x.value, x.lengths, x.facts, *optional]
    sizes = problem.head_size * x.key.itemsize, problem.value_size * x.value.itemsize
    growing = [(x.lengths, problem.kv_heads * sum(sizes))]
    if kernels.decode is not None and kernels.shape.fits(problem) and problem.tokens == 1:
        decode = specialise.specialise(attending, *dataclasses.astuple(shape))
        rows = problem.batch * problem.kv_heads
        space = b.lasting(aligned(decode.workspace_size(rows, SPLITS, b.threads)))
        block = decode.Attend(address(x.facts), *places, address(space), address(b.control), SPLITS)
        units = problem.kv_heads if problem.batch == 1 else 0
        b.emit(decode.attend, block, reads, [x.output], first=False, growing=growing, units=units)
        return
    kernel, size = kernels.other(problem, b.threads)
    space = b.lasting(aligned(16 + size + 64))
    begin = moves.Begin(address(space), address(x.lengths), problem.batch, SHORTEST, 1)
    b.emit(moves.begin, begin, [x.lengths], [space[:16]])
    call = moves.Attend(kernel.ready().address, address(x.facts), *places, address(space), 0)
    reads = [*reads, space[:16]]
    b.emit(moves.attend, call, reads, [x.output, space], first=False, growing=growing)
