"""The type of a paged cache: what its pages decode to, and how they may be stored.

In the graph a paged cache is a value of type ``PagedType`` whose shape is that of a page, [2,
heads, page_size, head_size], so that sizes of pages take part wherever sizes of tensors do. In a
file it is a sequence of uint8 vectors, the bytes of each page, with ``quantized_tensor`` in the
type of the element. What operators on pages demand is decided in ``paged_rules``; what a file must
say, in ``page_contract``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnx_inplace.compiler import errors, formats
from onnx_inplace.compiler.formats import PageFormat

DECODED = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
HALVES, HEADS, PAGE_SIZE, HEAD_SIZE = range(4)  # axes of a page
RANK = 4


@dataclasses.dataclass(frozen=True, slots=True)
class PageType:
    """What a plan knows of a paged cache.

    Attributes:
        elem_type: element type that every page decodes to.
        shape: of a page, [2, heads, page_size, head_size]: numbers; heads may be the name of a
            dimension, or None.
        formats: page formats that a page may have, in canonical order; never empty.
        sparse: whether any int64 is a page id, and not only the numbers from 0 on.
    """

    elem_type: ir.DataType
    shape: tuple[int | str | None, ...]
    formats: tuple[PageFormat, ...]
    sparse: bool

    def __str__(self) -> str:
        """As an author would write it."""
        dims = ", ".join(map(str, self.shape))
        allowed = ", ".join(f.name for f in self.formats)
        return f"{'SparsePaged' if self.sparse else 'Paged'}[{self.elem_type}[{dims}], {allowed}]"


class PageTypeError(ValueError):
    """Pages that cannot be: E115."""


class PagedType(ir.SequenceType):
    """Type of a paged cache.

    Attributes:
        dtype: element type that every page decodes to.
        formats: page formats that a page may have, in canonical order.
        any_format: whether these are all that the model declares.
        sparse: whether any int64 is a page id, and not only the numbers from 0 on.
    """

    __slots__ = ("_decoded", "any_format", "formats", "sparse")

    def __init__(
        self,
        decoded: ir.DataType,
        allowed: Iterable[PageFormat],
        *,
        any_format: bool = False,
        sparse: bool = False,
    ):
        super().__init__(ir.TensorType(ir.DataType.UINT8))
        self._decoded, self.any_format, self.sparse = decoded, any_format, sparse
        self.formats = canonical(allowed)

    @property
    def dtype(self) -> ir.DataType:
        """Element type that every page decodes to."""
        return self._decoded

    @dtype.setter
    def dtype(self, value: ir.DataType) -> None:
        raise AttributeError("the type of a paged cache does not change")

    def format(self, name: str) -> PageFormat | None:
        """The allowed format of that name."""
        return next((f for f in self.formats if f.name == name), None)

    def _key(self) -> tuple[object, ...]:
        allowed = None if self.any_format else self.formats
        return self._decoded, allowed, self.sparse

    def __eq__(self, other: object) -> bool:
        """Whether both decode to the same and allow the same."""
        return isinstance(other, PagedType) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self._decoded, self.any_format, self.sparse, names(self)))

    def __repr__(self) -> str:
        allowed = "any format" if self.any_format else ", ".join(f.name for f in self.formats)
        return f"{'SparsePaged' if self.sparse else 'Paged'}[{self._decoded}, {allowed}]"


def declared(
    decoded: ir.DataType, allowed: Sequence[PageFormat], *, sparse: bool = False
) -> PagedType:
    """What an author declares: no formats means any of this version's.

    Raises:
        PageTypeError: two formats have one name.
    """
    return PagedType(
        decoded, allowed or formats.BUILTIN.values(), any_format=not allowed, sparse=sparse
    )


def names(type_: PagedType) -> tuple[str, ...]:
    """Names of the allowed formats; none: any."""
    return () if type_.any_format else tuple(f.name for f in type_.formats)


def canonical(allowed: Iterable[PageFormat]) -> tuple[PageFormat, ...]:
    """Each format once: those of this version in its order, then others by name.

    Raises:
        PageTypeError: two formats have one name.
    """
    by_name: dict[str, PageFormat] = {}
    for found in allowed:
        if by_name.setdefault(found.name, found) != found:
            raise PageTypeError(f"two page formats are called {found.name}")
    order = {name: k for k, name in enumerate(formats.BUILTIN)}
    return tuple(sorted(by_name.values(), key=lambda f: (order.get(f.name, len(order)), f.name)))


def check_page(type_: PagedType, shape: ir.Shape | None) -> None:
    """Whether pages of this shape can be stored in every allowed format.

    Raises:
        PageTypeError: they cannot.
    """
    if type_.dtype not in DECODED:
        raise PageTypeError(
            f"pages decode to FLOAT, FLOAT16 or BFLOAT16, not to {type_.dtype.name}"
        )
    if shape is None or shape.rank() != RANK:
        raise PageTypeError("a page has the dimensions [2, heads, page_size, head_size]")
    if shape[HALVES] != 2:
        raise PageTypeError(f"axis 0 of a page is K and V: 2, not {shape[HALVES]}")
    for axis, name in ((PAGE_SIZE, "page_size"), (HEAD_SIZE, "head_size")):
        if not isinstance(shape[axis], int):
            raise PageTypeError(f"{name} of a page is a number, not {shape[axis]}")
    dims = [d if isinstance(d, int) else 1 for d in shape]  # bytes are proportional to heads
    for found in type_.formats:
        try:
            found.page_bytes(dims)
        except errors.FormatError as error:
            if not type_.any_format:  # else it is merely no format of these pages
                raise PageTypeError(str(error)) from None


def text(type_: PagedType, shape: ir.Shape | None) -> str:
    """As an author would write it."""
    dims = (
        "?"
        if shape is None
        else ", ".join(str(d if isinstance(d, int) else d.value) for d in shape)
    )
    allowed = "".join(f", {name}" for name in names(type_))
    return f"{'SparsePaged' if type_.sparse else 'Paged'}[{type_.dtype}[{dims}]{allowed}]"


def of(value: ir.Value) -> PageType | None:
    """The pages of a paged cache; None: the value is none."""
    if not isinstance(value.type, PagedType):
        return None
    dims = tuple(d if isinstance(d, int) else d.value for d in value.shape or ())
    return PageType(value.type.dtype, dims, value.type.formats, value.type.sparse)


def is_paged(value: ir.Value | None) -> bool:
    """Whether a value is a paged cache."""
    return value is not None and isinstance(value.type, PagedType)


# -- on disk


def write(proto: Any, type_: PagedType, shape: ir.Shape | None) -> None:
    """Describe a paged cache in a ``schema.TypeProto``."""
    proto.Clear()
    element = proto.sequence_type.elem_type
    element.tensor_type.elem_type = onnx.TensorProto.UINT8
    element.tensor_type.shape.dim.add()
    pages = element.quantized_tensor
    pages.allowed_quantized_type.extend(names(type_))
    pages.elem_type = type_.dtype.value
    pages.shape.SetInParent()
    for dim in shape or ():
        added = pages.shape.dim.add()
        if isinstance(dim, int):
            added.dim_value = dim
        elif dim.value is not None:
            added.dim_param = dim.value
    if type_.sparse:
        pages.sparse_ids = True


def described(proto: Any) -> bool:
    """Whether a ``schema.TypeProto`` is one of pages, however wrong."""
    return _pages(proto) is not None


def _pages(proto: Any) -> Any:
    if proto.HasField("sequence_type"):
        element = proto.sequence_type.elem_type
        if element.HasField("quantized_tensor"):
            return element.quantized_tensor
    return None


def read(proto: Any, declared: Mapping[str, PageFormat]) -> tuple[PagedType, ir.Shape]:
    """The type and the page shape that a ``schema.TypeProto`` describes.

    Args:
        proto: a type for which ``described`` holds.
        declared: page formats of the model.

    Raises:
        PageTypeError: the model does not declare an allowed format, or there can be no such page.
    """
    pages = _pages(proto)
    unknown = [name for name in pages.allowed_quantized_type if name not in declared]
    if unknown:
        raise PageTypeError(f"the page format {unknown[0]} is not declared in the model")
    allowed = [declared[name] for name in pages.allowed_quantized_type]
    try:
        decoded = ir.DataType(pages.elem_type)
    except ValueError:
        raise PageTypeError(f"{pages.elem_type} is no element type") from None
    type_ = PagedType(
        decoded,
        allowed or declared.values(),
        any_format=not allowed,
        sparse=pages.sparse_ids,
    )
    shape = ir.Shape(
        [d.dim_param or (d.dim_value if d.HasField("dim_value") else None) for d in pages.shape.dim]
    )
    check_page(type_, shape)
    return type_, shape
