"""Operators of ours in a session of onnxruntime: functions that it calls back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from onnx_inplace.numba_kernels import called
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.native.functions import Functions

_VERSION = 16  # of the structure: the first that lets a function say why it failed
_P, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_OF_OPERATOR, _OF_PORT = ctypes.CFUNCTYPE(_SIZE, _P), ctypes.CFUNCTYPE(_INT, _P, _SIZE)
_BACK = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
_FAILED = 1  # code of a status
_WHY = ctypes.create_string_buffer(b"an operator of ours has failed")


class _Operator(ctypes.Structure):
    """OrtCustomOp, in the order that onnxruntime documents."""

    _fields_ = (
        ("version", ctypes.c_uint32),
        ("create_without_status", _P),
        ("name", ctypes.CFUNCTYPE(_P, _P)),
        ("provider", ctypes.CFUNCTYPE(_P, _P)),
        ("input_type", _OF_PORT),
        ("inputs", _OF_OPERATOR),
        ("output_type", _OF_PORT),
        ("outputs", _OF_OPERATOR),
        ("compute_without_status", _P),
        ("destroy", ctypes.CFUNCTYPE(None, _P)),
        ("input_character", _OF_PORT),
        ("output_character", _OF_PORT),
        ("input_memory", _OF_PORT),
        ("fewest_inputs", ctypes.CFUNCTYPE(_INT, _P)),
        ("inputs_alike", ctypes.CFUNCTYPE(_INT, _P)),
        ("fewest_outputs", ctypes.CFUNCTYPE(_INT, _P)),
        ("outputs_alike", ctypes.CFUNCTYPE(_INT, _P)),
        ("create", ctypes.CFUNCTYPE(_P, _P, _P, _P, _P)),
        ("compute", _P),
    )


class Operator(NamedTuple):
    """An operator.

    Attributes:
        name: in its domain.
        number: see ``called.Operator``.
        inputs: element types, as ONNX numbers them.
        outputs: likewise.
        compute: is called with the address of a context, which says what goes in and takes what
            comes out; ``called.SUCCEEDED``, or ``called.FAILED`` where it has kept why.
    """

    name: str
    number: int
    inputs: Sequence[int]
    outputs: Sequence[int]
    compute: Callable[[int], int]


class Domain:
    """Operators for one session.

    Attributes:
        at: address of onnxruntime's object; who uses it gives it back.
        kept: what it refers to.
    """

    def __init__(
        self, functions: Functions, table: Array, name: str, operators: Sequence[Operator]
    ) -> None:
        """Describe the operators to onnxruntime. ``table``: ``foreign.Functions``."""
        self._functions = functions
        described = [_describe(functions, table, operator) for operator in operators]
        self.kept: Sequence[object] = described
        self.at = functions.make("CreateCustomOpDomain", name.encode())
        for structure, *_ in described:
            functions.call("CustomOpDomain_Add", self.at, ctypes.byref(structure))

    def register(self, options: int) -> None:
        """Let a session with these options use them."""
        self._functions.call("AddCustomOpDomain", options, self.at)


def _describe(
    functions: Functions, table: Array, operator: Operator
) -> tuple[_Operator, *tuple[object, ...]]:
    """The structure, and what it refers to."""
    name = ctypes.create_string_buffer(operator.name.encode())
    fields: dict[str, Any] = dict(_Operator._fields_)
    back = _BACK(operator.compute)
    words = np.zeros(called.Operator.END, np.int64)
    words[called.Operator.FUNCTIONS] = address(table)
    words[called.Operator.BACK] = ctypes.cast(back, _P).value or 0
    words[called.Operator.FAIL] = functions.address("CreateStatus")
    words[called.Operator.CODE] = _FAILED
    words[called.Operator.TEXT] = ctypes.addressof(_WHY)
    words[called.Operator.NUMBER] = operator.number
    state = address(words)

    def constant(field: str, value: int | None) -> Any:
        return fields[field](lambda *_: value)

    def types(field: str, codes: Sequence[int]) -> Any:
        return fields[field](lambda _, number: codes[number])

    def create(*arguments: int) -> None:
        ctypes.c_void_p.from_address(arguments[-1]).value = state

    structure = _Operator(
        version=_VERSION,
        name=constant("name", ctypes.addressof(name)),
        provider=constant("provider", None),
        input_type=types("input_type", operator.inputs),
        inputs=constant("inputs", len(operator.inputs)),
        output_type=types("output_type", operator.outputs),
        outputs=constant("outputs", len(operator.outputs)),
        destroy=constant("destroy", None),
        input_character=constant("input_character", 0),
        output_character=constant("output_character", 0),
        input_memory=constant("input_memory", 0),
        fewest_inputs=constant("fewest_inputs", 0),
        inputs_alike=constant("inputs_alike", 0),
        fewest_outputs=constant("fewest_outputs", 0),
        outputs_alike=constant("outputs_alike", 0),
        create=fields["create"](create),
        compute=called.compute.ready().address,
    )
    return structure, name, back, words, table
