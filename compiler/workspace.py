"""Temporary bytes of our kernels, by operator: what the plan says, and a test compares.

Each is the most that one thread takes. The compiler runs nothing, so the formulas are declared here
beside the kernels' own.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnx_inplace.compiler import sizes
from onnx_inplace.compiler.contract import DOMAIN
from onnx_inplace.compiler.extents import Extents
from onnx_inplace.compiler.sizes import Size

REORDERED = 1 << 16  # [bytes] rows are reordered in pieces of at most this size
_LANES = 16  # a head whose size is no multiple takes the portable kernel

Formula = Callable[[ir.Node, Extents], Size | None]


def of(node: ir.Node, known: Extents) -> Size | None:
    """Temporary bytes of a kernel step; None: not known."""
    found = _FORMULAS.get((node.domain, node.op_type))
    return None if found is None else found(node, known)


def _none(node: ir.Node, known: Extents) -> Size:
    return 0


def _scatter_nd(node: ir.Node, known: Extents) -> Size | None:
    """The sizes of the axes that are indexed."""
    depth = _size(node, 1, -1, known)
    return None if depth is None else sizes.operation("*", 8, depth)


def _scatter_elements(node: ir.Node, known: Extents) -> Size | None:
    """Two shapes."""
    data = node.inputs[0]
    shape = None if data is None else known.partial(data)
    return None if shape is None else 2 * 8 * len(shape)


def _reorder(node: ir.Node, known: Extents) -> Size | None:
    """A table of moves, and a piece of a row."""
    cache = node.inputs[0]
    shape = None if cache is None else known.shape(cache)
    if shape is None or cache is None or cache.dtype is None:
        return None
    axis = _attribute(node, "batch_axis", 0) % max(len(shape), 1)
    row = sizes.operation("*", cache.dtype.bitwidth // 8, sizes.product(shape[axis + 1 :]))
    piece = REORDERED
    if isinstance(row, int):
        piece = min(row, REORDERED)
    table = sizes.operation("*", 16, sizes.operation("+", sizes.operation("*", 3, shape[axis]), 1))
    return sizes.operation("+", table, piece)


def attention(batch: Size, heads: int, kv_heads: int, head_size: int, value_size: int) -> Size:
    """The portable kernel and those for one token and for many: the most of what they take.

    The first and the last need the same for all lengths; the second, a partial result for each
    row and head of keys.
    """
    tile = 4 * (32 * (head_size + value_size + 2) + 64 * (head_size + value_size + 1))
    if head_size != value_size or head_size % _LANES:
        return 16 + tile
    group = heads // kv_heads
    prefill = 64 + 4 * (128 * (2 * head_size + 2) + 64 * (2 * head_size + 8) + 40)
    partial = kv_heads * (128 + group * head_size * 4)
    decode = 64 + 4 * (group * head_size + 48 + 32 * 16)
    fixed = 16 + max(tile, prefill, decode)
    return sizes.operation("+", fixed, sizes.operation("*", batch, partial))


def _attention(node: ir.Node, known: Extents) -> Size | None:
    query, value = _shape(node, 0, known), _shape(node, 2, known)
    if query is None or value is None or len(query) != len(value):
        return None
    if len(query) == 4:
        heads, kv_heads, size, value_size = query[1], value[1], query[3], value[3]
    else:
        heads = _attribute(node, "q_num_heads", 0)
        kv_heads = _attribute(node, "kv_num_heads", 0)
        if not heads or not kv_heads:
            return None
        size = sizes.operation("//", query[2], heads)
        value_size = sizes.operation("//", value[2], kv_heads)
    numbers = heads, kv_heads, size, value_size
    if not all(isinstance(n, int) and n > 0 for n in numbers):
        return None
    h, k, s, v = (n for n in numbers if isinstance(n, int))
    return attention(query[0], h, k, s, v)


def _grouped(node: ir.Node, known: Extents) -> Size | None:
    """Attention, one rotated head, and in float32 all rotated queries."""
    query, cache = _shape(node, 0, known), _shape(node, 3, known)
    heads, kv_heads = _attribute(node, "num_heads", 0), _attribute(node, "kv_num_heads", 0)
    if query is None or cache is None or len(cache) != 4 or not heads or not kv_heads:
        return None
    size = cache[3]
    if not isinstance(size, int):
        return None
    total = sizes.operation("+", attention(query[0], heads, kv_heads, size, size), 8 * size)
    if _attribute(node, "do_rotary", 0):
        rotated = sizes.product((query[0], query[1], heads * size * 4))
        total = sizes.operation("+", total, rotated)
    return total


def _shape(node: ir.Node, port: int, known: Extents) -> sizes.Shape | None:
    value = node.inputs[port] if port < len(node.inputs) else None
    return None if value is None else known.shape(value)


def _size(node: ir.Node, port: int, axis: int, known: Extents) -> Size | None:
    value = node.inputs[port] if port < len(node.inputs) else None
    return None if value is None else known.size(value, axis)


def _attribute(node: ir.Node, name: str, default: int) -> int:
    found = node.attributes.get(name)
    return default if found is None else found.as_int()


_FORMULAS: dict[tuple[str, str], Formula] = {
    (DOMAIN, "CacheUpdate"): _none,
    (DOMAIN, "Assign"): _none,
    (DOMAIN, "Copy"): _none,
    (DOMAIN, "CacheReorder"): _reorder,
    ("", "TensorScatter"): _none,
    ("", "ScatterND"): _scatter_nd,
    ("", "ScatterElements"): _scatter_elements,
    ("", "Attention"): _attention,
    ("com.microsoft", "GroupQueryAttention"): _grouped,
}
