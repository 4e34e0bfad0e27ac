"""What a plan lists for its reader: what copies, what reads too much, what is left to run time.

Texts and places only; what a run checks is decided in ``positions``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx_ir as ir
import sympy

from onnx_inplace.compiler import contract, integrity, paged_rules, partition, symbols
from onnx_inplace.compiler.capacity import Judgement, Verdict
from onnx_inplace.compiler.conditions import MOST, Kind, Linear
from onnx_inplace.compiler.errors import Location
from onnx_inplace.compiler.notes import Condition, Copied, Fallback
from onnx_inplace.compiler.paged_types import PagedType
from onnx_inplace.compiler.positions import Bound, Checks, Static
from onnx_inplace.compiler.steps import WriteAfterRead

_NO_CONTENT = {"Shape", "Size"}  # read what is known of a tensor, not its bytes
_FEW = 8  # numbers that stand in a text
_CONTAINERS = {
    "SequenceConstruct": "a sequence holds values of its own",
    "SequenceInsert": "a sequence holds values of its own",
    "Optional": "an optional value holds a value of its own",
}


def copies(nodes: list[ir.Node], facts: partition.Facts) -> tuple[Copied, ...]:
    """What ``kv.Copy`` asks for, and what cannot hold a root without copying it."""
    return tuple(_copies(nodes, facts))


def _copies(nodes: list[ir.Node], facts: partition.Facts) -> Iterator[Copied]:
    for node in nodes:
        source = node.inputs[0] if node.inputs else None
        root = facts.roots.get(source) if source is not None else None
        name = root.name if root is not None else None
        value = node.outputs[0].name or ""
        if (node.domain, node.op_type) == (contract.DOMAIN, "Copy"):
            yield Copied(value, name, "kv.Copy asks for it", integrity.source(node))
        elif node.domain == "" and node.op_type in _CONTAINERS:
            for held in dict.fromkeys(node.inputs):
                if held is not None and held in facts.roots:
                    reason = _CONTAINERS[node.op_type]
                    yield Copied(value, facts.roots[held].name, reason, integrity.source(node))
        elif node.domain == "" and node.op_type == "Scan":
            yield from _sliced(node, facts)


def _sliced(node: ir.Node, facts: partition.Facts) -> Iterator[Copied]:
    """Elements along an inner axis are not contiguous in the root: each is copied for its round."""
    body = node.attributes["body"].as_graph()
    scanned = node.attributes["num_scan_inputs"].as_int()
    axes = (
        node.attributes["scan_input_axes"].as_ints() if "scan_input_axes" in node.attributes else ()
    )
    for whole, element, axis in zip(
        node.inputs[-scanned:], body.inputs[-scanned:], axes, strict=False
    ):
        if whole is not None and whole in facts.roots and axis != 0:
            yield Copied(
                element.name or "",
                facts.roots[whole].name,
                "a Scan takes it apart along an inner axis",
                integrity.source(node),
            )


def fallbacks(nodes: list[ir.Node], facts: partition.Facts) -> tuple[Fallback, ...]:
    """Ordinary nodes that read the bytes of a root: all of them, not only its valid part."""
    return tuple(
        Fallback(node.op_type, str(root.name), integrity.source(node))
        for node in nodes
        if not facts.is_special(node)
        and not (node.domain == "" and node.op_type in {*_NO_CONTENT, *_CONTAINERS})
        for root in dict.fromkeys(
            facts.roots[v] for v in node.inputs if v is not None and v in facts.roots
        )
    )


def write_after_read(orders: Iterable[partition.Order]) -> tuple[WriteAfterRead, ...]:
    """Reads of old versions that stand before what writes over them."""
    return tuple(
        WriteAfterRead(
            conflict.root.name or "",
            conflict.reader.outputs[0].name or "",
            conflict.writer.outputs[0].name or "",
        )
        for order in orders
        for conflict in order.conflicts
    )


def conditions(
    judgements: Iterable[Judgement],
    checks: Checks,
    nodes: Iterable[ir.Node],
    pages: Mapping[ir.Value, ir.Value],
) -> tuple[Condition, ...]:
    """What is left to a run: positions, shapes, page tables; each once, in program order.

    Args:
        judgements: of positions, indices and lengths.
        checks: of a run.
        nodes: of the model, those of bodies included.
        pages: paged values and their roots.
    """
    return (
        *_listed(judgements, Verdict.OPEN),
        *_of_shapes(checks),
        *dict.fromkeys(_of_pages(nodes, pages)),
    )


def proofs(judgements: Iterable[Judgement]) -> tuple[Condition, ...]:
    """What holds in every run, each once, in the order of the program."""
    return _listed(judgements, Verdict.PROVED)


def _of_shapes(checks: Checks) -> tuple[Condition, ...]:
    """Sizes that must agree, where those of the inputs do not say that they do."""
    found = [
        Condition(f"{text} (`{static.bound.root}`)", static.bound.root, _place(static.bound))
        for static in checks.static
        if static.bound.kind is Kind.SHAPE
        for text in _unequal(static)
    ]
    bounds = [*(checks.sliced.bounds if checks.sliced is not None else ())]
    bounds += (late.bound for late in checks.late)
    found += (
        Condition(f"the shape of {bound.port} fits `{bound.root}`", bound.root, _place(bound))
        for bound in bounds
        if bound.kind is Kind.SHAPE
    )
    return tuple(dict.fromkeys(found))


def _unequal(static: Static) -> Iterator[str]:
    bound = static.bound
    for size, low, high in zip(static.sizes, bound.low, bound.high, strict=True):
        if size != high:
            relation = "==" if low == high else "<="
            left, right = (symbols.expression(side) for side in (size, high))
            yield f"{left} {relation} {right}"


def _place(bound: Bound) -> Location | None:
    return None if bound.location is None else integrity.located(bound.location)


def _listed(judgements: Iterable[Judgement], verdict: Verdict) -> tuple[Condition, ...]:
    found = (
        Condition(_text(j), j.requirement.root, integrity.source(j.requirement.node))
        for j in judgements
        if j.verdict is verdict
    )
    return tuple(dict.fromkeys(found))


def _text(judgement: Judgement) -> str:
    """What must hold, in the author's names; counters of loops stand at their extremes.

    Of what is left open, the end that holds in every run is not said.
    """
    r, proved = judgement.requirement, judgement.verdict is Verdict.PROVED
    name = str(r.subject.name) if isinstance(r.subject, ir.Value) else r.port
    lowest = name if judgement.lowest is None else symbols.text(judgement.lowest)
    capacity = r.capacity[0] if len(r.capacity) == 1 else None
    room = _known(judgement.capacity, capacity, "the capacity")
    parts = []
    if proved or judgement.lowest is None or not judgement.lowest.is_nonnegative:
        low = r.low[0] if len(r.low) == 1 else None
        parts.append(f"{_known(None, low, '0')} <= {lowest}")
    if not any(high.constant == MOST for high in r.high):
        parts.append(f"{_end(judgement, name)} <= {room}")
    return f"{' and '.join(parts)} (`{r.root}`)"


def _end(judgement: Judgement, name: str) -> str:
    """Where the last write ends, or the last number that is read."""
    r, highest, length = judgement.requirement, judgement.highest, judgement.length
    if r.kind is Kind.LENGTH:
        return name if highest is None else symbols.text(highest)
    if (
        highest is not None
        and length is not None
        and not (highest.is_Symbol or highest.is_positive)
    ):
        return symbols.text(sympy.expand(highest + length))
    start = name if highest is None else symbols.text(highest)
    return f"{start} + {_known(length, r.length, 'its length')}"


def _known(expression: sympy.Expr | None, term: Linear | None, otherwise: str) -> str:
    """An expression of dimensions, or how the author would write the term."""
    if expression is not None:
        return symbols.text(expression)
    if term is None:
        return otherwise
    text = "" if term.axes and not term.constant else str(term.constant)
    for factor, value, axis in term.axes:
        sign = " - " if factor < 0 else " + " if text else ""
        times = "" if abs(factor) == 1 else f"{abs(factor)} * "
        text += f"{sign}{times}{value.name}.shape[{axis}]"
    return text.strip()


def _of_pages(nodes: Iterable[ir.Node], pages: Mapping[ir.Value, ir.Value]) -> Iterator[Condition]:
    """What page tables must allow."""
    for node in nodes:
        if not paged_rules.is_paged_operator(node):
            continue
        cache = node.inputs[paged_rules.CACHE_PORT[node.domain, node.op_type]]
        ids = node.inputs[2 if node.op_type == "PagedAttention" else 1]
        if cache is None or ids is None or not isinstance(cache.type, PagedType):
            continue
        root, new = str(pages[cache].name), None
        if node.op_type == "PagedCacheUpdate":
            new = paged_rules.created_format(node, cache.type)
        needed = "exist"
        if new is not None:
            which = "or are made" if cache.type.sparse else "or are the next ones, made"
            needed = f"exist {which} as {new}"
        if contract.rule(node) is not None:
            needed += ", and have one owner"
        text = f"pages {_ids(ids)} of `{root}` {needed}"
        yield Condition(text, root, integrity.source(node))


def _ids(value: ir.Value) -> str:
    constant = value.const_value
    if constant is not None and constant.size <= _FEW:
        return ", ".join(map(str, constant.numpy().reshape(-1).tolist()))
    return f"`{value.name}`"
