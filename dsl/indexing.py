"""``x[...]`` as numpy means it: ints, slices, None, Ellipsis, tensors become operators."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_inplace.dsl import literals, recorder
from onnx_inplace.dsl.operations import as_vector, standard

_LAST, _FIRST = 2**63 - 1, -(2**63)  # bounds that Slice clamps


def index(x: ir.Value, key: Any) -> ir.Value:
    """Record ``x[key]``.

    All slices are one Slice, which keeps the axes; then ints and index tensors are Gathers, from
    the last axis to the first, so that the axes in front keep their number; then None are one
    Unsqueeze.
    """
    r = recorder.current()
    if r.is_unknown(x):
        return x
    keys = _expanded(r, x, key)
    if keys is None:
        return r.unknown()
    slices: list[tuple[int, slice]] = []
    gathers: list[tuple[int, Any]] = []
    new: list[int] = []
    axis = place = 0
    for k in keys:
        if k is None:
            new.append(place)
            place += 1
            continue
        if isinstance(k, slice):
            if (k.start, k.stop, k.step) != (None, None, None):
                slices.append((axis, k))
            place += 1
        else:
            gathers.append((axis, k))
            place += _rank_of_index(k)
        axis += 1
    if not all(_is_whole(r, k) for _, k in gathers):
        return r.unknown()
    if sum(_rank_of_index(k) > 0 for _, k in gathers) > 1:
        r.fault("Only one index can be a list or a tensor of rank 1; use op.GatherND for several.")
        return r.unknown()
    if _is_torn(keys):
        r.fault(
            "numpy moves the axis of a list that a slice parts from another index: use op.Gather."
        )
        return r.unknown()
    if slices:
        x = _slice(r, x, slices)
    for axis, k in reversed(gathers):
        x = standard("Gather", x, _index_input(r, k), axis=axis)
    return standard("Unsqueeze", x, new) if new else x


def _expanded(r: recorder.Recorder, x: ir.Value, key: Any) -> list[Any] | None:
    """One key per axis or None; Ellipsis and what is left out become full slices."""
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [k for k, e in enumerate(keys) if e is Ellipsis]
    used = sum(e is not None and e is not Ellipsis for e in keys)
    name = recorder.called(x)
    rank = None if x.shape is None else x.shape.rank()
    if rank is not None and used > rank:
        r.fault(f"{name} has {rank} dimensions, and {used} indices.", "E102")
        return None
    if len(dots) > 1:
        r.fault("An index has one `...` at most.")
        return None
    if not dots:
        return keys
    after = keys[dots[0] + 1 :]
    if all(k is None for k in after) and not after:
        return keys[: dots[0]]
    if rank is None:
        r.fault(f"the rank of {name} is not known here, so `...` means nothing.")
        return None
    return [*keys[: dots[0]], *([slice(None)] * (rank - used)), *after]


def _rank_of_index(k: Any) -> int:
    if isinstance(k, ir.Value):
        return 0 if k.shape is None else k.shape.rank()
    return np.ndim(k)


def _is_torn(keys: list[Any]) -> bool:
    """Whether a list or vector is an index, and something stands between it and another index."""
    places = [p for p, k in enumerate(keys) if k is not None and not isinstance(k, slice)]
    apart = bool(places) and places[-1] - places[0] >= len(places)
    return apart and any(_rank_of_index(keys[p]) > 0 for p in places)


def _is_whole(r: recorder.Recorder, k: Any) -> bool:
    if isinstance(k, ir.Value):
        if k.dtype == ir.DataType.BOOL:
            r.fault("An index of BOOL selects a number of elements that is not known: op.Compress.")
            return False
        if k.dtype is not None and not literals.is_integer_type(k.dtype):
            r.fault(f"{recorder.called(k)} is {k.dtype.name}: an index is a whole number.", "E102")
            return False
        return True
    if isinstance(k, bool | np.bool_) or not _all_whole(k):
        r.fault(f"{k!r} is no index: whole numbers, slices, None, `...` and tensors are.")
        return False
    return True


def _all_whole(k: Any) -> bool:
    if isinstance(k, list | tuple):
        return all(not isinstance(e, bool) and _all_whole(e) for e in k)
    if isinstance(k, np.ndarray):
        return bool(np.issubdtype(k.dtype, np.integer))
    try:
        operator.index(k)
    except TypeError:
        return False
    return True


def _index_input(r: recorder.Recorder, k: Any) -> Any:
    if isinstance(k, ir.Value):
        wide = k.dtype in (None, ir.DataType.INT64, ir.DataType.INT32)
        return k if wide else standard("Cast", k, to=ir.DataType.INT64)
    numbers = k.tolist() if isinstance(k, np.ndarray) else k
    return r.constant(literals.literal(numbers, ir.DataType.INT64))


def _slice(r: recorder.Recorder, x: ir.Value, slices: list[tuple[int, slice]]) -> ir.Value:
    starts, stops, steps = [], [], []
    for _, s in slices:
        step = 1 if s.step is None else s.step
        if isinstance(step, ir.Value):
            if s.start is None or s.stop is None:
                r.fault("A slice with a tensor as step needs both of its bounds.")
                return r.unknown()
        elif step == 0:
            r.fault("The step of a slice is zero.")
            return r.unknown()
        backwards = not isinstance(step, ir.Value) and step < 0
        starts.append((_LAST if backwards else 0) if s.start is None else s.start)
        stops.append((_FIRST if backwards else _LAST) if s.stop is None else s.stop)
        steps.append(step)
    axes = [axis for axis, _ in slices]
    bounds = [_vector(r, b) for b in (starts, stops)]
    if all(not isinstance(s, ir.Value) and s == 1 for s in steps):
        return standard("Slice", x, *bounds, axes)
    return standard("Slice", x, *bounds, axes, _vector(r, steps))


def _vector(r: recorder.Recorder, numbers: list[Any]) -> Any:
    for n in numbers:
        if not isinstance(n, ir.Value) and (isinstance(n, bool | list) or not _all_whole(n)):
            r.fault(f"{n!r} is no bound of a slice: whole numbers and tensors are.")
            return r.unknown()
    if not any(isinstance(n, ir.Value) for n in numbers):
        return [operator.index(n) for n in numbers]
    vectors = [as_vector(n) for n in numbers]
    return vectors[0] if len(vectors) == 1 else standard("Concat", *vectors, axis=0)
