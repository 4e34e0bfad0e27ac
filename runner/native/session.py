"""Sessions of onnxruntime in which operators of ours take part, and bindings of them."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnx_inplace.runner.actions import Array, DType
from onnx_inplace.runner.border import over
from onnx_inplace.runner.native import allocator
from onnx_inplace.runner.native.functions import Functions, load

_SILENT = 4  # log severity: fatal
_ARENA, _DEFAULT = 1, 0  # kind of an allocator, kind of memory
# Addresses are free, memory is taken where it is touched: at the lowest place that fits.
REGION = {"initial_chunk_size_bytes": 1 << 28, "max_dead_bytes_per_chunk": 256}
_SIZES = {
    t.value: max(1, t.bitwidth // 8)
    for t in ir.DataType
    if t not in (ir.DataType.UNDEFINED, ir.DataType.STRING)
}  # bytes of an element


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


def _release(functions: Functions, objects: Sequence[tuple[str, int]], *_kept: object) -> None:
    """Give objects back, in order; what they refer to has been kept until then."""
    for kind, pointer in objects:
        functions.release(kind, pointer)


def _release_with(
    owner: object, functions: Functions, objects: Sequence[tuple[str, int]], *kept: object
) -> None:
    """Give objects back when their owner is gone; at the end of the process they may be in use."""
    weakref.finalize(owner, _release, functions, objects, *kept).atexit = False


class Environment:
    """What all sessions of the process have in common: logging, and one arena for what they make.

    Attributes:
        functions: of the library.
        at: address of onnxruntime's object.
        memory: address of what onnxruntime calls this kind of memory.
        allocator: what stands before the arena; None where nothing does.
    """

    def __init__(self, functions: Functions) -> None:
        """Make it. It lives as long as the process."""
        self.functions = functions
        self.at = functions.make("CreateEnv", _SILENT, b"onnx_inplace")
        self.memory = functions.make("CreateCpuMemoryInfo", _ARENA, _DEFAULT)
        count = len(REGION)
        keys = (ctypes.c_char_p * count)(*[key.encode() for key in REGION])
        values = (ctypes.c_size_t * count)(*REGION.values())
        arena = functions.make("CreateArenaCfgV2", keys, values, count)
        functions.call("CreateAndRegisterAllocator", self.at, self.memory, arena)
        functions.release("ArenaCfg", arena)
        shared = functions, self.at, self.memory
        self.allocator = allocator.share(*shared) if sys.platform != "win32" else None


@functools.cache
def environment() -> Environment | None:
    """The environment of the process; None where onnxruntime comes without its C interface."""
    functions = load()
    return None if functions is None else Environment(functions)


class Options:
    """What a session is loaded with. Weights that are given stay the caller's memory.

    Attributes:
        at: address of onnxruntime's object.
        values: addresses of those for weights.
    """

    def __init__(self, shared: Environment, threads: int) -> None:
        """Options of a session that takes its memory from the environment."""
        functions = self._functions = shared.functions
        self._memory = shared.memory
        self.at = functions.make("CreateSessionOptions")
        self.values: list[int] = []
        functions.call("SetSessionLogSeverityLevel", self.at, _SILENT)
        functions.call("SetIntraOpNumThreads", self.at, threads)
        functions.call("SetInterOpNumThreads", self.at, 1)
        functions.call("DisableMemPattern", self.at)  # see ``library`` and ``allocator``
        self.set("session.use_env_allocators", "1")

    def set(self, key: str, value: str) -> None:
        """Set an entry of the configuration."""
        self._functions.call("AddSessionConfigEntry", self.at, key.encode(), value.encode())

    def share(self, weights: Mapping[str, Weight]) -> None:
        """Use this memory as the weights of these names; it outlives the session."""
        for name, weight in weights.items():
            self.values.append(tensor(self._functions, self._memory, *weight))
            self._functions.call("AddInitializer", self.at, name.encode(), self.values[-1])

    def copy(self, weights: Mapping[str, Weight]) -> None:
        """Like ``share``, but onnxruntime copies them."""
        count = len(weights)
        names = (ctypes.c_char_p * count)(*[name.encode() for name in weights])
        values = (ctypes.c_void_p * count)()
        for index, weight in enumerate(weights.values()):
            values[index] = tensor(self._functions, self._memory, *weight)
            self.values.append(values[index] or 0)
        self._functions.call("AddExternalInitializers", self.at, names, values, count)

    def release(self) -> None:
        """Give it back: no session has been loaded with it."""
        _release(self._functions, self.objects)

    @property
    def objects(self) -> list[tuple[str, int]]:
        """What has to be given back behind the session."""
        return [("SessionOptions", self.at), *(("Value", value) for value in self.values)]


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
        self,
        shared: Environment,
        options: Options,
        model: bytes,
        domain: int = 0,
        *kept: object,
    ) -> None:
        """Load it.

        Args:
            shared: where it lives.
            options: its own.
            model: a ModelProto.
            domain: of custom operators that the options name; given back with the session.
            kept: what operators of it refer to.

        Raises:
            Exception: of the kind that the Python package raises.
        """
        self._shared, functions = shared, shared.functions
        behind = [*options.objects, *([("CustomOpDomain", domain)] if domain else [])]
        try:
            self._at = functions.make(
                "CreateSessionFromArray", shared.at, model, len(model), options.at
            )
        except BaseException:
            _release(functions, behind)
            raise
        _release_with(self, functions, [("Session", self._at), *behind], *kept)

    def bind(self) -> Binding:
        """A binding without inputs and outputs."""
        return Binding(self._shared, self, self._at)


class Binding:
    """Inputs and outputs of a session by their addresses. Not thread-safe."""

    def __init__(self, shared: Environment, owner: Session, session: int) -> None:
        """A binding of the session at an address."""
        functions = self._functions = shared.functions
        self._memory, self._session = shared.memory, session
        self._at = functions.make("CreateIoBinding", session)
        self._options = functions.make("CreateRunOptions")
        objects = [("IoBinding", self._at), ("RunOptions", self._options)]
        _release_with(self, functions, objects, owner)  # what runs is not given back

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

    def runner(self) -> Callable[[], None]:
        """What executes the session once, and raises what the Python package raises."""
        functions, run = self._functions, self._functions.plain("RunWithBinding")
        session, options, at = map(ctypes.c_void_p, (self._session, self._options, self._at))

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


class _Value:
    """Gives an OrtValue back when no array over it is left."""

    def __init__(self, functions: Functions, value: int) -> None:
        _release_with(self, functions, [("Value", value)])


def _array(functions: Functions, value: int, dtype: DType) -> Array:
    """The memory of an OrtValue as an array that keeps it alive."""
    owner = _Value(functions, value)
    place = functions.make("GetTensorMutableData", value)
    return over(place, shape(functions, value), dtype, owner)


def shape(functions: Functions, value: int) -> tuple[int, ...]:
    """The sizes of the tensor at an address."""
    info = functions.make("GetTensorTypeAndShape", value)
    try:
        count = ctypes.c_size_t()
        functions.call("GetDimensionsCount", info, ctypes.byref(count))
        dims = (ctypes.c_int64 * count.value)()
        functions.call("GetDimensions", info, dims, count.value)
        return tuple(dims)
    finally:
        functions.release("TensorTypeAndShapeInfo", info)
