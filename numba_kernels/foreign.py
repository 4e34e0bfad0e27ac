"""What a kernel needs of a library that calls it: the memory of its tensors.

The library offers C functions; each returns 0, or the address of something that says why not.
"""

from __future__ import annotations

import enum

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.memory import load_int64, on_demand, store_int64

_INT = ir.IntType(64)


class Functions(enum.IntEnum):
    """Places of a table of addresses of C functions, in int64."""

    INPUT = 0
    """(context, number, place): writes a tensor that goes in to ``place``."""
    OUTPUT = 1
    """(context, number, sizes, rank, place): makes a tensor that comes out, writes it likewise."""
    DATA = 2
    """(tensor, place): writes the address of its elements to ``place``."""
    END = 3


def _caller(count):
    """An intrinsic ``call(function, arguments)`` of a C function with ``count`` integers."""

    @intrinsic
    def call(typing_context, function, arguments):
        def generate(context, builder, signature, values):
            pointer = ir.FunctionType(_INT, [_INT] * count).as_pointer()
            inputs = [builder.extract_value(values[1], k) for k in range(count)]
            return builder.call(builder.inttoptr(values[0], pointer), inputs)

        return types.int64(types.int64, arguments), generate

    return call


call_2, call_3, call_4, call_5 = (_caller(count) for count in (2, 3, 4, 5))


@njit
def fetch(functions, context, number, place):
    """Write the address of the elements of a tensor that goes in to ``place``; 0, or why not."""
    status = call_3(load_int64(functions + 8 * Functions.INPUT), (context, number, place))
    if status != 0:
        return status
    return call_2(load_int64(functions + 8 * Functions.DATA), (load_int64(place), place))


@njit
def create(functions, context, number, shape, place):
    """Make a tensor that comes out, and write the address of its elements; 0, or why not.

    ``shape``: address of its rank and sizes.
    """
    sizes = shape + 8, load_int64(shape)
    status = call_5(load_int64(functions + 8 * Functions.OUTPUT), (context, number, *sizes, place))
    if status != 0:
        return status
    return call_2(load_int64(functions + 8 * Functions.DATA), (load_int64(place), place))


@on_demand("int64(int64,int64,int64,int64)")
def collect(functions, context, count, places):
    """Write the addresses of the elements of ``count`` tensors that go in, int64, to ``places``.

    Returns:
        What the library says if it has no such tensor, else 0.
    """
    for number in range(count):
        status = fetch(functions, context, number, places + 8 * number)
        if status != 0:
            return status
    return 0


@on_demand("int64(int64,int64,int64,int64,int64,int64)")
def provide(functions, context, count, shapes, places, token):
    """Make ``count`` tensors that come out, and write the addresses of their elements.

    Args:
        functions: address of a table, see ``Functions``.
        context: of the call.
        count: of tensors. The first one is int64[1], and gets ``token``.
        shapes: address of the rank and the sizes of each tensor, int64, one behind the other.
        places: where addresses are written, int64.
        token: what the library hands on to the next call.

    Returns:
        What the library says if it cannot make one, else 0.
    """
    for number in range(count):
        status = create(functions, context, number, shapes, places + 8 * number)
        if status != 0:
            return status
        shapes += 8 * (load_int64(shapes) + 1)
    store_int64(load_int64(places), token)
    return 0
