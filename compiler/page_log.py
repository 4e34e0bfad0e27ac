"""Nodes that note which pages a run is going to touch: a log, written in order of execution.

The log is an int64 vector that the run hands over: its first element is how much of the rest is
written, then entries follow, one behind the other:

    number, length, rows, blocks, positions (one for each row), ids (rows * blocks)

A number of -1 - k is access k of which something is not known before the run; nothing follows it
but zeros for length, rows and blocks. What does not fit is not kept, but counted, so that whoever
reads the log can hand over a longer one. Its size stays, as that of what a Scan carries must.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import onnx
import onnx_ir as ir

from onnx_inplace.compiler.check_nodes import CHECK_DOMAIN, Measured, Vector, Writer

LOG = "%log"
HEADER = 4  # number, length, rows, blocks
_NOTE = """
<domain: "onnx_inplace.check", opset_import: ["" : {opset}]>
Note (log, header, positions, ids) => (updated) {{
    zero = Constant <value_int: int = 0> ()
    first = Constant <value_ints: ints = [0]> ()
    one = Constant <value_ints: ints = [1]> ()
    two = Constant <value_ints: ints = [2]> ()
    all = Constant <value_ints: ints = [-1]> ()
    rows = Gather (header, two)
    flat_positions = Reshape (positions, all)
    each = Expand (flat_positions, rows)
    flat_ids = Reshape (ids, all)
    entry = Concat <axis: int = 0> (header, each, flat_ids)
    size = Shape (entry)
    count = Squeeze (size, first)
    step = Constant <value_int: int = 1> ()
    offsets = Range (zero, count, step)
    written = Gather (log, first)
    begin = Add (written, one)
    places = Add (offsets, begin)
    length = Shape (log)
    last = Sub (length, one)
    inside = Min (places, last)
    noted = ScatterElements <axis: int = 0> (log, inside, entry)
    total = Add (written, size)
    updated = ScatterElements <axis: int = 0> (noted, first, total)
}}"""


@dataclasses.dataclass(frozen=True, slots=True)
class LogSite:
    """One access to pages, noted before ``node``.

    Attributes:
        node: the operator, or the control node around it that is not known to run.
        header: number, length, rows, blocks.
        positions: first tokens, or lengths: one, or one for each row. None: zeros.
        ids: page ids; None: there are none to note.
    """

    node: ir.Node
    header: Vector
    positions: ir.Value | None
    ids: ir.Value | None

    def needed(self) -> Iterable[ir.Value]:
        """Values whose content or shape is wanted."""
        yield from (v for v in (self.positions, self.ids) if v is not None)
        for item in self.header:
            if isinstance(item, Measured):
                yield from (value for _, value, _ in item.axes)


class LogWriter(Writer[LogSite]):
    """Appends notes: the token is the log."""

    function, token_size, stops, given = _NOTE, None, False, True

    def begin(self, nodes: list[onnx.NodeProto]) -> str:
        """What the run hands over."""
        return LOG

    def append(self, site: LogSite, token: str, nodes: list[onnx.NodeProto]) -> str:
        """Append a note; return the log behind it."""
        header = self.vector(site.header, nodes)
        positions = (
            self.vector((0,), nodes)
            if site.positions is None
            else self.int64(site.positions, nodes)
        )
        if site.ids is None:
            ids = self.node(
                nodes,
                "Constant",
                [],
                value=onnx.TensorProto(data_type=onnx.TensorProto.INT64, dims=[0]),
            )
        else:
            ids = self.int64(site.ids, nodes)
        after = self.names.new("log")
        inputs = [token, header, positions, ids]
        nodes.append(onnx.helper.make_node("Note", inputs, [after], domain=CHECK_DOMAIN))
        return after
