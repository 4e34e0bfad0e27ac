"""Workspace of kernels: one piece of memory for each thread, that grows when more is asked for.

A kernel has it from its call to its return; nothing is kept in it between calls.
"""

from __future__ import annotations

import threading

import numpy as np

from onnx_inplace.runner import storage
from onnx_inplace.runner.storage import Array

_BYTE = np.dtype(np.uint8)
_held = threading.local()


def of_thread(size: int) -> Array:
    """At least ``size`` bytes, uint8, aligned to a cache line, with any content."""
    space: Array | None = getattr(_held, "space", None)
    if space is None or space.nbytes < size:
        _held.space = None  # the old piece goes before the new one comes
        space = _held.space = storage.empty((size,), _BYTE)
    return space
