"""An operator of ours in onnxruntime: its threads run our kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import onnx

from onnx_inplace.numba_kernels import shared
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.native import session
from onnx_inplace.runner.native.functions import Functions

_INT64 = 7  # element type
_DOMAIN, _NAME = "onnx_inplace.native", "Work"
_VERSION = 12  # of the structure: later ones have more functions
_P, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class _Operator(ctypes.Structure):
    """OrtCustomOp, in the order that onnxruntime documents."""

    _fields_ = (
        ("version", ctypes.c_uint32),
        ("create", ctypes.CFUNCTYPE(_P, _P, _P, _P)),
        ("name", ctypes.CFUNCTYPE(_P, _P)),
        ("provider", ctypes.CFUNCTYPE(_P, _P)),
        ("input_type", ctypes.CFUNCTYPE(ctypes.c_int, _P, _SIZE)),
        ("inputs", ctypes.CFUNCTYPE(_SIZE, _P)),
        ("output_type", ctypes.CFUNCTYPE(ctypes.c_int, _P, _SIZE)),
        ("outputs", ctypes.CFUNCTYPE(_SIZE, _P)),
        ("compute", _P),
        ("destroy", _P),
        ("input_character", ctypes.CFUNCTYPE(ctypes.c_int, _P, _SIZE)),
        ("output_character", ctypes.CFUNCTYPE(ctypes.c_int, _P, _SIZE)),
    )


class Work:
    """The operator that does what its input says: see ``shared.work``.

    It lives as long as the process, for sessions refer to it.
    """

    def __init__(self, functions: Functions) -> None:
        """Compile its kernels and make a domain for it."""
        self._functions = functions
        self._table = np.array(
            shared.Table(
                functions.address("KernelContext_GetInput"),
                functions.address("GetTensorMutableData"),
                functions.address("KernelContext_ParallelFor"),
                shared.part.ready().address,
            ),
            np.int64,
        )
        self._name = ctypes.create_string_buffer(_NAME.encode())
        fields: dict[str, Any] = dict(_Operator._fields_)

        def constant(field: str, value: int | None) -> Any:
            return fields[field](lambda *_: value)

        self._operator = _Operator(
            _VERSION,
            constant("create", address(self._table)),
            constant("name", ctypes.addressof(self._name)),
            constant("provider", None),
            constant("input_type", _INT64),
            constant("inputs", 1),
            constant("output_type", _INT64),
            constant("outputs", 1),
            shared.work.ready().address,
            shared.nothing.ready().address,
            constant("input_character", 0),
            constant("output_character", 0),
        )
        self._domain = functions.make("CreateCustomOpDomain", _DOMAIN.encode())
        functions.call("CustomOpDomain_Add", self._domain, ctypes.byref(self._operator))

    def register(self, options: int) -> None:
        """Let sessions with these options use it."""
        self._functions.call("AddCustomOpDomain", options, self._domain)


def model() -> bytes:
    """A graph of the operator: ``job`` in, ``nothing`` out."""
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(_NAME, ["job"], ["nothing"], domain=_DOMAIN)],
        "work",
        [value("job", _INT64, [shared.WORDS])],
        [value("nothing", _INT64, [1])],
    )
    imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(_DOMAIN, 1)]
    proto = onnx.helper.make_model(graph, ir_version=10, opset_imports=imports)
    return bytes(proto.SerializeToString())


class Desk:
    """Where one thread of the caller lays down its jobs."""

    def __init__(self, loaded: session.Session) -> None:
        """Bind its memory."""
        self.job, self._nothing = np.zeros(shared.WORDS, np.int64), np.zeros(1, np.int64)
        self.binding = loaded.bind()
        self.binding.bind_input("job", _INT64, self.job.shape, address(self.job))
        self.binding.bind_output("nothing", _INT64, (1,), address(self._nothing))
        self.run = self.binding.runner()
