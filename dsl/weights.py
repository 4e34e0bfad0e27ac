"""Weights: arrays that become named initializers of the model that uses them."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_inplace.compiler.errors import ContractError, Finding
from onnx_inplace.dsl import literals, places, recorder, tensor


class Weight(tensor.Operand):
    """An array with a name. It can be used like a tensor in any number of models."""

    __slots__ = ("content", "name")

    def __init__(self, content: ir.TensorProtocol, name: str) -> None:
        self.content, self.name = content, name

    @property
    def value(self) -> ir.Value:
        """The initializer in the model that is being recorded; in a @function a constant."""
        r = recorder.current()
        if r.kind is recorder.Kind.FUNCTION:
            return r.constant(self.content)
        return r.initializer(self.content, self.name, exact=True)

    @property
    def dtype(self) -> ir.DataType:
        """The element type."""
        return self.content.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions."""
        return tuple(int(d) for d in self.content.shape.numpy())

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __repr__(self) -> str:
        return f"Weight({self.name}: {self.dtype.name}{list(self.shape)})"


def weight(array: Any, name: str) -> Weight:
    """Make ``array`` an initializer called ``name`` of the models that use it.

    The content is neither copied nor read here: a ``numpy.memmap`` and onnx_ir's lazy and
    external tensors stay where they are until the model is saved. In a @function, which has no
    initializers, it becomes a constant.

    Args:
        array: numpy (ml_dtypes' types included), onnx_ir or onnx tensor.
        name: of the initializer; two weights of one model cannot share it.

    Raises:
        ContractError: E100, ``array`` is no tensor.
    """
    try:
        return Weight(literals.as_tensor(array), name)
    except TypeError as error:
        finding = Finding("E100", f"weight `{name}`: {error}.", places.user_line())
        raise ContractError([finding]) from None
