"""A model that is ready to run: loaded once, immutable, shared by bindings and threads.

The session knows the plan and the checks; storage and everything that a run changes belong to
``binding.Binding``.
"""

from __future__ import annotations

import bisect
import math
import operator
import os
import sys
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import numpy as np
import onnx_ir as ir

from onnx_inplace.compiler import errors, loader, planner, positions
from onnx_inplace.numba_kernels import cpu
from onnx_inplace.runner import (
    binding,
    checks,
    execute,
    inputs,
    intake,
    outputs,
    page_checks,
    slabs,
    storage,
)
from onnx_inplace.runner.actions import Fuse, Settings
from onnx_inplace.runner.fused.choice import Refusal
from onnx_inplace.runner.page_port import PagedPort
from onnx_inplace.runner.storage import Array, Interval

Source = loader.Source
Fusing = Literal["auto", "off", "decode-only"]
Kernels = Literal["auto", "portable", "avx2", "avx512"]


class Session:
    """A model on which arrays of the caller can be bound.

    Example:
        session = Session("decode.onnx", threads=2)
        cache = session.allocate("cache", batch=1, max_length=4096)
        with session.bind(cache=cache) as step:
            out = step.run(values=values, position=0)
            assert out["updated"] is cache

    Attributes:
        inputs: ordinary inputs, in the order of the graph.
        defaults: what some of them are where a run does not bring them.
        mutable_inputs: inputs that a caller lends for writing.
        outputs: results of a run.
        threads: of onnxruntime and of parallel kernels.
    """

    def __init__(
        self,
        source: Source,
        *,
        threads: int = 1,
        fuse: Fusing = "auto",
        kernels: Kernels = "auto",
    ):
        """Load a model.

        Args:
            source: path of an ``.onnx`` file, a compiled program, or what ``compiler.load``
                returned.
            threads: how many threads a run may use.
            fuse: "auto" runs the stretches of the model that have templates in one call of
                compiled kernels each, where a run has few rows, as when a decoder makes one token;
                "off" never does; "decode-only" loads nothing else, and refuses runs of other
                shapes.
            kernels: "portable" takes those that run on every CPU, "avx2" and "avx512" those that
                name such instructions; "auto" what ``ONNX_INPLACE_KERNELS`` says, else the best
                that this CPU has. A process compiles for one CPU: where that has AVX-512, only the
                variable can ask for "avx2".

        Raises:
            errors.ContractError: the file does not keep its contract.
            errors.UnsupportedOperator: an operator, or a type of it, has no kernel.
            errors.BindingError: ``fuse="decode-only"``, and nothing of the model can be fused; or
                this process cannot run such ``kernels``.
        """
        if operator.index(threads) < 1:
            raise errors.BindingError(f"threads is {threads}: at least 1 is needed.", "threads")
        if fuse not in get_args(Fusing):
            words = ", ".join(f'"{word}"' for word in get_args(Fusing))
            raise errors.BindingError(f"fuse is {fuse!r}, not one of {words}.", "fuse")
        loaded = loader.load(source)
        self.threads = threads
        self.plan = planner.plan(loaded)
        self.checks = positions.build(loaded)
        graph, mutable = loaded.model.graph, set(self.plan.mutable)
        ports = [
            (i.slot, PagedPort.of(value))
            for i, value in zip(self.plan.inputs, graph.inputs, strict=True)
        ]
        self.mutable_inputs = tuple(port for _, port in ports if port.name in mutable)
        self.feeds = tuple((slot, port) for slot, port in ports if port.name not in mutable)
        self.inputs = tuple(port for _, port in self.feeds)
        self.paged_inputs = tuple(
            (k, port.name) for k, port in enumerate(self.inputs) if isinstance(port, PagedPort)
        )
        self.feed_names = frozenset(port.name for port in self.inputs)
        self.defaults = {name: _constant(tensor) for name, tensor in loaded.defaults.items()}
        self.ports_by_name = {port.name: port for port in self.mutable_inputs}
        self.paged = any(isinstance(port, PagedPort) for _, port in ports)
        self.results = tuple((o.name, o.slot, o.root) for o in self.plan.outputs)
        self.outputs = tuple(
            PagedPort.of(value) if root is None else self.ports_by_name[root]
            for value, (_, _, root) in zip(graph.outputs, self.results, strict=True)
        )
        self.outputs_type = outputs.outputs_type([name for name, _, _ in self.results])
        self._slot_of = {port.name: slot for slot, port in ports}
        path = Path(source) if isinstance(source, str | os.PathLike) else None
        settings = Settings(threads=threads, fuse=Fuse(fuse), kernels=_path(kernels))
        self._engine = execute.Engine(self.plan, settings, path)
        intake.ready()
        self.prechecks = checks.Prechecks(self.checks, self._slot_of)
        self.page_checks = page_checks.Checker(self.checks.pages, self._slot_of)
        self._kept = _disjoint(storage.interval(a) for a in self._engine.constants.values())
        weights = _weights_in_memory(graph)
        if weights:
            key = storage.leases.number()
            weakref.finalize(self, storage.leases.give_back, key)
            storage.leases.lend(weights, key)

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Why runs with few rows did not take fused steps: each reason once, as it was met.

        Empty where all of them did. Each is logged, too, as a warning of the logger
        "onnx_inplace". What the plan knows beforehand stands in ``plan.fused.refusals``.
        """
        return self._engine.fused.refusals

    def allocate(self, name: str, /, **dims: int | None) -> Any:
        """Storage for a mutable input: a zeroed array aligned to 64 bytes, or a ``PagedCache``.

        Args:
            name: a mutable input; a member of a group is called ``caches.0``.
            **dims: a size for each named dimension of it. A paged input also takes ``budget``: most
                bytes of all its pages; without it, what the memory holds.

        Raises:
            errors.BindingError: no such mutable input; a size is missing, unknown or no size.
        """
        port = self.ports_by_name.get(name)
        if port is None:
            raise errors.BindingError(
                f"`{name}` is no mutable input. Declared: "
                f"{', '.join(self.ports_by_name) or 'none'}.",
                name,
            )
        if port.shape is None or None in port.shape:
            raise errors.BindingError(
                f"{port} has dimensions without a name: make the array yourself.", name
            )
        budget = None
        if isinstance(port, PagedPort) and "budget" not in port.dims:
            budget = dims.pop("budget", None)
        for word, wrong in (
            ("missing", [d for d in port.dims if d not in dims]),
            ("unknown", [d for d in dims if d not in port.dims]),
        ):
            if wrong:
                raise errors.BindingError(f"{port}: {word} sizes: {', '.join(wrong)}.", wrong[0])
        shape = tuple(_size(port, d, d if isinstance(d, int) else dims[str(d)]) for d in port.shape)
        if isinstance(port, PagedPort):
            return port.allocate(shape, None if budget is None else _size(port, "budget", budget))
        if math.prod(shape) * port.dtype.itemsize > sys.maxsize:
            raise errors.BindingError(f"{port}: no memory has room for {shape}.", name)
        return slabs.zeros(shape, port.dtype)

    def bind(self, /, **arrays: object) -> binding.Binding:
        """Lend arrays to the session, which then may write them. The lease begins here.

        Args:
            **arrays: one array, or paged cache, per mutable input; a group of parameters takes a
                sequence, mapping or dataclass.

        Raises:
            errors.BindingError: an argument is missing or unknown.
            errors.ImmutableStorage: an array is read-only.
            errors.StorageMismatch: no array; byte order, type, shape or layout differ from the
                declaration; a paged cache has other pages, ids or formats.
            errors.SharedStorage: two arrays overlap, or one overlaps a weight of a session.
            errors.BindingInUse: bytes of an array, or a paged cache, are lent already.
        """
        return binding.Binding(self, arrays)

    def run(
        self,
        feeds: Mapping[str, object] | None = None,
        writable: Mapping[str, object] | None = None,
    ) -> outputs.Outputs:
        """Bind, run once, give back. ``writable`` names the arrays that the run may change.

        Raises:
            errors.BindingError: as ``bind`` and ``Binding.run``; also when a mutable input stands
                among ``feeds``.
        """
        feeds = dict(feeds or {})
        refused = [name for name in feeds if self._is_mutable(name)]
        if refused:
            raise errors.BindingError(
                f"{', '.join(f'`{n}`' for n in refused)} will be written: pass it as "
                f"writable={{{refused[0]!r}: ...}}.",
                refused[0],
            )
        with self.bind(**dict(writable or {})) as step:
            return step.run(**feeds)

    def _is_mutable(self, name: str) -> bool:
        return name in self.ports_by_name or any(
            port.startswith(f"{name}.") for port in self.ports_by_name
        )

    def __reduce__(self) -> NoReturn:
        """Not copied, not pickled: what is loaded belongs to this process."""
        raise TypeError("a Session cannot be copied or pickled: make one of the same model.")

    # What follows serves Binding.

    def open(self, arrays: Mapping[str, Any]) -> execute.Execution:
        """The executable plan of one binding."""
        return self._engine.open(arrays)

    def keeps(self, mine: Interval) -> bool:
        """Whether ``mine`` lies in a constant of the plan."""
        at = bisect.bisect_left(self._kept, (mine.stop, 0)) - 1
        return at >= 0 and self._kept[at].overlaps(mine)


def _path(kernels: str) -> cpu.Path:
    try:
        return cpu.choose(kernels)
    except ValueError as error:
        raise errors.BindingError(str(error), "kernels") from None


def _constant(tensor: ir.TensorProtocol) -> Array:
    array = tensor.numpy().view()
    array.flags.writeable = False
    return array


def _weights_in_memory(graph: ir.Graph) -> dict[str, Array]:
    """Initializers that are arrays of somebody. Those that were read from a file are nobody's."""
    arrays = {}
    for name, value in graph.initializers.items():
        if isinstance(value.const_value, ir.Tensor) and isinstance(
            value.const_value.raw, np.ndarray
        ):
            memory: object = value.const_value.raw
            while isinstance(memory, np.ndarray) and memory.base is not None:
                memory = memory.base
            if not isinstance(memory, bytes):
                arrays[name] = value.const_value.raw
    return arrays


def _disjoint(intervals: Iterable[Interval]) -> list[Interval]:
    """The same bytes in intervals that do not overlap, in order."""
    found: list[Interval] = []
    for one in sorted(intervals):
        if found and one.start < found[-1].stop:
            found[-1] = Interval(found[-1].start, max(found[-1].stop, one.stop))
        elif one.start < one.stop:
            found.append(one)
    return found


def _size(port: inputs.Port, dim: int | str | None, value: object) -> int:
    try:
        size = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        size = -1
    if size < 0 or isinstance(value, bool):
        raise errors.BindingError(f"{port}: {dim}={value!r} is no size.", str(dim))
    return size
