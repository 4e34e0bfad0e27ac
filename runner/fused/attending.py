"""Template of attention over caches: the kernels of ``runner.attend``, called by address."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

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


def _kernels(loading: Loading, o: Operation) -> Iterator[OnDemand]:
    """Those for one token and for several; for caches of these types and sizes, where known."""
    query, key = (loading.value(k) for k in o.inputs[:2])
    shape = operators_attention.shape(o.attributes, query, key)
    fast = _ready(shape, loading.portable)
    yield from (moves.begin, moves.attend)
    if fast.decode is not None:
        yield from heads.KERNELS
        yield specialise.specialise(attending, *dataclasses.astuple(shape)).attend


def _ready(shape: attend.Shape, portable: bool) -> attend.Kernels:
    return attend.Kernels(Settings(1, cpu.Path.PORTABLE) if portable else Settings(1), shape)


@template(_kernels)
def attention(b: Builder, o: Operation) -> None:
    """Attention with ``nonpad_kv_seqlen``, over the valid part of caches."""
    inputs = (*o.inputs, *[None] * (7 - len(o.inputs)))
    query, key, value = b.array(inputs[0]), b.array(inputs[1]), b.array(inputs[2])
    query = b.contiguous(query, query.dtype)
    target = b.result(o.outputs[0])
    lengths_at = inputs[6]
    assert lengths_at is not None
    lengths = b.array(lengths_at)
    try:
        problem = operators_attention.problem(o.attributes, query, key, value, None, True)
    except errors.StorageMismatch as error:
        raise NotFused(str(error)) from None
    if problem.shape != target.shape or lengths.shape != (problem.batch,):
        raise NotFused(f"Attention of {query.shape} to {target.shape}")
    group = problem.heads // problem.kv_heads
    shape = attend.Shape(problem.kinds[1], problem.head_size, group)
    kernels = _ready(shape, b.portable)
    name = b.value(inputs[1] or 0)
    root, capacity = name.root or name.name, problem.capacity

    def fail(numbers: Array) -> None:
        attend.longest_length(root, numbers, problem.batch, capacity)

    b.bounds.append(Bound(lengths_at, 0, capacity + 1, fail))
    facts = b.lasting(attend.facts(problem))
    reads = [query, key, value, lengths]
    token = problem.kv_heads * (key.shape[-1] * key.itemsize + value.shape[-1] * value.itemsize)
    growing = [(lengths, token)]
    places = layout.Places(
        *(address(query), address(key), address(value), address(target), address(lengths), 0, 0)
    )
    if kernels.decode is not None and kernels.shape.fits(problem) and problem.tokens == 1:
        decode = specialise.specialise(attending, *dataclasses.astuple(shape))
        rows = problem.batch * problem.kv_heads
        space = b.lasting(aligned(decode.workspace_size(rows, SPLITS, b.threads)))
        block = decode.Attend(address(facts), *places, address(space), address(b.control), SPLITS)
        units = problem.kv_heads if problem.batch == 1 else 0
        b.emit(decode.attend, block, reads, [target], first=False, growing=growing, units=units)
        return
    kernel, size = kernels.other(problem, b.threads)
    space = b.lasting(aligned(16 + size + 64))
    begin = moves.Begin(address(space), address(lengths), problem.batch, SHORTEST, 1)
    b.emit(moves.begin, begin, [lengths], [space[:16]])
    call = moves.Attend(kernel.ready().address, address(facts), *places, address(space), 0)
    reads = [*reads, space[:16]]
    b.emit(moves.attend, call, reads, [target, space], first=False, growing=growing)


SHORTEST = 64  # tokens of a split
SPLITS = 8  # at most, whatever the number of threads: results must not depend on it
