"""Element types, ranks, dimensions and counts of values that are, or meet, one storage.

Decides E102 as far as the types in the graph tell. Two dimensions that are not known to be equal
and not known to differ become an ``Equality``: a condition that a run checks before it writes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnx_inplace.compiler.classes import Link, Summary
from onnx_inplace.compiler.contract import DOMAIN, Access
from onnx_inplace.compiler.diagnosis import called
from onnx_inplace.compiler.paged_types import is_carrier, is_paged

Dimension = int | ir.SymbolicDim
SAME = "Give both the same element type and shape."


@dataclasses.dataclass(frozen=True, slots=True)
class Equality:
    """Axis ``left_axis`` of ``left`` must be as long as axis ``right_axis`` of ``right``.

    Attributes:
        left, right: the values; axes are not negative.
        node: who needs it; None: a result that is declared as an alias.
    """

    node: ir.Node | None
    left: ir.Value
    left_axis: int
    right: ir.Value
    right_axis: int


@dataclasses.dataclass(slots=True)
class Verdict:
    """What is wrong for certain, and what only a run can tell."""

    faults: list[str] = dataclasses.field(default_factory=list)
    equalities: list[Equality] = dataclasses.field(default_factory=list)
    repair: str = SAME
    code: str = "E102"


def code(*values: ir.Value) -> str:
    """The rule that values break which cannot be merged: pages have one of their own."""
    return "E115" if any(map(is_paged, values)) else "E102"


def adopt(value: ir.Value, source: ir.Value) -> list[str]:
    """``value`` has the type and shape of ``source``: fill in what it lacks, say what differs."""
    faults = _element_type(value, source)
    if faults:
        return faults
    if source.shape is None:
        return []
    if value.shape is None:
        value.shape = source.shape.copy()
        return []
    if faults := _rank(value, source):
        return faults
    dims: list[Dimension] = []
    for k, (own, given) in enumerate(zip(value.shape, source.shape, strict=True)):
        if isinstance(own, int) and isinstance(given, int) and own != given:
            return [_differs(value, k, source, k)]
        dims.append(own if isinstance(own, int) or _unnamed(given) else given)
    value.shape = ir.Shape(dims)
    return []


def agree(a: ir.Value, b: ir.Value, node: ir.Node | None, but: Iterable[int] = ()) -> Verdict:
    """Both must have one element type and, except for the axes ``but``, one shape."""
    verdict = Verdict(_element_type(a, b) or _rank(a, b), code=code(a, b))
    known = a.shape if a.shape is not None else b.shape
    if verdict.faults or known is None:
        return verdict
    for k in range(known.rank()):
        if k not in but:
            compare(verdict, Equality(node, a, k, b, k))
    return verdict


def join(value: ir.Value, a: ir.Value, b: ir.Value) -> list[str]:
    """``value`` is a view that is one or the other: it has the sizes that both have."""
    verdict = agree(a, b, None)
    verdict.faults.extend(_element_type(value, a))
    if (
        not verdict.faults
        and value.shape is None
        and not verdict.equalities
        and a.shape is not None
    ):
        value.shape = a.shape.copy()
    return verdict.faults


def recount(view: ir.Value, source: ir.Value) -> list[str]:
    """``view`` keeps its own shape but has the elements of ``source``."""
    if faults := _element_type(view, source):
        return faults
    counts = [_count(v) for v in (view, source)]
    if None not in counts and counts[0] != counts[1]:
        return [f"{called(view)} has {counts[0]} elements, {called(source)} {counts[1]}"]
    return []


def check(node: ir.Node, links: Sequence[Link], summary: Summary | None) -> Verdict:
    """A node against its own inputs, and its aliased results against what they are made from."""
    if summary is not None:
        verdict = _call(node, summary)
    elif any(attribute.is_ref() for attribute in node.attributes.values()):
        verdict = Verdict()  # a function of another author: judged where it is inlined
    elif (node.domain, node.op_type) in ((DOMAIN, "CacheUpdate"), ("", "TensorScatter")):
        verdict = _update(node) if links else Verdict()
    elif (node.domain, node.op_type) == (DOMAIN, "Assign"):
        verdict = agree(_input(node, 0), _input(node, 1), node)
    elif (node.domain, node.op_type) == (DOMAIN, "CacheReorder"):
        verdict = _reorder(node)
    else:
        verdict = Verdict()
    for link in links:
        if not verdict.faults and link.output is not None:
            output, source = node.outputs[link.output], _input(node, link.input)
            merge = recount if link.reshaped else adopt
            verdict.faults.extend(merge(output, source))
            verdict.code = code(output, source) if verdict.faults else verdict.code
    return verdict


# -- operators and calls


def _input(node: ir.Node, k: int) -> ir.Value:
    value = node.inputs[k]
    if value is None:
        raise ValueError(f"{node.op_type} has no input {k}")
    return value


def _update(node: ir.Node) -> Verdict:
    """CacheUpdate and TensorScatter: values like the cache but for the axis of tokens."""
    cache, values = _input(node, 0), _input(node, 1)
    if cache.shape is None:
        if "batch_axis" in node.attributes and node.attributes["batch_axis"].as_int() != 0:
            fault = f"the rank of {called(cache)} must be known for `batch_axis`"
            return Verdict([fault], repair="Reshape it to a shape that is known, or declare one.")
        return Verdict(_element_type(cache, values))
    rank = cache.shape.rank()
    axis = _axis(node, "axis", -2, rank)
    batched = node.domain == "" or "batch_axis" in node.attributes
    batch_axis = _axis(node, "batch_axis", 0, rank) if batched else None
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "linear"
    faults = [
        f"`{name}` of `{node.op_type}` is outside of the {rank} dimensions of {called(cache)}"
        for name, found in (("axis", axis), ("batch_axis", batch_axis))
        if found == _NO_AXIS
    ]
    if not faults and axis == batch_axis:
        faults.append(f"`axis` and `batch_axis` of `{node.op_type}` are both {axis}")
    if mode not in ("linear", "circular"):
        faults.append(f"`mode` of `{node.op_type}` is linear or circular, not {mode}")
    if faults:
        repair = f"Name two axes of {called(cache)}, and one of the two modes."
        return Verdict(faults, repair=repair)
    verdict = agree(cache, values, node, but=(axis,))
    position = node.inputs[2] if len(node.inputs) > 2 else None
    if not verdict.faults and position is not None:
        _indices(verdict, node, position, batch_axis, scalar=node.domain != "")
    return verdict


def _reorder(node: ir.Node) -> Verdict:
    cache, indices = _input(node, 0), _input(node, 1)
    verdict = Verdict()
    if cache.shape is None:
        return verdict
    axis = _axis(node, "batch_axis", 0, cache.shape.rank())
    if axis == _NO_AXIS:
        verdict.faults.append(f"`batch_axis` is outside of the dimensions of {called(cache)}")
        verdict.repair = f"Name an axis of {called(cache)}."
    else:
        _indices(verdict, node, indices, axis, scalar=False)
    return verdict


def _indices(
    verdict: Verdict, node: ir.Node, indices: ir.Value, axis: int | None, scalar: bool
) -> None:
    """INT64, a scalar where that is allowed, or one for each row along ``axis``."""
    if indices.dtype not in (None, ir.DataType.INT64):
        verdict.faults.append(f"{called(indices)} is {indices.dtype}, not INT64")
        verdict.repair = f"Cast {called(indices)} to INT64."
    if indices.shape is None or verdict.faults:
        return
    rank = indices.shape.rank()
    if rank == 0 and scalar:
        return
    if rank != 1:
        wanted = "a scalar, or one number for each row" if scalar else "one number for each row"
        verdict.faults.append(f"{called(indices)} has {rank} dimensions, it is {wanted}")
        verdict.repair = "Reshape it."
    elif axis is None:
        verdict.faults.append(f"{called(indices)} holds one number for each row of no axis")
        verdict.repair = "Pass `batch_axis=...`, the axis of these rows, or a scalar."
    else:
        compare(verdict, Equality(node, _input(node, 0), axis, indices, 0))


def _call(node: ir.Node, summary: Summary) -> Verdict:
    """Arguments against declared parameters; one symbol of the callee is one length."""
    verdict = Verdict()
    bound: dict[str, tuple[ir.Value, int]] = {}
    for value, parameter in zip(node.inputs, summary.parameters, strict=False):
        if value is None:
            continue
        formal = parameter.value
        if parameter.access is Access.READ_WRITE or is_paged(value) or is_paged(formal):
            verdict.faults.extend(_element_type(value, formal))
            verdict.code = code(value, formal) if verdict.faults else verdict.code
        if verdict.faults or value.shape is None or formal.shape is None:
            continue
        if parameter.access is Access.READ_WRITE and (faults := _rank(value, formal)):
            verdict.faults.extend(faults)
            continue
        for k, (given, wanted) in enumerate(zip(value.shape, formal.shape, strict=False)):
            if isinstance(wanted, int):
                if isinstance(given, int) and given != wanted:
                    verdict.faults.append(_differs(value, k, formal, k))
            elif wanted.value is not None:
                first = Verdict()
                compare(
                    first, Equality(node, *bound.setdefault(wanted.value, (value, k)), value, k)
                )
                verdict.faults.extend(
                    first.faults
                )  # what is not certain is judged where it is used
    return verdict


# -- dimensions

_NO_AXIS = -1


def _axis(node: ir.Node, name: str, default: int, rank: int) -> int:
    axis = node.attributes[name].as_int() if name in node.attributes else default
    return axis % rank if -rank <= axis < rank else _NO_AXIS


def _element_type(a: ir.Value, b: ir.Value) -> list[str]:
    """Fills in the type that one of them lacks, or that a tool has left only a carrier of."""
    for value, other in ((a, b), (b, a)):
        if is_carrier(value) and is_paged(other):
            value.type, value.shape = other.type, other.shape
    if a.type is None:
        a.type = b.type
    elif b.type is None:
        b.type = a.type
    elif is_paged(a) or is_paged(b):
        if a.type != b.type:
            return [f"{called(a)} is {_pages(a)}, {called(b)} is {_pages(b)}"]
    elif a.dtype != b.dtype:
        return [f"{called(a)} is {a.dtype}, {called(b)} is {b.dtype}"]
    return []


def _pages(value: ir.Value) -> str:
    return str(value.type) if is_paged(value) else "no paged cache"


def _rank(a: ir.Value, b: ir.Value) -> list[str]:
    if a.shape is None or b.shape is None or a.shape.rank() == b.shape.rank():
        return []
    return [f"{called(a)} has {a.shape.rank()} dimensions, {called(b)} {b.shape.rank()}"]


def _count(value: ir.Value) -> int | None:
    if value.shape is None or not value.shape.is_static():
        return None
    return math.prod(d for d in value.shape if isinstance(d, int))


def _unnamed(dim: Dimension) -> bool:
    return not isinstance(dim, int) and dim.value is None


def _differs(a: ir.Value, j: int, b: ir.Value, k: int) -> str:
    x, y = (() if v.shape is None else v.shape.dims for v in (a, b))
    return f"axis {j} of {called(a)} is {x[j]}, axis {k} of {called(b)} is {y[k]}"


def compare(verdict: Verdict, equality: Equality) -> None:
    """Equal, different, or left to the run: note in ``verdict`` what two axes are."""
    left, right = equality.left, equality.right
    if left.shape is None or right.shape is None:  # not even the rank is known
        verdict.equalities.append(equality)
        return
    a, b = left.shape[equality.left_axis], right.shape[equality.right_axis]
    if isinstance(a, int) and isinstance(b, int):
        if a != b:
            verdict.faults.append(_differs(left, equality.left_axis, right, equality.right_axis))
    elif _unnamed(a) or _unnamed(b) or a != b:
        verdict.equalities.append(equality)
