"""Session and binding: the caller's storage, one run after the other."""
from __future__ import annotations

import os
import threading
import weakref

import numpy as np

from onnx_inplace.compiler import errors, loader, planner, positions
from onnx_inplace.runner import execute, storage


class Outputs(tuple):
    """Results by position and by name."""

    names: tuple[str, ...]

    def __getitem__(self, key):
        return tuple.__getitem__(self, self.names.index(key) if isinstance(key, str) else key)

    def keys(self):
        return self.names


def i_kind(dtype: np.dtype) -> bool:
    return dtype.kind in "iuf"


class Input:
    """A declared input."""

    __slots__ = ("name", "dtype", "shape", "slot")

    def __init__(self, value, slot: int):
        self.name, self.slot = value.name, slot
        self.dtype = np.dtype(value.dtype.numpy())
        self.shape = tuple(d if isinstance(d, int) else d.value for d in value.shape)

    def convert(self, value) -> np.ndarray:
        """A Python or numpy scalar, or a list, of the declared kind. Nothing is rounded."""
        try:
            array = np.asarray(value)
            if array.dtype.kind in "iu" and i_kind(self.dtype) or np.can_cast(array.dtype, self.dtype, "same_kind"):
                result = array.astype(self.dtype)
                if array.dtype.kind == "f" or np.array_equal(result, array):
                    return result
        except (TypeError, ValueError, OverflowError):
            pass
        raise errors.StorageMismatch(f"{self.name}: {value!r} is not {self.dtype}")

    def match(self, shape: tuple[int, ...], dims: dict[str, int]) -> None:
        """Unify declared and given dimensions."""
        if len(shape) != len(self.shape):
            raise errors.StorageMismatch(f"{self.name}: shape {shape}, declared {self.shape}")
        for declared, given in zip(self.shape, shape):
            if (declared if isinstance(declared, int) else dims.setdefault(declared, given)) != given:
                raise errors.StorageMismatch(f"{self.name}: shape {shape}, declared {self.shape} with {dims}")


class Session:
    """A model that is ready to run on storage of the caller.

    ``source`` is a path, or a compiled model.
    """

    def __init__(self, source):
        serialized = getattr(source, "serialized", None)
        if serialized is None:
            with open(os.fspath(source), "rb") as file:
                serialized = file.read()
        self.loaded = loader.load(serialized)
        self.checks = positions.build(self.loaded)
        self.plan = planner.plan(self.loaded)
        self._act = execute.compile_block(self.plan.block)
        self._check = execute.compile_checks(self.checks, {v.name: s for v, s in self.plan.slot.items() if v.is_graph_input()})
        inputs = [Input(v, self.plan.slot[v]) for v in self.plan.inputs]
        self.mutable_inputs = [i for i in inputs if i.name in self.plan.mutable]
        self.inputs = [i for i in inputs if i.name not in self.plan.mutable]

    def allocate(self, name: str, **dims: int) -> np.ndarray:
        """Zeroed, aligned storage for a mutable input."""
        i = next(i for i in self.mutable_inputs if i.name == name)
        return storage.zeros(tuple(d if isinstance(d, int) else dims[d] for d in i.shape), i.dtype)

    def bind(self, **arrays) -> Binding:
        """Lend storage. The lease begins here and ends with ``close`` or the ``with`` block."""
        return Binding(self, arrays)

    def run(self, feeds: dict, writable: dict | None = None) -> Outputs:
        """One call; ``writable`` names the storage that it may change."""
        refused = {i.name for i in self.mutable_inputs} & set(feeds)
        if refused:
            raise errors.BindingError(f"{sorted(refused)} will be written: pass them as `writable`")
        with self.bind(**(writable or {})) as step:
            return step.run(**feeds)


class Binding:
    """Storage lent to a session."""

    def __init__(self, session: Session, arrays: dict):
        flat = {}
        for name, value in arrays.items():
            if isinstance(value, (list, tuple)) and any(i.name == f"{name}.0" for i in session.mutable_inputs):
                flat.update({f"{name}.{k}": v for k, v in enumerate(value)})
            else:
                flat[name] = value
        expected = {i.name: i for i in session.mutable_inputs}
        if set(flat) != set(expected):
            raise errors.BindingError(f"mutable inputs are {sorted(expected)}, given {sorted(flat)}")
        self._dims: dict[str, int] = {}
        for name, value in flat.items():
            storage.check(name, value, expected[name].dtype)
            expected[name].match(value.shape, self._dims)
        self.session, self._arrays = session, flat
        self._keys = storage.lease(flat)
        self._finalizer = weakref.finalize(self, storage.release, self._keys)
        self._intervals = [storage.interval(a) for a in flat.values()]
        self._addresses = {n: execute.address(a) for n, a in flat.items()}
        self._slots = [None] * session.plan.slots
        for slot, value in session.plan.constants.items():
            self._slots[slot] = value
        for name, value in flat.items():
            self._slots[expected[name].slot] = value
        self._results = [(slot, flat[root] if root else None) for (_, root), slot in zip(session.plan.outputs, session.plan.block.outputs)]
        self._type = type("Outputs", (Outputs,), {"names": tuple(n for n, _ in session.plan.outputs)})
        self._running = threading.Lock()
        self._dirty = False

    def __enter__(self) -> Binding:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the lease."""
        self._finalizer()

    def run(self, **feeds) -> Outputs:
        """Execute the plan once."""
        if not self._running.acquire(blocking=False):
            raise errors.BindingInUse("the binding is running in another thread")
        try:
            return self._run(feeds)
        finally:
            self._running.release()

    def _run(self, feeds: dict) -> Outputs:
        if not self._finalizer.alive:
            raise errors.BindingError("the binding is closed")
        slots, dims, constants = self._slots, dict(self._dims), self.session.plan.constants
        inputs = self.session.inputs
        if len(feeds) != len(inputs):
            raise errors.BindingError(f"inputs are {[i.name for i in inputs]}, given {sorted(feeds)}")
        given = []
        for i in inputs:
            if i.name not in feeds:
                raise errors.BindingError(f"input {i.name} is missing")
            value = feeds[i.name]
            if isinstance(value, np.ndarray):
                if value.dtype != i.dtype:
                    raise errors.StorageMismatch(f"{i.name}: element type {value.dtype}, declared {i.dtype}")
            else:
                value = i.convert(value)
            i.match(value.shape, dims)
            mine = storage.interval(value)
            for theirs in self._intervals:
                if mine[0] < theirs[1] and theirs[0] < mine[1]:
                    raise errors.SharedStorage(f"{i.name} overlaps a cache")
            slots[i.slot] = value
            given.append(value)
        if self._dirty:
            raise errors.DirtyState("an earlier run failed after it had written; call reset()")
        self.session._check(slots, dims, self._arrays)
        self._dirty = True
        self.session._act(slots)
        self._dirty = False
        results = []
        for slot, root in self._results:
            value = slots[slot]
            if root is not None:
                if value is not root:
                    raise errors.AliasViolation("an aliased output left its root")
            elif slot in constants or any(np.may_share_memory(value, g) for g in given):
                value = value.copy()
            results.append(value)
        return self._type(results)

    def reset(self) -> None:
        """Accept the storage as it is after a failed run."""
        self._dirty = False
