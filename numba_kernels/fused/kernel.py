"""What all kernels of a fused step share: signature, argument blocks, the share of a thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

KERNEL = "void(int64,int64,int64)"
"""Signature: address of the argument block, number of the thread, threads."""

_INT = ir.IntType(64)


def block(arguments: Sequence[int]) -> np.ndarray[Any, Any]:
    """An argument block as memory: its address is what an instruction holds."""
    return np.array(arguments, np.int64)


def reader(kind: type) -> Any:
    """A function ``read(address)`` for kernels: the argument block, a NamedTuple of ``kind``."""
    count = len(kind._fields)  # type: ignore[attr-defined]
    result = types.NamedUniTuple(types.int64, count, kind)

    @intrinsic
    def read(typing_context, address):
        def generate(context, builder, signature, arguments):
            base = builder.inttoptr(arguments[0], _INT.as_pointer())
            values = []
            for index in range(count):
                place = builder.gep(base, [_INT(index)], source_etype=_INT)
                values.append(builder.load(place, typ=_INT))
            return context.make_tuple(builder, result, values)

        return result(types.int64), generate

    return read


@njit
def share(count, thread, threads):
    """First, and one past the last of ``count`` things that a thread does.

    Kernels that share by the same count give the same things to the same thread: between them no
    barrier is needed where each thing depends on itself alone.
    """
    return count * thread // threads, count * (thread + 1) // threads


@njit
def share_elements(count, thread, threads):
    """Like :func:`share` for float32 side by side: in whole cache lines of 16."""
    lines = (count + 15) // 16
    begin, end = share(lines, thread, threads)
    return min(count, 16 * begin), min(count, 16 * end)
