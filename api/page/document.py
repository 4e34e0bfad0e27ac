"""The page as a whole: what it says first, and the sections behind it."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from collections.abc import Mapping
from pathlib import PurePath
from xml.etree.ElementTree import Element

from onnx_inplace.compiler import steps, verifier
from onnx_inplace.compiler.memory import Memory
from onnx_inplace.page import (
    amounts,
    conditions,
    facts,
    lanes,
    listing,
    markup,
    memory,
    sample,
    storage,
)
from onnx_inplace.page.facts import Kind, Row
from onnx_inplace.page.markup import e
from onnx_inplace.page.sample import Sample

_SECTIONS = {
    "conditions": "Proofs",
    "memory": "Memory",
    "storage": "Storage",
    "steps": "Steps",
}


def render(plan: steps.ExecutionPlan, path: str, dims: Mapping[str, int]) -> str:
    """The page of a plan, which is verified first.

    Args:
        plan: what is shown.
        path: of the model, for the title.
        dims: sizes for numbers and pictures; example sizes stand in for those that are missing.

    Raises:
        errors.BindingError: a dimension is unknown or no size.
        errors.ContractError: no run with these dimensions is possible.
        errors.PlanError: the verifier refuses the plan.
    """
    given = sample.sample(plan, dims)
    verifier.verify(plan, **({} if given is None else given.dims))
    program = facts.program(plan)
    rows = list(facts.rows(program.entries))
    storages = lanes.storages(plan, program)
    held = {} if given is None else {(m.block, m.step): m for m in plan.moments(**given.dims)}
    name = PurePath(path).name
    main = e(
        "main",
        conditions.section(plan, len(rows)),
        memory.section(plan, rows, given),
        storage.section(storages),
        listing.section(program, held, plan.fused),
        id="main",
    )
    body = e("body", _skip(), _header(plan, rows, name, given), _bar(), main, _script())
    return markup.document(e("html", _head(name), body, lang="en"))


def _head(name: str) -> Element:
    digest = base64.b64encode(hashlib.sha256(_file("page.js").encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return e(
        "head",
        e("meta", charset="utf-8"),
        e("meta", http_equiv="Content-Security-Policy", content=policy),
        e("meta", name="viewport", content="width=device-width, initial-scale=1"),
        e("meta", name="color-scheme", content="light dark"),
        e("title", f"{name}: execution plan"),
        e("style", _file("page.css")),
    )


def _script() -> Element:
    return e("script", _file("page.js"))


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _skip() -> Element:
    return e("a", "Skip to the plan", href="#main", class_="skip")


def _bar() -> Element:
    links = [e("li", e("a", title, href=f"#{name}")) for name, title in _SECTIONS.items()]
    search = e(
        "form",
        e("label", "Find", for_="find"),
        e(
            "input",
            type="search",
            id="find",
            placeholder="value, operator, line",
            autocomplete="off",
        ),
        e("output", for_="find", id="found", aria_live="polite"),
        role="search",
    )
    return e("nav", e("ul", links), search, aria_label="Sections")


def _header(plan: steps.ExecutionPlan, rows: list[Row], name: str, given: Sample | None) -> Element:
    formulas = plan.memory()
    numbers = None if given is None else plan.memory(**given.dims)
    return e(
        "header",
        e("p", "execution plan", class_="kicker"),
        e("h1", name),
        e("p", _verdict(plan), class_="verdict"),
        e("dl", _tiles(plan, rows, formulas, numbers), class_="tiles"),
    )


def _verdict(plan: steps.ExecutionPlan) -> str:
    written = {alias.root for alias in plan.must_alias}
    mutable = len(plan.mutable)
    copied = [copy for copy in plan.copies if copy.root is not None]
    if not mutable:
        return "This model has no mutable input: it changes nothing of the caller's."
    all_ = {1: "The mutable input is", 2: "Both mutable inputs are"}
    whose = all_.get(mutable, f"All {mutable} mutable inputs are")
    if len(written) < mutable:
        whose = f"{len(written)} of {mutable} mutable inputs are"
    cost = (
        "No step copies a cache."
        if not copied
        else (
            "The author asks for 1 copy of a cache."
            if len(copied) == 1
            else f"{len(copied)} values are copies out of caches."
        )
    )
    return f"{whose} updated in place. {cost}"


def _tiles(
    plan: steps.ExecutionPlan, rows: list[Row], formulas: Memory, numbers: Memory | None
) -> list[Element]:
    of_library = sum(row.kind is Kind.LIBRARY for row in rows)
    writes = sum(row.kind is Kind.WRITE for row in rows)
    caches = formulas.caches if numbers is None else numbers.caches
    peak = formulas.peak if numbers is None else numbers.peak
    copied = formulas.extra_cache_bytes if numbers is None else numbers.extra_cache_bytes
    checks = len(plan.conditions)
    return [
        _tile("Storages", f"{len(plan.mutable)}", amounts.brief(caches)),
        _tile("Copied", amounts.brief(copied), "of caches, in one run"),
        _tile("Peak", amounts.brief(peak), "with caches" if numbers is not None else "formula"),
        _tile("Steps", f"{len(rows)}", f"{writes} write, {of_library} in onnxruntime"),
        _tile("Left to a run", f"{checks}", "conditions" if checks != 1 else "condition"),
    ]


def _tile(title: str, value: str, note: str) -> Element:
    return e("div", e("dt", title), e("dd", value), e("dd", note, class_="note"))
