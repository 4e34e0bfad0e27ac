"""Pages in guarded memory, and the kernels of pages on them: what tests of kernels share."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from onnx_inplace.compiler import formats
from onnx_inplace.numba_kernels import pages
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.page_description import describe

GUARD = 256  # bytes before and behind each page
POISON = 0x5A
KINDS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(ml_dtypes.bfloat16): 2}
FORMATS = list(formats.BUILTIN.values())


class Table:
    """Pages of one shape, each alone in memory, with its guards.

    Attributes:
        raw: by page, its bytes.
        format, fill: (pages) int32.
    """

    def __init__(self, dims, names, page_formats=None):
        self.formats = list(page_formats or FORMATS)
        self.dims = tuple(dims)
        self.descriptions = np.stack([describe(f, dims) for f in self.formats])
        index = {f.name: i for i, f in enumerate(self.formats)}
        self.format = np.array([index[name] for name in names], np.int32)
        self.fill = np.zeros(len(names), np.int32)
        self._memory, self.raw = [], []
        for i in self.format:
            size = self.formats[i].page_bytes(dims)
            memory = np.full(size + 2 * GUARD + 64, POISON, np.uint8)
            begin = GUARD - (address(memory) + GUARD) % 64 + 64
            self._memory.append((memory, begin))
            self.raw.append(memory[begin : begin + size])
            self.raw[-1][:] = 0
        self.addresses = np.array([address(r) for r in self.raw], np.int64)
        self._space = np.empty(pages.workspace_size(*dims[2:]) + 64, np.uint8)

    def guards_intact(self):
        """Whether no byte around a page was written."""
        return all(
            (memory[:begin] == POISON).all() and (memory[begin + len(raw) :] == POISON).all()
            for (memory, begin), raw in zip(self._memory, self.raw, strict=True)
        )

    def description(self, page):
        """Address of the description of a page."""
        return address(self.descriptions[self.format[page]])

    def write(self, blocks, values, position):
        """``values`` (2, heads, n, size), or with a batch (2, batch, heads, n, size)."""
        blocks = np.atleast_2d(np.asarray(blocks, np.int64))
        if values.ndim == 4:
            values = values[:, None]
        layout = np.array(
            pages.Values(
                values.shape[1], values.shape[3], KINDS[values.dtype], *values.strides[:4],
                blocks.shape[1],
            ),
            np.int64,
        )  # fmt: skip
        positions = np.broadcast_to(np.asarray(position, np.int64), (values.shape[1],)).copy()
        return pages.write.ready()(
            address(self.descriptions), address(layout), address(values), address(self.addresses),
            address(self.format), address(self.fill), address(blocks), address(positions),
            address(self._space),
        )  # fmt: skip

    def read(self, page, dtype=np.float32, first=0, count=None):
        """Tokens of a page as an array."""
        _, heads, page_size, size = self.dims
        count = page_size - first if count is None else count
        out = np.empty((2, heads, count, size), dtype)
        pages.read.ready()(
            self.description(page), int(self.addresses[page]), first, count, address(out),
            KINDS[out.dtype], *out.strides[:3], address(self._space),
        )  # fmt: skip
        return out

    def convert(self, source, target):
        """Write the valid tokens of a page into another one."""
        count = int(self.fill[source])
        self.fill[target] = count
        return pages.convert.ready()(
            self.description(source), int(self.addresses[source]), self.description(target),
            int(self.addresses[target]), count, address(self._space),
        )  # fmt: skip
