"""What must hold for a node that writes or reads storage in place.

Every requirement has one form: some integers, the content of a value or sizes of shapes, lie
between two bounds. A position is bounded by capacity - length, never position + length by capacity:
a subtraction of sizes cannot overflow. How and when a requirement is checked is decided in
``positions``.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping

import onnx_ir as ir

from onnx_inplace.compiler import contract, merging
from onnx_inplace.compiler.paged_types import HALVES, HEAD_SIZE, HEADS, PAGE_SIZE, is_paged

MOST = 2**63 - 1  # the largest int64: no bound


class Kind(enum.Enum):
    """What the bounded numbers are, which decides how a violation is reported."""

    POSITION = "position"  # first token written, or an index, which is a position of length 1
    LENGTH = "length"  # number of valid tokens, from position 0 on
    SHAPE = "shape"  # sizes


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """A number plus sizes with factors: ``constant + sum(factor * shape(value)[axis])``."""

    constant: int = 0
    axes: tuple[tuple[int, ir.Value, int], ...] = ()

    def __sub__(self, other: Linear) -> Linear:
        """Difference."""
        minus = tuple((-factor, value, axis) for factor, value, axis in other.axes)
        return Linear(self.constant - other.constant, self.axes + minus)


def axis_of(value: ir.Value, axis: int) -> Linear:
    """A size of a value."""
    return Linear(0, ((1, value, axis),))


ZERO, ONE = Linear(0), Linear(1)


@dataclasses.dataclass(frozen=True, slots=True)
class Requirement:
    """``low <= subject + offset <= high``, element by element.

    Attributes:
        kind: what the subject is.
        root: name of the mutable parameter that is at stake.
        node: that asks for it; None: a result that is declared as an alias.
        subject: a value whose elements are bounded, or sizes.
        offset: is added to each element.
        low: one bound, or one for each element of the last axis of the subject.
        high: likewise.
        length: tokens that the node writes from each position on.
        capacity: one number, or one for each element of the last axis.
        port: name of what is bounded, for messages.
    """

    kind: Kind
    root: str
    node: ir.Node | None
    subject: ir.Value | tuple[Linear, ...]
    offset: Linear
    low: tuple[Linear, ...]
    high: tuple[Linear, ...]
    length: Linear
    capacity: tuple[Linear, ...]
    port: str


def requirements(
    node: ir.Node, root_of: Mapping[ir.Value, ir.Value], mutable: Iterable[ir.Value]
) -> list[Requirement]:
    """What a node requires of storage that ``root_of`` knows, if that is mutable or pages.

    Pages are read by kernels of ours only, and so within bounds, also where they are not mutable.
    Ranks are taken from the storage; an operator whose ranks cannot be right is refused elsewhere.
    """
    make = _OPERATORS.get((node.domain, node.op_type))
    if make is None:
        return []
    owned, found = set(mutable), []
    if contract.rule(node) is not None and not any(v in root_of for v in node.outputs):
        return []  # on a value that must not be written, the operator makes a new one
    for port in _STORAGE_PORTS.get((node.domain, node.op_type), (0,)):
        storage = node.inputs[port] if port < len(node.inputs) else None
        if storage is None or storage.shape is None:
            continue
        root = root_of.get(storage)
        if root is not None and (root in owned or is_paged(storage)):
            found += make(_Site(node, str(root.name), storage, len(storage.shape)))
    return found


def equality(needed: merging.Equality, root_of: Mapping[ir.Value, ir.Value]) -> Requirement:
    """Two axes that the analysis could not prove to be equally long."""
    left, right = needed.left, needed.right
    root = root_of.get(left) or root_of.get(right) or right
    size = (axis_of(right, needed.right_axis),)
    return Requirement(
        kind=Kind.SHAPE,
        root=str(root.name),
        node=needed.node,
        subject=(axis_of(left, needed.left_axis),),
        offset=ZERO,
        low=size,
        high=size,
        length=ZERO,
        capacity=size,
        port=str(left.name),
    )


def covers(node: ir.Node | None) -> bool:
    """Whether ``requirements`` says all that a node needs of shapes."""
    return node is not None and (node.domain, node.op_type) in _OPERATORS


@dataclasses.dataclass(frozen=True, slots=True)
class _Site:
    """A node on storage: makes requirements of it."""

    node: ir.Node
    root: str
    storage: ir.Value
    rank: int

    def input(self, port: int) -> ir.Value | None:
        return self.node.inputs[port] if port < len(self.node.inputs) else None

    def attribute(self, name: str, default: int) -> int:
        found = self.node.attributes.get(name)
        return default if found is None else found.as_int()

    def behind(self, axis: int) -> int:
        """The axis counted from the end: right for every value of the same rank, known or not."""
        return axis if axis < 0 else axis - self.rank

    def size(self, axis: int) -> Linear:
        return axis_of(self.storage, axis)

    def equal(self, port: str, pairs: Iterable[tuple[Linear, Linear]]) -> list[Requirement]:
        """Sizes on the left are those on the right."""
        found = list(pairs)
        left, right = tuple(a for a, _ in found), tuple(b for _, b in found)
        return [self._shape(port, left, right, right)] if found else []

    def at_most(self, port: str, pairs: Iterable[tuple[Linear, Linear]]) -> list[Requirement]:
        """Sizes on the left are no larger than those on the right."""
        found = list(pairs)
        left, right = tuple(a for a, _ in found), tuple(b for _, b in found)
        return [self._shape(port, left, (ZERO,) * len(found), right)] if found else []

    def _shape(
        self, port: str, left: tuple[Linear, ...], low: tuple[Linear, ...], high: tuple[Linear, ...]
    ) -> Requirement:
        return Requirement(
            Kind.SHAPE, self.root, self.node, left, ZERO, low, high, ZERO, high, port
        )

    def alike(self, value: ir.Value, port: str, but: int | None = None) -> list[Requirement]:
        """``value`` has the shape of the storage, but for one axis."""
        axes = (k - self.rank for k in range(self.rank))
        return self.equal(port, [(axis_of(value, k), self.size(k)) for k in axes if k != but])

    def bounded(
        self,
        kind: Kind,
        subject: ir.Value | None,
        high: tuple[Linear, ...],
        length: Linear,
        capacity: tuple[Linear, ...],
        port: str,
        *,
        offset: Linear = ZERO,
        low: tuple[Linear, ...] = (ZERO,),
    ) -> Requirement:
        """Elements of ``subject`` are bounded; without a subject, the number 0 is."""
        bound = (ZERO,) if subject is None else subject
        return Requirement(
            kind, self.root, self.node, bound, offset, low, high, length, capacity, port
        )


def _update(site: _Site, batch_axis: int) -> list[Requirement]:
    """CacheUpdate and TensorScatter: values, then a position for all rows or one for each."""
    values, position = site.input(1), site.input(2)
    if values is None:
        return []
    axis = site.behind(site.attribute("axis", -2))
    length, capacity = axis_of(values, axis), site.size(axis)
    found = site.alike(values, "values", but=axis)
    if position is not None and position.shape is not None and len(position.shape) == 1:
        rows = (axis_of(position, 0), site.size(site.behind(batch_axis)))
        found += site.equal("position", [rows])
    mode = site.node.attributes.get("mode")
    if mode is None or mode.as_string() == "linear":
        room = (capacity - length,)
        return [
            *found,
            site.bounded(Kind.POSITION, position, room, length, (capacity,), "position"),
        ]
    return [
        *found,
        site.bounded(Kind.POSITION, None, (capacity - length,), length, (capacity,), "position"),
        site.bounded(Kind.POSITION, position, (Linear(MOST),), length, (capacity,), "position"),
    ]


def _cache_update(site: _Site) -> list[Requirement]:
    return _update(site, site.attribute("batch_axis", 0))


def _tensor_scatter(site: _Site) -> list[Requirement]:
    return _update(site, 0)


def _assign(site: _Site) -> list[Requirement]:
    value = site.input(1)
    return [] if value is None else site.alike(value, "value")


def _cache_reorder(site: _Site) -> list[Requirement]:
    indices, rows = site.input(1), site.size(site.behind(site.attribute("batch_axis", 0)))
    if indices is None:
        return []
    return [
        *site.equal("indices", [(axis_of(indices, 0), rows)]),
        site.bounded(Kind.POSITION, indices, (rows - ONE,), ONE, (rows,), "indices"),
    ]


def _scatter_elements(site: _Site) -> list[Requirement]:
    indices, updates = site.input(1), site.input(2)
    if indices is None or updates is None:
        return []
    axis = site.behind(site.attribute("axis", 0))
    axes = [k - site.rank for k in range(site.rank)]
    size = site.size(axis)
    others = [(axis_of(indices, k), site.size(k)) for k in axes if k != axis]
    return [
        *site.equal("updates", [(axis_of(updates, k), axis_of(indices, k)) for k in axes]),
        *site.at_most("indices", others),
        site.bounded(
            Kind.POSITION, indices, (size - ONE,), ONE, (size,), "indices", low=(ZERO - size,)
        ),
    ]


def _scatter_nd(site: _Site) -> list[Requirement]:
    indices, updates = site.input(1), site.input(2)
    if indices is None or updates is None or indices.shape is None:
        return []
    rank, columns = len(indices.shape), indices.shape[-1]
    if not isinstance(columns, int) or columns > site.rank:
        return []
    sizes = tuple(site.size(k) for k in range(columns))
    leading = [(axis_of(updates, k), axis_of(indices, k)) for k in range(rank - 1)]
    rest = [
        (axis_of(updates, rank - 1 + k), site.size(columns + k)) for k in range(site.rank - columns)
    ]
    found = site.equal("updates", leading + rest)
    if not columns:
        return found
    high, low = tuple(s - ONE for s in sizes), tuple(ZERO - s for s in sizes)
    return [
        *found,
        site.bounded(Kind.POSITION, indices, high, ONE, sizes, "indices", low=low),
    ]


def _attention(site: _Site) -> list[Requirement]:
    """Keys and values are read up to ``nonpad_kv_seqlen``."""
    lengths = site.input(6)
    if lengths is None:
        return []
    capacity, batch = site.size(-2), site.size(0)
    return [
        *site.equal("nonpad_kv_seqlen", [(axis_of(lengths, 0), batch)]),
        site.bounded(Kind.LENGTH, lengths, (capacity,), ZERO, (capacity,), "nonpad_kv_seqlen"),
    ]


def _group_query_attention(site: _Site) -> list[Requirement]:
    """``seqlens_k`` is one less than the valid length after the new tokens are written."""
    query, lengths = site.input(0), site.input(5)
    if query is None or lengths is None:
        return []
    capacity, new = site.size(-2), axis_of(query, 1)
    return [
        # Where the new tokens begin depends on whether this is a prompt: the kernel looks at that.
        site.bounded(Kind.POSITION, None, (capacity - new,), new, (capacity,), "query"),
        site.bounded(Kind.LENGTH, lengths, (capacity,), ZERO, (capacity,), "seqlens_k", offset=ONE),
    ]


def _pages(site: _Site, ids: ir.Value) -> Linear:
    """Tokens that fit into one page, or into all pages of a block table."""
    page_size = site.storage.shape[PAGE_SIZE] if site.storage.shape is not None else None
    if not isinstance(page_size, int):
        raise ValueError(f"the page size of `{site.storage.name}` is no number")
    if ids.shape is None or ids.shape.rank() == 0:
        return Linear(page_size)
    return Linear(0, ((page_size, ids, -1),))


def _paged_rows(numbers: ir.Value, ids: ir.Value) -> list[tuple[Linear, Linear]]:
    """A number for each row of block tables."""
    if numbers.shape is None or ids.shape is None or numbers.shape.rank() == 0:
        return []
    return [(axis_of(numbers, 0), axis_of(ids, 0) if ids.shape.rank() == 2 else ONE)]


def _paged_update(site: _Site) -> list[Requirement]:
    ids, values, position = (site.input(k) for k in (1, 2, 3))
    if ids is None or values is None or position is None:
        return []
    length, capacity = axis_of(values, -2), _pages(site, ids)
    own = ((0, HALVES), (-3, HEADS), (-1, HEAD_SIZE))
    found = [(axis_of(values, k), site.size(axis)) for k, axis in own]
    if ids.shape is not None and ids.shape.rank() == 2:
        found.append((axis_of(values, 1), axis_of(ids, 0)))
    room = (capacity - length,)
    return [
        *site.equal("values", found),
        *site.equal("position", _paged_rows(position, ids)),
        site.bounded(Kind.POSITION, position, room, length, (capacity,), "position"),
    ]


def _paged_attention(site: _Site) -> list[Requirement]:
    query, table, lengths = (site.input(k) for k in (0, 2, 3))
    if query is None or table is None or lengths is None:
        return []
    capacity = _pages(site, table)
    batched = table.shape is not None and table.shape.rank() == 2
    rows = axis_of(table, 0) if batched else ONE
    return [
        *site.equal(
            "query", [(axis_of(query, 0), rows), (axis_of(query, -1), site.size(HEAD_SIZE))]
        ),
        *site.equal("lengths", _paged_rows(lengths, table)),
        site.bounded(Kind.LENGTH, lengths, (capacity,), ZERO, (capacity,), "lengths"),
    ]


def _on_pages(site: _Site) -> list[Requirement]:
    """Page ids alone: whether there are such pages, the page table knows."""
    return []


_DOMAIN = contract.DOMAIN
_OPERATORS: dict[tuple[str, str], Callable[[_Site], list[Requirement]]] = {
    (_DOMAIN, "CacheUpdate"): _cache_update,
    (_DOMAIN, "Assign"): _assign,
    (_DOMAIN, "CacheReorder"): _cache_reorder,
    (_DOMAIN, "PagedCacheUpdate"): _paged_update,
    (_DOMAIN, "PagedCacheConvert"): _on_pages,
    (_DOMAIN, "PagedAttention"): _paged_attention,
    (_DOMAIN, "PageGather"): _on_pages,
    ("", "TensorScatter"): _tensor_scatter,
    ("", "ScatterElements"): _scatter_elements,
    ("", "ScatterND"): _scatter_nd,
    ("", "Attention"): _attention,
    ("com.microsoft", "GroupQueryAttention"): _group_query_attention,
}
_STORAGE_PORTS = {
    ("", "Attention"): (1, 2),
    ("com.microsoft", "GroupQueryAttention"): (3, 4),
    (_DOMAIN, "PagedAttention"): (1,),
}
