"""Which pages will a run touch? Decides how that is found out before the first write.

Positions against sizes are decided in ``positions``, as for arrays. Whether pages exist, may be
created, or belong to somebody else depends on the page table, which only a runner has: here it
gets everything that is done to it, in order. Where no control flow is around and page ids,
positions and lengths are inputs, or inputs plus a number, that is a list (``Operand``). Otherwise
it is the log of a model that computes them and writes nothing (``page_log``).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import onnx_ir as ir

from onnx_inplace.compiler import (
    integrity,
    loader,
    page_log,
    paged_rules,
    paged_types,
    sizes,
    slicing,
)
from onnx_inplace.compiler.check_nodes import Measured
from onnx_inplace.compiler.control import bodies, is_control
from onnx_inplace.compiler.errors import ContractError, Finding
from onnx_inplace.compiler.extents import Extents
from onnx_inplace.compiler.knowledge import Knowledge
from onnx_inplace.compiler.sizes import Size


class Mode(enum.Enum):
    """What an operator does to pages."""

    WRITE = "write"  # into pages that exist or are created
    CONVERT = "convert"
    READ = "read"  # the first tokens of sequences
    GATHER = "gather"  # whole pages


MODES = {
    "PagedCacheUpdate": Mode.WRITE,
    "PagedCacheConvert": Mode.CONVERT,
    "PagedAttention": Mode.READ,
    "PageGather": Mode.GATHER,
}
_IDS = {"PagedAttention": 2}
_POSITIONS = {"PagedCacheUpdate": 3, "PagedAttention": 3}
_TOKENS = {Mode.WRITE: 2, Mode.READ: 0}


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """Integers that a run begins with.

    Attributes:
        input: name of a graph input; None: ``numbers`` are all there is.
        offset: is added to each element of the input.
        numbers: without an input.
    """

    input: str | None
    offset: Size = 0
    numbers: tuple[Size, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class PageAccess:
    """What one operator does to pages.

    Attributes:
        number: index into ``PageChecks.accesses``.
        mode: whether it writes, converts, reads or gathers.
        root: name of the paged cache.
        location: the author's line, where it is known.
        quantized_type: format of created or converted pages; None: none are created.
        rank: of the page ids: 0 one page, 1 a block table (or several pages), 2 one for each row.
        ids: page ids; None in a log.
        positions: first token of each row; of READ the number of valid tokens. None in a log, and
            where there are none.
        length: tokens that are written from each position on; of READ the number of queries, which
            are the last valid tokens. None in a log.
        rows: rows of page ids; 1 unless ``rank`` is 2. None in a log.
        blocks: page ids of a row. None in a log.
        late: why something of it is not known before a run; None: all is. Its step has to look for
            itself, and so have later ones on the same root.
        left: of READ: tokens before its own that a query sees; -1: all.
    """

    number: int
    mode: Mode
    root: str
    location: str | None
    quantized_type: str | None
    rank: int
    ids: Operand | None = None
    positions: Operand | None = None
    length: Size | None = None
    rows: Size | None = None
    blocks: Size | None = None
    late: str | None = None
    left: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """A model that writes nothing, and notes every access of a run in its order.

    Attributes:
        model: serialized ModelProto with one output, the log.
        inputs: inputs of the graph that it reads, mutable ones as they are before the run.
        sizes: further inputs, int64 vectors: name and content.
        log: name of the input for the log as it is before: zeros. See ``page_log``.
    """

    model: bytes
    inputs: tuple[str, ...]
    sizes: tuple[tuple[str, tuple[Size, ...]], ...]
    log: str = page_log.LOG


@dataclasses.dataclass(frozen=True, slots=True)
class PageChecks:
    """All accesses to pages.

    Attributes:
        accesses: in program order.
        trace: None: this is also their order in every run, each once, and all operands are known.
    """

    accesses: tuple[PageAccess, ...]
    trace: Trace | None


def build(loaded: loader.Loaded, known: Extents, knowledge: Knowledge) -> PageChecks | None:
    """The accesses of a model whose calls are inlined; None: it has no paged caches."""
    return _Builder(loaded, known, knowledge).run()


class _Builder:
    def __init__(self, loaded: loader.Loaded, known: Extents, knowledge: Knowledge):
        self.loaded, self.known, self.knowledge = loaded, known, knowledge
        self.accesses: list[PageAccess] = []
        self.sites: list[page_log.LogSite] = []
        self.is_listed = True

    def run(self) -> PageChecks | None:
        self.block(self.loaded.model.graph, ())
        if not self.accesses:
            return None
        if self.is_listed:
            return PageChecks(tuple(self.accesses), None)
        slicer = slicing.Slicer(
            self.loaded.model,
            self.loaded.aliases.root,
            self.knowledge,
            self.sites,
            page_log.LogWriter(),
        )
        model = slicer.run().SerializeToString()
        plain = (
            dataclasses.replace(a, ids=None, positions=None, length=None, rows=None, blocks=None)
            for a in self.accesses
        )
        return PageChecks(tuple(plain), Trace(model, slicer.inputs, slicer.sizes))

    def block(self, graph: ir.Graph, around: tuple[ir.Node, ...]) -> None:
        for node in graph:
            if paged_rules.is_paged_operator(node):
                self.access(node, around)
            if is_control(node):
                for body in bodies(node):
                    self.block(body, (*around, node))

    def access(self, node: ir.Node, around: tuple[ir.Node, ...]) -> None:
        cache = node.inputs[paged_rules.CACHE_PORT[node.domain, node.op_type]]
        ids = node.inputs[_IDS.get(node.op_type, 1)]
        port = _POSITIONS.get(node.op_type)
        positions = None if port is None else node.inputs[port]
        assert cache is not None and ids is not None
        assert isinstance(cache.type, paged_types.PagedType)
        if ids.shape is None:
            message = f"It is not known whether `{ids.name}` is one page id or a block table."
            repair = "Declare its shape, or reshape it to one that is known."
            raise ContractError([Finding("E102", message, integrity.source(node), repair)])
        rank = ids.shape.rank()
        mode, number = MODES[node.op_type], len(self.accesses)
        counts = self.counts(node, mode, ids, rank)
        length, rows, blocks = (None if isinstance(n, Measured) else n for n in counts)
        root = self.loaded.aliases.pages[cache]
        place, reason = self.unknown(node, around, ids, positions, counts)
        found = PageAccess(
            number,
            mode,
            str(root.name),
            node.metadata_props.get("onnx_inplace.source"),
            paged_rules.created_format(node, cache.type),
            rank,
            self.operand(ids),
            None if positions is None else self.operand(positions),
            length,
            rows,
            blocks,
            reason,
            node.attributes["left_window_size"].as_int()
            if "left_window_size" in node.attributes
            else -1,
        )
        self.accesses.append(found)
        if reason is None:
            self.sites.append(page_log.LogSite(node, (number, *counts), positions, ids))
        else:
            self.sites.append(page_log.LogSite(place, (-1 - number, 0, 0, 0), None, None))
        self.is_listed = self.is_listed and not around and self.is_whole(found, positions)

    @staticmethod
    def is_whole(found: PageAccess, positions: ir.Value | None) -> bool:
        """Whether nothing is left for a model to compute."""
        if found.late is not None:
            return True
        counted = None not in (found.length, found.rows, found.blocks)
        has_positions = positions is None or found.positions is not None
        return counted and found.ids is not None and has_positions

    def counts(
        self, node: ir.Node, mode: Mode, ids: ir.Value, rank: int
    ) -> tuple[Size | Measured, Size | Measured, Size | Measured]:
        """Tokens that are written, or that look back; rows of page ids, page ids of a row."""
        length: Size | Measured = 0
        tokens = node.inputs[_TOKENS[mode]] if mode in _TOKENS else None
        if tokens is not None:
            length = self.size(tokens, -2)
        rows = self.size(ids, 0) if rank == 2 else 1
        return length, rows, self.size(ids, -1) if rank else 1

    def size(self, value: ir.Value, axis: int) -> Size | Measured:
        found = self.known.size(value, axis)
        return Measured(0, ((1, value, axis),)) if found is None else found

    def unknown(
        self,
        node: ir.Node,
        around: tuple[ir.Node, ...],
        ids: ir.Value,
        positions: ir.Value | None,
        counts: Sequence[Size | Measured],
    ) -> tuple[ir.Node, str | None]:
        """Why an access cannot be computed before the run, and where the order of it is known."""
        for control in around:
            reason = self.knowledge.why_unsteered(control)
            if reason is not None:
                return control, reason
        measured = [v for n in counts if isinstance(n, Measured) for _, v, _ in n.axes]
        for value in (ids, positions, *measured):
            reason = None if value is None else self.knowledge.why_unknown(value)
            if reason is not None:
                return node, reason
        return node, None

    def operand(self, value: ir.Value) -> Operand | None:
        """Integers as an input plus a number, or as sizes fix them."""
        found = self.known.affine(value)
        if found is not None:
            return Operand(str(found[0].name), found[1])
        one = self.known.integer(value)
        if one is not None:
            return Operand(None, numbers=(one,))
        several = sizes.whole(self.known.integers(value))
        return None if several is None else Operand(None, numbers=several)
