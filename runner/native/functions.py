"""Functions of onnxruntime's C interface.

The Python package comes with the library twice: inside its extension module, and as a shared
library for programs in other languages. Only the latter has the C interface, which can do what the
extension cannot: operators of ours in a session, which call kernels on the session's own threads.
Sessions of the caller, which are the extension's, notice nothing.

The interface is a table of functions whose order never changes (its ABI).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as ort

VERSION = 24  # of the interface: that of the oldest release that is supported

_ERRORS: dict[int, tuple[str, type[Exception]]] = {
    1: ("FAIL", ort.Fail),
    2: ("INVALID_ARGUMENT", ort.InvalidArgument),
    3: ("NO_SUCHFILE", ort.NoSuchFile),
    4: ("NO_MODEL", ort.NoModel),
    5: ("ENGINE_ERROR", ort.EngineError),
    6: ("RUNTIME_EXCEPTION", ort.RuntimeException),
    7: ("INVALID_PROTOBUF", ort.InvalidProtobuf),
    8: ("MODEL_LOADED", ort.ModelLoaded),
    9: ("NOT_IMPLEMENTED", ort.NotImplemented),
    10: ("INVALID_GRAPH", ort.InvalidGraph),
    11: ("EP_FAIL", ort.EPFail),
}
"""What the Python package calls a status, and raises."""

_P = c_void_p
_STATUS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "CreateStatus": (0, (c_int, c_char_p)),
    "CreateEnv": (3, (c_int, c_char_p, _P)),
    "CreateSessionFromArray": (8, (_P, c_char_p, c_size_t, _P, _P)),
    "CreateSessionOptions": (10, (_P,)),
    "DisableMemPattern": (17, (_P,)),
    "DisableCpuMemArena": (19, (_P,)),
    "SetSessionLogSeverityLevel": (22, (_P, c_int)),
    "SetIntraOpNumThreads": (24, (_P, c_int)),
    "SetInterOpNumThreads": (25, (_P, c_int)),
    "CreateCustomOpDomain": (26, (c_char_p, _P)),
    "CustomOpDomain_Add": (27, (_P, _P)),
    "AddCustomOpDomain": (28, (_P, _P)),
    "CreateRunOptions": (39, (_P,)),
    "CreateTensorWithDataAsOrtValue": (49, (_P, _P, c_size_t, _P, c_size_t, c_int, _P)),
    "GetTensorMutableData": (51, (_P, _P)),
    "GetDimensionsCount": (61, (_P, _P)),
    "GetDimensions": (62, (_P, _P, c_size_t)),
    "GetTensorTypeAndShape": (65, (_P, _P)),
    "CreateCpuMemoryInfo": (69, (c_int, c_int, _P)),
    "AllocatorFree": (76, (_P, _P)),
    "GetAllocatorWithDefaultOptions": (78, (_P,)),
    "KernelContext_GetInput": (90, (_P, c_size_t, _P)),
    "KernelContext_GetOutput": (91, (_P, c_size_t, _P, c_size_t, _P)),
    "AddSessionConfigEntry": (130, (_P, c_char_p, c_char_p)),
    "CreateAllocator": (131, (_P, _P, _P)),
    "RunWithBinding": (133, (_P, _P, _P)),
    "CreateIoBinding": (134, (_P, _P)),
    "BindInput": (136, (_P, c_char_p, _P)),
    "BindOutput": (137, (_P, c_char_p, _P)),
    "BindOutputToDevice": (138, (_P, c_char_p, _P)),
    "GetBoundOutputValues": (140, (_P, _P, _P, _P)),
    "CreateAndRegisterAllocator": (144, (_P, _P, _P)),
    "AddInitializer": (150, (_P, c_char_p, _P)),
    "CreateArenaCfgV2": (164, (_P, _P, c_size_t, _P)),
    "RegisterAllocator": (176, (_P, _P)),
    "AddExternalInitializers": (210, (_P, _P, _P, c_size_t)),
    "KernelContext_ParallelFor": (274, (_P, _P, c_size_t, c_size_t, _P)),
}
"""Place in the table and types of the arguments; they return a status, 0 for success."""

_RELEASE = {
    "Status": 93,
    "MemoryInfo": 94,
    "Session": 95,
    "Value": 96,
    "RunOptions": 97,
    "TensorTypeAndShapeInfo": 99,
    "SessionOptions": 100,
    "CustomOpDomain": 101,
    "IoBinding": 135,
    "ArenaCfg": 157,
}


class _Base(ctypes.Structure):
    _fields_ = (
        ("get_api", ctypes.CFUNCTYPE(c_void_p, ctypes.c_uint32)),
        ("get_version", ctypes.CFUNCTYPE(c_char_p)),
    )


class Functions:
    """The functions of one loaded library, by name. Danger: they check no argument."""

    def __init__(self, table: int) -> None:
        """Look at the table at this address."""
        size = 1 + max(place for place, _ in _STATUS.values())
        self.places = (c_void_p * size).from_address(table)
        self._error_code = ctypes.CFUNCTYPE(c_int, _P)(self._place(1))
        self._error_message = ctypes.CFUNCTYPE(c_char_p, _P)(self._place(2))
        self._calls = {
            name: ctypes.CFUNCTYPE(_P, *types)(self._place(place))
            for name, (place, types) in _STATUS.items()
        }
        self._releases = {
            name: ctypes.CFUNCTYPE(None, _P)(self._place(place)) for name, place in _RELEASE.items()
        }

    def _place(self, index: int) -> int:
        place: int | None = self.places[index]
        assert place is not None
        return place

    def address(self, name: str) -> int:
        """Where a function is, for kernels that call it."""
        return self._place(_STATUS[name][0])

    def plain(self, name: str) -> Callable[..., int | None]:
        """A function whose status the caller looks at: None for success, else see ``error``."""
        return self._calls[name]

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            Exception: of the kind that the Python package raises.
        """
        status = self._calls[name](*arguments)
        if status:
            raise self.error(status)

    def make(self, name: str, *arguments: Any) -> int:
        """Call a function whose last argument is where it puts a pointer: that."""
        result = c_void_p()
        self.call(name, *arguments, ctypes.byref(result))
        return result.value or 0

    def release(self, kind: str, pointer: int) -> None:
        """Give an object back."""
        self._releases[kind](pointer)

    def message(self, status: int) -> tuple[int, str]:
        """The code and the text of a status, which is given back."""
        code, text = self._error_code(status), self._error_message(status)
        self.release("Status", status)
        return code, text.decode(errors="replace")

    def error(self, status: int) -> Exception:
        """What a status says, as the exception that the Python package raises at load."""
        code, text = self.message(status)
        name, kind = _ERRORS.get(code, _ERRORS[1])
        return kind(f"[ONNXRuntimeError] : {code} : {name} : {text}")


@functools.cache
def load() -> Functions | None:
    """The library beside onnxruntime's extension module; None where it does not come with one."""
    folder = Path(onnxruntime.__file__).parent / "capi"
    names = (f"libonnxruntime.so.{onnxruntime.__version__}", "libonnxruntime.so", "onnxruntime.dll")
    mac = (f"libonnxruntime.{onnxruntime.__version__}.dylib", "libonnxruntime.dylib")
    path = next((p for name in (*names, *mac) if (p := folder / name).exists()), None)
    if path is None:
        return None
    try:
        base = ctypes.CDLL(str(path)).OrtGetApiBase
    except (OSError, AttributeError):
        return None
    base.restype = ctypes.POINTER(_Base)
    table = base().contents.get_api(VERSION)
    return Functions(table) if table else None
