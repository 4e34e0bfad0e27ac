"""Memory of the values of one table: given out as operations are laid out, taken back when dead."""

from __future__ import annotations

import dataclasses

import numpy as np

from onnx_inplace.compiler import arena
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Array, DType


def aligned(size: int) -> Array:
    """Bytes that begin on a cache line."""
    raw = np.empty(size + arena.ALIGNMENT, np.uint8)
    offset = -address(raw) % arena.ALIGNMENT
    return raw[offset : offset + size]


@dataclasses.dataclass
class _Buffer:
    """``users``: values and operations that still need it."""

    memory: Array
    users: int


class Buffers:
    """A pool. What is given back last is given out first: it is still in the CPU's caches."""

    def __init__(self) -> None:
        self._held: dict[int, _Buffer] = {}  # by address of the memory's owner
        self._free: dict[int, list[Array]] = {}
        self.nbytes = 0

    def take(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """An array that nobody else uses until it is dropped."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        room = max(1, -(-size // arena.ALIGNMENT)) * arena.ALIGNMENT
        free = self._free.get(room)
        if free:
            memory = free.pop()
        else:
            memory = aligned(room)
            self.nbytes += room
        self._held[_owner(memory)] = _Buffer(memory, 1)
        return memory[:size].view(dtype).reshape(shape)

    def keep(self, array: Array) -> None:
        """One more user of the memory of ``array``."""
        held = self._held.get(_owner(array))
        if held is not None:
            held.users += 1

    def drop(self, array: Array) -> None:
        """One user less; without any, the memory may be given out again."""
        owner = _owner(array)
        held = self._held.get(owner)
        if held is None:
            return
        held.users -= 1
        if not held.users:
            del self._held[owner]
            self._free.setdefault(held.memory.size, []).append(held.memory)


def _owner(array: Array) -> int:
    """Identity of the array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return id(array)
