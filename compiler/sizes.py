"""Sizes in terms of the dimensions that are known when a run begins.

A size is a number, the name of a dimension of an input, or an operation on sizes. Products are kept
in one form, so that ``batch * n * 64 // 64`` is ``batch * n`` again and equal sizes look alike.
Evaluation uses Python's integers, which do not overflow.
"""

from __future__ import annotations

import ast
import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """``left operator right``: one of + - * // (which is 0 where ``right`` is 0), min, max."""

    operator: str
    left: Size
    right: Size

    def __str__(self) -> str:
        return f"({self.left} {self.operator} {self.right})"


Size = int | str | Operation
Shape = tuple[Size, ...]
Partial = tuple[Size | None, ...]
"""A shape of known rank; None where a size is not known before the run."""

_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
}


_Polynomial = dict[tuple[str | Operation, ...], int]
"""Factors by products of names and quotients; the empty product is 1."""


def operation(operator: str, left: Size, right: Size) -> Size:
    """``left operator right``, in its simplest form."""
    a, b = _polynomial(left), _polynomial(right)
    if operator == "//":
        exact = _quotient(a, b)
        return Operation("//", left, right) if exact is None else _size(exact)
    if operator in ("min", "max"):
        if isinstance(left, int) and isinstance(right, int):
            return min(left, right) if operator == "min" else max(left, right)
        return Operation(operator, left, right)
    return _size(_combine(operator, a, b))


def _polynomial(size: Size) -> _Polynomial:
    if isinstance(size, int):
        return {(): size}
    if isinstance(size, str) or size.operator in ("//", "min", "max"):
        return {(size,): 1}
    return _combine(size.operator, _polynomial(size.left), _polynomial(size.right))


def _combine(operator: str, a: _Polynomial, b: _Polynomial) -> _Polynomial:
    if operator != "*":
        sign = 1 if operator == "+" else -1
        return {term: a.get(term, 0) + sign * b.get(term, 0) for term in {**a, **b}}
    result: _Polynomial = {}
    for x, factor in a.items():
        for y, other in b.items():
            term = tuple(sorted((*x, *y), key=str))
            result[term] = result.get(term, 0) + factor * other
    return result


def _quotient(a: _Polynomial, b: _Polynomial) -> _Polynomial | None:
    """``a // b`` where ``b`` is one product that divides all of ``a``."""
    divisors = [(term, factor) for term, factor in b.items() if factor]
    if not divisors:
        return {(): 0}
    if len(divisors) != 1:
        return None
    (names, divisor), result = divisors[0], {}
    for term, factor in a.items():
        rest = Counter(term)
        rest.subtract(names)
        if factor % divisor or min(rest.values(), default=0) < 0:
            number = not names and set(a) == {()}
            return {(): a[()] // divisor} if number else None
        result[tuple(sorted(rest.elements(), key=str))] = factor // divisor
    return result


def _size(polynomial: _Polynomial) -> Size:
    """One form for each polynomial: what is added before what is taken away, the number last."""
    terms = sorted(
        (factor < 0, not term, len(term), str(term), term, factor)
        for term, factor in polynomial.items()
        if factor
    )
    total: Size | None = None
    for negative, _, _, _, term, factor in terms:
        size: Size = 1
        for name in term:
            size = name if size == 1 else Operation("*", size, name)
        if abs(factor) != 1 or not term:
            size = abs(factor) if not term else Operation("*", abs(factor), size)
        if total is None:
            total = size if not negative else -size if isinstance(size, int) else None
            total = Operation("-", 0, size) if total is None else total
        else:
            total = Operation("-" if negative else "+", total, size)
    return 0 if total is None else total


def product(sizes: Iterable[Size]) -> Size:
    """Product of sizes."""
    total: Size = 1
    for size in sizes:
        total = operation("*", total, size)
    return total


def total(sizes: Iterable[Size]) -> Size:
    """Sum of sizes."""
    polynomial: _Polynomial = {}
    for size in sizes:
        polynomial = _combine("+", polynomial, _polynomial(size))
    return _size(polynomial)


def covers(larger: Size, smaller: Size) -> bool:
    """Whether ``larger`` is never less: the difference takes nothing away."""
    return all(factor >= 0 for factor in _polynomial(operation("-", larger, smaller)).values())


def partly(size: Size, dims: Mapping[str, int]) -> Size:
    """The size with numbers for the dimensions that are given."""
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        return dims.get(size, size)
    return operation(size.operator, partly(size.left, dims), partly(size.right, dims))


def names(sizes: Iterable[Size]) -> frozenset[str]:
    """Dimensions that sizes depend on."""
    found: set[str] = set()
    for size in sizes:
        if isinstance(size, str):
            found.add(size)
        elif isinstance(size, Operation):
            found |= names((size.left, size.right))
    return frozenset(found)


def evaluate(size: Size, dims: Mapping[str, int]) -> int:
    """The number that a size is with these dimensions."""
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        return dims[size]
    left, right = evaluate(size.left, dims), evaluate(size.right, dims)
    if size.operator == "+":
        return left + right
    if size.operator == "-":
        return left - right
    if size.operator == "*":
        return left * right
    if size.operator == "min":
        return min(left, right)
    if size.operator == "max":
        return max(left, right)
    return left // right if right else 0


def numbers(shape: Sequence[Size], dims: Mapping[str, int]) -> tuple[int, ...]:
    """Sizes in a run with these dimensions."""
    return tuple(evaluate(size, dims) for size in shape)


def parse(text: str, names: Collection[str]) -> Size | None:
    """A dimension as inference writes it: a name, or arithmetic of ``names``."""
    if text in names:
        return text
    try:
        return _tree(ast.parse(text, mode="eval").body, names)
    except SyntaxError:
        return None


def _tree(tree: ast.expr, names: Collection[str]) -> Size | None:
    if isinstance(tree, ast.Constant) and type(tree.value) is int:
        return tree.value
    if isinstance(tree, ast.Name):
        return tree.id if tree.id in names else None
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATORS:
        left, right = _tree(tree.left, names), _tree(tree.right, names)
        if left is not None and right is not None:
            return operation(_OPERATORS[type(tree.op)], left, right)
    return None


def whole(shape: Partial | None) -> Shape | None:
    """The shape, if all of it is known."""
    if shape is None or None in shape:
        return None
    return tuple(size for size in shape if size is not None)
