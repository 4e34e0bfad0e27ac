"""Sub-sessions: runs of ordinary nodes, executed by onnxruntime.

A call costs little only when everything is prepared: one IOBinding per frame, addresses bound
once, one RunOptions. Values that cannot be bound by address (strings, sequences) take the ordinary
way through ``session.run``.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as ort

from onnx_inplace.compiler import errors
from onnx_inplace.compiler.steps import Block, ExecutionPlan, Storage, SubSession, Value
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import library
from onnx_inplace.runner.actions import Action, Array, DType, Slots
from onnx_inplace.runner.border import Border, over
from onnx_inplace.runner.frames import Frame

_CPU = ort.OrtDevice(ort.OrtDevice.cpu(), ort.OrtDevice.default_memory(), 0)


class SubSessionRunner:
    """A sub-session, loaded when it is first needed. Shared by bindings and threads.

    Attributes:
        step: what it is in the plan.
    """

    def __init__(self, step: SubSession, plan: ExecutionPlan, loader: library.Library):
        """Look at its border; nothing is loaded.

        Raises:
            errors.UnsupportedOperator: numpy cannot hold a value.
        """
        ports = [plan.values[p.slot] for p in (*step.inputs, *step.outputs)]
        for value in ports:
            _refuse_parts_of_a_byte(value)
        self._plain = all(value.dtype not in (None, ir.DataType.STRING) for value in ports)
        self.step, self._loader = step, loader
        self._owner: onnxruntime.InferenceSession | None = None
        self._lock = threading.Lock()
        self._inputs = [Border.of(plan, p) for p in step.inputs] if self._plain else []
        self._outputs = [Border.of(plan, p) for p in step.outputs] if self._plain else []

    def load(self) -> None:
        """Load the model, if that has not been done.

        Raises:
            errors.UnsupportedOperator: onnxruntime cannot run a node.
            errors.WeightsError: a file of its weights has changed since.
        """
        with self._lock:
            if self._owner is None:
                self._owner = self._loader.load(self.step)

    @property
    def _session(self) -> Any:
        """The layer below the library's session: it costs a third of a call less."""
        self.load()
        assert self._owner is not None
        return self._owner._sess

    def action(self, frame: Frame, block: Block) -> Action:
        """The call of one frame: noting shapes, or prepared when they are known."""
        if not self._plain:
            return self._unbound()
        if all(p.slot in frame.shapes for p in self._outputs if p.value.fixed):
            return self._prepared(frame, block)
        return self._noting(frame)

    def _unbound(self) -> Action:
        run = self._session.run
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
        session, inputs, outputs = self._session, self._inputs, self._outputs
        options = ort.RunOptions()

        def act(slots: Slots) -> None:
            binding = ort.SessionIOBinding(session)
            for port in inputs:
                array = _checked(port, slots[port.slot])
                binding.bind_input(port.name, _CPU, port.code, array.shape, address(array))
            for port in outputs:
                binding.bind_output(port.name, _CPU)
            try:
                session.run_with_iobinding(binding, options)
            except Exception as error:
                raise errors.OperatorError(str(error)) from None
            for port, result in zip(outputs, binding.get_outputs(), strict=True):
                array = _to_numpy(result, port.dtype)
                slots[port.slot] = array
                if port.value.fixed:
                    frame.note(port.slot, array.shape)

        return act

    def _prepared(self, frame: Frame, block: Block) -> Action:
        """What keeps its address is bound here, the rest at every call."""
        binding = ort.SessionIOBinding(self._session)
        bind_input, bind_output, get_outputs = (
            binding.bind_input,
            binding.bind_output,
            binding.get_outputs,
        )
        moving = []
        for port in self._inputs:
            array = frame.template[port.slot]
            if array is None:
                moving.append((port.slot, port.name, port.code))
            else:
                bind_input(port.name, _CPU, port.code, array.shape, address(array))
        fresh, unknown = [], []
        for port in self._outputs:
            if port.value.storage is Storage.BUFFER:
                array = frame.buffer(block, port.slot)
                bind_output(port.name, _CPU, port.code, array.shape, address(array))
            elif port.value.fixed:
                fresh.append((port.slot, port.name, port.code, frame.shapes[port.slot], port.dtype))
            else:
                unknown.append((port.slot, port.name, port.dtype))
        # get_outputs has the order in which they were bound first: buffers, fresh ones, unknown
        # ones
        known = len(self._outputs) - len(unknown)
        run, options, empty = self._session.run_with_iobinding, ort.RunOptions(), np.empty

        def act(slots: Slots) -> None:
            for slot, name, code in moving:
                array = slots[slot]
                bind_input(name, _CPU, code, array.shape, address(array))
            for slot, name, code, shape, dtype in fresh:
                slots[slot] = array = empty(shape, dtype)
                bind_output(name, _CPU, code, shape, address(array))
            for _, name, _ in unknown:
                bind_output(name, _CPU)  # or the result of the last run would be overwritten
            try:
                run(binding, options)
            except Exception as error:
                raise errors.OperatorError(str(error)) from None
            if not unknown:
                return
            for (slot, _, dtype), value in zip(unknown, list(get_outputs())[known:], strict=True):
                slots[slot] = _to_numpy(value, dtype)

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


def _checked(port: Border, array: Array) -> Array:
    """An address says nothing about type and layout: compare them once, when a frame begins."""
    if array.dtype != port.dtype or not array.flags.c_contiguous:
        raise TypeError(
            f"`{port.value.name}` is {array.dtype}, strides {array.strides}; "
            f"{port.dtype} in C order is expected"
        )
    return array


def _to_numpy(value: Any, dtype: DType) -> Array:
    """The memory of an OrtValue as an array that keeps it alive."""
    if dtype.isbuiltin == 1:
        array: Array = value.numpy()
        return array
    return over(value.data_ptr(), value.shape(), dtype, value)
