"""Sizes as expressions that sympy can compare: dimensions are symbols of integers from 0 on."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import sympy

from onnx_inplace.compiler import sizes
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
    if size.operator in ("min", "max"):
        return (sympy.Min if size.operator == "min" else sympy.Max)(left, right)
    return sympy.floor(left / right) if right != 0 else sympy.Integer(0)


@functools.lru_cache(maxsize=1024)
def text(expression: sympy.Expr) -> str:
    """An expression as people write it: printing takes long, and layers are alike."""
    return str(expression)


def largest(terms: Iterable[Size], dims: Mapping[str, int]) -> sympy.Expr:
    """The largest of some sizes; those that never are, are left out."""
    kept: list[Size] = []
    for term in dict.fromkeys(sizes.partly(term, dims) for term in terms):
        if not any(sizes.covers(other, term) for other in kept):
            kept = [other for other in kept if not sizes.covers(term, other)]
            kept.append(term)
    expressions = [sympy.expand(expression(term)) for term in kept]
    if not expressions:
        return sympy.Integer(0)
    return expressions[0] if len(expressions) == 1 else sympy.Max(*expressions, evaluate=False)
