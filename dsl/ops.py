"""``op``: ONNX's operators. ``kv``: cache operators. ``domain``, ``opset``: those of others."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnxscript.onnx_types import TensorType

from onnx_inplace.compiler import contract
from onnx_inplace.dsl import notation, recorder, tensor
from onnx_inplace.dsl.signatures import Operator, signature

__all__ = ["Operators", "domain", "kv", "op", "opset"]

_CONTROL = ("If", "Loop", "Scan")


class Operators:
    """``op.X(inputs..., attribute=...)`` records operator X of a domain.

    Inputs are tensors, Python numbers, lists of numbers, arrays, or None for one that is left
    out; they may be named as in the schema. Attributes are given by name. ``_outputs`` says how
    many outputs are wanted where the schema leaves it open or there is none: a number, or their
    types (``[FLOAT["n", 4], INT64[()]]``).
    """

    def __init__(self, domain: str, version: int | None) -> None:
        self._domain, self._version = domain, version

    def __repr__(self) -> str:
        return f"Operators({self._domain!r}, {self._version})"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The operator of that name."""
        if name.startswith("_"):
            raise AttributeError(name)
        operator = Operator(self._domain, name, self._version)

        def record(
            *inputs: Any,
            _outputs: int | Sequence[type[TensorType]] | None = None,
            **attributes: Any,
        ) -> Any:
            _check(operator)
            types: list[tuple[ir.TypeProtocol | None, ir.Shape | None]] = []
            if _outputs is not None and not isinstance(_outputs, int):
                types = [notation.type_and_shape(t) for t in _outputs]
                _outputs = len(types)
            return tensor.call(operator, inputs, attributes, _outputs, types)

        record.__name__ = name
        return record


def _check(operator: Operator) -> None:
    """Refuse what there is not."""
    r = recorder.current()
    version = operator.version or r.opset
    if operator.domain == "" and operator.name in _CONTROL:
        r.stop(
            f"Write Python's if, for, while instead of op.{operator.name}, and for a Scan "
            "`for x in scan(xs)`."
        )
    known = operator.domain not in ("", contract.DOMAIN)
    if not known and signature(operator.domain, operator.name, version) is None:
        where = operator.domain or "ONNX"
        r.stop(
            f"There is no operator {operator.name} in {where}, opset {version}.{_similar(operator)}"
        )


def _similar(operator: Operator) -> str:
    """A question, where the name is almost that of an operator."""
    names = {s.name for s in onnx.defs.get_all_schemas() if s.domain == operator.domain}
    close = difflib.get_close_matches(operator.name, sorted(names), 1)
    return f" Did you mean {close[0]}?" if close else ""


def opset(version: int) -> Operators:
    """ONNX's operators of one version; the model that uses them has that version."""
    return Operators("", version)


def domain(name: str, version: int = 1) -> Operators:
    """The operators of another domain: ``domain("com.microsoft")``."""
    return opset(version) if name in ("", "ai.onnx") else Operators(name, version)


op = Operators("", None)  # of the opset that the model has: 25, or what its decorator says
kv = Operators(contract.DOMAIN, contract.VERSION)
