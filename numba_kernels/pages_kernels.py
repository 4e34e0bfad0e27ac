"""Which kernels attend over the pages of a cache: chosen, and compiled, when a model is loaded."""

from __future__ import annotations

import dataclasses
import enum
import types

import numpy as np
import numpy.typing as npt

from onnx_inplace.numba_kernels import (
    pages_attention,
    pages_bytes,
    pages_bytes_lanes,
    pages_heads,
    pages_portable,
    pages_prefill,
    pages_rows,
    pages_tiles,
    vector,
)
from onnx_inplace.numba_kernels.pages_attention import PagesLayout
from onnx_inplace.numba_kernels.pages_layout import (
    BY_CHANNEL,
    BY_TOKEN,
    E4M3,
    E5M2,
    HALF,
    HEADER,
    INTEGER,
    Half,
    Page,
)
from onnx_inplace.numba_kernels.prefill_parts import ROWS, item_rows
from onnx_inplace.numba_kernels.specialise import specialise

_Int64s = npt.NDArray[np.int64]


class Accuracy(enum.Enum):
    """What the weights of tokens become for values in codes of less than 8 bits."""

    PRECISE = 0  # integers of 16 bits
    BYTES = 4  # integers of 8 bits


@dataclasses.dataclass(frozen=True, slots=True)
class Kernels:
    """Compiled code for the formats of one cache and the heads of one query.

    Attributes:
        attend: address of the driver, for ``invoke``.
        merge: address of what follows a parallel call with several splits.
        many: (formats) int64, addresses of page kernels for any number of rows.
        fast: (formats) int64, addresses of page kernels for the rows of one token.
        rows: query rows of an item that ``many`` are made for.
        scratch: bytes of ``Task.scratch`` that any kernel needs.
        prepared: bytes of ``Task.prepared``.
    """

    attend: int
    merge: int
    many: _Int64s
    fast: _Int64s
    rows: int
    scratch: int
    prepared: int

    def choose(self, x: PagesLayout) -> tuple[PagesLayout, _Int64s]:
        """A call's layout with its last four fields filled in; ``Tables.kernels`` for it."""
        rows, kernels, prepared = x.group, self.fast, self.prepared
        if x.tokens > 1:
            rows = item_rows(x.group * x.tokens, x.batch * x.kv_heads, self.rows)
            kernels, prepared = self.many, 0
        scratch = max(self.scratch, pages_portable.scratch_size(x.head_size))
        if x.tokens == 1:  # that may be written from there
            scratch = max(scratch, pages_heads.workspace_size(x.page_size, x.head_size) + 64)
        x = x._replace(rows=rows, scratch=scratch, prepared=prepared)
        return x._replace(worker_bytes=pages_attention.worker_bytes(x)), kernels


def ready(
    descriptions: _Int64s, group: int, portable: bool = False, accuracy: Accuracy = Accuracy.PRECISE
) -> Kernels:
    """Compile, or load from disk, what attention over pages of these formats needs.

    ``group``: query heads of a kv head. ``portable``: leave out what not every CPU executes.
    ``accuracy``: what rows of one token over integer formats of less than 8 bits have at least.

    Shapes:
        descriptions: (formats, pages_layout.WORDS)
    """
    anywhere: int = pages_portable.attend.ready().address
    modules = [None if portable else _fast(row.tolist(), group, accuracy) for row in descriptions]
    prefills = [None if portable else _prefill(row.tolist()) for row in descriptions]
    many, fast = (
        [anywhere if module is None else module.attend.ready().address for module in found]
        for found in (prefills, modules)
    )
    rows = {pages_portable.ROWS if module is None else module.ROWS for module in prefills}
    return Kernels(
        attend=pages_attention.attend.ready().address,
        merge=pages_attention.merge.ready().address,
        many=np.array(many, np.int64),
        fast=np.array(fast, np.int64),
        rows=min(rows, default=pages_portable.ROWS),
        scratch=max((m.SCRATCH for m in [*prefills, *modules] if m is not None), default=0),
        prepared=max((m.PREPARED for m in modules if m is not None), default=0),
    )


def _prefill(description: list[int]) -> types.ModuleType | None:
    """The fast kernel of many queries for a format; None: there is none."""
    if not vector.available():
        return None
    page = Page(*description[:HEADER])
    return specialise(pages_prefill, page.kind, page.head_size, ROWS)


def _fast(description: list[int], group: int, accuracy: Accuracy) -> types.ModuleType | None:
    """The fast kernel of a format, not yet compiled; None: there is none."""
    page = Page(*description[:HEADER])
    key = Half(*description[HEADER : HEADER + HALF])
    value = Half(*description[HEADER + HALF :])
    if not vector.available() or group > vector.LANES:
        return None
    if page.kind in (E4M3, E5M2) and pages_bytes_lanes.available(page.head_size):
        return specialise(pages_bytes, page.kind, page.head_size, group)
    if page.kind != INTEGER:
        return specialise(pages_rows, page.kind, page.head_size, group)
    affine = key.midpoint > 0
    if key.bits != value.bits or affine != (value.midpoint > 0) or value.grouping != BY_TOKEN:
        return None
    if affine and key.bits == 8:
        return None  # twice a sum of codes and queries does not fit an int32
    channels = key.group if key.grouping == BY_CHANNEL else 0
    center = 2**key.bits - 1 if affine else 2**key.bits
    planes = 1 if accuracy is Accuracy.BYTES and key.bits < 8 else 2
    numbers = page.head_size, page.page_size, group, planes
    return specialise(pages_tiles, key.bits, channels, key.group, value.group, center, *numbers)
