"""The cache operators for ``onnx.reference``: what they mean, in numpy, out of place.

``ReferenceEvaluator(model, new_ops=reference.OPERATORS)`` runs any file of ours. Without them it
takes the functional bodies in the file, but one body for all variants of an operator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from onnx_inplace.compiler.contract import DOMAIN

Array = np.ndarray[Any, np.dtype[Any]]


class CacheUpdate(OpRun):
    """Writes values at a position."""

    op_domain = DOMAIN

    def _run(
        self,
        cache: Array,
        values: Array,
        position: Array,
        axis: int = -2,
        batch_axis: int | None = None,
        mode: str = "linear",
    ) -> tuple[Array]:
        axis %= cache.ndim
        capacity, length = cache.shape[axis], values.shape[axis]
        starts = np.asarray(position).reshape(-1)
        if starts.size > 1 and batch_axis is None:
            raise ValueError("a position for each row needs batch_axis")
        if length > capacity:
            raise ValueError(f"{length} tokens do not fit into a capacity of {capacity}")
        if mode == "linear" and any(not 0 <= p <= capacity - length for p in starts):
            raise ValueError(f"position {starts} + {length} leaves a capacity of {capacity}")
        updated = np.moveaxis(cache.copy(), axis, 0)
        given = np.moveaxis(values, axis, 0)
        rows = _rows(updated, given, starts, axis, batch_axis)
        for target, source, start in rows:
            for token in range(length):
                target[(start + token) % capacity] = source[token]
        return (np.moveaxis(updated, 0, axis),)


def _rows(
    updated: Array, given: Array, starts: Array, axis: int, batch_axis: int | None
) -> list[tuple[Array, Array, int]]:
    """(target, source, start) of every row; tokens come first in both."""
    if starts.size == 1:
        return [(updated, given, int(starts[0]))]
    batch = (batch_axis or 0) % updated.ndim
    batch += 1 if batch < axis else 0  # the axis of tokens has moved to the front
    targets, sources = np.moveaxis(updated, batch, 0), np.moveaxis(given, batch, 0)
    return [
        (target, source, int(start))
        for target, source, start in zip(targets, sources, starts, strict=True)
    ]


class Assign(OpRun):
    """Overwrites a state."""

    op_domain = DOMAIN

    def _run(self, state: Array, value: Array) -> tuple[Array]:
        if state.shape != value.shape:
            raise ValueError(f"a state {state.shape} cannot become {value.shape}")
        return (value.copy(),)


class CacheReorder(OpRun):
    """Reorders rows."""

    op_domain = DOMAIN

    def _run(self, cache: Array, indices: Array, batch_axis: int = 0) -> tuple[Array]:
        if indices.shape != (cache.shape[batch_axis],):
            raise ValueError(f"{indices.shape} indices for {cache.shape[batch_axis]} rows")
        return (np.take(cache, indices, axis=batch_axis),)


class Copy(OpRun):
    """Copies."""

    op_domain = DOMAIN

    def _run(self, x: Array) -> tuple[Array]:
        return (x.copy(),)


OPERATORS: tuple[type[OpRun], ...] = (CacheUpdate, Assign, CacheReorder, Copy)
