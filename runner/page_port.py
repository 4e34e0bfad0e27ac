"""A paged input of a model: what is allocated for it, and what may be bound to it."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_inplace.compiler import errors
from onnx_inplace.compiler.formats import PageFormat
from onnx_inplace.compiler.paged_types import PagedType
from onnx_inplace.runner.inputs import Port
from onnx_inplace.runner.pages import PagedCache


@dataclasses.dataclass(frozen=True, slots=True)
class PagedPort(Port):
    """A paged cache as the model declares it: what pages decode to, and the shape of a page.

    Attributes:
        formats: that pages may have.
        any_format: whether the model names none of them for this cache.
        sparse_ids: whether any int64 is a page id.
    """

    formats: tuple[PageFormat, ...] = ()
    any_format: bool = False
    sparse_ids: bool = False

    @classmethod
    def of(cls, value: ir.Value) -> Port:
        """Describe a value of a graph: as a paged cache where it is one."""
        port = Port.of(value)
        type_ = value.type
        if not isinstance(type_, PagedType):
            return port
        return cls(port.name, port.dtype, port.shape, type_.formats, type_.any_format, type_.sparse)

    def allocate(self, dims: tuple[int, ...], budget: int | None) -> PagedCache:
        """A cache without pages that can be bound here."""
        return PagedCache(
            dims,
            self.dtype,
            self._storable(dims),
            sparse_ids=self.sparse_ids,
            budget=budget,
            name=self.name,
        )

    def _storable(self, dims: tuple[int, ...]) -> tuple[PageFormat, ...]:
        """Formats that can store such pages; where the model names some, all of those."""
        if not self.any_format:
            return self.formats
        found = []
        for format in self.formats:
            try:
                format.layout(dims)
            except errors.FormatError:
                continue
            found.append(format)
        return tuple(found)

    def check(self, cache: object) -> PagedCache:
        """Refuse what cannot be bound here. Dims are compared by ``unify``.

        Raises:
            errors.StorageMismatch: no paged cache; other elements, ids, or formats.
        """
        if not isinstance(cache, PagedCache):
            raise errors.StorageMismatch(
                f"`{self.name}`: storage is a PagedCache (Session.allocate), not "
                f"{type(cache).__name__}.",
                self.name,
            )
        if cache.elem_type != self.dtype:
            raise self._mismatch("pages decode to", self.dtype, cache.elem_type)
        if cache.sparse_ids != self.sparse_ids:
            words = {True: "sparse", False: "dense"}
            raise self._mismatch("page ids are", words[self.sparse_ids], words[cache.sparse_ids])
        foreign = [f.name for f in cache.formats if f not in self.formats]
        if foreign:
            declared = [f.name for f in self.formats]
            raise self._mismatch("pages may be", ", ".join(declared), ", ".join(foreign))
        return cache

    def _mismatch(self, what: str, expected: object, given: object) -> errors.StorageMismatch:
        return errors.StorageMismatch(
            f"`{self.name}`: {what} {given}; declared {expected}.", self.name, expected, given
        )
