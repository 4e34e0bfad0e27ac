"""Calls a kernel of attention by its address, on one thread or on several.

Compiled once for all kernels: a parallel loop takes seconds to compile, a call by address nothing.
"""

from __future__ import annotations

import os

from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.memory import load_int64, on_demand, store_int64

_INT = ir.IntType(64)
_ARGUMENTS = 11
# Threads of GNU OpenMP wait for the next region in a busy loop of 300,000 rounds: beside a library
# with threads of its own that is a core less. It is read when the first region starts.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

SIGNATURE = "void(" + ",".join(["int64"] * 11) + ")"


@intrinsic
def call_kernel(typing_context, function, arguments):
    """Call the kernel at an address."""

    def generate(context, builder, signature, values):
        kernel = ir.FunctionType(ir.VoidType(), [_INT] * _ARGUMENTS).as_pointer()
        inputs = [builder.extract_value(values[1], k) for k in range(_ARGUMENTS)]
        builder.call(builder.inttoptr(values[0], kernel), inputs)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


@on_demand(SIGNATURE)
def invoke(function, layout, query, key, value, output, lengths, mask, sinks, space, workers):
    """Run ``function`` on the calling thread, as the first of ``workers``."""
    call_kernel(
        function, (layout, query, key, value, output, lengths, mask, sinks, space, 0, workers)
    )


@on_demand("void(" + ",".join(["int64"] * 8) + ")")
def invoke_arrays(function, layout, query, key, value, output, lengths, space):
    """Like :func:`invoke` without mask and sinks, for array objects: ``id(...) + FIELD`` of each.

    ``space`` is workspace of int64; its first items become 0 and 1, as kernels that count expect.
    """
    workspace = load_int64(space)
    store_int64(workspace, 0)
    store_int64(workspace + 8, 1)
    query, key, value = load_int64(query), load_int64(key), load_int64(value)
    output, lengths = load_int64(output), load_int64(lengths)
    call_kernel(function, (layout, query, key, value, output, lengths, 0, 0, workspace, 0, 1))


@on_demand(SIGNATURE, parallel=True)
def invoke_parallel(
    function, layout, query, key, value, output, lengths, mask, sinks, space, workers
):
    """Run ``function`` on ``workers`` threads."""
    for worker in prange(workers):
        places = (layout, query, key, value, output, lengths, mask, sinks, space, worker, workers)
        call_kernel(function, places)
