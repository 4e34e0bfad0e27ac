"""The page of a plan: its facts are the plan's, in the file and in a browser."""

from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element

import browser
import file_programs
import onnx
import pytest
from decoders import Shape, decoder
from onnx import helper

from onnx_inplace import compiler, errors, formats, page
from onnx_inplace.compiler import steps
from onnx_inplace.dsl import FLOAT16, INT64, Alias, Mutable, Paged, kv, model

SIZES = {"heads": 2, "capacity": 64, "n": 3, "batch": 2, "t": 5, "m": 16}


def planned(name: str) -> tuple[steps.ExecutionPlan, dict[str, int]]:
    plan = compiler.plan(file_programs.ALL[name])
    return plan, {name: SIZES[name] for name in plan.footprint.dims}


def read(plan: steps.ExecutionPlan, dims: dict[str, int]) -> Element:
    return browser.parse(page.render(plan, "a/model.onnx", dims))


def all_steps(block: steps.Block) -> Iterator[steps.Step]:
    for step in block.steps:
        yield step
        match step:
            case steps.Branch():
                yield from all_steps(step.then)
                yield from all_steps(step.otherwise)
            case steps.Repeat() | steps.ScanStep():
                yield from all_steps(step.body)


def check_facts(document: Element, plan: steps.ExecutionPlan, dims: dict[str, int]) -> None:
    """All that a reader sees of steps, storage, memory and conditions."""
    rows = list(browser.of_class(document, "row"))
    expected = list(all_steps(plan.block))
    assert len(rows) == len(expected)
    for row, step in zip(rows, expected, strict=True):
        (operation,) = browser.of_class(row, "operation")
        operator = browser.text(next(operation.iter("b")))
        if isinstance(step, steps.Kernel | steps.View):
            assert operator == step.op_type
        kernel = isinstance(step, steps.Kernel)
        writes = browser.text(next(browser.of_class(operation, "effect"), Element("none")))
        if kernel:
            assert writes.removeprefix("writes ") == ", ".join(dict.fromkeys(step.roots.values()))
        (makes,) = browser.of_class(row, "makes")
        made = [(name.text or "").strip() for name in makes.iter("code")]
        if kernel or isinstance(step, steps.View):
            slots = step.outputs if isinstance(step, steps.Kernel) else (step.output,)
            names = [plan.values[slot].name for slot in slots if slot is not None]
            assert made == names
    articles = list(browser.of_class(document, "storage"))
    assert sorted(a.get("data-root", "") for a in articles) == sorted(plan.mutable)
    for article in articles:
        root = article.get("data-root")
        shown = {
            browser.text(name)
            for names in browser.of_class(article, "names")
            for name in names.iter("code")
        }
        assert shown == {v.name for v in plan.values if v.root == root}
    memory = plan.memory(**dims)
    for part in ("caches", "values", "workspace", "pages", "peak"):
        cell = browser.by_id(document, f"bytes-{part}")
        assert browser.text(cell) == f"{getattr(memory, part):,}"
    for kind, notes in (("open", plan.conditions), ("proved", plan.proofs)):
        said = browser.text(browser.by_id(document, f"notes-{kind}"))
        for note in notes:
            assert note.text.removesuffix(f" (`{note.root}`)") in said and note.root in said
    if plan.copies:
        said = browser.text(browser.by_id(document, "notes-copies"))
        assert all(copy.value in said for copy in plan.copies)


@pytest.mark.parametrize("name", file_programs.ALL)
def test_the_facts_are_those_of_the_plan(name: str) -> None:
    plan, dims = planned(name)
    check_facts(read(plan, dims), plan, dims)


@pytest.mark.parametrize("name", ["loop", "recurrent", "variants", "layers"])
def test_a_browser_shows_the_same_and_complains_of_nothing(name: str, tmp_path: Path) -> None:
    plan, dims = planned(name)
    path = tmp_path / "page.html"
    path.write_text(page.render(plan, "model.onnx", dims), encoding="utf-8")
    document, console = browser.opened(path)
    assert console == []
    check_facts(document, plan, dims)


