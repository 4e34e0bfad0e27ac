"""A loaded sub-session, whatever loaded it: how it is bound to addresses and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as ort

from onnx_inplace.runner.actions import Array, DType

_CPU = ort.OrtDevice(ort.OrtDevice.cpu(), ort.OrtDevice.default_memory(), 0)


class Bound(Protocol):
    """Inputs and outputs of a sub-session by their addresses. Not thread-safe."""

    def bind_input(self, name: str, code: int, shape: Sequence[int], place: int, /) -> None:
        """Read an input of this element type, as ONNX numbers it, and shape from an address."""

    def bind_output(self, name: str, code: int, shape: Sequence[int], place: int, /) -> None:
        """Write an output to an address."""

    def bind_unknown(self, name: str, /) -> None:
        """Let the library allocate an output: the next run makes a new one."""

    def runner(self) -> Callable[[], None]:
        """What executes the sub-session once, and raises what the library raises."""

    def made(self, first: int, dtypes: Sequence[DType]) -> list[Array]:
        """Outputs from the ``first`` on, in the order in which they were bound first."""


class Loaded(Protocol):
    """A sub-session. Shared by bindings and threads."""

    def bind(self) -> Bound:
        """A binding without inputs and outputs."""


class Packaged:
    """A session of onnxruntime's Python package.

    Attributes:
        session: the layer below the package's session: it costs a third of a call less.
    """

    def __init__(self, owner: onnxruntime.InferenceSession) -> None:
        """Keep it."""
        self._owner = owner
        self.session: Any = owner._sess

    def bind(self) -> Bound:
        """A binding without inputs and outputs."""
        return _Bound(self.session)


class _Bound:
    def __init__(self, session: Any) -> None:
        self._session = session
        self._binding = ort.SessionIOBinding(session)
        self._bind_input, self._bind_output = self._binding.bind_input, self._binding.bind_output

    def bind_input(self, name: str, code: int, shape: Sequence[int], place: int, /) -> None:
        self._bind_input(name, _CPU, code, shape, place)

    def bind_output(self, name: str, code: int, shape: Sequence[int], place: int, /) -> None:
        self._bind_output(name, _CPU, code, shape, place)

    def bind_unknown(self, name: str, /) -> None:
        self._bind_output(name, _CPU)

    def runner(self) -> Callable[[], None]:
        run, binding, options = self._session.run_with_iobinding, self._binding, ort.RunOptions()

        def act() -> None:
            run(binding, options)

        return act

    def made(self, first: int, dtypes: Sequence[DType]) -> list[Array]:
        values = list(self._binding.get_outputs())[first:]
        return [_to_numpy(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]


def _to_numpy(value: Any, dtype: DType) -> Array:
    """The memory of an OrtValue as an array that keeps it alive."""
    if dtype.isbuiltin == 1:
        array: Array = value.numpy()
        return array
    shape: Sequence[int] = value.shape()
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    memory = _Memory(value, size)
    return np.asarray(memory).view(dtype).reshape(shape)


class _Memory:
    """Bytes of an OrtValue for numpy; types of ml_dtypes have no other way."""

    def __init__(self, value: Any, size: int):
        self._value = value
        self.__array_interface__ = {
            "data": (value.data_ptr(), False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }
