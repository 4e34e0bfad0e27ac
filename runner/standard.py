"""Sub-sessions: runs of ordinary nodes, executed by onnxruntime.

A call costs little only when everything is prepared: one binding per frame, addresses bound once.
Values that cannot be bound by address (strings, sequences) take the ordinary way through
``session.run``.
"""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import onnx_ir as ir

from onnx_inplace.compiler import errors
from onnx_inplace.compiler.steps import Block, ExecutionPlan, Storage, SubSession, Value
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import library
from onnx_inplace.runner.actions import Action, Array, DType, Slots
from onnx_inplace.runner.frames import Frame
from onnx_inplace.runner.loaded import Loaded, Packaged


@dataclasses.dataclass(frozen=True, slots=True)
class _Port:
    """A value at the border of a sub-session."""

    name: str
    slot: int
    value: Value
    code: int  # element type as ONNX numbers it
    dtype: DType


class SubSessionRunner:
    """A sub-session, loaded when it is first needed. Shared by bindings and threads.

    Attributes:
        step: what it is in the plan.
    """

    def __init__(
        self,
        step: SubSession,
        plan: ExecutionPlan,
        loader: library.Library,
        threads: library.Threads,
    ):
        """Look at its border; nothing is loaded.

        Raises:
            errors.UnsupportedOperator: numpy cannot hold a value.
        """
        ports = [plan.values[p.slot] for p in (*step.inputs, *step.outputs)]
        for value in ports:
            _refuse_parts_of_a_byte(value)
        self._plain = all(value.dtype not in (None, ir.DataType.STRING) for value in ports)
        self.step, self._loader = step, loader
        self._threads = threads if self._plain else library.Threads.OWN
        self._loaded: Loaded | None = None
        self._lock = threading.Lock()
        self._inputs = (
            [_port(p.name, plan.values[p.slot]) for p in step.inputs] if self._plain else []
        )
        self._outputs = (
            [_port(p.name, plan.values[p.slot]) for p in step.outputs] if self._plain else []
        )

    def load(self) -> None:
        """Load the model, if that has not been done.

        Raises:
            errors.UnsupportedOperator: onnxruntime cannot run a node.
            errors.WeightsError: a file of its weights has changed since.
        """
        with self._lock:
            if self._loaded is None:
                self._loaded = self._loader.load(self.step, self._threads)

    def _session(self) -> Loaded:
        self.load()
        assert self._loaded is not None
        return self._loaded

    def action(self, frame: Frame, block: Block) -> Action:
        """The call of one frame: noting shapes, or prepared when they are known."""
        if not self._plain:
            return self._unbound()
        if all(p.slot in frame.shapes for p in self._outputs if p.value.fixed):
            return self._prepared(frame, block)
        return self._noting(frame)

    def _unbound(self) -> Action:
        session = self._session()
        assert isinstance(session, Packaged)
        run = session.session.run
        inputs = [(p.name, p.slot) for p in self.step.inputs]
        outputs = [p.slot for p in self.step.outputs]
        names = [p.name for p in self.step.outputs]

        def act(slots: Slots) -> None:
            feeds = {name: slots[slot] for name, slot in inputs}
            try:
                results = run(names, feeds, None)
            except Exception as error:
                raise errors.OperatorError(str(error)) from None
            for slot, result in zip(outputs, results, strict=True):
                slots[slot] = result

        return act

    def _noting(self, frame: Frame) -> Action:
        """Everything is bound anew, the library allocates all results."""
        session, inputs, outputs = self._session(), self._inputs, self._outputs
        dtypes = [port.dtype for port in outputs]

        def act(slots: Slots) -> None:
            bound = session.bind()
            for port in inputs:
                array = _checked(port, slots[port.slot])
                bound.bind_input(port.name, port.code, array.shape, address(array))
            for port in outputs:
                bound.bind_unknown(port.name)
            try:
                bound.runner()()
            except Exception as error:
                raise errors.OperatorError(str(error)) from None
            for port, array in zip(outputs, bound.made(0, dtypes), strict=True):
                slots[port.slot] = array
                if port.value.fixed:
                    frame.note(port.slot, array.shape)

        return act

    def _prepared(self, frame: Frame, block: Block) -> Action:
        """What keeps its address is bound here, the rest at every call."""
        bound = self._session().bind()
        bind_input, bind_output = bound.bind_input, bound.bind_output
        moving = []
        for port in self._inputs:
            array = frame.template[port.slot]
            if array is None:
                moving.append((port.slot, port.name, port.code))
            else:
                bind_input(port.name, port.code, array.shape, address(array))
        fresh, unknown = [], []
        for port in self._outputs:
            if port.value.storage is Storage.BUFFER:
                array = frame.buffer(block, port.slot)
                bind_output(port.name, port.code, array.shape, address(array))
            elif port.value.fixed:
                fresh.append((port.slot, port.name, port.code, frame.shapes[port.slot], port.dtype))
            else:
                unknown.append(port)
        # they are made in the order in which they were bound first: buffers, fresh ones, unknown
        # ones
        known = len(self._outputs) - len(unknown)
        names, made = [p.name for p in unknown], [p.slot for p in unknown]
        dtypes, run, empty = [p.dtype for p in unknown], bound.runner(), np.empty

        def act(slots: Slots) -> None:
            for slot, name, code in moving:
                array = slots[slot]
                bind_input(name, code, array.shape, address(array))
            for slot, name, code, shape, dtype in fresh:
                slots[slot] = array = empty(shape, dtype)
                bind_output(name, code, shape, address(array))
            for name in names:
                bound.bind_unknown(name)  # or the result of the last run would be overwritten
            try:
                run()
            except Exception as error:
                raise errors.OperatorError(str(error)) from None
            if made:
                for slot, array in zip(made, bound.made(known, dtypes), strict=True):
                    slots[slot] = array

        return act


def _refuse_parts_of_a_byte(value: Value) -> None:
    """Arrays have no packed elements, and onnxruntime takes no others."""
    if value.dtype not in (None, ir.DataType.STRING) and value.dtype.bitwidth < 8:
        raise errors.UnsupportedOperator(
            "",
            value.dtype.name,
            f"`{value.name}` has elements of less than a byte and leaves its sub-session: "
            "cast it to INT8 or UINT8 before a write, and back behind it",
        )


def _port(name: str, value: Value) -> _Port:
    assert value.dtype is not None
    return _Port(name, value.slot, value, value.dtype.value, value.dtype.numpy())


def _checked(port: _Port, array: Array) -> Array:
    """An address says nothing about type and layout: compare them once, when a frame begins."""
    if array.dtype != port.dtype or not array.flags.c_contiguous:
        raise TypeError(
            f"`{port.value.name}` is {array.dtype}, strides {array.strides}; "
            f"{port.dtype} in C order is expected"
        )
    return array
