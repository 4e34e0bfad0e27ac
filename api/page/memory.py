"""The section on memory: a table of the parts, their proportion, and the pictures of ``chart``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.etree.ElementTree import Element

from onnx_inplace.compiler import steps
from onnx_inplace.compiler.memory import Memory
from onnx_inplace.page import amounts, chart
from onnx_inplace.page.facts import Row
from onnx_inplace.page.markup import code, e
from onnx_inplace.page.sample import Sample

_PARTS = (
    ("caches", "caches", "Lent by the caller and written in place: an update adds nothing."),
    ("values", "values", "Buffers of the arena, results, and what passes between steps."),
    ("workspace", "workspace", "Temporary bytes at the peak, of kernels and of onnxruntime."),
    ("pages", "new pages", "The most that a run adds to paged caches."),
)
_SUMS = (
    ("peak", "peak", "What running takes: the sum of these."),
    ("weights", "weights", "Of the model, and copies of them in another form."),
    ("total", "total", "Peak and weights."),
)


def section(plan: steps.ExecutionPlan, rows: Sequence[Row], given: Sample | None) -> Element:
    """What a run needs, before anything is allocated."""
    formulas = plan.memory()
    numbers = None if given is None else plan.memory(**given.dims)
    children: list[Element] = [e("h2", "Memory"), *_sizes(plan, given), _table(formulas, numbers)]
    if numbers is not None and given is not None:
        children += [_proportion(numbers), *_pictures(plan, rows, given.dims)]
    return e("section", children, id="memory")


def _sizes(plan: steps.ExecutionPlan, given: Sample | None) -> Iterator[Element]:
    if given is None:
        text = "No picture: the sizes that this page would choose fit together in no run. Say "
        yield e("p", text, code("--dims"), ".", class_="note")
    elif given.dims:
        listed: list[Element | str] = []
        for name, size in given.dims.items():
            own = name in given.chosen
            listed.append(e("li", code(name), f" = {size:,}", e("em", " chosen") if own else None))
        yield e("ul", listed, class_="dims")
        if given.chosen:
            text = "Chosen sizes are an example, for the pictures. Say your own with "
            yield e("p", text, code("--dims"), ".", class_="note")


def _table(formulas: Memory, numbers: Memory | None) -> Element:
    body = []
    for name, title, note in (*_PARTS, *_SUMS):
        size = None if numbers is None else int(getattr(numbers, name))
        body.append(
            e(
                "tr",
                e("th", e("i", class_=f"key {name}"), title, scope="row"),
                e("td", code(_formula(formulas, name))),
                None if size is None else e("td", f"{size:,}", class_="number", id=f"bytes-{name}"),
                None if size is None else e("td", amounts.short(size), class_="number short"),
                e("td", note, class_="note"),
                class_="sum" if name in ("peak", "total") else None,
            )
        )
    head = e(
        "tr",
        e("th", "Part", scope="col"),
        e("th", "Formula [bytes]", scope="col"),
        None if numbers is None else e("th", "Bytes", scope="col", class_="number", colspan="2"),
        e("th", "What it is", scope="col"),
    )
    feet = [
        e("div", e("p", text), e("ul", [e("li", code(name)) for name in names]), class_="unknown")
        for text, names in (
            ("Not counted, because data decides their size:", formulas.unknown),
            ("Estimated, because their kernels may take more:", formulas.estimates),
        )
        if names
    ]
    table = e("table", e("caption", "What a run needs at most"), e("thead", head), e("tbody", body))
    return e("div", e("div", table, class_="scroll", tabindex="0"), feet)


_LONG = 80  # characters of a sum that says more than the names of its parts
_ADDED = {"peak": "caches + values + workspace + new pages", "total": "peak + weights"}


def _formula(formulas: Memory, name: str) -> str:
    text = amounts.formula(getattr(formulas, name))
    return text if len(text) < _LONG else _ADDED.get(name, text)


def _proportion(numbers: Memory) -> Element:
    """The parts to scale. Caches are nearly all of it, which is the point."""
    peak = int(numbers.peak) or 1
    bars, said = [], []
    for name, title, _ in _PARTS:
        size = int(getattr(numbers, name))
        if size:
            share = 100 * size / peak
            bars.append(e("span", class_=f"share {name}", style=f"flex-grow:{size / peak:.6f}"))
            said.append(f"{title} {share:.1f} %" if share >= 0.1 else f"{title} under 0.1 %")
    bar = e("div", bars, class_="proportion", aria_hidden="true")
    return e("figure", bar, e("figcaption", "To scale: ", ", ".join(said) or "nothing", "."))


def _pictures(
    plan: steps.ExecutionPlan, rows: Sequence[Row], dims: Mapping[str, int]
) -> Iterator[Element]:
    found = chart.columns(plan, rows, dims)
    most = max(found, key=lambda c: c.moment.values + c.moment.workspace)
    total = most.moment.values + most.moment.workspace
    yield e("h3", "Over the steps")
    if not total:
        yield e("p", "No step holds anything beside the caches.", class_="note")
        return
    yield e(
        "p",
        "Values and workspace at each step, without the caches, which stand still. The most is ",
        e("strong", amounts.short(total)),
        ", at ",
        e("a", most.title, href=most.link) if most.link else "the end",
        ".",
    )
    kinds = (("buffers", "buffers"), ("passing", "values made anew"), ("work", "workspace"))
    yield e("ul", [e("li", e("i", class_=f"key {k}"), t) for k, t in kinds], class_="legend")
    yield e("div", chart.held(found), class_="scroll", tabindex="0")
    arenas = chart.buffers(plan, found, dims)
    if arenas:
        yield e("h3", "Where buffers stand")
        yield e(
            "p",
            "Buffers that are never alive at one step share bytes. Height is the offset in the "
            "arena, width the steps from the write to the last read.",
        )
    for number, stands in enumerate(arenas, 1):
        yield e("div", chart.arena(stands, found, number), class_="scroll", tabindex="0")
