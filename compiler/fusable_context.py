"""What rules of fused steps ask about a graph, and the questions that many of them share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnx_inplace.compiler import paged_types, partition
from onnx_inplace.compiler.extents import Extents
from onnx_inplace.compiler.sizes import Shape, Size

LARGEST_HEAD = 1024  # numbers of a head that is rotated
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What rules ask about the graph.

    Attributes:
        known: sizes and integers, as far as the dimensions of the inputs decide them.
        facts: which values are storage of the caller.
        opsets: versions of the domains that the model imports.
    """

    known: Extents
    facts: partition.Facts
    opsets: Mapping[str, int]

    def constant(self, value: ir.Value | None) -> bool:
        """Whether a value is a weight that no caller can replace."""
        return self.tensor(value) is not None

    def tensor(self, value: ir.Value | None) -> ir.TensorProtocol | None:
        """The weight that a value is: an initializer, or what a Constant node holds."""
        if value is None or value.is_graph_input():
            return None
        if value.is_initializer():
            return value.const_value
        maker = value.producer()
        if maker is None or maker.domain or maker.op_type != "Constant":
            return None
        return maker.attributes["value"].as_tensor() if "value" in maker.attributes else None

    def shape(self, value: ir.Value | None) -> Shape | None:
        """Sizes of a value; None where there is no value, or one of them is not known."""
        return None if value is None else self.known.shape(value)

    def rank(self, value: ir.Value | None) -> int:
        """Number of axes; 0 where nothing is known."""
        return len(self.shape(value) or ())

    def root(self, value: ir.Value | None) -> bool:
        """Whether a value is storage of the caller."""
        return value is not None and value in self.facts.roots

    def content(self, value: ir.Value | None) -> tuple[Size, ...] | None:
        """The integers of a parameter, where the dimensions decide them."""
        found = self.known.integers(value)
        if found is not None:
            return None if None in found else tuple(n for n in found if n is not None)
        one = self.known.integer(value)
        return None if one is None else (one,)


Rule = Callable[[ir.Node, Context], str | None]
"""Why a fused step cannot execute a node; None: it can."""


def unknown_shape(node: ir.Node, context: Context) -> str | None:
    """A value whose sizes the dimensions of the inputs do not decide. Pages have none."""
    for value in (*node.inputs, *(v for v in node.outputs if wanted(v))):
        if value is None or paged_types.is_paged(value):
            continue
        if context.known.shape(value) is None:
            return f"the shape of `{value.name}` is known only in a run"
    return None


def given(node: ir.Node, index: int) -> ir.Value | None:
    """An input; None where the node leaves it out."""
    return node.inputs[index] if index < len(node.inputs) else None


def integer(node: ir.Node, name: str, default: int) -> int:
    """An attribute."""
    found = node.attributes.get(name)
    return default if found is None else found.as_int()


def number(node: ir.Node, name: str, default: float) -> float:
    """An attribute."""
    found = node.attributes.get(name)
    return default if found is None else found.as_float()


def wanted(output: ir.Value) -> bool:
    """Whether something uses an output of a node."""
    return bool(output.uses()) or output.is_graph_output()


def only(node: ir.Node, *indices: int) -> str | None:
    """Refuse a node of which other outputs are wanted."""
    if any(wanted(v) for k, v in enumerate(node.outputs) if k not in indices):
        return "more of its results are wanted than a kernel makes"
    return None


def is_float(value: ir.Value | None) -> bool:
    """Whether a value holds floats of at most 32 bits."""
    return value is not None and value.dtype in FLOATS


def floats(node: ir.Node, context: Context) -> str | None:
    """A rule: all inputs and outputs are floats of at most 32 bits."""
    for value in (*node.inputs, *(v for v in node.outputs if wanted(v))):
        if value is not None and value.dtype not in FLOATS:
            kind = "unknown type" if value.dtype is None else value.dtype.name
            return f"`{value.name}` is {kind}, not a float of at most 32 bits"
    return None


def parameters(*ports: int) -> Rule:
    """A rule: data are floats; the inputs at ``ports`` are integers that the dimensions decide."""

    def rule(node: ir.Node, context: Context) -> str | None:
        if not all(is_float(v) for v in node.outputs if wanted(v)):
            return "it does not make floats"
        for port in ports:
            value = given(node, port)
            if value is not None and context.content(value) is None:
                return f"`{value.name}` is known only in a run"
        return None

    return rule
