"""The section on storage: every root as a line on which its versions stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from onnx_inplace.page import folding, lanes
from onnx_inplace.page.lanes import Item, Lane, Name, Nested, State, Storage, Write
from onnx_inplace.page.markup import code, e, hidden


def section(storages: Sequence[Storage]) -> Element:
    """The alias graph."""
    children: list[Element] = [e("h2", "Storage")]
    if not storages:
        children.append(e("p", "No input is mutable: a run changes nothing of the caller's."))
        return e("section", children, id="storage")
    text = (
        "Each line is one piece of memory that the caller lends. A box is a version of its "
        "content, with all names for it; a write makes the next version in the same bytes."
    )
    children.append(e("p", text))
    for group in folding.alike(storages, lanes.signature):
        children += _group(group)
    return e("section", children, id="storage")


def _group(group: Sequence[Storage]) -> Iterator[Element]:
    first, *others = group
    yield _storage(first)
    if len(others) == 1:
        yield _storage(others[0])
    elif others:
        names = f"{others[0].root} … {others[-1].root}"
        summary = e("summary", f"{len(others)} more with the same history: ", code(names))
        yield e("details", summary, [_storage(storage) for storage in others], class_="fold")


def _storage(storage: Storage) -> Element:
    results = [code(name) for name in storage.outputs]
    returned: list[Element | str] = []
    for name in results:
        returned += [" and " if returned else "returned as ", name]
    head = e(
        "h3",
        code(storage.root, class_="root"),
        e("span", storage.type, class_="type"),
        e("span", returned or "not returned, never written", class_="returned"),
    )
    lane = e("div", _lane(storage.lane), class_="scroll", tabindex="0")
    return e("article", head, lane, class_="storage", data_find=True, data_root=storage.root)


def _lane(lane: Lane) -> Element:
    return e("ol", [e("li", _item(item), class_=_kind(item)) for item in lane], class_="lane")


def _kind(item: Item) -> str:
    return {State: "state", Write: "write", Nested: "nested"}[type(item)]


def _item(item: Item) -> list[Element]:
    match item:
        case State():
            version = e("span", hidden("version "), f"@{item.version}", class_="version")
            names = [_name(name) for name in item.names]
            listed = e("ul", names, class_="names") if names else None
            return [version, e("div", listed, _readers(item))]
        case Write():
            return [_operator("writes", item.number, item.operator, item.calls, item.source)]
        case Nested():
            head = _operator("", item.number, item.operator, item.calls, item.source)
            if len(item.parts) == 1:
                head.append(e("span", "every round ↺", class_="part"))
                return [head, e("div", _lane(item.parts[0][1]), class_="branch")]
            parts = [
                e("div", e("p", title, class_="part"), _lane(lane), class_="branch")
                for title, lane in item.parts
            ]
            return [head, e("div", parts, class_="branches")]


def _name(name: Name) -> Element:
    view = e("span", f"{name.view} ", class_="view") if name.view else None
    shape = e("span", name.shape, class_="type") if name.shape else None
    return e("li", view, code(name.name), shape)


def _readers(state: State) -> Iterator[Element]:
    if state.readers:
        links: list[Element | str] = []
        for number, operator in state.readers:
            links += [", " if links else "", e("a", f"{number} {operator}", href=f"#step-{number}")]
        yield e("p", "read by ", links, class_="readers")


def _operator(word: str, number: str, operator: str, calls: Sequence[str], source: str) -> Element:
    path = "".join(f"in {call}() " for call in calls)
    return e(
        "p",
        e("a", f"{number} ", e("b", operator), href=f"#step-{number}"),
        hidden(f" {word}") if word else None,
        e("span", f"{path}{source}".strip(), class_="source") if path or source else None,
        class_="operator",
    )
