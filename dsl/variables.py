"""Variables of the author's code around a block: what they hold, and having no value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import onnx_ir as ir

from onnx_inplace.compiler.errors import Location
from onnx_inplace.dsl import recorder, structures, tensor

_REPAIR = "Let it have a tensor of one type on every way that leads here."


class Undefined(tensor.Operand):
    """What a variable holds that has no value here. Using it is a fault that says why."""

    __slots__ = ("code", "name", "reason")

    def __init__(self, name: str, reason: str, code: str = "E100") -> None:
        self.name, self.reason, self.code = name, reason, code

    @property
    def value(self) -> ir.Value:
        """A fault."""
        r = recorder.current()
        r.fault(f"`{self.name}` has no value here: {self.reason}.", self.code, repair=_REPAIR)
        return r.unknown(self.name)

    def stop(self) -> NoReturn:
        """Fault: Python cannot go on."""
        message = f"`{self.name}` has no value here: {self.reason}."
        recorder.current().stop(message, self.code, _REPAIR)

    def __getattr__(self, name: str) -> NoReturn:
        """Fault: there is nothing that could have an attribute."""
        if name.startswith("__"):
            raise AttributeError(name)
        self.stop()

    def __hash__(self) -> int:
        """Fault: there is nothing to look up."""
        self.stop()

    def __format__(self, spec: str) -> str:
        """Fault: there is nothing to write."""
        self.stop()

    def __repr__(self) -> str:
        return f"<`{self.name}` has no value: {self.reason}>"


@dataclasses.dataclass(frozen=True)
class Variables:
    """The variables that a block assigns.

    Attributes:
        names: in order of appearance.
        looks: one function per variable that returns it, or raises NameError.
        assign: takes all values.
    """

    names: tuple[str, ...]
    looks: tuple[Callable[[], Any], ...]
    assign: Callable[[Sequence[Any]], None]

    def values(self, location: Location) -> list[Any]:
        """What the variables hold."""
        return [self._look(n, f, location) for n, f in zip(self.names, self.looks, strict=True)]

    @staticmethod
    def _look(name: str, look: Callable[[], Any], location: Location) -> Any:
        try:
            return look()
        except NameError:
            return Undefined(name, f"nothing is assigned to it before line {location.line}")


def is_leaf(x: Any) -> bool:
    """Whether ``x`` is a tensor, or can become one."""
    return isinstance(x, tensor.Operand) or structures.is_number_or_array(x)


def is_undefined(x: Any) -> bool:
    """Whether ``x`` stands for no value."""
    return isinstance(x, Undefined)


def same(a: Any, b: Any) -> bool:
    """Whether two Python values are one: the object, the tensor, or equal and of one type."""
    if a is b:
        return True
    if isinstance(a, tensor.Tensor) and isinstance(b, tensor.Tensor):
        return a.value is b.value
    if (
        type(a) is not type(b)
        or isinstance(a, tensor.Operand)
        or structures.contains(tensor.Operand, a)
    ):
        return False
    try:
        return bool(a == b)
    except Exception:  # whatever == of the author's classes raises: they are not the same
        return False
