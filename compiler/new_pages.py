"""Pages that a run may add to paged caches: how many, in which format, of how many bytes.

Upper bounds, before a page table is known: each update may find none of its pages there, and each
conversion takes a page beside the old one until that is freed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from onnx_inplace.compiler import integrity, loader, paged_rules, sizes
from onnx_inplace.compiler.control import bodies, is_control
from onnx_inplace.compiler.errors import Location
from onnx_inplace.compiler.extents import Extents
from onnx_inplace.compiler.formats import PageFormat
from onnx_inplace.compiler.paged_types import HEADS, PAGE_SIZE, PagedType
from onnx_inplace.compiler.sizes import Size


@dataclasses.dataclass(frozen=True, slots=True)
class NewPages:
    """Pages that one step may make.

    Attributes:
        root: name of the paged cache.
        format: of the pages.
        count: at most so many, each time that the step runs; None: data decides.
        page_bytes: of each.
        repeated: whether the step stands in a loop, so that data decides how often it runs.
        location: the author's line, where it is known.
    """

    root: str
    format: str
    count: Size | None
    page_bytes: Size
    repeated: bool
    location: Location | None

    @property
    def bytes(self) -> Size | None:
        """Of all that the step makes in a run, at most; None: not known before."""
        if self.count is None or self.repeated:
            return None
        return sizes.operation("*", self.count, self.page_bytes)

    def __str__(self) -> str:
        count = "an unknown number of" if self.count is None else f"at most {_plain(self.count)}"
        round_ = " in each round" if self.repeated else ""
        size = _plain(self.page_bytes)
        return f"`{self.root}`: {count} pages {self.format} of {size} bytes{round_}"


def _plain(size: Size) -> str:
    """Without the parentheses that would stand around the whole."""
    return str(size)[1:-1] if isinstance(size, sizes.Operation) else str(size)


def of(loaded: loader.Loaded) -> tuple[NewPages, ...]:
    """All steps of a model that may make pages, in program order."""
    return tuple(_block(loaded, loaded.model.graph, False))


def _block(loaded: loader.Loaded, graph: ir.Graph, repeated: bool) -> Iterator[NewPages]:
    for node in graph:
        if paged_rules.is_paged_operator(node):
            yield from _made(loaded, node, repeated)
        elif is_control(node):
            for body in bodies(node):
                yield from _block(loaded, body, repeated or node.op_type != "If")


def _made(loaded: loader.Loaded, node: ir.Node, repeated: bool) -> Iterator[NewPages]:
    cache, ids = node.inputs[0], node.inputs[1]
    if cache is None or ids is None or not isinstance(cache.type, PagedType):
        return
    known = loaded.extents
    if node.op_type == "PagedCacheUpdate":
        name, count = paged_rules.created_format(node, cache.type), _touched(node, known)
    elif node.op_type == "PagedCacheConvert":
        name = node.attributes["quantized_type"].as_string()
        count = known.size(ids, 0) if ids.shape is not None and ids.shape.rank() else 1
    else:
        return
    page_format = None if name is None else cache.type.format(name)
    if page_format is not None:
        root = loaded.aliases.pages[cache]
        size = page_bytes(page_format, cache, known)
        place = integrity.source(node)
        yield NewPages(str(root.name), page_format.name, count, size, repeated, place)


def page_bytes(page_format: PageFormat, cache: ir.Value, known: Extents) -> Size:
    """Bytes of one page, which are in proportion to its heads."""
    assert cache.shape is not None
    dims = [d if isinstance(d, int) else 1 for d in cache.shape]
    dims[HEADS] = 1
    heads = known.size(cache, HEADS)
    return sizes.operation("*", page_format.page_bytes(dims), 1 if heads is None else heads)


def _touched(node: ir.Node, known: Extents) -> Size | None:
    """Most pages that an update lies on, over all positions."""
    cache, ids, values = node.inputs[0], node.inputs[1], node.inputs[2]
    assert cache is not None and cache.shape is not None and ids is not None and values is not None
    rank = 0 if ids.shape is None else ids.shape.rank()
    if not rank:
        return 1
    length, page_size = known.size(values, -2), cache.shape[PAGE_SIZE]
    blocks, rows = known.size(ids, -1), 1 if rank == 1 else known.size(ids, 0)
    if length is None or rows is None or not isinstance(page_size, int):
        return None
    behind = sizes.operation("//", sizes.operation("+", length, page_size - 2), page_size)
    touched = sizes.operation("+", behind, 1)
    if isinstance(touched, int) and isinstance(blocks, int):
        touched = min(touched, blocks)
    return sizes.operation("*", touched, rows)