def test_finding_hides_what_does_not_match_and_opens_what_does(tmp_path: Path) -> None:
    plan = compiler.plan(file_programs.layers(12))
    path = tmp_path / "page.html"
    path.write_text(page.render(plan, "model.onnx", {}), encoding="utf-8")
    document, console = browser.opened(path, "#find=caches.7")
    assert console == []
    hits = [row for row in browser.of_class(document, "row") if "hit" in row.get("class", "")]
    misses = [row for row in browser.of_class(document, "row") if "miss" in row.get("class", "")]
    assert len(hits) == 1 and "caches.7" in browser.text(hits[0]) and len(misses) > 10
    folds = [fold for fold in document.iter("details") if hits[0] in list(fold.iter())]
    assert folds and all("open" in fold.attrib for fold in folds)
    closed, _ = browser.opened(path)
    assert not any("open" in fold.attrib for fold in closed.iter("details"))


def test_a_link_opens_what_its_step_is_folded_into(tmp_path: Path) -> None:
    plan = compiler.plan(file_programs.layers(12))
    path = tmp_path / "page.html"
    path.write_text(page.render(plan, "model.onnx", {}), encoding="utf-8")
    document, _ = browser.opened(path, "#step-9")
    target = browser.by_id(document, "step-9")
    folds = [fold for fold in document.iter("details") if target in list(fold.iter())]
    assert folds and all("open" in fold.attrib for fold in folds)


def test_control_flow_is_nested_in_the_history_of_a_storage() -> None:
    plan, dims = planned("loop")
    document = read(plan, dims)
    (cache,) = (a for a in browser.of_class(document, "storage") if a.get("data-root") == "cache")
    (lane,) = (ol for ol in cache.iter("ol") if ol in list(cache[1]))
    kinds = [item.get("class") for item in lane]
    assert kinds == ["state", "nested", "state"]  # cache, Loop, updated_cache
    nested = [item for item in lane[1].iter("li") if item.get("class") == "nested"]
    assert ["If" in browser.text(item) for item in nested[-1:]] == [True]
    (write,) = (item for item in cache.iter("li") if item.get("class") == "write")
    assert "CacheUpdate" in browser.text(write) and "in append()" in browser.text(write)
    versions = [browser.text(v) for v in browser.of_class(cache, "version")]
    assert [v.removeprefix("version ") for v in versions] == [
        "@0",
        "@1",
        "@1",
        "@2",
        "@1",
        "@3",
        "@4",
    ]


def test_calls_stand_around_their_steps() -> None:
    document = read(*planned("calls"))
    groups = list(browser.of_class(document, "group"))
    titles = [browser.text(next(browser.of_class(group, "call"))) for group in groups]
    assert [title.split("()")[0] for title in titles] == ["twice", "append", "append"] * 2
    inner = list(browser.of_class(groups[0], "group"))
    assert len(inner) == 3  # itself, and both calls in it


def test_what_repeats_is_folded_and_complete() -> None:
    plan = compiler.plan(file_programs.layers(30))
    document = read(plan, {})
    rows = list(browser.of_class(document, "row"))
    assert len(rows) == len(list(all_steps(plan.block)))
    folded = {row for fold in document.iter("details") for row in browser.of_class(fold, "row")}
    assert len(rows) - len(folded) < 10
    storages = list(browser.of_class(document, "storage"))
    hidden = {s for fold in document.iter("details") for s in browser.of_class(fold, "storage")}
    assert len(storages) == 30 and len(hidden) == 28  # one has a history of its own


def test_a_page_needs_nothing_but_itself() -> None:
    document = read(*planned("variants"))
    for element in document.iter():
        for name in ("src", "href", "action", "data"):
            assert element.get(name, "#").startswith("#"), element.attrib
    style = browser.text(next(document.iter("style")))
    assert "url(" not in style and "@import" not in style
    (policy,) = (m for m in document.iter("meta") if m.get("http-equiv"))
    assert policy.get("content", "").startswith("default-src 'none'")


