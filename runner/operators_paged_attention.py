"""Kernel step of PagedAttention: pages of any formats in one call, several sequences.

The kernel reads addresses, formats and descriptions from the page table; which pages it may read is
judged before the call, or before the run.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from onnx_inplace.compiler import errors, steps
from onnx_inplace.compiler.paged_types import PageType
from onnx_inplace.numba_kernels import (
    pages_attention,
    pages_call,
    pages_kernels,
    pages_table,
)
from onnx_inplace.numba_kernels.layout import bits
from onnx_inplace.numba_kernels.memory import FIELD, address, pointer
from onnx_inplace.numba_kernels.pages_kernels import Accuracy
from onnx_inplace.numba_kernels.sharing import Sharing
from onnx_inplace.runner import team, threads, work, workspace
from onnx_inplace.runner.actions import Action, Array, Settings, Slots, result, reusable
from onnx_inplace.runner.attend import (
    KINDS,
    PARALLEL,
    SHARED,
    Calls,
    Known,
    Plain,
    known_dim,
)
from onnx_inplace.runner.page_codec import Codec
from onnx_inplace.runner.page_pieces import check_readable, ends_of, reading
from onnx_inplace.runner.page_store import PageStore

_policies: dict[tuple[bytes, bool], threads.Policy] = collections.defaultdict(threads.Policy)
"""By kernels of pages, and whether a head has one query: what a layer, or a part of a prompt, has
found out is known to those that follow."""


class Options(NamedTuple):
    """Attributes of a node."""

    causal: bool
    left: int
    scale: float | None
    softcap: float
    accuracy: Accuracy

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Options:
        """What a node says."""
        scale = attributes.get("scale")
        return cls(
            bool(attributes.get("is_causal", 0)),
            attributes.get("left_window_size", -1),
            None if scale is None else float(scale),
            float(attributes.get("softcap", 0.0)),
            Accuracy(attributes.get("accuracy_level", 0)),
        )


def paged_attention(step: steps.Kernel, settings: Settings) -> Action:
    """``PagedAttention(query, cache, block_table, lengths)``.

    Raises:
        UnsupportedOperator: a window of a negative size.
    """
    query_slot, cache_slot, table_slot, lengths_slot = _present(step)
    (output,) = (slot for slot in step.outputs[:1] if slot is not None)
    options = Options.of(step.attributes)
    if options.left < -1:
        reason = f"left_window_size={options.left}"
        raise errors.UnsupportedOperator(step.domain, step.op_type, reason)
    reuse, calls = reusable(step, output), Calls[Call]()
    fast = compile_step(step, settings)
    pages_call.attend.ready()
    pages_call.begin.ready()
    team.ready(settings.threads)

    def act(slots: Slots) -> None:
        query, store = slots[query_slot], slots[cache_slot].store
        if not query.flags.c_contiguous:
            query = np.ascontiguousarray(query)
        ids, lengths = slots[table_slot], slots[lengths_slot]
        if store.judged:
            lengths, longest = ends_of(store, ids, lengths)
            places = store.table.rows_of(ids, ids.shape[0] if ids.ndim == 2 else 1)
        else:
            wanted = reading(store, ids, lengths, query.shape[2], options.left)
            places, lengths = check_readable(store, wanted), wanted.ends
            longest = max(lengths.tolist(), default=0)
        key = query.shape, query.dtype, places.shape, store.codec.key
        call = calls.get(key)
        if call is None:
            call = calls.put(key, Call(store, query, places, options, settings.threads, fast))
        target = result(slots, output, reuse, query.shape, query.dtype)
        call(store, query, places, lengths, longest, target)

    return act


def _present(step: steps.Kernel) -> list[int]:
    found = [slot for slot in step.inputs[:4] if slot is not None]
    if len(found) != 4:
        raise errors.UnsupportedOperator(step.domain, step.op_type, "4 inputs are needed")
    return found


def compile_step(step: steps.Kernel, settings: Settings) -> bool:
    """Compile the kernels of a step, see :func:`compile_known`."""
    query, cache = (None if slot is None else step.values.get(slot) for slot in step.inputs[:2])
    pages, accuracy = None if cache is None else cache.pages, Options.of(step.attributes).accuracy
    return compile_known(query, pages, accuracy, portable=settings.portable)


def compile_known(
    query: Known | None, pages: PageType | None, accuracy: Accuracy, *, portable: bool
) -> bool:
    """Compile the kernels of attention, so that nothing is compiled in the middle of a run.

    Returns:
        Whether fast kernels are ready: what they are made for, formats and sizes, is known now.
    """
    pages_table.find_unreadable.ready()
    heads = known_dim(query, 1)
    dims = () if pages is None or pages.shape is None else pages.shape
    sizes = [dim for dim in dims if isinstance(dim, int)]
    fast = not portable and heads is not None and len(sizes) == 4
    if fast and pages is not None and heads is not None:
        known = Codec(sizes, pages.formats).descriptions
        pages_kernels.ready(known, heads // sizes[1], accuracy=accuracy)
    else:
        pages_kernels.ready(np.empty((0, 1), np.int64), 1, portable=True)
    return fast


def layout_of(
    store: PageStore, query: Array, output: Array, batch: int, blocks: int, options: Options
) -> pages_attention.PagesLayout:
    """A call for ``batch`` sequences of ``blocks`` pages; what kernels fill in is 0.

    Raises:
        StorageMismatch: the query is none of these sequences and pages.
    """
    rows, heads, tokens, size = query.shape
    _, kv_heads, page_size, head_size = store.codec.dims
    if rows != batch or size != head_size or heads % kv_heads or not heads:
        raise errors.StorageMismatch(
            f"`{store.name}`: a query {list(query.shape)} for {batch} sequences and "
            f"pages {list(store.codec.dims)}",
            store.name,
            store.codec.dims,
            query.shape,
        )
    scale = size**-0.5 if options.scale is None else options.scale
    (qb, qh, qt), (ob, oh, ot) = query.strides[:3], output.strides[:3]
    return pages_attention.PagesLayout(
        batch, kv_heads, heads // kv_heads, tokens, size, page_size, blocks,
        len(store.codec.formats), KINDS[query.dtype], KINDS[output.dtype], options.left,
        0 if options.causal else -1, bits(scale), bits(options.softcap),
        qb, qh, qt, ob, oh, ot, 0, 0, 0, 0,
    )  # fmt: skip


class Call:
    """A prepared call for one tuple of shapes and one list of formats. Threads share it.

    Attributes:
        clock: decides on how many threads it runs.
    """

    def __init__(
        self,
        store: PageStore,
        query: Array,
        places: Array,
        options: Options,
        workers: int,
        fast: bool,
    ):
        batch, blocks = places.shape
        x = layout_of(store, query, query, batch, blocks, options)
        known, accuracy = store.codec.descriptions, options.accuracy
        self._kernels = pages_kernels.ready(known, x.group, portable=not fast, accuracy=accuracy)
        self._layout, self._page_kernels = self._kernels.choose(x)
        self._array = np.array(self._layout, np.int64)
        self._addresses = self._kernels.attend, address(self._array), address(self._page_kernels)
        self._workers = workers
        products = x.kv_heads * x.group * x.tokens * x.head_size  # of a sequence and a key
        self._shared, long = (
            least // max(batch * products, 1) if workers > 1 else _NEVER
            for least in (min(SHARED, PARALLEL), PARALLEL)
        )
        reach = work.reach(self._layout, blocks * x.page_size)
        items = pages_attention.items(self._layout)
        sizes = self._shared, work.SHORTEST_SPLIT, items, reach
        self._sharing = Sharing(*sizes, workers, self._kernels.merge)
        policy = _policies[self._page_kernels.tobytes(), x.tokens == 1]
        self.clock = work.Clock(policy, products, self._layout, True, long)
        self._alone = pages_attention.workspace_size(self._layout, 1, 1)
        self._serial = pages_call.attend.ready()

    def __call__(
        self,
        store: PageStore,
        query: Array,
        places: Array,
        lengths: Array,
        longest: int,
        target: Array,
    ) -> None:
        """Write the output of a query over the pages in ``places``."""
        if not query.size:
            return
        arguments = self._arguments(store, query, places, lengths, target)
        if longest <= self._shared:
            self._serial(*arguments, address(workspace.of_thread(self._alone)), 1)
            return
        # As many on one thread as on several: see ``attend.Call``.
        parts = work.splits(self._sharing, lengths, longest)
        awake = team.borrows()
        alone = not awake and (longest <= self.clock.least or not self.clock.policy.parallel())
        workers = 1 if alone else self._workers
        size = pages_attention.workspace_size(self._layout, parts, workers)
        arguments = *arguments, address(workspace.of_thread(size)), parts
        start = time.perf_counter()
        if alone:
            self._serial(*arguments)
        else:
            self._team(arguments, workers)
        if not awake and longest > self.clock.least:
            seconds = time.perf_counter() - start
            self.clock.took(seconds, self.clock.seen(lengths), parallel=not alone)

    @property
    def plain(self) -> Plain:
        """What a call is; its Layout is a PagesLayout."""
        attend, layout, _ = self._addresses
        x = self._layout
        parts = work.most_splits(self._sharing, x.blocks * x.page_size)
        space = pages_attention.workspace_size(x, parts, self._workers)
        return Plain(attend, layout, max(self._alone, space), self._sharing)

    @property
    def page_kernels(self) -> int:
        """Address of ``Tables.kernels``."""
        return self._addresses[2]

    def _team(self, arguments: tuple[int, ...], workers: int) -> None:
        """What ``pages_call.attend`` does, on several threads."""
        attend, layout, *tables, query, blocks, lengths, target, space, parts = arguments
        tables_at = pages_call.begin.ready()(*tables, blocks, space, parts)
        places = (
            layout, pointer(query), tables_at, 0, pointer(target), pointer(lengths), 0, 0, space,
        )  # fmt: skip
        team.run(attend, places, workers, self._kernels.merge if parts > 1 else 0)

    def _arguments(
        self, store: PageStore, query: Array, places: Array, lengths: Array, target: Array
    ) -> tuple[int, ...]:
        """What ``pages_call.attend`` takes first."""
        attend, layout, kernels = self._addresses
        addresses, formats, _ = store.table.places
        return (
            attend, layout, addresses, formats, address(store.codec.descriptions), kernels,
            id(query) + FIELD, id(places) + FIELD, id(lengths) + FIELD, id(target) + FIELD,
        )  # fmt: skip


_NEVER = 2**63 - 1
