"""What a file says about one paged cache: in its type, and in the JSON contract.

Names and numbers only. Whether there can be such pages is decided in ``paged_types``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx

Dim = int | str | None


@dataclasses.dataclass(frozen=True, slots=True)
class PageDeclaration:
    """The message QuantizedTensor.

    Attributes:
        elem_type: TensorProto.DataType that every page decodes to.
        shape: of a page; a number, a name, or None for each axis.
        formats: names of the page formats that are allowed; none: any that the model declares.
        sparse: whether any int64 is a page id.
    """

    elem_type: int
    shape: tuple[Dim, ...]
    formats: tuple[str, ...] = ()
    sparse: bool = False

    def __str__(self) -> str:
        """As an author would write it."""
        known = self.elem_type in onnx.TensorProto.DataType.values()
        name = onnx.TensorProto.DataType.Name(self.elem_type) if known else str(self.elem_type)
        page = f"{name}[{', '.join(str(d) for d in self.shape)}]"
        kind = "SparsePaged" if self.sparse else "Paged"
        return f"{kind}[{', '.join((page, *self.formats))}]"

    def to_json(self) -> dict[str, Any]:
        """Plain values, all of them."""
        return {
            "elem_type": self.elem_type,
            "shape": list(self.shape),
            "formats": list(self.formats),
            "sparse_ids": self.sparse,
        }

    @classmethod
    def from_json(cls, content: Any) -> PageDeclaration:
        """Read what ``to_json`` wrote.

        Raises:
            KeyError, TypeError: it is something else.
        """
        shape = tuple(content["shape"])
        names = tuple(content["formats"])
        if not all(isinstance(d, int | str | None) for d in shape):
            raise TypeError(f"shape {shape}")
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"formats {names}")
        return cls(int(content["elem_type"]), shape, names, bool(content["sparse_ids"]))

    def write(self, proto: Any) -> None:
        """Make a ``schema.TypeProto`` the type of the paged cache: carrier and pages."""
        proto.Clear()
        element = proto.sequence_type.elem_type
        element.tensor_type.elem_type = onnx.TensorProto.UINT8
        element.tensor_type.shape.dim.add()
        pages = element.quantized_tensor
        pages.allowed_quantized_type.extend(self.formats)
        pages.elem_type = self.elem_type
        pages.shape.SetInParent()
        for dim in self.shape:
            added = pages.shape.dim.add()
            if isinstance(dim, int):
                added.dim_value = dim
            elif dim is not None:
                added.dim_param = dim
        if self.sparse:
            pages.sparse_ids = True


def read(proto: Any) -> PageDeclaration | None:
    """What a ``schema.TypeProto`` says about pages; None: it is no type of a paged cache."""
    if not proto.HasField("sequence_type"):
        return None
    element = proto.sequence_type.elem_type
    if not element.HasField("quantized_tensor"):
        return None
    pages = element.quantized_tensor
    shape = (
        d.dim_param or (d.dim_value if d.HasField("dim_value") else None) for d in pages.shape.dim
    )
    allowed = tuple(pages.allowed_quantized_type)
    return PageDeclaration(pages.elem_type, tuple(shape), allowed, pages.sparse_ids)


def is_carrier(proto: Any) -> bool:
    """Whether a type is a sequence of uint8 tensors: what other tools leave of a paged cache."""
    element = proto.sequence_type.elem_type
    return bool(element.tensor_type.elem_type == onnx.TensorProto.UINT8)
