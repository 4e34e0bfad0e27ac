"""Kernel steps that write tokens or rows: CacheUpdate, TensorScatter, Assign, CacheReorder; Copy.

Every position and index is compared with its bounds before the step writes, also where the checks
before the run have seen it already: the comparison costs less than a tenth of a microsecond, a wild
write costs the process.
"""

from __future__ import annotations

import math

import numpy as np

from onnx_inplace.compiler import errors, steps
from onnx_inplace.numba_kernels import dense
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Action, Array, Settings, Slots

WORKSPACE = 1 << 16  # bytes; rows are reordered in pieces of at most this size
_MOST_GEOMETRIES = 1024  # a server sees many lengths of prompts: forget, do not grow for ever


def cache_update(step: steps.Kernel, settings: Settings) -> Action:
    """``CacheUpdate(cache, values, position)``: one position, or one for each row of a batch."""
    attributes = step.attributes
    return _update(
        step,
        axis=attributes.get("axis", -2),
        batch_axis=attributes.get("batch_axis", 0),
        circular=_circular(step),
    )


def tensor_scatter(step: steps.Kernel, settings: Settings) -> Action:
    """``TensorScatter(past_cache, update, write_indices)``; without indices it writes from 0 on."""
    return _update(
        step, axis=step.attributes.get("axis", -2), batch_axis=0, circular=_circular(step)
    )


def assign(step: steps.Kernel, settings: Settings) -> Action:
    """``Assign(state, value)`` overwrites the whole state."""
    state_slot, value_slot, output, root = _ports(step)

    def act(slots: Slots) -> None:
        state, value = slots[state_slot], slots[value_slot]
        if value.shape != state.shape or value.dtype.itemsize != state.dtype.itemsize:
            raise errors.StorageMismatch(
                f"{root}: a value {value.dtype}{list(value.shape)} "
                f"for a state {state.dtype}{list(state.shape)}"
            )
        if not value.flags.c_contiguous:
            value = np.ascontiguousarray(value)
        dense.assign(address(state), address(value), state.nbytes)
        slots[output] = state

    return act


def cache_reorder(step: steps.Kernel, settings: Settings) -> Action:
    """``CacheReorder(cache, indices)``: ``updated[i] = cache[indices[i]]``, in place."""
    cache_slot, indices_slot, output, root = _ports(step)
    batch_axis: int = step.attributes.get("batch_axis", 0)

    def act(slots: Slots) -> None:
        cache = slots[cache_slot]
        indices = np.ascontiguousarray(slots[indices_slot], dtype=np.int64)
        axis = batch_axis % cache.ndim
        count = cache.shape[axis]
        if indices.shape != (count,):
            raise errors.StorageMismatch(f"{root}: {list(indices.shape)} indices for {count} rows")
        wrong = dense.find_outside(address(indices), count, 8, 0, count)
        if wrong >= 0:
            raise errors.CapacityError(root, int(indices[wrong]), 1, count, wrong)
        slots[output] = cache
        if not cache.size:
            return
        row = math.prod(cache.shape[axis + 1 :]) * cache.itemsize
        table = np.empty((3 * count + 1, 2), np.int64)
        moves = dense.plan_moves(address(indices), count, address(table))
        workspace = np.empty(min(row, WORKSPACE), np.uint8)
        outer = math.prod(cache.shape[:axis])
        dense.move_rows(
            address(cache),
            outer,
            count,
            row,
            moves,
            address(table),
            address(workspace),
            workspace.size,
        )

    return act


def copy(step: steps.Kernel, settings: Settings) -> Action:
    """``Copy(x)``: new storage."""
    (source,), (output,) = step.inputs, step.outputs
    assert source is not None and output is not None

    def act(slots: Slots) -> None:
        slots[output] = np.array(slots[source], order="C")

    return act


def _ports(step: steps.Kernel) -> tuple[int, int, int, str]:
    first, second = step.inputs[:2]
    output = step.outputs[0]
    assert first is not None and second is not None and output is not None
    return first, second, output, step.roots[0]


