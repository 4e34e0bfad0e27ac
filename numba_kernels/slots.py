"""Memory for small pieces: slots of a few sizes; a bit says of each whether it is free.

A library that keeps what is free in order of size, under a lock, takes 0.3 us to give a piece away
and to take it back. A token of a decoder asks for more than a thousand pieces of a few KiB.

The lowest free slot is given, so the same wishes in the same order get the same places: calls that
are prepared for the places of their tensors stay prepared.
"""

from __future__ import annotations

import enum

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.foreign import call_2
from onnx_inplace.numba_kernels.fused.barrier import load_shared
from onnx_inplace.numba_kernels.memory import (
    address,
    fetch_add,
    kernel,
    load_int64,
    mapped,
    swap_if,
)

LINE = 64
LARGEST = 32 << 10
"""Bytes of the largest piece that has a slot: more is used for longer than finding it takes."""

_EACH = 64  # slots of a size: bits of a word
_FRAME = 12  # bits of an address inside a frame, which holds slots of one size
_INVERSE = 32  # bits behind the point of one over a size


class Words(enum.IntEnum):
    """Places in what describes a pool, in int64. Those before are the library's."""

    REST = 8
    """Address of the allocator for all other pieces, which is the first argument of the next."""
    GIVE = 9
    """Address of a C function of that: ``(allocator, bytes)`` gives an address."""
    TAKE_BACK = 10
    """Likewise: ``(allocator, address)``."""
    KEEP = 11
    """Like ``GIVE``, for pieces that are kept for long."""
    INFORMATION = 12
    """What :func:`describe` says."""
    BEGIN = 13
    """Address of the slots."""
    BYTES = 14
    """Of all slots."""
    FRAMES = 15
    """Address of a table: by frame, the address of its ``Size``."""
    SIZES = 16
    """By number of lines from 0 to those of ``LARGEST``: the address of the ``Size`` that fits."""
    END = SIZES + LARGEST // LINE + 1


class Size(enum.IntEnum):
    """Places in what describes slots of one size, in int64: a line of the CPU's caches."""

    FREE = 0
    """A bit for each slot, lowest first."""
    FIRST = 1
    """Address of the first slot."""
    STRIDE = 2
    """Bytes from one to the next."""
    INVERSE = 3
    """2**32 over that, rounded up."""
    END = 8


@intrinsic
def _lowest(typing_context, bits):
    """The number of the lowest bit that is set; one is."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


@kernel("int64(int64,int64)")
def give(pool, size):
    """A piece of so many bytes, which begins a line; 0 where there is no memory."""
    lines = (size + (LINE - 1)) // LINE
    if 0 < lines <= LARGEST // LINE:
        found = load_int64(pool + 8 * (Words.SIZES + lines))
        while True:
            free = load_shared(found + 8 * Size.FREE)
            if free == 0:
                break
            if swap_if(found + 8 * Size.FREE, free, free & (free - 1)):
                first, stride = found + 8 * Size.FIRST, found + 8 * Size.STRIDE
                return load_int64(first) + _lowest(free) * load_int64(stride)
    return call_2(load_int64(pool + 8 * Words.GIVE), (load_int64(pool + 8 * Words.REST), size))


@kernel("void(int64,int64)")
def take_back(pool, place):
    """Take a piece back."""
    offset = place - load_int64(pool + 8 * Words.BEGIN)
    if 0 <= offset < load_int64(pool + 8 * Words.BYTES):
        found = load_int64(load_int64(pool + 8 * Words.FRAMES) + 8 * (offset >> _FRAME))
        offset = place - load_int64(found + 8 * Size.FIRST)
        slot = (offset * load_int64(found + 8 * Size.INVERSE)) >> _INVERSE
        fetch_add(found + 8 * Size.FREE, 1 << slot)  # its bit is 0
    else:
        rest = load_int64(pool + 8 * Words.REST)
        call_2(load_int64(pool + 8 * Words.TAKE_BACK), (rest, place))


@kernel("int64(int64,int64)")
def keep(pool, size):
    """Like :func:`give`, for what is kept for long: no slot is lost to it."""
    return call_2(load_int64(pool + 8 * Words.KEEP), (load_int64(pool + 8 * Words.REST), size))


@kernel("int64(int64)")
def describe(pool):
    """What the library is told of the memory."""
    return load_int64(pool + 8 * Words.INFORMATION)


class Pool:
    """Slots, and what describes them. Any thread may use them.

    Attributes:
        words: see ``Words``; those of the library and of the allocator for all else are 0.
    """

    def __init__(self) -> None:
        """Reserve addresses, 13 MiB; memory is taken where a slot is first written."""
        strides = _strides()
        total = _EACH * sum(strides)
        self._region = mapped(total)
        begin = address(np.frombuffer(self._region, np.uint8))
        memory = self._memory = np.zeros((1 + len(strides)) * Size.END, np.int64)
        skipped = -address(memory) % LINE // memory.itemsize
        self._sizes = memory[skipped:][: len(strides) * Size.END].reshape(-1, Size.END)
        self._frames = np.zeros(total >> _FRAME, np.int64)
        words = self.words = np.zeros(Words.END, np.int64)
        words[Words.BEGIN], words[Words.BYTES] = begin, total
        words[Words.FRAMES] = address(self._frames)
        lines = frame = 0
        for size, stride in zip(self._sizes, strides, strict=True):
            inverse = -(-(1 << _INVERSE) // stride)
            size[: Size.INVERSE + 1] = -1, begin + (frame << _FRAME), stride, inverse
            end = frame + (_EACH * stride >> _FRAME)
            self._frames[frame:end] = address(size)
            words[Words.SIZES + lines : Words.SIZES + stride // LINE + 1] = address(size)
            lines, frame = stride // LINE + 1, end

    @property
    def at(self) -> int:
        """Address of what describes it."""
        return address(self.words)

    @property
    def free(self) -> int:
        """How many slots nobody has."""
        return sum(int(mask).bit_count() for mask in self._sizes[:, Size.FREE].view(np.uint64))


def _strides() -> list[int]:
    """Four sizes up to each power of two: at most a fifth of a slot is never used."""
    lines = [1, 2, 3, *(k << power for power in range(16) for k in (4, 5, 6, 7))]
    return [LINE * n for n in lines if LINE * n <= LARGEST]
