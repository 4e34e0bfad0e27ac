"""Nodes that compare: one check of a slice, and the numbers that it compares.

A check takes a token and gives it back, changed where it is the first to find a violation. What the
numbers mean is decided in ``positions``, where the nodes stand in ``slicing``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import onnx
import onnx_ir as ir

from onnx_inplace.compiler.sizes import Size

CHECK_DOMAIN = "onnx_inplace.check"
CHECK = """
<domain: "onnx_inplace.check", opset_import: ["" : {opset}]>
Check (token, number, subject, offset, low, high, length, capacity) => (updated) {{
    zero = Constant <value_int: int = 0> ()
    all = Constant <value_ints: ints = [-1]> ()
    shifted = Add (subject, offset)
    below = Less (shifted, low)
    above = Greater (shifted, high)
    outside = Or (below, above)
    flat = Reshape (outside, all)
    found = NonZero (flat)
    places = Reshape (found, all)
    count = Size (places)
    any = Greater (count, zero)
    before = Gather (token, zero)
    clean = Equal (before, zero)
    take = And (any, clean)
    updated = If (take) <
        then_branch = violated () => (report) {{
            start = Constant <value_ints: ints = [0]> ()
            one = Constant <value_ints: ints = [1]> ()
            place = Slice (places, start, one)
            shape = Shape (outside)
            spread = Expand (shifted, shape)
            numbers = Reshape (spread, all)
            position = Gather (numbers, place)
            width = Size (capacity)
            column = Mod (place, width)
            size = Gather (capacity, column)
            report = Concat <axis: int = 0> (number, position, length, size, place)
        }},
        else_branch = kept () => (same) {{ same = Identity (token) }}
    >
}}"""
TOKEN_SIZE = 5  # number of the check, position, length, capacity, place


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A number that the slice computes: ``base + sum(factor * shape(value)[axis])``."""

    base: Size
    axes: tuple[tuple[int, ir.Value, int], ...]


Vector = tuple[Size | Measured, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """One check: ``low <= subject + offset <= high`` before ``node``; ``number`` is reported."""

    node: ir.Node
    number: int
    subject: ir.Value | Vector
    offset: Vector
    low: Vector
    high: Vector
    length: Vector
    capacity: Vector

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """All that is no content of a value, in the order of the check's inputs."""
        return self.offset, self.low, self.high, self.length, self.capacity

    def measured(self) -> Iterable[ir.Value]:
        """Values whose shapes the slice must compute."""
        own = () if isinstance(self.subject, ir.Value) else (self.subject,)
        for vector in (*own, *self.vectors):
            for item in vector:
                if isinstance(item, Measured):
                    yield from (value for _, value, _ in item.axes)


class Names:
    """Names that no author gives: they begin with %."""

    def __init__(self) -> None:
        self._count = 0

    def new(self, base: str) -> str:
        """A name that was not given before."""
        self._count += 1
        return f"%{base}.{self._count}"


class CheckWriter:
    """Appends checks to blocks of a slice.

    Attributes:
        sizes: vectors that the run hands over, by content: inputs of the slice.
    """

    def __init__(self, names: Names):
        self.sizes: dict[tuple[Size, ...], str] = {}
        self._names = names
        self._done: list[set[object]] = [set()]

    def open(self) -> None:
        """A block begins: what was checked around it has been checked."""
        self._done.append(set())

    def close(self) -> None:
        """The block ends: what was checked in it may not have run."""
        self._done.pop()

    def check(self, site: Site, token: str, nodes: list[onnx.NodeProto]) -> str:
        """Append a check, unless the same was made before; return the token behind it."""
        key = (site.subject, *site.vectors)
        if any(key in done for done in self._done):
            return token
        self._done[-1].add(key)
        if isinstance(site.subject, ir.Value):
            subject = self._int64(site.subject, nodes)
        else:
            subject = self._vector(site.subject, nodes)
        vectors = [self._vector(v, nodes) for v in ((site.number,), *site.vectors)]
        after = self._names.new("token")
        inputs = [token, vectors[0], subject, *vectors[1:]]
        nodes.append(onnx.helper.make_node("Check", inputs, [after], domain=CHECK_DOMAIN))
        return after

    def _int64(self, value: ir.Value, nodes: list[onnx.NodeProto]) -> str:
        if value.dtype == ir.DataType.INT64:
            return str(value.name)
        return self._node(nodes, "Cast", [str(value.name)], to=onnx.TensorProto.INT64)

    def _vector(self, vector: Vector, nodes: list[onnx.NodeProto]) -> str:
        """Name of an int64 vector: an input of the slice, or computed where the block stands."""
        sizes = tuple(item for item in vector if not isinstance(item, Measured))
        if len(sizes) == len(vector):
            return self.sizes.setdefault(sizes, f"%sizes.{len(self.sizes)}")
        parts = []
        for item in vector:
            if not isinstance(item, Measured):
                parts.append(self._vector((item,), nodes))
                continue
            total = self._vector((item.base,), nodes)
            for factor, value, axis in item.axes:
                shape = self._node(nodes, "Shape", [str(value.name)])
                where = self._node(nodes, "Constant", [], value_ints=[axis])
                size = self._node(nodes, "Gather", [shape, where])
                if abs(factor) != 1:
                    times = self._vector((abs(factor),), nodes)
                    size = self._node(nodes, "Mul", [size, times])
                total = self._node(nodes, "Add" if factor > 0 else "Sub", [total, size])
            parts.append(total)
        return parts[0] if len(parts) == 1 else self._node(nodes, "Concat", parts, axis=0)

    def _node(
        self, nodes: list[onnx.NodeProto], op_type: str, inputs: list[str], **attributes: Any
    ) -> str:
        name = self._names.new(op_type.lower())
        nodes.append(onnx.helper.make_node(op_type, inputs, [name], **attributes))
        return name
