"""What kernels of pages are told about a format: ``formats.PageLayout`` as a row of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from onnx_inplace.compiler.encodings import Encoding, Fit, Grouping
from onnx_inplace.compiler.formats import PageFormat
from onnx_inplace.compiler.page_layout import HalfLayout
from onnx_inplace.numba_kernels import pages_layout

_KINDS = {
    "FLOAT": pages_layout.FLOAT32,
    "FLOAT16": pages_layout.FLOAT16,
    "BFLOAT16": pages_layout.BFLOAT16,
    "FLOAT8E4M3FN": pages_layout.E4M3,
    "FLOAT8E5M2": pages_layout.E5M2,
}


def describe(page_format: PageFormat, dims: Sequence[int]) -> npt.NDArray[np.int64]:
    """The description of pages of ``dims`` = [2, heads, page_size, head_size], as kernels read it.

    Returns:
        (pages_layout.WORDS,) int64.

    Raises:
        FormatError: the format cannot group such a page.
    """
    layout = page_format.layout(dims)
    kind = _KINDS.get(page_format.key.storage.name, pages_layout.INTEGER)
    page = pages_layout.Page(kind, layout.size, layout.heads, layout.page_size, layout.head_size)
    key, value = _half(page_format.key, layout.key), _half(page_format.value, layout.value)
    return np.array(pages_layout.description(page, key, value), np.int64)


def _half(encoding: Encoding, layout: HalfLayout) -> pages_layout.Half:
    by_channel = encoding.grouping is Grouping.CHANNEL
    return pages_layout.Half(
        at=layout.offset,
        head=layout.head_stride,
        bits=encoding.bits,
        grouping=pages_layout.BY_CHANNEL if by_channel else pages_layout.BY_TOKEN,
        group=layout.group_size,
        step=layout.group_stride,
        midpoint=layout.midpoint,
        searched=int(encoding.fit is Fit.SEARCH),
        codes=layout.codes,
        tile=layout.tile_stride,
        offsets=layout.channel_offsets,
        rotation=layout.rotation,
    )
