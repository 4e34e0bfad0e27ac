"""Kernel steps of ScatterND and ScatterElements. All indices are checked before the first write."""

from __future__ import annotations

import math

import numpy as np

from onnx_inplace.compiler import errors, steps
from onnx_inplace.numba_kernels import dense
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Action, Array, Settings, Slots


def scatter_nd(step: steps.Kernel, settings: Settings) -> Action:
    """``ScatterND(data, indices, updates)``; of two updates of one place the last one stays."""
    data_slot, indices_slot, updates_slot, output, root = _ports(step)
    find_outside, scatter = dense.find_outside_tuples.ready(), dense.scatter_blocks.ready()

    def act(slots: Slots) -> None:
        data, indices, updates = slots[data_slot], slots[indices_slot], slots[updates_slot]
        if indices.ndim < 1 or indices.shape[-1] > data.ndim:
            raise _indices_mismatch(root, indices, data)
        depth = indices.shape[-1]
        _fit(root, data, updates, indices.shape[:-1] + data.shape[depth:])
        indices, updates = np.ascontiguousarray(indices), np.ascontiguousarray(updates)
        dims = np.asarray(data.shape[:depth], np.int64)
        count = math.prod(indices.shape[:-1])
        if depth:
            wrong = find_outside(address(indices), count, depth, address(dims))
            if wrong >= 0:
                raise _index_error(root, indices, wrong, data.shape[wrong % depth])
        block = math.prod(data.shape[depth:]) * data.itemsize
        scatter(
            address(data), address(updates), address(indices), count, depth, address(dims), block
        )
        slots[output] = data

    return act


def scatter_elements(step: steps.Kernel, settings: Settings) -> Action:
    """``ScatterElements(data, indices, updates)`` along ``axis``."""
    data_slot, indices_slot, updates_slot, output, root = _ports(step)
    given_axis: int = step.attributes.get("axis", 0)
    find_outside, scatter = dense.find_outside.ready(), dense.scatter_elements.ready()

    def act(slots: Slots) -> None:
        data, indices, updates = slots[data_slot], slots[indices_slot], slots[updates_slot]
        _fit(root, data, updates, indices.shape)
        axis = given_axis % max(data.ndim, 1)
        if indices.ndim != data.ndim or any(
            i > d
            for k, (i, d) in enumerate(zip(indices.shape, data.shape, strict=True))
            if k != axis
        ):
            raise _indices_mismatch(root, indices, data)
        indices, updates = np.ascontiguousarray(indices), np.ascontiguousarray(updates)
        dims = np.asarray((data.shape, indices.shape), np.int64)
        count, width, limit = indices.size, indices.itemsize, data.shape[axis]
        wrong = find_outside(address(indices), count, width, -limit, limit)
        if wrong >= 0:
            raise _index_error(root, indices, wrong, limit)
        scatter(
            address(data),
            address(updates),
            address(indices),
            width,
            count,
            data.ndim,
            axis,
            address(dims),
            data.itemsize,
        )
        slots[output] = data

    return act


def _ports(step: steps.Kernel) -> tuple[int, int, int, int, str]:
    data, indices, updates = step.inputs[:3]
    output = step.outputs[0]
    assert data is not None and indices is not None and updates is not None and output is not None
    reduction = step.attributes.get("reduction", "none")
    if reduction != "none":
        raise errors.UnsupportedOperator(step.domain, step.op_type, f'reduction="{reduction}"')
    return data, indices, updates, output, step.roots[0]


def _fit(root: str, data: Array, updates: Array, shape: tuple[int, ...]) -> None:
    if updates.shape != shape or updates.dtype.itemsize != data.dtype.itemsize:
        raise errors.StorageMismatch(
            f"{root}: updates {updates.dtype}{list(updates.shape)}, "
            f"expected {data.dtype}{list(shape)}"
        )


def _index_error(root: str, indices: Array, place: int, limit: int) -> errors.CapacityError:
    return errors.CapacityError(root, int(indices.reshape(-1)[place]), 1, limit, place)


def _indices_mismatch(root: str, indices: Array, data: Array) -> errors.StorageMismatch:
    return errors.StorageMismatch(f"{root}: indices {list(indices.shape)} for {list(data.shape)}")
