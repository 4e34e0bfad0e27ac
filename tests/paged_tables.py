"""Pages in guarded memory, and the kernels of pages on them: what tests of kernels share."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import page_specification as spec

from onnx_inplace.compiler import formats
from onnx_inplace.numba_kernels import (
    invoke,
    pages,
    pages_attention,
    pages_heads,
    pages_kernels,
)
from onnx_inplace.numba_kernels.layout import bits
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.numba_kernels.pages_kernels import Accuracy
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
        self._space = np.empty(pages_heads.workspace_size(*dims[2:]) + 64, np.uint8)

    def set_offsets(self, page, offsets):
        """Store offsets of channels (heads, size), where the format has them."""
        layout = self.formats[self.format[page]].layout(self.dims)
        if layout.key.channel_offsets:
            for h, row in enumerate(offsets.astype(np.float16)):
                at = layout.key.offset + h * layout.key.head_stride + layout.key.channel_offsets
                self.raw[page][at : at + 2 * len(row)] = row.view(np.uint8)

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
            pages_heads.Values(
                values.shape[1], values.shape[3], KINDS[values.dtype], *values.strides[:4],
                blocks.shape[1],
            ),
            np.int64,
        )  # fmt: skip
        positions = np.broadcast_to(np.asarray(position, np.int64), (values.shape[1],)).copy()
        return pages.write.ready()(
            pages.writer.ready().address,
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

    def attend(
        self, query, blocks, lengths, *, causal=True, left=-1, scale=None, softcap=0.0,
        sinks=None, splits=1, workers=1, portable=False, accuracy=Accuracy.PRECISE,
    ):  # fmt: skip
        """Attention of ``query`` (batch, heads, tokens, size), like ``oracle``."""
        blocks = np.atleast_2d(np.asarray(blocks, np.int64))
        lengths = np.atleast_1d(np.asarray(lengths, np.int64))
        batch, heads, count, size = query.shape
        group = heads // self.dims[1]
        ready = pages_kernels.ready(self.descriptions, group, portable, accuracy)
        output = np.empty_like(query)
        kind = KINDS[query.dtype]
        x = pages_attention.PagesLayout(
            batch, self.dims[1], group, count, size, self.dims[2], blocks.shape[1],
            len(self.formats), kind, kind, left, 0 if causal else -1,
            bits(size**-0.5 if scale is None else scale), bits(softcap),
            *query.strides[:3], *output.strides[:3], 0, 0, 0, 0,
        )  # fmt: skip
        x, kernels = ready.choose(x)
        tables = pages_attention.Tables(
            address(self.addresses), address(self.format), address(self.descriptions),
            address(kernels), address(blocks),
        )  # fmt: skip
        layout, tables = np.array(x, np.int64), np.array(tables, np.int64)
        space = np.full(pages_attention.workspace_size(x, splits, workers) // 8, -1, np.int64)
        space[:2] = 0, splits
        call = invoke.invoke.ready() if workers == 1 else invoke.invoke_parallel.ready()
        places = (
            address(layout), address(query), address(tables), 0, address(output),
            address(lengths), 0, 0 if sinks is None else address(sinks), address(space), workers,
        )  # fmt: skip
        call(ready.attend, *places)
        if workers > 1 and splits > 1:
            invoke.invoke.ready()(ready.merge, *places)
        return output


def oracle(
    table, query, blocks, lengths, *, causal=True, left=-1, scale=None, softcap=0, sinks=None
):
    """Attention in float64 over what the specification says is stored; the queries come last."""
    blocks = np.atleast_2d(np.asarray(blocks, np.int64))
    _, heads, count, size = query.shape
    group, output = heads // table.dims[1], np.zeros(query.shape)
    for b, length in enumerate(np.atleast_1d(lengths)):
        stored = [
            spec.decode(table.formats[table.format[p]], table.raw[p], table.dims)
            for p in blocks[b, : -(-int(length) // table.dims[2])]
        ]
        if not stored:
            continue
        keys, values = np.concatenate(stored, axis=2)[:, :, :length].astype(np.float64)
        i, j = np.arange(count)[:, None] + length - count, np.arange(length)
        seen = (j <= i) | (not causal)
        if left >= 0:
            seen &= j >= i - left
        for h in range(heads):
            s = query[b, h].astype(np.float64) @ keys[h // group].T
            s *= size**-0.5 if scale is None else scale
            if softcap:
                s = softcap * np.tanh(s / softcap)
            s = np.where(seen, s, -np.inf)
            top = s.max(1, keepdims=True)
            if sinks is not None:
                top = np.maximum(top, sinks[h])
            p = np.exp(s - np.where(np.isinf(top), 0, top))
            total = p.sum(1, keepdims=True)
            if sinks is not None:
                total += np.exp(sinks[h] - top)
            output[b, h] = p / np.where(total == 0, 1, total) @ values[h // group]
    return output
