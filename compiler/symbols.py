"""Sizes as expressions that sympy can compare: dimensions are symbols of integers from 0 on."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from onnx_inplace.compiler.sizes import Size


def expression(size: Size, dims: Mapping[str, int] | None = None) -> sympy.Expr:
    """A size with symbols for the names of dimensions, and numbers for those in ``dims``."""
    if isinstance(size, int):
        return sympy.Integer(size)
    if isinstance(size, str):
        if dims is not None and size in dims:
            return sympy.Integer(dims[size])
        return sympy.Symbol(size, integer=True, nonnegative=True)
    left, right = expression(size.left, dims), expression(size.right, dims)
    if size.operator == "+":
        return left + right
    if size.operator == "-":
        return left - right
    if size.operator == "*":
        return left * right
    return sympy.floor(left / right) if right != 0 else sympy.Integer(0)
