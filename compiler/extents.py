"""Sizes of values in terms of the dimensions that are known when a run begins.

A size is a number, the name of a dimension of an input, or an operation on sizes. It is decided
here which sizes a graph fixes; what they are in a run is computed by ``evaluate``, with Python's
integers, which do not overflow. What inference has found is trusted; beyond it only views of
storage and simple integer arithmetic are followed.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir


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
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
}


def operation(operator: str, left: Size, right: Size) -> Size:
    """``left operator right``, computed at once where both are numbers."""
    if operator in "+-" and right == 0:
        return left
    result = Operation(operator, left, right)
    return evaluate(result, {}) if isinstance(left, int) and isinstance(right, int) else result


def product(sizes: Iterable[Size]) -> Size:
    """Product of sizes."""
    total: Size = 1
    for size in sizes:
        total = size if total == 1 else operation("*", total, size)
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


def unnamed(name: str, axis: int) -> str:
    """How the dimension of an input that the model gives no name is called."""
    return f"{name}[{axis}]"


class Extents:
    """What is known of the shapes of a graph's values, and of integers computed from shapes."""

    def __init__(self, graph: ir.Graph, source: Mapping[ir.Value, ir.Value]):
        """``source`` maps an aliased value to the value that it was made from."""
        self._source = source
        self._declared: dict[ir.Value, Shape] = {}
        for value in graph.inputs:
            if value.shape is not None:
                self._declared[value] = tuple(_dimension(value, k) for k in range(len(value.shape)))
        self._names = {s for shape in self._declared.values() for s in shape if isinstance(s, str)}

    def shape(self, value: ir.Value) -> Shape | None:
        """All sizes of a value, or None where one is not known before the run."""
        if value in self._declared:
            return self._declared[value]
        if value.const_value is not None:
            return tuple(value.const_value.shape.numpy())
        if value.shape is not None:
            sizes = [self._inferred(d) for d in value.shape]
            if None not in sizes:
                return tuple(s for s in sizes if s is not None)
        return self._followed(value)

    def size(self, value: ir.Value, axis: int) -> Size | None:
        """One size of a value."""
        if value not in self._declared and value.shape is not None and value.const_value is None:
            found = self._inferred(value.shape[axis])
            if found is not None:
                return found
        shape = self.shape(value)
        return None if shape is None else shape[axis]

    def _inferred(self, dimension: int | ir.SymbolicDim) -> Size | None:
        if isinstance(dimension, int):
            return dimension
        return None if dimension.value is None else self._parse(dimension.value)

    def _parse(self, text: str) -> Size | None:
        """A name of a dimension, or arithmetic of names as symbolic inference writes it."""
        if text in self._names:
            return text
        try:
            return self._tree(ast.parse(text, mode="eval").body)
        except SyntaxError:
            return None

    def _tree(self, tree: ast.expr) -> Size | None:
        if isinstance(tree, ast.Constant) and type(tree.value) is int:
            return tree.value
        if isinstance(tree, ast.Name):
            return tree.id if tree.id in self._names else None
        if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATORS:
            left, right = self._tree(tree.left), self._tree(tree.right)
            if left is not None and right is not None:
                return operation(_OPERATORS[type(tree.op)], left, right)
        return None

    def _followed(self, value: ir.Value) -> Shape | None:
        """The shape of a name of storage, through what it was made from."""
        node, source = value.producer(), self._source.get(value)
        if node is None or (node.domain == "" and node.op_type in ("If", "Loop", "Scan")):
            return None if source is None or source is value else self.shape(source)
        view = _VIEWS.get((node.domain, node.op_type))
        if view is None:
            return None if source is None else self.shape(source)
        before = None if node.inputs[0] is None else self.shape(node.inputs[0])
        return None if before is None else view(node, before)

    def integer(self, value: ir.Value | None) -> Size | None:
        """A value that holds one integer which a run's dimensions fix, if it is one."""
        if value is None:
            return None
        constant = _constant(value)
        if constant is not None:
            return (
                int(constant.item()) if constant.size == 1 and constant.dtype.kind in "iu" else None
            )
        node = value.producer()
        if node is None or node.domain:
            return None
        if node.op_type in _KEEPS_THE_ELEMENT:
            return self.integer(node.inputs[0]) if _to_int64(node) else None
        if node.op_type in _ARITHMETIC:
            left, right = (self.integer(v) for v in node.inputs)
            if left is None or right is None:
                return None
            return operation(_ARITHMETIC[node.op_type], left, right)
        if node.op_type == "Size" and node.inputs[0] is not None:
            shape = self.shape(node.inputs[0])
            return None if shape is None else product(shape)
        return self._part_of_shape(node)

    def _part_of_shape(self, node: ir.Node) -> Size | None:
        """``Shape<start, end>(x)`` of one axis, or ``Gather(Shape(x), k)``."""
        which: int | None = None
        if node.op_type == "Gather" and node.inputs[0] is not None:
            index, shape = self.integer(node.inputs[1]), node.inputs[0].producer()
            if shape is None or not isinstance(index, int):
                return None
            node, which = shape, index
        if node.op_type != "Shape" or node.domain or node.inputs[0] is None:
            return None
        value = node.inputs[0]
        rank = None if value.shape is None else len(value.shape)
        if rank is None:
            return None
        start, end, _ = slice(_int(node, "start"), _int(node, "end")).indices(rank)
        axes = range(start, end)
        if which is None:
            return self.size(value, axes[0]) if len(axes) == 1 else None
        return self.size(value, axes[which]) if -len(axes) <= which < len(axes) else None

    def affine(self, value: ir.Value) -> tuple[ir.Value, Size] | None:
        """``value`` as an integer graph input plus one number, element by element."""
        if value in self._declared:
            return (value, 0) if value.dtype in (ir.DataType.INT64, ir.DataType.INT32) else None
        node = value.producer()
        if node is None or node.domain:
            return None
        if node.op_type in _KEEPS_THE_ELEMENT and node.inputs[0] is not None:
            return self.affine(node.inputs[0]) if _to_int64(node) else None
        if node.op_type not in ("Add", "Sub"):
            return None
        left, right = node.inputs
        if left is None or right is None:
            return None
        if node.op_type == "Add" and self.integer(left) is not None:
            left, right = right, left
        found, number = self.affine(left), self.integer(right)
        if found is None or number is None:
            return None
        return found[0], operation("+" if node.op_type == "Add" else "-", found[1], number)


