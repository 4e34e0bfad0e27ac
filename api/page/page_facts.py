"""What is shown of saved pages: one row for each, and its error against a float copy."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

import onnx_inplace
from onnx_inplace.compiler.errors import SavedStateError

if TYPE_CHECKING:
    from onnx_inplace import PagedCache

Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Error:
    """What a page has lost, over its valid tokens.

    Attributes:
        key: root of the mean square of K's error, over that of K.
        value: of V, likewise.
        largest: largest difference of a number.
    """

    key: float
    value: float
    largest: float


@dataclasses.dataclass(frozen=True, slots=True)
class PageRow:
    """One page. ``error``: None where nothing was compared."""

    id: int
    format: str
    fill: int
    owners: int
    nbytes: int
    error: Error | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CacheRows:
    """One paged cache.

    Attributes:
        name: it was saved as.
        dims: of a page.
        elem_type: that pages decode to.
        pages: by id.
    """

    name: str
    dims: tuple[int, ...]
    elem_type: str
    pages: tuple[PageRow, ...]

    @property
    def nbytes(self) -> int:
        """Of all pages."""
        return sum(page.nbytes for page in self.pages)

    @property
    def tokens(self) -> int:
        """Valid tokens of all pages."""
        return sum(page.fill for page in self.pages)

    @property
    def bits(self) -> float:
        """Bits of a number, scales and padding included."""
        numbers = len(self.pages) * int(np.prod(self.dims, dtype=np.int64))
        return 8 * self.nbytes / numbers if numbers else 0.0

    def by_format(self) -> dict[str, tuple[int, int]]:
        """Pages and bytes of each format, in order of the first page that has it."""
        found: dict[str, tuple[int, int]] = {}
        for page in self.pages:
            count, size = found.get(page.format, (0, 0))
            found[page.format] = count + 1, size + page.nbytes
        return found

    def runs(self) -> Iterator[list[PageRow]]:
        """Neighbours that differ in their id only."""

        def key(item: tuple[int, PageRow]) -> tuple[object, ...]:
            k, page = item
            return page.id - k, page.format, page.fill, page.owners, page.error

        for _, run in itertools.groupby(enumerate(self.pages), key):
            yield [page for _, page in run]


def read(path: Path, floats: Path | None = None) -> list[CacheRows]:
    """The paged caches of a file of saved state.

    Args:
        path: of the file.
        floats: a file with the same caches as they were: pages of the same ids are compared.

    Raises:
        SavedStateError: a file cannot be read, or they have no cache of the same name and dims.
        OSError: likewise.
    """
    caches = _caches(path)
    if floats is None:
        return [_rows(name, cache, None) for name, cache in caches.items()]
    originals = _caches(floats)
    if len(caches) == len(originals) == 1:  # whatever they are called
        originals = dict(zip(caches, originals.values(), strict=True))
    rows = []
    for name, cache in caches.items():
        original = originals.get(name)
        if original is None or original.dims != cache.dims:
            raise SavedStateError(os.fspath(floats), f"it has no such cache: {name} {cache.dims}")
        rows.append(_rows(name, cache, original))
    return rows


def _caches(path: Path) -> dict[str, PagedCache]:
    state = onnx_inplace.checkpoint.load(path, map=True)
    return {name: value for name, value in state.items() if not isinstance(value, np.ndarray)}


def _rows(name: str, cache: PagedCache, original: PagedCache | None) -> CacheRows:
    rows = []
    for id_ in cache:
        page = cache.page(id_)
        error = None
        if original is not None and id_ in original:
            tokens = min(page.fill, original.page(id_).fill)
            error = _error(cache, original, id_, tokens)
        rows.append(PageRow(id_, page.quantized_type, page.fill, page.owners, page.nbytes, error))
    return CacheRows(name, cache.dims, str(cache.elem_type), tuple(rows))


def _error(cache: PagedCache, original: PagedCache, page: int, tokens: int) -> Error | None:
    if not tokens:
        return None
    stored = cache.page(page).decode(np.float32)[:, :, :tokens].astype(np.float64)
    before = original.page(page).decode(np.float32)[:, :, :tokens].astype(np.float64)
    lost = stored - before
    key, value = (_relative(lost[half], before[half]) for half in (0, 1))
    return Error(key, value, float(np.abs(lost).max()))


def _relative(lost: Any, before: Any) -> float:
    size = float(np.sqrt(np.mean(before**2)))
    error = float(np.sqrt(np.mean(lost**2)))
    return error / size if size else float(error > 0)
