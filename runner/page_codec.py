"""Reads and writes the bytes of pages: which kernel, with which description of the format.

Everything has been checked before. What bytes mean is said in ``compiler.formats``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from onnx_inplace.compiler import errors, formats
from onnx_inplace.compiler.formats import PageFormat
from onnx_inplace.runner.storage import Array

VALUES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
"""Element types of what is written."""


class Codec:
    """Pages of one shape.

    Attributes:
        dims: of a page, (2, heads, page_size, head_size).
        formats: what pages may be stored as; a page table holds indices into this.
        page_bytes: of a page, by format.
    """

    def __init__(self, dims: Sequence[int], allowed: Iterable[PageFormat]):
        """Prepare formats; without any, those of this version that can store such pages.

        Raises:
            errors.FormatError: an allowed format cannot store pages of these dimensions.
            ValueError: two formats have one name, or no format can store such pages.
        """
        self.dims = tuple(dims)
        self.formats: list[PageFormat] = []
        self.page_bytes: list[int] = []
        self._index: dict[str, int] = {}
        for format in allowed:
            self._add(format)
        self._any = not self.formats
        if self._any:
            for format in formats.BUILTIN.values():
                self._try(format)
        if not self.formats:
            formats.FLOAT32.layout(self.dims)  # says what is wrong with the dimensions

    def _add(self, format: PageFormat) -> int:
        if format.name in self._index:
            raise ValueError(f"two page formats are called {format.name}")
        size = format.page_bytes(self.dims)
        self.formats.append(format)
        self.page_bytes.append(size)
        self._index[format.name] = len(self.formats) - 1
        return self._index[format.name]

    def _try(self, format: PageFormat) -> None:
        try:
            self._add(format)
        except errors.FormatError:
            return  # it is no format of such pages

    def find(self, format: str | PageFormat) -> int | None:
        """Index of a format; None: it is not allowed, or another one has its name."""
        name = format if isinstance(format, str) else format.name
        index = self._index.get(name)
        if isinstance(format, str) or (index is not None and self.formats[index] == format):
            return index
        return self._add(format) if self._any and index is None else None

    def check_values(self, name: str, values: Array) -> None:
        """Refuse values that are not tokens of these pages.

        Raises:
            errors.StorageMismatch: element type or shape.
        """
        expected = (*self.dims[:2], values.shape[2] if values.ndim == 4 else 0, self.dims[3])
        if values.dtype not in VALUES or values.shape != expected:
            raise errors.StorageMismatch(
                f"`{name}`: values {values.dtype}{list(values.shape)} are no tokens of pages "
                f"{list(self.dims)}; float32, float16 or bfloat16 are taken.",
                name,
                self.dims,
                values.shape,
            )

    def decode(self, block: Array, index: int) -> Array:
        """The numbers of a page as float32."""
        return self._rows(block, index).astype(np.float32)

    def write(self, block: Array, index: int, values: Array, position: int, fill: int) -> None:
        """Write tokens from ``position`` on; ``fill`` tokens are there."""
        rows = self._rows(block, index)
        with np.errstate(over="ignore"):
            rows[:, :, position : position + values.shape[2]] = values

    def convert(self, old: Array, before: int, new: Array, after: int, fill: int) -> None:
        """Write ``fill`` tokens of a page as a page of another format."""
        self.write(new, after, self._rows(old, before)[:, :, :fill], 0, 0)

    def _rows(self, block: Array, index: int) -> Array:
        format = self.formats[index]
        if not format.is_float:
            raise errors.UnsupportedOperator("onnx_inplace", "page", f"{format.name}: no kernel")
        dtype: np.dtype[Any] = format.key.storage.numpy()
        return block.view(dtype).reshape(self.dims)
