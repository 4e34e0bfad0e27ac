"""A paged cache as a message, and back: every page with the declaration of its format.

Nothing of a message is trusted: what contradicts itself, or does not fit the cache that it goes
into, is refused before anything changes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_inplace.compiler import formats, page_declarations, paged_types, schema
from onnx_inplace.compiler.formats import FormatError, PageFormat
from onnx_inplace.compiler.page_declarations import PageDeclaration
from onnx_inplace.compiler.paged_types import PageTypeError
from onnx_inplace.runner import state_file
from onnx_inplace.runner.page_store import PageStore
from onnx_inplace.runner.page_table import NewPage
from onnx_inplace.runner.state_file import Part
from onnx_inplace.runner.storage import Array

_MOST_DENSE = 1 << 31  # ids: a table of more rows is no table that was saved


@dataclasses.dataclass(frozen=True, slots=True)
class SavedPage:
    """A page without its bytes."""

    id: int
    format: PageFormat
    fill: int
    owners: int
    part: Part


@dataclasses.dataclass(frozen=True, slots=True)
class SavedCache:
    """A paged cache without the bytes of its pages.

    Attributes:
        name: it had.
        dims: of a page.
        elem_type: that pages decode to.
        allowed: formats that pages may have; none: any.
        sparse_ids: whether any int64 is an id.
        pages: by id, ascending.
    """

    name: str
    dims: tuple[int, ...]
    elem_type: np.dtype[Any]
    allowed: tuple[PageFormat, ...]
    sparse_ids: bool
    pages: tuple[SavedPage, ...]

    def fault(self, store: PageStore) -> str | None:
        """Why these pages cannot be pages of a cache; None: they can."""
        if self.dims != store.codec.dims:
            return f"pages are {list(self.dims)}, and {list(store.codec.dims)} are wanted"
        if self.elem_type != store.elem_type:
            return f"pages decode to {self.elem_type}, and {store.elem_type} is wanted"
        for page in self.pages:
            if store.codec.find(page.format) is None:
                return f"page {page.id} is {page.format.name}, which is not allowed"
        return None


def describe(
    store: PageStore, allowed: Sequence[PageFormat], *, inline: bool
) -> tuple[Any, list[Array]]:
    """The PagedCacheProto of a cache, and the bytes of its pages in order.

    Args:
        store: the cache.
        allowed: its formats; none: any.
        inline: whether the message holds the bytes itself.
    """
    proto = schema.PagedCacheProto(name=store.name)
    elem_type = ir.DataType.from_numpy(store.elem_type).value
    names = tuple(format.name for format in allowed)
    PageDeclaration(elem_type, store.codec.dims, names, store.sparse_ids).write(proto.type)
    proto.quantizations.extend(format.to_proto() for format in store.codec.formats)
    blocks = []
    for page in store.table.ids.ids():
        row = store.row(page)
        block = store.block(row)
        fill, owners = int(store.table.fill[row]), int(store.table.owners[row])
        saved = proto.pages.add(id=page, fill=fill, owners=owners)
        saved.tensor.dims.extend(store.codec.dims)
        saved.tensor.quantized_type = store.codec.formats[store.table.format[row]].name
        saved.tensor.crc32 = state_file.checksum(block)
        if inline:
            saved.tensor.raw_data = block.tobytes()
        blocks.append(block)
    return proto, blocks


def read(proto: Any) -> SavedCache:
    """What a PagedCacheProto says.

    Raises:
        ValueError: it contradicts itself, or says something that is not known here.
    """
    if sys.byteorder != "little":
        raise ValueError("pages are little-endian, and this machine is not")
    try:
        known = formats.read_table(proto.quantizations)
        declared = page_declarations.read(proto.type)
        if declared is None:
            raise ValueError(f"`{proto.name}` has no type of a paged cache")
        type_, shape = paged_types.read(declared, known)
    except (FormatError, PageTypeError) as error:
        raise ValueError(str(error)) from None
    dims = tuple(size for size in shape if isinstance(size, int))
    if len(dims) != len(declared.shape):
        raise ValueError(f"`{proto.name}` has pages of an unknown size")
    pages = tuple(_page(saved, dims, known) for saved in proto.pages)
    ids = [page.id for page in pages]
    if ids != sorted(set(ids)):
        raise ValueError(f"`{proto.name}`: page ids do not ascend")
    if ids and not declared.sparse and not 0 <= ids[0] <= ids[-1] < _MOST_DENSE:
        raise ValueError(f"`{proto.name}`: {ids[0]} to {ids[-1]} are no dense ids")
    allowed = () if type_.any_format else type_.formats
    foreign = [p for p in pages if allowed and p.format not in allowed]
    if foreign:
        raise ValueError(f"page {foreign[0].id} is {foreign[0].format.name}: not allowed")
    return SavedCache(
        proto.name, dims, np.dtype(type_.dtype.numpy()), allowed, declared.sparse, pages
    )


def _page(saved: Any, dims: tuple[int, ...], known: dict[str, PageFormat]) -> SavedPage:
    tensor = saved.tensor
    for field in ("id", "fill", "owners"):
        if not saved.HasField(field):
            raise ValueError(f"a page without its {field}")
    if not (tensor.HasField("crc32") and tensor.HasField("quantized_type")):
        raise ValueError(f"page {saved.id}: its format or its checksum is missing")
    format = known.get(tensor.quantized_type)
    if format is None:
        raise ValueError(f"page {saved.id}: {tensor.quantized_type} is not declared")
    if tuple(tensor.dims) != dims:
        raise ValueError(f"page {saved.id} is {list(tensor.dims)}, declared {list(dims)}")
    if not 0 <= saved.fill <= dims[2] or saved.owners < 1:
        raise ValueError(f"page {saved.id}: {saved.fill} tokens, {saved.owners} owners")
    part = Part(format.page_bytes(dims), tensor.crc32)
    return SavedPage(saved.id, format, saved.fill, saved.owners, part)


def inline_parts(proto: Any, saved: SavedCache) -> list[Array]:
    """The bytes that a message holds itself.

    Raises:
        ValueError: they are damaged, or not as many as the format says.
    """
    found = []
    for page, message in zip(saved.pages, proto.pages, strict=True):
        content = np.frombuffer(message.tensor.raw_data, np.uint8)
        if content.nbytes != page.part.size or state_file.checksum(content) != page.part.crc32:
            raise ValueError(f"page {page.id} is damaged (CRC-32)")
        found.append(content)
    return found


def enter(
    store: PageStore, saved: SavedCache, parts: Sequence[Array], ids: Sequence[int], *, copy: bool
) -> None:
    """Make saved pages pages of a cache: all or none.

    Args:
        store: the cache; ``fault`` has found none.
        saved: the pages.
        parts: their bytes, writable unless they are copied.
        ids: which they get; they have no page.
        copy: whether pages get memory of their own, or stay in the mapped file.

    Raises:
        errors.PageBudget, MemoryError: nothing has changed.
    """
    store.afford(sum(part.nbytes for part in parts))
    blocks = list(parts)
    if copy:
        blocks = store.memory.take([part.nbytes for part in parts], zeroed=False)
        for block, part in zip(blocks, parts, strict=True):
            block[:] = part
    new = []
    for page, id_, block in zip(saved.pages, ids, blocks, strict=True):
        index = store.codec.find(page.format)
        assert index is not None
        new.append(NewPage(id_, block, index, page.fill, page.owners))
    store.enter(new)
