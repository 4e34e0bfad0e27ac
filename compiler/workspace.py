"""Temporary bytes of our kernels, by operator: what the plan says, and a test compares.

The compiler runs nothing, so the formulas are declared here beside the kernels' own. A kernel has
several answers where which of its forms runs depends on threads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from onnx_inplace.compiler import sizes
from onnx_inplace.compiler.contract import DOMAIN
from onnx_inplace.compiler.extents import Extents
from onnx_inplace.compiler.memory import PORTABLE, THREADS, Allocations
from onnx_inplace.compiler.sizes import Size

REORDERED = 1 << 16  # [bytes] rows are reordered in pieces of at most this size
SHORTEST_SPLIT = 256  # [tokens] of a split of the keys, where several threads decode
_ROWS, _BLOCK, _MANY = 256, 8, 16  # of prompts: see ``prefill_parts.item_rows``
_LANES = 16  # a head whose size is no multiple takes the portable kernel

Formula = Callable[[ir.Node, Extents], "tuple[Allocations, ...] | None"]


def of(node: ir.Node, known: Extents) -> tuple[Allocations, ...] | None:
    """Allocations of a kernel step beside its results; None: not known."""
    found = _FORMULAS.get((node.domain, node.op_type))
    return None if found is None else found(node, known)


def _none(node: ir.Node, known: Extents) -> tuple[Allocations, ...]:
    return ()


def _scatter_nd(node: ir.Node, known: Extents) -> tuple[Allocations, ...] | None:
    """The sizes of the axes that are indexed."""
    depth = _size(node, 1, -1, known)
    return None if depth is None else ((sizes.operation("*", 8, depth),),)


def _scatter_elements(node: ir.Node, known: Extents) -> tuple[Allocations, ...] | None:
    """Two shapes."""
    data = node.inputs[0]
    shape = None if data is None else known.partial(data)
    return None if shape is None else ((2 * 8 * len(shape),),)


def _reorder(node: ir.Node, known: Extents) -> tuple[Allocations, ...] | None:
    """A table of moves, and a piece of a row."""
    cache = node.inputs[0]
    shape = None if cache is None else known.shape(cache)
    if shape is None or cache is None or cache.dtype is None:
        return None
    axis = _attribute(node, "batch_axis", 0) % max(len(shape), 1)
    row = sizes.operation("*", cache.dtype.bitwidth // 8, sizes.product(shape[axis + 1 :]))
    table = sizes.operation("*", 16, sizes.operation("+", sizes.operation("*", 3, shape[axis]), 1))
    return ((table, sizes.operation("min", row, REORDERED)),)


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Sizes that kernels of attention are made for, and those of a call."""

    batch: Size
    tokens: Size
    capacity: Size
    heads: int
    kv_heads: int
    size: int
    value_size: int

    def workspace(self) -> tuple[Allocations, ...]:
        """Of the kernels for this CPU, or of those for every CPU; alone, or with all threads."""
        tile = self._portable()
        one: Size = tile
        several = _times(THREADS, tile)
        if self.size == self.value_size and self.size % _LANES == 0:
            alone, together = self._vector(1, 1), self._vector(THREADS, self._splits())
            one = _choose(PORTABLE, tile, alone)
            several = _choose(PORTABLE, several, together)
        parallel = sizes.operation("-", 1, sizes.operation("//", 1, THREADS))
        return ((_plus(16, one),), (_times(parallel, _plus(16, several)),))

    def _portable(self) -> int:
        both = self.size + self.value_size
        return 4 * (32 * (both + 2) + 64 * (both + 1))

    def _vector(self, threads: Size, splits: Size) -> Size:
        """For one token where the group is small, else for many."""
        group = self.heads // self.kv_heads
        row, shared = 4 * (2 * self.size + 2), 4 * (64 * (2 * self.size + 8) + 48)
        worker = _plus(shared, _times(row, self._item_rows()))
        many = _plus(128, _times(threads, worker))
        if group > _LANES:
            return many
        lanes = 1 << (group - 1).bit_length()
        decode = 4 * (group * self.size + 48 + 32 // (_LANES // lanes) * 16)
        partial = 128 + group * self.size * 4
        results = sizes.product((self.batch, self.kv_heads, splits, partial))
        one = sizes.total((64, _times(threads, decode), results))
        return _choose(sizes.operation("//", 1, self.tokens), one, many)

    def _item_rows(self) -> Size:
        """Query rows of a kv head that one thread takes at once: half where there are few."""
        count = _times(self.tokens, self.heads // self.kv_heads)
        items = sizes.product((self.batch, self.kv_heads, _groups(count, _ROWS)))
        few = sizes.operation("//", _MANY, _plus(1, items))
        most = _choose(sizes.operation("min", few, 1), _ROWS // 2, _ROWS)
        return sizes.operation("min", most, _times(_BLOCK, _groups(count, _BLOCK)))

    def _splits(self) -> Size:
        """Most where all rows but one are empty: four parts of a row for each thread.

        As many for each: a multiple of what the heads lack to be one of the threads.
        """
        common: Size = 1  # the greatest divisor of heads and threads
        for k in range(2, self.kv_heads + 1):
            if self.kv_heads % k == 0:
                whole = sizes.operation("//", _times(k, sizes.operation("//", THREADS, k)), THREADS)
                common = sizes.operation("max", common, _times(k, whole))
        step = sizes.operation("//", THREADS, common)
        wanted = _groups(_times(4, THREADS), self.kv_heads)
        parts = _times(step, sizes.operation("//", _plus(_plus(-1, step), wanted), step))
        long = sizes.operation("//", self.capacity, SHORTEST_SPLIT)
        return sizes.operation("max", 1, sizes.operation("min", long, parts))


def _attention(node: ir.Node, known: Extents) -> tuple[Allocations, ...] | None:
    query, key, value = (_shape(node, port, known) for port in range(3))
    if query is None or key is None or value is None or not len(query) == len(key) == len(value):
        return None
    if len(query) == 4:
        heads, kv_heads, size, value_size = query[1], value[1], query[3], value[3]
        tokens, capacity = query[2], key[2]
    else:
        heads = _attribute(node, "q_num_heads", 0)
        kv_heads = _attribute(node, "kv_num_heads", 0)
        if not heads or not kv_heads:
            return None
        size = sizes.operation("//", query[2], heads)
        value_size = sizes.operation("//", value[2], kv_heads)
        tokens, capacity = query[1], key[1]
    numbers = heads, kv_heads, size, value_size
    if not all(isinstance(n, int) and n > 0 for n in numbers):
        return None
    h, k, s, v = (n for n in numbers if isinstance(n, int))
    found = Heads(query[0], tokens, capacity, h, k, s, v).workspace()
    return _with(found, _mask(node, 3, known))


def _grouped(node: ir.Node, known: Extents) -> tuple[Allocations, ...] | None:
    """Attention; one rotated head, and in float32 all rotated queries with their positions."""
    query, cache = _shape(node, 0, known), _shape(node, 3, known)
    heads, kv_heads = _attribute(node, "num_heads", 0), _attribute(node, "kv_num_heads", 0)
    if query is None or cache is None or len(cache) != 4 or not heads or not kv_heads:
        return None
    size = cache[3]
    if not isinstance(size, int):
        return None
    batch, tokens = query[0], query[1]
    head: Size = 4 * size
    rotated: Allocations = ()
    angles = _shape(node, 7, known)
    if _attribute(node, "do_rotary", 0) and angles is not None:
        head = _plus(head, _times(8, angles[1]))
        queries = sizes.product((batch, tokens, heads * size * 4))
        rotated = queries, sizes.product((batch, tokens, 8))
    found = Heads(batch, tokens, cache[2], heads, kv_heads, size, size).workspace()
    return _with(found, (head, *rotated, *_mask(node, 10, known)))


def _with(found: tuple[Allocations, ...], more: Allocations) -> tuple[Allocations, ...]:
    return tuple((*together, *more) for together in found)


def _mask(node: ir.Node, port: int, known: Extents) -> Allocations:
    """A mask that is neither bool nor float32 is converted."""
    value = node.inputs[port] if port < len(node.inputs) else None
    if value is None or value.dtype in (ir.DataType.BOOL, ir.DataType.FLOAT):
        return ()
    shape = known.shape(value)
    return () if shape is None else (_times(4, sizes.product(shape)),)


def _choose(one: Size, then: Size, otherwise: Size) -> Size:
    """``then`` where ``one`` is 1, ``otherwise`` where it is 0."""
    return _plus(_times(one, then), _times(sizes.operation("-", 1, one), otherwise))


def _groups(count: Size, size: int) -> Size:
    """How many groups of ``size`` hold ``count``."""
    return sizes.operation("//", _plus(size - 1, count), size)


def _plus(a: Size, b: Size) -> Size:
    return sizes.operation("+", a, b)


def _times(a: Size, b: Size) -> Size:
    return sizes.operation("*", a, b)


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
