"""Reads and writes the bytes of pages: which kernel, with which description of the format.

Everything has been checked before. What bytes mean is said in ``compiler.formats``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from onnx_inplace.compiler import errors, formats
from onnx_inplace.compiler.formats import PageFormat
from onnx_inplace.numba_kernels import pages, pages_heads, pages_layout
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import page_description, workspace
from onnx_inplace.runner.attend import KINDS
from onnx_inplace.runner.page_table import PageTable
from onnx_inplace.runner.storage import Array

_keys: dict[tuple[object, ...], int] = {}


class Codec:
    """Pages of one shape.

    Attributes:
        dims: of a page, (2, heads, page_size, head_size).
        formats: what pages may be stored as; a page table holds indices into this.
        page_bytes: of a page, by format.
        descriptions: (formats, words) int64, what kernels are told of each format.
        words: ``pages_layout.Formats``, for kernels, at one place as long as the codec lives.
        space: bytes of workspace that reading and writing take.
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
        self.descriptions = np.empty((0, pages_layout.WORDS), np.int64)
        self._index: dict[str, int] = {}
        self.words = np.full(pages_layout.Formats.END, -1, np.int64)
        for format in allowed:
            self._add(format)
        self._any = not self.formats
        if self._any:
            for format in formats.BUILTIN.values():
                self._try(format)
        if not self.formats:
            formats.FLOAT32.layout(self.dims)  # says what is wrong with the dimensions
        self.space = pages_heads.workspace_size(*self.dims[2:])
        self._write, self._writer = pages.write.ready(), pages.writer.ready().address

    def _add(self, format: PageFormat) -> int:
        if format.name in self._index:
            raise ValueError(f"two page formats are called {format.name}")
        row = page_description.describe(format, self.dims)
        self.descriptions = np.vstack([self.descriptions, row])
        self.formats.append(format)
        self.page_bytes.append(format.page_bytes(self.dims))
        self._index[format.name] = len(self.formats) - 1
        key = _keys.setdefault((self.dims, *self.formats), len(_keys))
        self.words[:] = key, address(self.descriptions)
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

    @property
    def key(self) -> int:
        """The same number for codecs with the same dims and the same formats in the same order."""
        return int(self.words[pages_layout.Formats.KEY])

    def check_values(self, name: str, values: Array) -> None:
        """Refuse values that are not tokens of these pages.

        Raises:
            errors.StorageMismatch: element type or shape.
        """
        expected = (*self.dims[:2], values.shape[2] if values.ndim == 4 else 0, self.dims[3])
        if values.dtype not in KINDS or values.shape != expected:
            raise errors.StorageMismatch(
                f"`{name}`: values {values.dtype}{list(values.shape)} are no tokens of pages "
                f"{list(self.dims)}; float32, float16 or bfloat16 are taken.",
                name,
                self.dims,
                values.shape,
            )

    def decode(self, block: Array, index: int, dtype: np.dtype[Any]) -> Array:
        """The numbers of a page, rounded once to ``dtype``, one of ``KINDS``."""
        target = np.empty(self.dims, dtype)
        self.read(block, index, self.dims[2], target)
        return target

    def read(self, block: Array, index: int, count: int, target: Array) -> None:
        """The first ``count`` tokens of a page into (2, heads, count, head_size)."""
        half, head, token, _ = target.strides
        kernel, space = pages.read.ready(), self._workspace()
        kind, place = KINDS[target.dtype], address(target)
        kernel(
            self._describe(index), address(block), 0, count, place, kind, half, head, token, space
        )

    def write(
        self, table: PageTable, rows: Array, values: Array, positions: Array, layout: Array
    ) -> int:
        """Write tokens; everything has been checked.

        Args:
            table: of the pages; fills become those after the write.
            rows: (batch, blocks) int64, of the table; those that are touched exist.
            values: see ``tokens_layout``.
            positions: (batch,) int64, first token of each sequence.
            layout: of the values.

        Returns:
            How many numbers did not fit the format of their page, and were clipped.
        """
        clipped: int = self._write(
            self._writer,
            address(self.descriptions),
            address(layout),
            address(values),
            *table.places,
            address(rows),
            address(positions),
            self._workspace(),
        )
        return clipped

    def convert(self, old: Array, before: int, new: Array, after: int, fill: int) -> int:
        """Write ``fill`` tokens of a page as a page of another format; how many were clipped."""
        kernel, space = pages.convert.ready(), self._workspace()
        source, target = self._describe(before), self._describe(after)
        clipped: int = kernel(source, address(old), target, address(new), fill, space)
        return clipped

    def _describe(self, index: int) -> int:
        return address(self.descriptions) + index * self.descriptions.strides[0]

    def _workspace(self) -> int:
        """Address of memory for the kernels of this thread, aligned to a cache line."""
        return address(workspace.of_thread(self.space))


def tokens_layout(values: Array, blocks: int) -> Array:
    """What kernels are told of new tokens; see ``numba_kernels.pages_heads.Values``.

    Args:
        values: (2, batch, heads, n, head_size), elements of a row are neighbours.
        blocks: pages of a row of the block table.
    """
    half, batch, head, token, _ = values.strides
    sizes = values.shape[1], values.shape[3], KINDS[values.dtype]
    return np.array((*sizes, half, batch, head, token, blocks), np.int64)
