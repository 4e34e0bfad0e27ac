"""Masks of attention, as kernels take them."""

from __future__ import annotations

import numpy as np

from onnx_inplace.compiler import errors
from onnx_inplace.runner.actions import Array


def mask_values(mask: Array) -> Array:
    """What kernels take as a mask: bool, or float32 to add."""
    if mask.dtype == np.bool_:
        return np.ascontiguousarray(mask)
    return np.ascontiguousarray(mask, dtype=np.float32)


def mask_layout(
    mask: Array | None, rows: tuple[int, int, int], capacity: int
) -> tuple[int, int, int, int, int]:
    """(batch, head and token stride, bytes of an element, keys): 0 strides repeat."""
    if mask is None:
        return 0, 0, 0, 0, 0
    shape = (1,) * (4 - mask.ndim) + mask.shape
    if any(m not in (1, r) for m, r in zip(shape, rows, strict=False)) or shape[3] > capacity:
        raise errors.StorageMismatch(f"Attention: a mask {list(mask.shape)} for rows {list(rows)}")
    strides = (0,) * (4 - mask.ndim) + mask.strides
    batch, head, token = (0 if m == 1 else s for m, s in zip(shape[:3], strides, strict=False))
    return batch, head, token, mask.itemsize, shape[3]
