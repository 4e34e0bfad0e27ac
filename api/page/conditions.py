"""The section on proofs: what holds in every run, what a run checks first, and what costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from onnx_inplace.compiler import steps
from onnx_inplace.compiler.new_pages import NewPages
from onnx_inplace.compiler.notes import Condition, Copied, Fallback
from onnx_inplace.page import folding
from onnx_inplace.page.markup import Child, code, e

Note = Condition | Copied | Fallback | NewPages

_SHOWN = 6  # notes of one kind before the others are folded
_MEANING = {
    "Proved": "Holds in every run.",
    "Checked in a run": "Depends on inputs. A run that is refused has written nothing.",
    "New pages": "The most that a run adds to paged caches.",
    "Copies": "What copies a storage, a view of one, or a value on request.",
    "Read over the whole capacity": "Standard operators that read all of a storage, valid or not.",
    "Kept in order": "A read of an old version, which stands before the write that ends it.",
}
_NOTHING = {
    "Copies": "nothing copies a storage",
    "Read over the whole capacity": "nothing reads a whole capacity",
    "Kept in order": "no old version is read",
}
_KINDS = {
    "New pages": "pages",
    "Copies": "copies",
    "Read over the whole capacity": "fallbacks",
    "Kept in order": "order",
}


def section(plan: steps.ExecutionPlan, verified: int) -> Element:
    """``verified``: steps that the verifier followed."""
    proved = [*_storage(plan, verified), *_notes(plan.proofs)]
    costs = {
        "New pages": list(_notes(plan.new_pages)),
        "Copies": list(_notes(plan.copies)),
        "Read over the whole capacity": list(_notes(plan.fallbacks)),
        "Kept in order": list(_order(plan.write_after_read)),
    }
    empty = [_NOTHING[title] for title in _NOTHING if not costs[title]]
    nothing = e("p", f"{'; '.join(empty).capitalize()}.", class_="note", id="notes-none")
    return e(
        "section",
        e("h2", "Proofs and conditions"),
        e(
            "div",
            _column("proved", "Proved", proved),
            _column("open", "Checked in a run", list(_notes(plan.conditions))),
            [_column(_KINDS[title], title, items) for title, items in costs.items() if items],
            class_="columns",
        ),
        nothing if empty else None,
        id="conditions",
    )


def _column(kind: str, title: str, items: Sequence[Element]) -> Element:
    listed = e("ul", items[:_SHOWN]) if items else e("p", "none", class_="none")
    rest = items[_SHOWN:]
    more = e("details", e("summary", f"{len(rest)} more"), e("ul", rest), class_="fold")
    count = e("span", f"{len(items)}", class_="count")
    return e(
        "article",
        e("h3", title, " ", count),
        e("p", _MEANING[title], class_="note"),
        listed,
        more if rest else None,
        class_=f"notes {kind}",
        id=f"notes-{kind}",
    )


def _storage(plan: steps.ExecutionPlan, verified: int) -> Iterator[Element]:
    aliases = len(plan.must_alias)
    names = "1 name is" if aliases == 1 else f"{aliases} names are"
    yield e(
        "li",
        f"{names} storage of the caller; no other two live storages overlap, and every read sees "
        f"the version that it names (a verifier of its own followed {verified} steps).",
        data_find=True,
    )


def _notes(notes: Sequence[Note]) -> Iterator[Element]:
    """Notes that say the same of several storages are told once, the others folded."""
    for alike in folding.alike(notes, lambda note: folding.anonymous(_split(note)[0])):
        first, *others = alike
        yield e("li", _note(first), _others(others), data_find=True)


def _others(others: Sequence[Note]) -> Element | None:
    if not others:
        return None
    listed = e("ul", [e("li", _note(note)) for note in others])
    summary = e("summary", f"and {len(others)} more like it")
    return e("details", summary, listed, class_="fold")


def _note(note: Note) -> Child:
    source = None if note.location is None else e("span", str(note.location), class_="source")
    if isinstance(note, Condition):
        what, root = _split(note)
        said = e("span", _plain(what)) if "`" in what else code(what)
        return [said, " ", code(root, class_="root"), source]
    return [e("span", _plain(str(note))), source]


def _split(note: Note) -> tuple[str, str]:
    """What is said, and of which storage."""
    if isinstance(note, Condition):
        return note.text.removesuffix(f" (`{note.root}`)"), note.root
    return str(note), note.root or ""


def _plain(text: str) -> Iterator[Child]:
    """Text in which names stand between backquotes."""
    for index, piece in enumerate(text.split("`")):
        yield code(piece) if index % 2 else piece


def _order(edges: Sequence[steps.WriteAfterRead]) -> Iterator[Element]:
    for edge in edges:
        yield e(
            "li",
            code(edge.reader),
            " reads ",
            code(edge.root, class_="root"),
            " before ",
            code(edge.writer),
            " is written",
            data_find=True,
        )