def test_names_of_a_model_are_text(tmp_path: Path) -> None:
    cache, new = "<script>alert('x')</script>", '"><img src=x onerror=alert(1)>&amp;'
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("TensorScatter", [cache, new, "at"], ["</style>"], axis=1)],
        "odd",
        [
            tensor(cache, onnx.TensorProto.FLOAT, ["b", "m", 4]),
            tensor(new, onnx.TensorProto.FLOAT, ["b", "n", 4]),
            tensor("at", onnx.TensorProto.INT64, ["b"]),
        ],
        [tensor("</style>", onnx.TensorProto.FLOAT, ["b", "m", 4])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
    onnx.save(model, tmp_path / "odd.onnx")
    compiler.annotate(tmp_path / "odd.onnx", tmp_path / "done.onnx")
    plan = compiler.plan(tmp_path / "done.onnx")
    text = page.render(plan, "<b>.onnx", {})
    document = browser.parse(text)
    assert len(list(document.iter("script"))) == 1 and not list(document.iter("img"))
    assert browser.text(next(document.iter("h1"))) == "<b>.onnx"
    (article,) = browser.of_class(document, "storage")
    assert article.get("data-root") == cache
    path = tmp_path / "odd.html"
    path.write_text(text, encoding="utf-8")
    shown, console = browser.opened(path)
    assert console == [] and not list(shown.iter("img"))


def test_sizes_are_chosen_where_none_are_given_and_said_to_be() -> None:
    plan, _ = planned("plain")
    document = read(plan, {"n": 2})
    (dims,) = browser.of_class(document, "dims")
    said = [browser.text(item) for item in dims.iter("li")]
    assert said == ["heads = 1 chosen", "capacity = 1,024 chosen", "n = 2"]


def test_impossible_sizes_are_refused() -> None:
    plan, _ = planned("plain")
    with pytest.raises(errors.ContractError) as caught:
        page.render(plan, "m.onnx", {"heads": 1, "capacity": 4, "n": 5})
    assert {finding.code for finding in caught.value.findings} == {"E112"}
    with pytest.raises(errors.BindingError):
        page.render(plan, "m.onnx", {"rows": 5})


def test_a_plan_that_breaks_its_promise_has_no_page() -> None:
    plan, dims = planned("plain")
    broken = steps.ExecutionPlan(
        **{
            **{f: getattr(plan, f) for f in plan.__dataclass_fields__},
            "must_alias": (),
        }
    )
    with pytest.raises(errors.PlanError):
        page.render(broken, "m.onnx", dims)


def test_pages_are_storage_too() -> None:
    pages = Paged[FLOAT16[2, 1, 16, 32], formats.FLOAT16, formats.INT8]

    @model
    def program(
        cache: Mutable[pages], page: INT64[()], new: FLOAT16[2, 1, "n", 32], at: INT64[()]
    ) -> Alias["cache"]:
        return kv.PagedCacheUpdate(cache, page, new, at, quantized_type="INT8")

    plan = compiler.plan(program)
    document = read(plan, {"n": 1})
    (article,) = browser.of_class(document, "storage")
    title = browser.text(next(article.iter("h3")))
    assert "Paged[FLOAT16[2, 1, 16, 32], FLOAT16, INT8]" in title
    said = browser.text(browser.by_id(document, "notes-open"))
    assert all(note.text.split(" (`")[0].replace("`", "") in said for note in plan.conditions)
    added = browser.text(browser.by_id(document, "notes-pages"))
    assert plan.new_pages and all(str(new).replace("`", "") in added for new in plan.new_pages)


def test_what_runs_with_few_rows_do_is_said() -> None:
    plan = compiler.plan(decoder(Shape()))
    (region,) = plan.fused.regions
    said = browser.text(browser.by_id(read(plan, {}), "fused"))
    assert (
        said == f"Runs with at most 4 rows compute {region.nodes} of the nodes below in one call."
    )
    assert not [p for p in read(*planned("plain")).iter("p") if p.get("id") == "fused"]


def test_one_plan_gives_one_page() -> None:
    plan, dims = planned("layers")
    again, _ = planned("layers")
    assert page.render(plan, "m.onnx", dims) == page.render(again, "m.onnx", dims)
