"""The section of steps: a list in the order of the program, what repeats folded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from xml.etree.ElementTree import Element

from onnx_inplace.compiler.fused import ROWS, Fusion
from onnx_inplace.compiler.moments import Moment
from onnx_inplace.page import folding
from onnx_inplace.page.facts import Entry, Group, Kind, Part, Ref, Row, rows
from onnx_inplace.page.folding import Repeated
from onnx_inplace.page.markup import code, e, hidden

Held = Mapping[tuple[int, int], Moment]

_WORDS = {
    Kind.LIBRARY: "library",
    Kind.WRITE: "writes",
    Kind.KERNEL: "kernel",
    Kind.VIEW: "view",
    Kind.CONTROL: "control",
}


def section(program: Part, held: Held, fused: Fusion) -> Element:
    """All steps; ``held``: bytes in use, by place; ``fused``: what few rows take instead."""
    head = e(
        "div",
        [e("span", title) for title in ("Step", "Operation", "Makes", "Reads", "Held", "Source")],
        class_="heading",
        aria_hidden="true",
    )
    text = "One run, from top to bottom. Every read stands before the write that ends its version."
    steps = e("div", head, _list(program.entries, held, 0), class_="steps")
    return e("section", e("h2", "Steps"), e("p", text), _fused(fused), steps, id="steps")


def _fused(fused: Fusion) -> Element | None:
    if not fused.regions:
        return None
    nodes = sum(region.nodes for region in fused.regions)
    calls = "one call" if len(fused.regions) == 1 else f"{len(fused.regions)} calls"
    text = f"Runs with at most {ROWS} rows compute {nodes} of the nodes below in {calls}."
    return e("p", text, class_="note", id="fused")


def _list(entries: Iterable[Entry], held: Held, depth: int) -> Element:
    items = []
    for item in folding.repetitions(list(entries), folding.entry_signature):
        if isinstance(item, Repeated):
            items += [_entry(entry, held, depth) for entry in item.first]
            items.append(_folded(item, held, depth))
        else:
            items.append(_entry(item, held, depth))
    return e("ol", items)


def _folded(item: Repeated[Entry], held: Held, depth: int) -> Element:
    numbers = [row.number for row in rows(item.others)]
    again = [row.number for row in rows(item.first)]
    like = again[0] if len(again) == 1 else f"{again[0]} to {again[-1]}"
    summary = e(
        "summary",
        f"{item.count - 1} more like {like}: ",
        e("span", f"steps {numbers[0]} to {numbers[-1]}", class_="muted"),
    )
    others = e("ol", [_entry(entry, held, depth) for entry in item.others])
    return e("li", e("details", summary, others, class_="fold"), style=_deep(depth))


def _entry(entry: Entry, held: Held, depth: int) -> Element:
    if isinstance(entry, Group):
        called = e(
            "p",
            e("b", f"{entry.function}()"),
            e("span", f" called at {entry.source}" if entry.source else "", class_="source"),
            class_="call",
            style=_deep(depth),
        )
        return e("li", called, _list(entry.entries, held, depth + 1), class_="group")
    row = _row(entry, held, depth)
    parts: list[Element] = []
    for part in entry.parts:
        title = e("p", part.title, class_="part", style=_deep(depth + 1))
        returns = e("p", "returns ", _refs(part.returns), class_="returns", style=_deep(depth + 1))
        parts += [title, _list(part.entries, held, depth + 1), returns]
    inner = e("div", parts, class_="inner") if parts else None
    return e("li", row, inner)


def _row(row: Row, held: Held, depth: int) -> Element:
    moment = held.get(row.place)
    size = "" if moment is None else f"{moment.values + moment.workspace:,}"
    effect = e("span", "writes ", _roots(row.writes), class_="effect") if row.writes else None
    return e(
        "div",
        e("span", row.number, class_="number"),
        e(
            "span",
            e("b", row.operator),
            e("span", _WORDS[row.kind], class_=f"badge {row.kind.value}"),
            e("span", row.detail, class_="detail") if row.detail else None,
            effect,
            class_="operation",
        ),
        e("span", hidden("makes "), _refs(row.makes), class_="makes"),
        e("span", hidden("reads "), _refs(row.reads), class_="reads"),
        e("span", hidden("holds "), size, class_="held"),
        e("span", row.source, class_="source"),
        class_=f"row {row.kind.value}",
        id=f"step-{row.number}",
        data_find=True,
        style=_deep(depth),
    )


def _deep(depth: int) -> str | None:
    return f"--depth:{depth}" if depth else None


def _roots(roots: Iterable[str]) -> Iterator[Element | str]:
    for index, root in enumerate(roots):
        yield ", " if index else ""
        yield code(root)


def _refs(refs: Iterable[Ref]) -> Element:
    return e("span", [_ref(ref) for ref in refs], class_="refs")


def _ref(ref: Ref) -> Element:
    if ref.root is None:
        return code(ref.name)
    tag = f"@{ref.version}" if ref.name == ref.root else f"{ref.root}@{ref.version}"
    return code(f"{ref.name} ", _tag(tag), class_="aliased", data_root=ref.root)


def _tag(text: str) -> Element:
    """Whose storage a value is."""
    return e("span", text, class_="tag")
