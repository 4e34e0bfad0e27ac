"""What a graph fixes about the shapes of its values, and about integers computed from shapes.

Inference by the library comes first; where it leaves a size open, the size is followed through the
operators (``extent_rules``) and through names of storage. Sizes are in terms of the dimensions of
the graph's inputs; what they are in a run is computed there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnx_inplace.compiler import extent_rules, sizes
from onnx_inplace.compiler.control import bodies, is_control
from onnx_inplace.compiler.sizes import Partial, Shape, Size

_SMALL = 1024  # elements of a constant that may be a shape, axes or a position


def unnamed(name: str, axis: int) -> str:
    """How the dimension of an input that the model gives no name is called."""
    return f"{name}[{axis}]"


class Extents:
    """Sizes of the values of one graph and its bodies.

    Attributes:
        agreements: results of If that are names of storage, and two sizes that must be the same.
    """

    def __init__(self, graph: ir.Graph, source: Mapping[ir.Value, ir.Value]):
        """``source`` maps an aliased value to the value that it was made from."""
        self._source = source
        self.agreements: list[tuple[ir.Value, Size, Size]] = []
        self._shapes: dict[ir.Value, Partial | None] = {}
        for value in graph.inputs:
            if value.shape is not None:
                axes = range(len(value.shape))
                self._shapes[value] = tuple(_dimension(value, k) for k in axes)
        self._numbers: dict[ir.Value, Size | None] = {}
        self._offsets: dict[ir.Value, tuple[ir.Value, Size] | None] = {}
        self._inputs, self._outputs = set(graph.inputs), set(graph.outputs)
        declared = (size for shape in self._shapes.values() for size in shape or ())
        self._names = {size for size in declared if isinstance(size, str)}
        self._walk(graph)

    def _walk(self, graph: ir.Graph) -> None:
        """Program order: what a value depends on has been seen."""
        for node in graph:
            if is_control(node):
                for body in bodies(node):
                    for parameter in body.inputs:
                        self._shapes[parameter] = self._named_storage(parameter)
                    self._walk(body)
            for output, shape in zip(node.outputs, self._results(node), strict=True):
                self._shapes[output] = shape
                if output.dtype in _INTEGERS:  # now, so that long chains are no deep recursion
                    self._numbers[output] = self._integer(output)
                    self._offsets[output] = self._affine(output)

    def _results(self, node: ir.Node) -> list[Partial | None]:
        if node.op_type == "If" and is_control(node):
            pairs = zip(node.outputs, *(body.outputs for body in bodies(node)), strict=True)
            return [self._joined(output, a, b) for output, a, b in pairs]
        followed = list(extent_rules.results(node, self)[: len(node.outputs)])
        followed += [None] * (len(node.outputs) - len(followed))
        return [
            _merge(self._named_storage(output), shape)
            for output, shape in zip(node.outputs, followed, strict=True)
        ]

    def _joined(self, output: ir.Value, a: ir.Value, b: ir.Value) -> Partial | None:
        """What both branches say. Two names of one storage have one shape: a run compares them."""
        first, second = self.partial(a), self.partial(b)
        if first is None or second is None or len(first) != len(second):
            return None
        shape: list[Size | None] = []
        for one, other in zip(first, second, strict=True):
            if output in self._source and one is not None and other is not None and one != other:
                self.agreements.append((output, one, other))
                shape.append(one)
            else:
                shape.append(one if one == other else None)
        return tuple(shape)

    def _named_storage(self, value: ir.Value) -> Partial | None:
        """What inference says; and of a name of storage, what its source has, if it is no view."""
        inferred: Partial | None = None
        if value.shape is not None:
            inferred = tuple(self._inferred(d) for d in value.shape)
            if value in self._outputs:  # its names are what an author says, not what was inferred
                inferred = tuple(d if isinstance(d, int) else None for d in inferred)
        source, node = self._source.get(value), value.producer()
        if source is None or (node is not None and (node.domain, node.op_type) in _RESHAPING):
            return inferred
        return _merge(inferred, self.partial(source))

    def _inferred(self, dimension: int | ir.SymbolicDim) -> Size | None:
        if isinstance(dimension, int):
            return dimension
        return None if dimension.value is None else sizes.parse(dimension.value, self._names)

    def partial(self, value: ir.Value) -> Partial | None:
        """Sizes of a value as far as they are known; None where the rank is not."""
        if value in self._shapes:
            return self._shapes[value]
        if value.const_value is not None:
            return tuple(value.const_value.shape.numpy())
        return self._named_storage(value)

    def shape(self, value: ir.Value) -> Shape | None:
        """All sizes of a value, or None where one is not known before the run."""
        return sizes.whole(self.partial(value))

    def size(self, value: ir.Value, axis: int) -> Size | None:
        """One size of a value."""
        shape = self.partial(value)
        return None if shape is None or not -len(shape) <= axis < len(shape) else shape[axis]

    def integers(self, value: ir.Value | None) -> Partial | None:
        """Elements of a vector of integers, as far as a run's dimensions fix them."""
        if value is None:
            return None
        constant = _constant(value)
        if constant is not None:
            whole = constant.dtype.kind in "iu" and constant.ndim == 1
            return tuple(int(n) for n in constant) if whole else None
        node = value.producer()
        if node is None or node.domain:
            return None
        if node.op_type == "Concat":
            parts = [self.integers(v) for v in node.inputs]
            found = [part for part in parts if part is not None]
            return tuple(n for part in found for n in part) if len(found) == len(parts) else None
        if node.op_type == "Shape" and node.inputs[0] is not None:
            shape = self.partial(node.inputs[0])
            if shape is None:
                return None
            start, end = (extent_rules.integer(node, name) for name in ("start", "end"))
            return shape[slice(start, end)]
        one = self.integer(value)
        rank = None if value.shape is None else len(value.shape)
        return None if one is None or rank != 1 else (one,)

    def integer(self, value: ir.Value | None) -> Size | None:
        """The one integer that a value holds, where a run's dimensions fix it."""
        if value is None or _is_float(value):
            return None
        return self._numbers[value] if value in self._numbers else self._integer(value)

    def _integer(self, value: ir.Value) -> Size | None:
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
            return sizes.operation(_ARITHMETIC[node.op_type], left, right)
        if node.op_type == "Size" and node.inputs[0] is not None:
            shape = self.shape(node.inputs[0])
            return None if shape is None else sizes.product(shape)
        if node.op_type == "Shape":
            one = self.integers(value)
            return one[0] if one is not None and len(one) == 1 else None
        if node.op_type == "Gather":
            among, which = self.integers(node.inputs[0]), self.integer(node.inputs[1])
            if among is None or not isinstance(which, int):
                return None
            return among[which] if -len(among) <= which < len(among) else None
        return None

    def affine(self, value: ir.Value) -> tuple[ir.Value, Size] | None:
        """``value`` as an integer graph input plus one number, element by element."""
        if _is_float(value):
            return None
        return self._offsets[value] if value in self._offsets else self._affine(value)

    def _affine(self, value: ir.Value) -> tuple[ir.Value, Size] | None:
        if value in self._inputs:
            return (value, 0) if value.dtype in _INTEGERS else None
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
        sign = "+" if node.op_type == "Add" else "-"
        return found[0], sizes.operation(sign, found[1], number)


