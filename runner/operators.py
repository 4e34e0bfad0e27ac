"""Kernel steps that write tokens or rows: CacheUpdate, TensorScatter, Assign, CacheReorder; Copy.

Every position and index is compared with its bounds before the step writes, also where the checks
before the run have seen it already: the comparison costs less than a tenth of a microsecond, a wild
write costs the process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from onnx_inplace.compiler import errors, steps
from onnx_inplace.numba_kernels import dense
from onnx_inplace.numba_kernels.memory import FIELD, address
from onnx_inplace.runner.actions import Action, Array, Settings, Slots

WORKSPACE = 1 << 16  # bytes; rows are reordered in pieces of at most this size
_NO_LIMIT = 2**63 - 1
_MOST_GEOMETRIES = 1024  # a server sees many lengths of prompts: forget, do not grow for ever


def cache_update(step: steps.Kernel, settings: Settings) -> Action:
    """``CacheUpdate(cache, values, position)``: one position, or one for each row of a batch."""
    return _update(step)


def tensor_scatter(step: steps.Kernel, settings: Settings) -> Action:
    """``TensorScatter(past_cache, update, write_indices)``; without indices it writes from 0 on."""
    return _update(step)


def assign(step: steps.Kernel, settings: Settings) -> Action:
    """``Assign(state, value)`` overwrites the whole state."""
    state_slot, value_slot, output, root = _ports(step)
    overwrite = dense.assign.ready()

    def act(slots: Slots) -> None:
        state, value = slots[state_slot], slots[value_slot]
        if value.shape != state.shape or value.dtype.itemsize != state.dtype.itemsize:
            raise errors.StorageMismatch(
                f"{root}: a value {value.dtype}{list(value.shape)} "
                f"for a state {state.dtype}{list(state.shape)}"
            )
        if not value.flags.c_contiguous:
            value = np.ascontiguousarray(value)
        overwrite(address(state), address(value), state.nbytes)
        slots[output] = state

    return act


def cache_reorder(step: steps.Kernel, settings: Settings) -> Action:
    """``CacheReorder(cache, indices)``: ``updated[i] = cache[indices[i]]``, in place."""
    cache_slot, indices_slot, output, root = _ports(step)
    batch_axis: int = step.attributes.get("batch_axis", 0)
    find_outside, plan_moves = dense.find_outside.ready(), dense.plan_moves.ready()
    move_rows = dense.move_rows.ready()

    def act(slots: Slots) -> None:
        cache = slots[cache_slot]
        indices = np.ascontiguousarray(slots[indices_slot], dtype=np.int64)
        axis = batch_axis % cache.ndim
        count = cache.shape[axis]
        if indices.shape != (count,):
            raise errors.StorageMismatch(f"{root}: {list(indices.shape)} indices for {count} rows")
        wrong = find_outside(address(indices), count, 8, 0, count)
        if wrong >= 0:
            raise errors.CapacityError(root, int(indices[wrong]), 1, count, wrong)
        slots[output] = cache
        if not cache.size:
            return
        row = math.prod(cache.shape[axis + 1 :]) * cache.itemsize
        table = np.empty((3 * count + 1, 2), np.int64)
        moves = plan_moves(address(indices), count, address(table))
        workspace = np.empty(min(row, WORKSPACE), np.uint8)
        outer = math.prod(cache.shape[:axis])
        move_rows(
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


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """What shapes say of an update.

    Attributes:
        rows: in front of the axis; 0 where there is nothing to write.
        capacity: of the axis [tokens].
        length: of the values [tokens].
        token: bytes behind the axis.
        batch: rows that may have a position of their own; 0 where there is no such axis.
        sizes: what the kernel for such rows wants to know, in its order.
        inside: the batch axis stands behind the axis.
    """

    rows: int
    capacity: int
    length: int
    token: int
    batch: int
    sizes: tuple[int, int, int, int, int, int]
    inside: bool


def axes(step: steps.Kernel) -> tuple[int, int]:
    """The axis that a CacheUpdate or TensorScatter writes along, and that of a batch."""
    batch_axis = step.attributes.get("batch_axis", 0) if step.op_type == "CacheUpdate" else 0
    return step.attributes.get("axis", -2), batch_axis


def _update(step: steps.Kernel) -> Action:
    axis, batch_axis = axes(step)
    circular = _circular(step)
    cache_slot, values_slot, output, root = _ports(step)
    position_slot = step.inputs[2] if len(step.inputs) > 2 else None
    zero = np.zeros((), np.int64)
    update = (dense.update_circular if circular else dense.update).ready()
    update_rows = _row_update(circular) if _may_have_rows(step, position_slot) else None
    geometries: dict[tuple[tuple[int, ...], tuple[int, ...]], Geometry] = {}

    def act(slots: Slots) -> None:
        cache, values = slots[cache_slot], slots[values_slot]
        position = zero if position_slot is None else slots[position_slot]
        key = cache.shape, values.shape
        geometry = geometries.get(key)
        if geometry is None:
            if len(geometries) >= _MOST_GEOMETRIES:
                geometries.clear()
            geometry = geometries[key] = geometry_of(root, cache, values, axis, batch_axis)
        if not values.flags.c_contiguous:
            values = np.ascontiguousarray(values)
        if position.ndim and (geometry.batch != 1 or position.shape != (1,)):
            if update_rows is None:
                raise errors.StorageMismatch(f"{root}: {position.ndim} dimensions of a position")
            update_rows(root, cache, values, position, geometry)
            slots[output] = cache
            return
        start, length, capacity = int(position.item()), geometry.length, geometry.capacity
        if length > capacity or start < 0 or (start > capacity - length and not circular):
            row = 0 if position.ndim else None
            raise errors.CapacityError(root, start, length, capacity, row)
        if geometry.rows:
            to, source = id(cache) + FIELD, id(values) + FIELD
            update(to, source, geometry.rows, capacity, length, geometry.token, start)
        slots[output] = cache

    return act


def _may_have_rows(step: steps.Kernel, position: int | None) -> bool:
    """Whether a position of each row may come, as far as is known at load."""
    if position is None:
        return False
    value = step.values.get(position)
    return value is None or value.shape != ()


_RowUpdate = Callable[[str, Array, Array, Array, Geometry], None]


def _row_update(circular: bool) -> _RowUpdate:
    """Writes every row of a batch at its own position."""
    find_outside, outside = dense.find_outside.ready(), dense.update_batch.ready()
    inside = dense.update_batch_inside.ready()

    def update(root: str, cache: Array, values: Array, position: Array, geometry: Geometry) -> None:
        positions = np.ascontiguousarray(position)
        capacity, length, batch = geometry.capacity, geometry.length, geometry.batch
        if positions.shape != (batch,):
            raise errors.StorageMismatch(
                f"{root}: positions {list(positions.shape)} for {batch} rows"
            )
        end = _NO_LIMIT if circular and length <= capacity else capacity - length + 1
        wrong = find_outside(address(positions), batch, 8, 0, end)
        if wrong >= 0:
            raise errors.CapacityError(root, int(positions[wrong]), length, capacity, wrong)
        if geometry.rows:
            kernel = inside if geometry.inside else outside
            to, source = address(cache), address(values)
            a, b, c, d, e, f = geometry.sizes
            kernel(to, source, a, b, c, d, e, f, address(positions), circular)

    return update


def geometry_of(root: str, cache: Array, values: Array, axis: int, batch_axis: int) -> Geometry:
    """What the shapes say; StorageMismatch where values do not fit."""
    shape = cache.shape
    along, over = axis % cache.ndim, batch_axis % cache.ndim
    if (
        values.ndim != cache.ndim
        or values.shape[:along] + values.shape[along + 1 :] != shape[:along] + shape[along + 1 :]
        or values.dtype.itemsize != cache.dtype.itemsize
    ):
        raise errors.StorageMismatch(
            f"{root}: values {values.dtype}{list(values.shape)} do not fit a cache "
            f"{cache.dtype}{list(shape)} along axis {axis}"
        )
    capacity, length = shape[along], values.shape[along]
    token = math.prod(shape[along + 1 :]) * cache.itemsize
    rows = math.prod(shape[:along]) if values.size else 0
    if over == along:  # no axis is left for a batch
        return Geometry(rows, capacity, length, token, 0, (0, 0, 0, 0, 0, 0), False)
    if over < along:
        outer, inner = math.prod(shape[:over]), math.prod(shape[over + 1 : along])
        sizes = outer, shape[over], inner, capacity, length, token
    else:
        outer, inner = math.prod(shape[:along]), math.prod(shape[along + 1 : over])
        block = math.prod(shape[over + 1 :]) * cache.itemsize
        sizes = outer, capacity, length, inner, shape[over], block
    return Geometry(rows, capacity, length, token, shape[over], sizes, over > along)
