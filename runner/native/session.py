"""Sessions and bindings of onnxruntime on the threads of a pool."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnx_inplace.runner.actions import Array, DType
from onnx_inplace.runner.native.functions import Functions

_SILENT = 4  # log severity: fatal
_SIZES = {
    t.value: max(1, t.bitwidth // 8)
    for t in ir.DataType
    if t not in (ir.DataType.UNDEFINED, ir.DataType.STRING)
}  # bytes of an element


def _release_with(owner: object, functions: Functions, kind: str, pointer: int) -> None:
    """Give an object back when its owner is gone; at the end of the process it may be in use."""
    weakref.finalize(owner, functions.release, kind, pointer).atexit = False


class Weight(NamedTuple):
    """Memory of the caller that holds a weight.

    Attributes:
        code: element type, as ONNX numbers it.
        shape: of the weight.
        place: address of the first element.
    """

    code: int
    shape: tuple[int, ...]
    place: int


class Options:
    """What a session is loaded with. Weights that are given stay the caller's memory.

    Attributes:
        at: address of onnxruntime's object.
    """

    def __init__(self, functions: Functions, memory: int) -> None:
        """Options of a session that takes threads and memory from its environment.

        Args:
            functions: of the library.
            memory: what kind of memory weights are in; see ``Pool``.
        """
        self._functions, self._memory = functions, memory
        self.at = functions.make("CreateSessionOptions")
        self._values: list[int] = []
        _release_with(self, functions, "SessionOptions", self.at)
        functions.call("SetSessionLogSeverityLevel", self.at, _SILENT)
        functions.call("DisablePerSessionThreads", self.at)
        functions.call("DisableMemPattern", self.at)
        self.set("session.use_env_allocators", "1")

    def set(self, key: str, value: str) -> None:
        """Set an entry of the configuration."""
        self._functions.call("AddSessionConfigEntry", self.at, key.encode(), value.encode())

    def share(self, weights: Mapping[str, Weight]) -> None:
        """Use this memory as the weights of these names; it outlives the session."""
        for name, weight in weights.items():
            value = tensor(self._functions, self._memory, *weight)
            _release_with(self, self._functions, "Value", value)
            self._functions.call("AddInitializer", self.at, name.encode(), value)

    def copy(self, weights: Mapping[str, Weight]) -> None:
        """Like ``share``, but onnxruntime copies them."""
        count = len(weights)
        names = (ctypes.c_char_p * count)(*[name.encode() for name in weights])
        values = (ctypes.c_void_p * count)()
        try:
            for index, weight in enumerate(weights.values()):
                values[index] = tensor(self._functions, self._memory, *weight)
            self._functions.call("AddExternalInitializers", self.at, names, values, count)
        finally:
            for value in filter(None, values):
                self._functions.release("Value", value)


def tensor(functions: Functions, memory: int, code: int, shape: Sequence[int], place: int) -> int:
    """An OrtValue over memory of ours, from ``place`` on."""
    dims = (ctypes.c_int64 * len(shape))(*shape)
    size = math.prod(shape) * _SIZES[code]
    return functions.make(
        "CreateTensorWithDataAsOrtValue", memory, place, size, dims, len(shape), code
    )


class Session:
    """A loaded model."""

    def __init__(
        self, functions: Functions, environment: int, memory: int, options: Options, model: bytes
    ) -> None:
        """Load it.

        Raises:
            Exception: of the kind that the Python package raises.
        """
        self._functions, self._memory = functions, memory
        self._options = options  # onnxruntime refers to its weights
        self._at = functions.make(
            "CreateSessionFromArray", environment, model, len(model), options.at
        )
        _release_with(self, functions, "Session", self._at)

    def bind(self) -> Binding:
        """A binding without inputs and outputs."""
        return Binding(self._functions, self._memory, self, self._at)


class Binding:
    """Inputs and outputs of a session by their addresses. Not thread-safe."""

    def __init__(self, functions: Functions, memory: int, owner: Session, session: int) -> None:
        """A binding of the session at an address, for arrays in this kind of memory."""
        self._functions, self._memory = functions, memory
        self._owner, self._session = owner, session  # what runs is not given back
        self._at = functions.make("CreateIoBinding", session)
        _release_with(self, functions, "IoBinding", self._at)
        self._options = functions.make("CreateRunOptions")
        _release_with(self, functions, "RunOptions", self._options)

    def bind_input(self, name: str, code: int, shape: Sequence[int], place: int, /) -> None:
        """Read an input of this element type, as ONNX numbers it, and shape from an address."""
        self._bind("BindInput", name, code, shape, place)

    def bind_output(self, name: str, code: int, shape: Sequence[int], place: int, /) -> None:
        """Write an output to an address."""
        self._bind("BindOutput", name, code, shape, place)

    def bind_unknown(self, name: str, /) -> None:
        """Let onnxruntime allocate an output: the next run makes a new one."""
        self._functions.call("BindOutputToDevice", self._at, name.encode(), self._memory)

    def _bind(self, kind: str, name: str, code: int, shape: Sequence[int], place: int) -> None:
        functions = self._functions
        value = tensor(functions, self._memory, code, shape, place)
        try:
            functions.call(kind, self._at, name.encode(), value)
        finally:
            functions.release("Value", value)

    @property
    def places(self) -> tuple[int, int, int]:
        """Addresses of what a run takes: session, options and binding."""
        return self._session, self._options, self._at

    def runner(self) -> Callable[[], None]:
        """What executes the session once, and raises what the Python package raises."""
        functions, run = self._functions, self._functions.plain("RunWithBinding")
        session, options, at = map(ctypes.c_void_p, self.places)

        def act() -> None:
            status = run(session, options, at)
            if status:  # as the package says it
                raise RuntimeError(f"Error in execution: {functions.message(status)[1]}")

        return act

    def made(self, first: int, dtypes: Sequence[DType]) -> list[Array]:
        """Outputs from the ``first`` on, in the order in which they were bound first."""
        functions = self._functions
        allocator = functions.make("GetAllocatorWithDefaultOptions")
        values, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
        functions.call(
            "GetBoundOutputValues", self._at, allocator, ctypes.byref(values), ctypes.byref(count)
        )
        found = [values[index] for index in range(count.value)]
        functions.call("AllocatorFree", allocator, values)
        for value in found[:first]:
            functions.release("Value", value or 0)
        return [_array(functions, v or 0, d) for v, d in zip(found[first:], dtypes, strict=True)]


class _Memory:
    """The elements of an OrtValue, which lives as long, for numpy."""

    def __init__(self, functions: Functions, value: int, size: int) -> None:
        _release_with(self, functions, "Value", value)
        self.__array_interface__: dict[str, Any] = {
            "data": (functions.make("GetTensorMutableData", value), False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def _array(functions: Functions, value: int, dtype: DType) -> Array:
    """The memory of an OrtValue as an array that keeps it alive."""
    shape = _shape(functions, value)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not size:
        functions.release("Value", value)
        return np.empty(shape, dtype)
    return np.asarray(_Memory(functions, value, size)).view(dtype).reshape(shape)


def _shape(functions: Functions, value: int) -> tuple[int, ...]:
    info = functions.make("GetTensorTypeAndShape", value)
    try:
        count = ctypes.c_size_t()
        functions.call("GetDimensionsCount", info, ctypes.byref(count))
        dims = (ctypes.c_int64 * count.value)()
        functions.call("GetDimensions", info, dims, count.value)
        return tuple(dims)
    finally:
        functions.release("TensorTypeAndShapeInfo", info)
