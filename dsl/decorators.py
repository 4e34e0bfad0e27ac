"""@model and @function: the pipeline from Python to a checked declaration, and to a program."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from onnx_inplace.compiler import program
from onnx_inplace.dsl import ops, trace


@dataclasses.dataclass(frozen=True)
class Function:
    """A function that models and other functions may call."""

    name: str
    checked: program.CheckedFunction

    @property
    def declaration(self) -> program.Declaration:
        """What was recorded."""
        return self.checked.declaration

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record a call."""
        return trace.recorder().call(self, args, kwargs)


def function(f: Callable[..., Any]) -> Function:
    """Compile ``f`` to a FunctionProto."""
    declaration = trace.translate(f, "local", ops.OPSET, sys._getframe(1).f_locals)
    return Function(f.__name__, program.check_function(declaration))


def model(f: Callable[..., Any]) -> program.Program:
    """Compile ``f`` to a graph; errors come where the decorator stands."""
    declaration = trace.translate(f, "model", ops.OPSET, sys._getframe(1).f_locals)
    return program.build(declaration)
