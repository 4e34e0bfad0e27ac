"""@model and @function: the pipeline from Python to a checked declaration, and to a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

from onnx_inplace.compiler import errors, program
from onnx_inplace.dsl import calls, places, trace
from onnx_inplace.dsl.recorder import Kind

F = Callable[..., Any]


@overload
def model(f: F, /) -> program.Program: ...
@overload
def model(
    *, opset: int | None = None, name: str | None = None
) -> Callable[[F], program.Program]: ...
def model(
    f: F | None = None, /, *, opset: int | None = None, name: str | None = None
) -> program.Program | Callable[[F], program.Program]:
    """Compile a function to a program, where the decorator stands.

    Args:
        f: the function; without it, a decorator is returned.
        opset: version of ONNX's operators, 25 unless operators of ``dsl.opset(n)`` are used.
        name: of the graph, else the function's.

    Raises:
        ContractError: all faults of the function, each at its line.
    """
    namespace = places.user_frame().f_locals

    def compiled(f: F) -> program.Program:
        try:
            subject = trace.Subject.of(f, namespace)
            recorded = trace.record(subject, Kind.MODEL, name or f.__name__, "model", opset, {})
            return program.build(recorded.declaration)
        except errors.ContractError as error:
            # The findings say where; the frames of the compiler would only stand in front of them.
            raise error.with_traceback(None)  # noqa: B904 (it is the same error)

    return compiled if f is None else compiled(f)


@overload
def function(f: F, /) -> calls.Function: ...
@overload
def function(
    *, domain: str = "local", opset: int | None = None
) -> Callable[[F], calls.Function]: ...
def function(
    f: F | None = None, /, *, domain: str = "local", opset: int | None = None
) -> calls.Function | Callable[[F], calls.Function]:
    """Compile a function to a FunctionProto that models and other functions call.

    Parameters that are annotated as tensors become inputs; all others take Python values, and
    each set of values that is called makes a function of its own.

    Args:
        f: the function; without it, a decorator is returned.
        domain: of the FunctionProto.
        opset: version of ONNX's operators in its body, else that of the model that calls it.

    Raises:
        ContractError: all faults of the function, each at its line.
    """
    namespace = places.user_frame().f_locals

    def compiled(f: F) -> calls.Function:
        subject = trace.Subject.of(f, namespace)

        def record(values: Mapping[str, Any], name: str, of_caller: int | None) -> calls.Recorded:
            version = opset or of_caller
            recorded = trace.record(subject, Kind.FUNCTION, name, domain, version, values)
            program.check_function(recorded.declaration)
            return recorded

        return calls.Function(f, subject.signature, subject.attributes(), record)

    return compiled if f is None else compiled(f)
