"""Nodes that compare: one check of a slice, and the numbers that it compares.

A check takes a token and gives it back, changed where it is the first to find a violation. What the
numbers mean is decided in ``positions``, where the nodes stand in ``slicing``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

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

    def needed(self) -> Iterable[ir.Value]:
        """Values whose content or shape is wanted."""
        if isinstance(self.subject, ir.Value):
            yield self.subject
        yield from self.measured()

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


class SiteLike(Protocol):
    """What a slice does something for: a node, and values that it needs there."""

    @property
    def node(self) -> ir.Node:
        """Before which it is done."""

    def needed(self) -> Iterable[ir.Value]:
        """Values whose content or shape is wanted."""


S = TypeVar("S", bound=SiteLike)


class Writer(Generic[S]):
    """Appends nodes that hand on a token to blocks of a slice.

    Attributes:
        sizes: vectors that the run hands over, by content: inputs of the slice.
        function: what ``append`` calls, as text with a place for the opset.
        token_size: elements of the token; None: a run decides.
        stops: whether a loop ends once the first element of the token is not 0.
        given: whether the first token is an input of the slice.
    """

    function: str
    token_size: int | None
    stops: bool
    given: bool

    def __init__(self) -> None:
        self.sizes: dict[tuple[Size, ...], str] = {}
        self.names = Names()

    def begin(self, nodes: list[onnx.NodeProto]) -> str:
        """Name of the token at the begin of the slice."""
        raise NotImplementedError

    def append(self, site: S, token: str, nodes: list[onnx.NodeProto]) -> str:
        """Append what is done for a site; return the token behind it."""
        raise NotImplementedError

    def open(self) -> None:
        """A block begins."""

    def close(self) -> None:
        """The block ends."""

    def info(self, name: str) -> onnx.ValueInfoProto:
        """Description of a token."""
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [self.token_size])

    def int64(self, value: ir.Value, nodes: list[onnx.NodeProto]) -> str:
        """Name of a value as int64."""
        if value.dtype == ir.DataType.INT64:
            return str(value.name)
        return self.node(nodes, "Cast", [str(value.name)], to=onnx.TensorProto.INT64)

    def vector(self, vector: Vector, nodes: list[onnx.NodeProto]) -> str:
        """Name of an int64 vector: an input of the slice, or computed where the block stands."""
        sizes = tuple(item for item in vector if not isinstance(item, Measured))
        if len(sizes) == len(vector):
            return self.sizes.setdefault(sizes, f"%sizes.{len(self.sizes)}")
        parts = []
        for item in vector:
            if not isinstance(item, Measured):
                parts.append(self.vector((item,), nodes))
                continue
            total = self.vector((item.base,), nodes)
            for factor, value, axis in item.axes:
                shape = self.node(nodes, "Shape", [str(value.name)])
                where = self.node(nodes, "Constant", [], value_ints=[axis])
                size = self.node(nodes, "Gather", [shape, where])
                if abs(factor) != 1:
                    times = self.vector((abs(factor),), nodes)
                    size = self.node(nodes, "Mul", [size, times])
                total = self.node(nodes, "Add" if factor > 0 else "Sub", [total, size])
            parts.append(total)
        return parts[0] if len(parts) == 1 else self.node(nodes, "Concat", parts, axis=0)

    def node(
        self, nodes: list[onnx.NodeProto], op_type: str, inputs: list[str], **attributes: Any
    ) -> str:
        """Append a node of one output; return its name."""
        name = self.names.new(op_type.lower())
        nodes.append(onnx.helper.make_node(op_type, inputs, [name], **attributes))
        return name


class CheckWriter(Writer[Site]):
    """Appends checks: the token is what the first violation reports."""

    function, token_size, stops, given = CHECK, TOKEN_SIZE, True, False

    def __init__(self) -> None:
        super().__init__()
        self._done: list[set[object]] = [set()]

    def begin(self, nodes: list[onnx.NodeProto]) -> str:
        """Zeros: nothing is violated."""
        nodes.append(onnx.helper.make_node("Constant", [], ["%token"], value_ints=[0] * TOKEN_SIZE))
        return "%token"

    def open(self) -> None:
        """A block begins: what was checked around it has been checked."""
        self._done.append(set())

    def close(self) -> None:
        """The block ends: what was checked in it may not have run."""
        self._done.pop()

    def append(self, site: Site, token: str, nodes: list[onnx.NodeProto]) -> str:
        """Append a check, unless the same was made before; return the token behind it."""
        key = (site.subject, *site.vectors)
        if any(key in done for done in self._done):
            return token
        self._done[-1].add(key)
        if isinstance(site.subject, ir.Value):
            subject = self.int64(site.subject, nodes)
        else:
            subject = self.vector(site.subject, nodes)
        vectors = [self.vector(v, nodes) for v in ((site.number,), *site.vectors)]
        after = self.names.new("token")
        inputs = [token, vectors[0], subject, *vectors[1:]]
        nodes.append(onnx.helper.make_node("Check", inputs, [after], domain=CHECK_DOMAIN))
        return after
