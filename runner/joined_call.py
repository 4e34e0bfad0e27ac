"""One call of the library: its tensors become arrays in the slots of a run, for steps of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnx_inplace.compiler import joining
from onnx_inplace.compiler.joining import Call
from onnx_inplace.compiler.steps import ExecutionPlan
from onnx_inplace.numba_kernels import foreign
from onnx_inplace.numba_kernels.foreign import Functions as Places
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Action, Array, Slots
from onnx_inplace.runner.border import Border, over
from onnx_inplace.runner.frames import Frame
from onnx_inplace.runner.joined_compiled import Compiled
from onnx_inplace.runner.layers import LayerAction
from onnx_inplace.runner.native import session
from onnx_inplace.runner.native.functions import Functions

INT64 = 7  # element type
_TOKEN = (1, 1)  # rank and size
_MOST_PLACES = 8
"""Combinations of addresses that a call keeps arrays for: most runs have one of few."""


class Tensors:
    """How a call finds its tensors.

    Attributes:
        functions: of the library.
        table: their addresses, as ``foreign.Functions`` says.
        at: address of that.
        loop: address of the one that shares work out, see ``numba_kernels.sharing``.
    """

    def __init__(self, functions: Functions) -> None:
        """Compile what asks for them."""
        self.functions = functions
        names = ("KernelContext_GetInput", "KernelContext_GetOutput", "GetTensorMutableData")
        table = [functions.address(name) for name in names]
        self.table = np.array(table, np.int64)
        assert len(table) == Places.END
        self.at = address(self.table)
        self.loop = functions.address("KernelContext_ParallelFor")
        self.collect, self._provide = foreign.collect.ready(), foreign.provide.ready()

    def provide(self, token: int, context: int, shapes: Array, count: int) -> list[int]:
        """Addresses of the tensors that come out, ``count`` beside the token."""
        places = np.empty(1 + count, np.int64)
        at = address(shapes), address(places)
        status = self._provide(self.at, context, 1 + count, *at, token)
        if status:
            raise self.functions.error(status)
        found: list[int] = places[1:].tolist()
        return found


class Prepared:
    """The steps of one call in one frame."""

    def __init__(
        self, tensors: Tensors, call: Call, plan: ExecutionPlan, action: Action, frame: Frame
    ) -> None:
        self._tensors, self._action, self._frame = tensors, action, frame
        self._inputs = [Border.of(plan, port) for port in call.inputs]
        self._outputs = [Border.of(plan, port) for port in call.outputs]
        ports = [*self._inputs, *self._outputs]
        self._slots = [port.slot for port in ports]
        self._results = [port.slot for port in self._outputs]
        made = {slot for step in call.steps for slot in joining.makes(step)}
        passing = {slot for slot in made if joining.is_own(plan, slot)}
        self._end = [*passing.union(self._slots)]  # slots whose values end with the call
        self._layer = action if isinstance(action, LayerAction) else None
        self._compiled: Compiled | None = None
        self._places: tuple[int, ...] | None = None  # of the last run
        self._arrays: dict[tuple[int, ...], list[Array]] = {}
        self._known = all(port.value.fixed and port.slot in frame.shapes for port in ports)
        if self._known:
            self._forms = [(frame.shapes[port.slot], port.dtype) for port in ports]
            self._shapes = _shapes([frame.shapes[slot] for slot in self._results])

    def __call__(self, slots: Slots, token: int, context: int, addresses: list[int]) -> None:
        """Execute them.

        Raises:
            BaseException: what a step raises.
        """
        if not self._known:
            self._noting(slots, token, context, addresses)
            return
        places = (
            *addresses,
            *self._tensors.provide(token, context, self._shapes, len(self._results)),
        )
        arrays = self._arrays.get(places)
        if arrays is None:
            arrays = self._views(places)
        for slot, array in zip(self._slots, arrays, strict=True):
            slots[slot] = array
        try:
            self._action(slots)
            self._hand_over(slots, arrays)
        finally:
            for slot in self._end:
                slots[slot] = None
        self._places = places

    def end(self, slots: Slots, result: int) -> None:
        """Do what a compiled call has left; ``result`` is what it has said."""
        assert self._layer is not None
        arrays = [slots[slot] for slot in self._slots]
        self._layer.end(slots, result)
        self._hand_over(slots, arrays)

    def _hand_over(self, slots: Slots, arrays: Sequence[Array]) -> None:
        """Let the library have the results of steps that made arrays of their own."""
        for slot, array in zip(self._results, arrays[len(self._inputs) :], strict=True):
            if slots[slot] is not array:
                _put(array, slots[slot])

    def compile(self, result: Array, space: Array) -> Compiled | None:
        """What does the steps without Python, from the next run on, while tensors stay in place.

        ``result``: int64, of which the first item is where that writes what it has done.
        ``space``: where it finds the address of its workspace, likewise.
        """
        layer, template = self._layer, self._frame.template
        if layer is None or layer.prepared is None or self._places is None:
            return None
        if any(template[old] is None for _, old in layer.written):
            return None
        if self._compiled is None or not self._compiled.serves(self._places):
            places, inputs = self._places, len(self._inputs)
            sizes = places, inputs, self._shapes, address(result), address(space)
            self._compiled = Compiled(self._tensors.loop, layer, *sizes)
            for slot, array in zip(self._slots, self._arrays[places], strict=True):
                template[slot] = array
            for new, old in layer.written:
                template[new] = template[old]
        return self._compiled

    def _views(self, places: tuple[int, ...]) -> list[Array]:
        if len(self._arrays) >= _MOST_PLACES:
            self._arrays.clear()
        found = [over(p, *form) for p, form in zip(places, self._forms, strict=True)]
        self._arrays[places] = found
        return found

    def _noting(self, slots: Slots, token: int, context: int, addresses: list[int]) -> None:
        """Shapes are asked for, and noted where they are the same in all runs of the frame."""
        functions, note = self._tensors.functions, self._frame.note
        try:
            for number, (port, place) in enumerate(zip(self._inputs, addresses, strict=True), 1):
                value = functions.make("KernelContext_GetInput", context, number)
                slots[port.slot] = array = over(place, session.shape(functions, value), port.dtype)
                if port.value.fixed:
                    note(port.slot, array.shape)
            self._action(slots)
            results = [slots[slot] for slot in self._results]
            shapes = _shapes([array.shape for array in results])
            places = self._tensors.provide(token, context, shapes, len(results))
            for port, place, array in zip(self._outputs, places, results, strict=True):
                _put(over(place, array.shape, port.dtype), array)
                if port.value.fixed:
                    note(port.slot, array.shape)
        finally:
            for slot in self._end:
                slots[slot] = None


def _shapes(shapes: Sequence[tuple[int, ...]]) -> Array:
    """As ``foreign.provide`` takes them, the token's before them."""
    return np.array([*_TOKEN, *(n for shape in shapes for n in (len(shape), *shape))], np.int64)


def _put(target: Array, value: Any) -> None:
    """Copy what a step has made into memory of the library."""
    if value.shape != target.shape or value.dtype != target.dtype:
        found, expected = (f"{a.dtype}{list(a.shape)}" for a in (value, target))
        raise RuntimeError(f"a step made {found}, not {expected}")
    np.copyto(target, value)