_KEEPS_THE_ELEMENT = {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Cast"}
_RESHAPING = {("", name) for name in ("Reshape", "Squeeze", "Unsqueeze", "Flatten")}
_ARITHMETIC = {"Add": "+", "Sub": "-", "Mul": "*"}
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)


def _to_int64(node: ir.Node) -> bool:
    """Whether a node leaves integers as they are; a Cast may not."""
    if node.op_type != "Cast":
        return True
    source = node.inputs[0]
    to_int64 = node.attributes["to"].as_int() == ir.DataType.INT64
    return to_int64 and source is not None and source.dtype in _INTEGERS


def _is_float(value: ir.Value) -> bool:
    """Whether a value surely holds no integers: a chain of such is as long as a model is deep."""
    return value.dtype is not None and value.dtype.is_floating_point()


def _merge(first: Partial | None, second: Partial | None) -> Partial | None:
    """What either says; the first where both do."""
    if first is None or second is None or len(first) != len(second):
        return first if first is not None else second
    return tuple(b if a is None else a for a, b in zip(first, second, strict=True))


def _dimension(value: ir.Value, axis: int) -> Size:
    assert value.shape is not None
    dimension = value.shape[axis]
    if isinstance(dimension, int):
        return dimension
    return dimension.value or unnamed(str(value.name), axis)


def _constant(value: ir.Value) -> np.ndarray | None:
    """The tensor of an initializer or of a Constant node."""
    if value.const_value is not None:
        return value.const_value.numpy() if value.const_value.size <= _SMALL else None
    node = value.producer()
    if node is None or node.domain or node.op_type != "Constant":
        return None
    if "value" in node.attributes:
        tensor = node.attributes["value"].as_tensor()
        return tensor.numpy() if tensor.size <= _SMALL else None
    if "value_int" in node.attributes:
        return np.asarray(node.attributes["value_int"].as_int(), np.int64)
    if "value_ints" in node.attributes:
        return np.asarray(node.attributes["value_ints"].as_ints(), np.int64)
    return None