_KEEPS_THE_ELEMENT = {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Cast"}
_ARITHMETIC = {"Add": "+", "Sub": "-", "Mul": "*"}


def _to_int64(node: ir.Node) -> bool:
    """Whether a node leaves integers as they are; a Cast may not."""
    if node.op_type != "Cast":
        return True
    source = node.inputs[0]
    return (
        node.attributes["to"].as_int() == ir.DataType.INT64
        and source is not None
        and source.dtype in (ir.DataType.INT64, ir.DataType.INT32)
    )


def _dimension(value: ir.Value, axis: int) -> Size:
    assert value.shape is not None
    dimension = value.shape[axis]
    if isinstance(dimension, int):
        return dimension
    return dimension.value or unnamed(str(value.name), axis)


def _constant(value: ir.Value) -> np.ndarray | None:
    """The tensor of an initializer or of a Constant node."""
    if value.const_value is not None:
        return value.const_value.numpy() if value.const_value.size < 1024 else None
    node = value.producer()
    if node is None or node.domain or node.op_type != "Constant":
        return None
    if "value" in node.attributes:
        return node.attributes["value"].as_tensor().numpy()
    if "value_int" in node.attributes:
        return np.asarray(node.attributes["value_int"].as_int(), np.int64)
    if "value_ints" in node.attributes:
        return np.asarray(node.attributes["value_ints"].as_ints(), np.int64)
    return None


def _int(node: ir.Node, name: str) -> int | None:
    attribute = node.attributes.get(name)
    return None if attribute is None else attribute.as_int()


def _parameter(node: ir.Node) -> list[int] | None:
    """The constant shape or axes of a view; None where a run computes them."""
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        constant = _constant(node.inputs[1])
        return None if constant is None else [int(n) for n in constant.ravel()]
    if "axes" in node.attributes:
        return list(node.attributes["axes"].as_ints())
    return None


def _same(node: ir.Node, before: Shape) -> Shape | None:
    return before


def _reshape(node: ir.Node, before: Shape) -> Shape | None:
    target = _parameter(node)
    if target is None or _int(node, "allowzero"):
        return None
    if any(n == 0 and k >= len(before) for k, n in enumerate(target)):
        return None
    sizes: list[Size] = [before[k] if n == 0 else n for k, n in enumerate(target)]
    if -1 in target:
        at = target.index(-1)
        others = product(s for k, s in enumerate(sizes) if k != at)
        sizes[at] = operation("//", product(before), others)
    return tuple(sizes)


def _squeeze(node: ir.Node, before: Shape) -> Shape | None:
    axes = _parameter(node)
    if axes is None:
        return None  # every axis of size 1, whichever these are
    gone = {a % len(before) for a in axes}
    return tuple(s for k, s in enumerate(before) if k not in gone)


def _unsqueeze(node: ir.Node, before: Shape) -> Shape | None:
    axes = _parameter(node)
    if axes is None:
        return None
    rank = len(before) + len(axes)
    new, old = {a % rank for a in axes}, iter(before)
    return tuple(1 if k in new else next(old) for k in range(rank))


def _flatten(node: ir.Node, before: Shape) -> Shape | None:
    axis = _int(node, "axis")
    axis = 1 if axis is None else axis if axis >= 0 else axis + len(before)
    return product(before[:axis]), product(before[axis:])


_VIEWS = {
    ("", "Identity"): _same,
    ("", "Reshape"): _reshape,
    ("", "Squeeze"): _squeeze,
    ("", "Unsqueeze"): _unsqueeze,
    ("", "Flatten"): _flatten,
}


def numbers(shape: Sequence[Size], dims: Mapping[str, int]) -> tuple[int, ...]:
    """A shape in a run with these dimensions."""
    return tuple(evaluate(size, dims) for size in shape)


def count(shape: Sequence[Size], dims: Mapping[str, int]) -> int:
    """Number of elements in a run with these dimensions."""
    return math.prod(numbers(shape, dims))
