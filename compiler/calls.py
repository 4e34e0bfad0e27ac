"""Which calls a node of the flat graph was inlined from.

Inlining takes calls away, and with them the names that an author gave to the parts of a model. The
inliner adds the metadata of a call to each node that it puts in its place, outer calls first: what
is noted at the calls before arrives, in order, at the nodes behind.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnx_inplace.compiler import integrity
from onnx_inplace.compiler.errors import Location

_NOTE = "onnx_inplace.call."  # and the number of the call, in metadata_props, while inlining lasts
_CALLS = "onnx_inplace.calls"  # in ir.Node.meta


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call in the file. Two runs through it, in calls of a caller, have the same number.

    Attributes:
        number: of the call node, unique in the model.
        function: name of what is called.
        location: the author's line, where it is known.
    """

    number: int
    function: str
    location: Location | None


def note(model: ir.Model, inlined: Callable[[ir.Function], bool]) -> dict[str, Call]:
    """Note at each call of an ``inlined`` function which one it is; before inlining."""
    found: dict[str, Call] = {}
    blocks: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for node in (node for block in blocks for node in block.all_nodes()):
        function = model.functions.get(node.op_identifier())
        if function is not None and inlined(function):
            key = f"{_NOTE}{len(found)}"
            found[key] = Call(len(found), node.op_type, integrity.source(node))
            node.metadata_props[key] = ""
    return found


def collect(graph: ir.Graph, noted: dict[str, Call]) -> None:
    """Take the notes off the nodes that came of inlining, and keep what they say."""
    for node in graph.all_nodes():
        keys = [key for key in node.metadata_props if key in noted]
        for key in keys:
            del node.metadata_props[key]
        node.meta[_CALLS] = tuple(noted[key] for key in keys)


def of(node: ir.Node) -> tuple[Call, ...]:
    """The calls that a node of a flat graph was inlined from, outermost first."""
    found = node.meta.get(_CALLS, ())
    assert isinstance(found, tuple)
    return found


def common(nodes: Sequence[ir.Node]) -> tuple[Call, ...]:
    """The calls that all of these nodes were inlined from, outermost first."""
    shared = of(nodes[0])
    for node in nodes[1:]:
        pairs = zip(shared, of(node), strict=False)
        shared = tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return shared