def _circular(step: steps.Kernel) -> bool:
    mode = step.attributes.get("mode", "linear")
    if mode not in ("linear", "circular"):
        raise errors.UnsupportedOperator(step.domain, step.op_type, f'mode="{mode}"')
    return bool(mode == "circular")


def _update(step: steps.Kernel, axis: int, batch_axis: int, circular: bool) -> Action:
    cache_slot, values_slot, output, root = _ports(step)
    position_slot = step.inputs[2] if len(step.inputs) > 2 else None
    zero = np.zeros((), np.int64)
    kernel = dense.update_circular if circular else dense.update
    # (rows, capacity, length, token) by the shapes of cache and values: found once, then one
    # look-up a call
    geometries: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int, int, int]] = {}

    def act(slots: Slots) -> None:
        cache, values = slots[cache_slot], slots[values_slot]
        position = zero if position_slot is None else slots[position_slot]
        key = cache.shape, values.shape
        geometry = geometries.get(key)
        if geometry is None:
            if len(geometries) >= _MOST_GEOMETRIES:
                geometries.clear()
            geometry = geometries[key] = _geometry(root, cache, values, axis)
        rows, capacity, length, token = geometry
        highest = capacity - length
        if not values.flags.c_contiguous:
            values = np.ascontiguousarray(values)
        if position.ndim:
            update_rows(cache, values, position, geometry)
        else:
            start = int(position)
            if highest < 0 or start < 0 or (start > highest and not circular):
                raise errors.CapacityError(root, start, length, capacity)
            if rows:
                kernel(address(cache), address(values), rows, capacity, length, token, start)
        slots[output] = cache

    def update_rows(
        cache: Array, values: Array, position: Array, geometry: tuple[int, int, int, int]
    ) -> None:
        _, capacity, length, token = geometry
        along, over = axis % cache.ndim, batch_axis % cache.ndim
        positions = np.ascontiguousarray(position)
        batch = cache.shape[over]
        if positions.shape != (batch,) or along == over:
            raise errors.StorageMismatch(
                f"{root}: positions {list(positions.shape)} for {batch} rows"
            )
        end = np.iinfo(np.int64).max if circular and capacity >= length else capacity - length + 1
        wrong = dense.find_outside(address(positions), batch, 8, 0, end)
        if wrong >= 0:
            raise errors.CapacityError(root, int(positions[wrong]), length, capacity, wrong)
        if not values.size:
            return
        inner = math.prod(cache.shape[along + 1 :])
        if over < along:
            outer, rows = math.prod(cache.shape[:over]), math.prod(cache.shape[over + 1 : along])
            dense.update_batch(
                address(cache),
                address(values),
                outer,
                batch,
                rows,
                capacity,
                length,
                token,
                address(positions),
                circular,
            )
        else:
            outer, rows = math.prod(cache.shape[:along]), math.prod(cache.shape[along + 1 : over])
            block = inner // (rows * batch) * cache.itemsize
            dense.update_batch_inside(
                address(cache),
                address(values),
                outer,
                capacity,
                length,
                rows,
                batch,
                block,
                address(positions),
                circular,
            )

    return act


def _geometry(root: str, cache: Array, values: Array, axis: int) -> tuple[int, int, int, int]:
    """(rows, capacity, length, bytes of a token); StorageMismatch where values do not fit."""
    along = axis % cache.ndim
    outside = cache.shape[:along] + cache.shape[along + 1 :]
    if (
        values.ndim != cache.ndim
        or values.shape[:along] + values.shape[along + 1 :] != outside
        or values.dtype.itemsize != cache.dtype.itemsize
    ):
        raise errors.StorageMismatch(
            f"{root}: values {values.dtype}{list(values.shape)} do not fit a cache "
            f"{cache.dtype}{list(cache.shape)} along axis {axis}"
        )
    token = math.prod(cache.shape[along + 1 :]) * cache.itemsize
    rows = math.prod(cache.shape[:along]) if values.size else 0
    return rows, cache.shape[along], values.shape[along], token
