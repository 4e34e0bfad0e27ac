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

import onnx_ir as ir

from onnx_inplace.compiler import errors, formats
from onnx_inplace.compiler.formats import PageFormat
from onnx_inplace.compiler.page_declarations import PageDeclaration

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


def of(value: ir.Value) -> PageType | None:
    """The pages of a paged cache; None: the value is none."""
    if not isinstance(value.type, PagedType):
        return None
    dims = tuple(d if isinstance(d, int) else d.value for d in value.shape or ())
    return PageType(value.type.dtype, dims, value.type.formats, value.type.sparse)


def is_paged(value: ir.Value | None) -> bool:
    """Whether a value is a paged cache."""
    return value is not None and isinstance(value.type, PagedType)


def is_carrier(value: ir.Value) -> bool:
    """Whether a value is a sequence of uint8 tensors: as a paged cache to who knows no pages."""
    type_ = value.type
    plain = isinstance(type_, ir.SequenceType) and not isinstance(type_, PagedType)
    return plain and type_ == ir.SequenceType(ir.TensorType(ir.DataType.UINT8))


# -- on disk


def declaration(type_: PagedType, shape: ir.Shape | None) -> PageDeclaration:
    """What a file says about such a paged cache."""
    dims = tuple(d if isinstance(d, int) else d.value for d in shape or ())
    return PageDeclaration(type_.dtype.value, dims, names(type_), type_.sparse)


def read(declared: PageDeclaration, known: Mapping[str, PageFormat]) -> tuple[PagedType, ir.Shape]:
    """The type and the page shape that a file declares.

    Args:
        declared: what stands there.
        known: page formats of the model.

    Raises:
        PageTypeError: the model does not declare an allowed format, or there can be no such page.
    """
    unknown = [name for name in declared.formats if name not in known]
    if unknown:
        raise PageTypeError(f"the page format {unknown[0]} is not declared in the model")
    allowed = [known[name] for name in declared.formats]
    try:
        decoded = ir.DataType(declared.elem_type)
    except ValueError:
        raise PageTypeError(f"{declared.elem_type} is no element type") from None
    type_ = PagedType(
        decoded, allowed or known.values(), any_format=not allowed, sparse=declared.sparse
    )
    shape = ir.Shape(declared.shape)
    check_page(type_, shape)
    return type_, shape
