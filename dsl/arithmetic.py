"""Python's operators on tensors, as Python means them: ``/`` has fractions, ``//`` rounds down."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_inplace.dsl import literals, recorder
from onnx_inplace.dsl.operations import standard

_PLAIN = {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "matmul": "MatMul",
    "lt": "Less",
    "le": "LessOrEqual",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
    "eq": "Equal",
}
_LOGICAL = {"and": ("And", "BitwiseAnd"), "or": ("Or", "BitwiseOr"), "xor": ("Xor", "BitwiseXor")}


def binary(name: str, a: Any, b: Any) -> ir.Value:
    """Record ``a`` operator ``b``: values, or one of them a number or an array."""
    if name in _PLAIN:
        return standard(_PLAIN[name], a, b)
    dtype = next((x.dtype for x in (a, b) if isinstance(x, ir.Value) and x.dtype), None)
    if name in _LOGICAL:
        return standard(_LOGICAL[name][dtype is not None and dtype != ir.DataType.BOOL], a, b)
    if name == "ne":
        return standard("Not", standard("Equal", a, b))
    if name == "pow":
        return _power(a, b)
    whole = dtype is not None and literals.is_integer_type(dtype)
    if name == "truediv":
        if whole and dtype is not None:
            r = recorder.current()
            r.fault(
                f"`/` of {dtype.name} has fractions: use `//`, or convert with op.Cast first.",
                "E102",
            )
            return r.unknown()
        return standard("Div", a, b)
    if name == "floordiv":
        if whole:  # ONNX's Div cuts towards zero, its Mod has the sign of the divisor, as Python's
            return standard("Div", standard("Sub", a, standard("Mod", a, b)), b)
        return standard("Floor", standard("Div", a, b))
    if whole:
        return standard("Mod", a, b)
    quotient = standard("Floor", standard("Div", a, b))
    return standard("Sub", a, standard("Mul", quotient, b))


def _power(base: Any, exponent: Any) -> ir.Value:
    """Pow takes exponents of another type; a Python number still takes the type of the tensor."""
    r = recorder.current()
    number, value = (exponent, base) if isinstance(base, ir.Value) else (base, exponent)
    if not isinstance(number, ir.Value) and value.dtype is not None:
        try:
            number = r.constant(literals.literal(number, value.dtype))
        except (literals.Lost, TypeError) as error:
            r.fault(f"Pow: {error}.", "E102")
            return r.unknown()
    return standard("Pow", value, number) if value is base else standard("Pow", number, value)


def invert(a: ir.Value) -> ir.Value:
    """``~a``: Not of BOOL, of the bits of whole numbers."""
    return standard("Not" if a.dtype in (None, ir.DataType.BOOL) else "BitwiseNot", a)
