"""Attention over pages as a step calls it: where everything is goes to the kernel in one call.

What changes from run to run (where pages, their table and the arrays are) is told as numbers, and
put together in workspace, behind its counter and the number of splits. Nothing is kept that threads
would have to share.
"""

from __future__ import annotations

from numba import njit

from onnx_inplace.numba_kernels.invoke import call_kernel
from onnx_inplace.numba_kernels.memory import load_int64, on_demand, store_int64

_TABLES = 16  # bytes in workspace, behind a counter and the number of splits


@njit
def prepare(addresses, formats, descriptions, kernels, blocks, space, splits):
    """Begin workspace: a counter, the number of splits, and ``Tables``, whose address it returns.

    ``blocks``: address of the block table.
    """
    store_int64(space, 0)
    store_int64(space + 8, splits)
    tables = space + _TABLES
    store_int64(tables, addresses)
    store_int64(tables + 8, formats)
    store_int64(tables + 16, descriptions)
    store_int64(tables + 24, kernels)
    store_int64(tables + 32, blocks)
    return tables


@on_demand("int64(" + ",".join(["int64"] * 7) + ")")
def begin(addresses, formats, descriptions, kernels, blocks, space, splits):
    """Prepare workspace for several threads; the address of ``Tables``. As of :data:`attend`."""
    return prepare(addresses, formats, descriptions, kernels, load_int64(blocks), space, splits)


@on_demand("void(" + ",".join(["int64"] * 12) + ")")
def attend(
    function, layout, addresses, formats, descriptions, kernels, query, blocks, lengths, output,
    space, splits,
):  # fmt: skip
    """Run ``function``, ``pages_attention.attend``, on the calling thread.

    ``query``, ``blocks``, ``lengths`` and ``output``: ``id(...) + FIELD`` of the arrays that
    ``Tables`` and ``layout.Places`` want addresses of. ``space``: address of
    ``pages_attention.workspace_size`` bytes. All else as in ``Tables``.
    """
    tables = prepare(addresses, formats, descriptions, kernels, load_int64(blocks), space, splits)
    query, output, lengths = load_int64(query), load_int64(output), load_int64(lengths)
    call_kernel(function, (layout, query, tables, 0, output, lengths, 0, 0, space, 0, 1))
