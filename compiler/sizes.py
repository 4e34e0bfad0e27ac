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
    """``left operator right``: one of + - * // (which is 0 where ``right`` is 0)."""

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


def operation(operator: str, left: Size, right: Size) -> Size:
    """``left operator right``, in its simplest form."""
    if isinstance(left, int) and isinstance(right, int):
        return evaluate(Operation(operator, left, right), {})
    if operator in "+-":
        return _sum(operator, left, right)
    a, b = _monomial(left), _monomial(right)
    if a is None or b is None:
        return Operation(operator, left, right)
    if operator == "*":
        return _from_monomial(a[0] * b[0], a[1] + b[1])
    if b[0] and a[0] % b[0] == 0 and a[1] >= b[1]:
        return _from_monomial(a[0] // b[0], a[1] - b[1])
    return Operation(operator, left, right)


def _sum(operator: str, left: Size, right: Size) -> Size:
    if right == 0:
        return left
    if left == 0 and operator == "+":
        return right
    if left == right and operator == "-":
        return 0
    if isinstance(right, Operation) and right.right == left and operator + right.operator == "+-":
        return right.left  # m + (n - m)
    if isinstance(left, Operation) and left.operator in "+-":
        if left.right == right and left.operator != operator:
            return left.left  # (n + m) - m
        if isinstance(left.right, int) and isinstance(right, int):
            held = left.right if left.operator == "+" else -left.right
            held += right if operator == "+" else -right
            return _sum("+" if held > 0 else "-", left.left, abs(held))  # (n + 2) - 1
    return Operation(operator, left, right)


def _monomial(size: Size) -> tuple[int, Counter[str]] | None:
    """A factor and names, if the size is a product of those."""
    if isinstance(size, int):
        return size, Counter()
    if isinstance(size, str):
        return 1, Counter({size: 1})
    if size.operator != "*":
        return None
    left, right = _monomial(size.left), _monomial(size.right)
    if left is None or right is None:
        return None
    return left[0] * right[0], left[1] + right[1]


def _from_monomial(factor: int, names: Counter[str]) -> Size:
    ordered = sorted(names.elements())
    if not ordered or factor == 0:
        return factor
    total: Size = ordered[0]
    for name in ordered[1:]:
        total = Operation("*", total, name)
    return total if factor == 1 else Operation("*", factor, total)


def product(sizes: Iterable[Size]) -> Size:
    """Product of sizes."""
    total: Size = 1
    for size in sizes:
        total = operation("*", total, size)
    return total


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
