"""The owner of pages: what may be done to a paged cache between runs.

Decides when something may be done. What is done, and that a refusal or a lack of memory leaves
everything as it was, is decided in ``page_store``; where pages stand, in ``page_table``; where
their bytes come from, in ``page_memory``; what these mean, in ``page_codec``.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir

from onnx_inplace.compiler import errors, paged_types
from onnx_inplace.compiler.contract import Access
from onnx_inplace.compiler.formats import PageFormat
from onnx_inplace.runner import page_memory
from onnx_inplace.runner.attend import KINDS
from onnx_inplace.runner.membership import Membership
from onnx_inplace.runner.page import Page, Snapshot, Use
from onnx_inplace.runner.page_codec import Codec, tokens_layout
from onnx_inplace.runner.page_runs import Runs
from onnx_inplace.runner.page_store import PageStore
from onnx_inplace.runner.page_table import NOWHERE
from onnx_inplace.runner.storage import Array


class PageOwner:
    """A paged cache without its saved states: see ``pages.PagedCache``.

    Attributes:
        dims: of a page, (2, heads, page_size, head_size): K, then V.
        elem_type: logical element type, that pages decode to.
        allowed: page formats that pages may have; empty: any.
        sparse_ids: whether any int64 is a page id. Otherwise ids are 0 to n-1.
        store: the pages themselves, for a run.
        membership: whether a pool of sequences counts on the pages.
    """

    def __init__(
        self,
        dims: Sequence[int],
        elem_type: Any = np.float32,
        allowed: Iterable[PageFormat] = (),
        *,
        sparse_ids: bool = False,
        budget: int | None = None,
        name: str = "cache",
        memory: page_memory.PageMemory = page_memory.shared,
    ):
        """A cache without pages.

        Args:
            dims: (2, heads, page_size, head_size).
            elem_type: a float type.
            allowed: page formats; none: any.
            sparse_ids: any int64 is a page id.
            budget: most bytes that all pages together may take; None: no limit but the memory.
            name: what errors call it.
            memory: where pages come from.

        Raises:
            errors.FormatError: a format cannot store pages of these dimensions.
            ValueError: two formats have one name; pages of no float type, or of other than K and V;
                a negative budget.
        """
        self.dims = tuple(operator.index(size) for size in dims)
        self.elem_type = np.dtype(elem_type)
        self.allowed = tuple(allowed)
        self.sparse_ids = sparse_ids
        decoded = ir.DataType.from_numpy(self.elem_type)
        # with any format: of those that are allowed the codec judges
        paged_types.check_page(paged_types.declared(decoded, ()), ir.Shape(self.dims))
        codec = Codec(self.dims, self.allowed)
        _refuse_budget(budget)
        self.store = PageStore(name, self.elem_type, codec, sparse_ids, budget, memory)
        self._runs = Runs(self.store)
        self.membership = Membership(self.store)

    # -- what is there

    @property
    def name(self) -> str:
        """What errors call it; of a cache that runs have written, the input that it is bound to."""
        return self.store.name

    @property
    def shape(self) -> tuple[int, ...]:
        """``dims``: what a model declares of a paged input."""
        return self.dims

    @property
    def formats(self) -> tuple[PageFormat, ...]:
        """All that pages may be stored as."""
        return tuple(self.store.codec.formats)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.dims[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, scales included."""
        return self.store.table.nbytes

    @property
    def clipped(self) -> int:
        """Numbers, of all that were written or converted, that did not fit the format they got."""
        return self.store.clipped

    @property
    def budget(self) -> int | None:
        """Most bytes of all pages; None: no limit but the memory. May be changed between runs.

        What is there already stays, also where it is more.
        """
        return self.store.budget

    @budget.setter
    def budget(self, budget: int | None) -> None:
        _refuse_budget(budget)
        with self._runs.none("limited"):
            self.store.budget = budget

    def __len__(self) -> int:
        """Dense ids: one more than the largest id of a page. Sparse ids: number of pages."""
        return len(self.store.table.ids)

    def __contains__(self, page: object) -> bool:
        if not isinstance(page, int | np.integer):
            return False
        return self.store.table.ids.row(int(page)) != NOWHERE

    def __iter__(self) -> Iterator[int]:
        return iter(self.store.table.ids.ids())

    def page(self, page: int) -> Page:
        """The page of an id.

        Raises:
            errors.PageError: there is none.
        """
        self.store.row(page)
        return Page(self, operator.index(page))

    def snapshot(self) -> Snapshot:
        """The value of the cache: a copy of every byte, to be compared."""
        with self._runs.none("read"):
            pages = {page: self.store.state(page) for page in self}
        return Snapshot(self.dims, self.elem_type, self.sparse_ids, pages)

    def __repr__(self) -> str:
        """Name, dims, number of pages and bytes."""
        pages, kind = sum(1 for _ in self), type(self).__name__
        return f"{kind}({self.name}: {list(self.dims)}, {pages} pages, {self.nbytes} bytes)"

    def __reduce__(self) -> NoReturn:
        """Not copied, not pickled: runs know it by identity."""
        raise TypeError("a paged cache cannot be copied or pickled: use save() and load().")

    # -- pages come and go

    def allocate_page(self, format: str | PageFormat, page: int | None = None) -> int:
        """Make a page of zeros with one owner.

        Args:
            format: a page format or its name.
            page: its id; None: the smallest that is free.

        Returns:
            The id.

        Raises:
            errors.PageError: the format is not allowed; the id is taken, or is no id.
            errors.PageBudget: the budget has no room.
            MemoryError: the system has none. The cache is as it was.
        """
        if page is None:
            return self.allocate_pages(1, format)[0]
        with self._runs.none("grown"):
            page = operator.index(page)
            self.store.refuse_new(page)
            self.store.add([(page, self.store.format(format))])
        return page

    def allocate_pages(self, count: int, format: str | PageFormat) -> list[int]:
        """Make several pages of zeros, all or none. See ``allocate_page``."""
        with self._runs.none("grown"):
            pages = self.store.free_ids(count)
            index = self.store.format(format)
            self.store.add([(page, index) for page in pages])
        return pages

    def free(self, page: int) -> None:
        """Give up a page. Dense ids: the others keep theirs; a freed id can be allocated again.

        Raises:
            errors.PageError: there is none, or it has several owners (``release``).
        """
        with self._runs.none("freed"):
            self.store.refuse_shared(page, self.store.row(page), "release it")
            self.store.drop(page)

    def clear(self) -> None:
        """Free all pages, whoever counts on them."""
        with self._runs.none("cleared"):
            for page in reversed(list(self)):
                self.store.drop(page)

    def share(self, page: int) -> None:
        """One more counts on a page. From two on, no run writes it.

        Raises:
            errors.PageError: there is no such page.
        """
        with self._runs.none("shared"):
            self.store.table.owners[self.store.row(page)] += 1

    def release(self, page: int) -> bool:
        """One less counts on a page; without any it is freed.

        Returns:
            Whether it was freed.

        Raises:
            errors.PageError: there is no such page.
        """
        with self._runs.none("released"):
            row, owners = self.store.row(page), self.store.table.owners
            if owners[row] == 1:
                self.store.drop(page)
                return True
            owners[row] -= 1
            return False

    def truncate(self, page: int, fill: int) -> None:
        """Forget the tokens of a page from ``fill`` on: they are not read, and written as new ones.

        No byte is touched. A page that has fewer tokens stays as it is.

        Raises:
            errors.PageError: there is no such page, or it has several owners.
            errors.CapacityError: no page has so few tokens.
        """
        with self._runs.none("truncated"):
            row, fill = self.store.row(page), operator.index(fill)
            if fill < 0:
                raise errors.CapacityError(self.name, 0, fill, self.page_size)
            self.store.refuse_shared(page, row, "write a copy (copy_page)")
            self.store.table.fill[row] = min(fill, self.store.table.fill[row])

    def copy_page(self, page: int, to: int | None = None, *, fill: int | None = None) -> int:
        """Copy a page into a new one with one owner. The old one keeps its owners.

        Args:
            page: what is copied: bytes, format, fill.
            to: id of the new page; None: the smallest that is free.
            fill: most tokens of the new page that count; None: all.

        Returns:
            The id of the new page.

        Raises:
            errors.PageError: there is no such page; the new id is taken, or is no id.
            errors.PageBudget: the budget has no room.
            MemoryError: the system has none. The cache is as it was.
        """
        with self._runs.none("copied"):
            row = self.store.row(page)
            if to is None:
                (to,) = self.store.free_ids(1)
            else:
                self.store.refuse_new(to := operator.index(to))
            self.store.copy(row, to, self.page_size if fill is None else fill)
        return to

    def convert(self, page: int, format: str | PageFormat) -> None:
        """Store a page in another format. All its owners see the result; other pages are untouched.

        A format with as many bytes is written where the page lies; otherwise that page alone moves.

        Raises:
            errors.PageError: there is no such page, or the format is not allowed.
            errors.PageBudget: the budget has no room for a larger page.
            MemoryError: the system has none. The cache is as it was.
        """
        with self._runs.none("converted"):
            self.store.convert([self.store.row(page)], self.store.format(format))

    def write(self, page: int, values: Array, position: int) -> None:
        """Write tokens into a page, as ``PagedCacheUpdate`` does with a scalar page id.

        Args:
            page: an id that has a page.
            values: (2, heads, n, head_size), float32, float16 or bfloat16.
            position: first token; the last one stands before ``page_size``.

        Raises:
            errors.PageError: there is no such page, or it has several owners.
            errors.StorageMismatch: type or shape of the values.
            errors.CapacityError: the tokens leave the page.
        """
        values = np.asarray(values)
        with self._runs.none("written"):
            self.store.codec.check_values(self.name, values)
            row = self.store.check_write(page, operator.index(position), values.shape[2])
            rows, start = np.array([[row]], np.int64), np.array([position], np.int64)
            values = np.ascontiguousarray(values)
            self.store.write(rows, values, start, tokens_layout(values[:, None], 1))

    @staticmethod
    @contextlib.contextmanager
    def still(what: str, caches: Iterable[PageOwner]) -> Iterator[None]:
        """No run uses any of the caches, and no other thread changes them."""
        with contextlib.ExitStack() as stack:
            for cache in sorted(caches, key=id):  # always in one order: two threads do not lock up
                stack.enter_context(cache._runs.none(what))
            yield

    def trim(self) -> int:
        """Give memory of freed pages back to the system, of all caches that share it.

        Returns:
            Bytes of pages that were kept for later ones.
        """
        return self.store.memory.trim()

    # -- for ``Page``

    def view(self, page: int) -> Array:
        """See ``Page.raw``."""
        with self._runs.none("read"):
            row = self.store.row(page)
            view: Array = self.store.block(row).view()
            self.store.table.show(row)
        view.flags.writeable = False
        return view

    def decode(self, page: int, dtype: Any = None) -> Array:
        """See ``Page.decode``."""
        wanted = self.elem_type if dtype is None else np.dtype(dtype)
        kind = wanted if wanted in KINDS else np.dtype(np.float32)
        with self._runs.none("read"):
            row = self.store.row(page)
            format = int(self.store.table.format[row])
            found = self.store.codec.decode(self.store.block(row), format, kind)
        return found.astype(wanted, copy=False)

    # -- for a run

    def begin(self, use: Use, access: Access) -> None:
        """A run begins: until its end the owner's methods raise BindingInUse.

        Raises:
            errors.BindingInUse: another run writes it, or this one wants to and another reads it.
        """
        self._runs.begin(use, access)

    @property
    def is_written(self) -> bool:
        """Whether a run may write it now: no other run uses it then."""
        return self._runs.write

    def end(self, use: Use) -> None:
        """A run has ended; nothing happens if it has not begun."""
        self._runs.end(use)

    def claim(self, name: str) -> Array:
        """``whole_run.Claim``, for compiled runs that write it as ``name``."""
        self._runs.compiled = name
        return self._runs.claim


def _refuse_budget(budget: int | None) -> None:
    if budget is not None and budget < 0:
        raise ValueError(f"a budget of {budget} bytes; None is no limit")
