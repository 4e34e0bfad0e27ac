"""`onnx-inplace pages`: what a terminal, a program and a browser are told of saved pages."""

import json
import re
from pathlib import Path
from xml.etree.ElementTree import Element

import browser
import numpy as np
import pytest
from typer.testing import CliRunner

from onnx_inplace import formats
from onnx_inplace.cli.commands import app
from onnx_inplace.page import page_facts, page_map
from onnx_inplace.runner import checkpoint
from onnx_inplace.runner.pages import PagedCache

DIMS = 2, 2, 32, 64
NAMES = ["INT8"] * 3 + ["INT4", "FLOAT16"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A cache, and the same cache in floats."""
    cache, rng = PagedCache(DIMS, np.float16), np.random.default_rng(0)
    for page in range(5):
        cache.allocate_page("FLOAT16")
        cache.write(page, rng.standard_normal((2, 2, 32 if page < 4 else 7, 64)).astype("f2"), 0)
    floats, path = tmp_path / "floats.pages", tmp_path / "cache.pages"
    cache.save(floats)
    for page, name in enumerate(NAMES):
        cache.convert(page, name)
    cache.share(0)
    cache.save(path)
    return path, floats


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["pages", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def words(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_pages_are_listed_neighbours_that_look_alike_together(files) -> None:
    path, _ = files
    lines = run(path).splitlines()
    eight, four, half = (f.page_bytes(DIMS) for f in (formats.INT8, formats.INT4, formats.FLOAT16))
    assert lines[1].startswith("cache: float16[2, 2, 32, 64], 5 pages, 135 tokens")
    assert [words(line) for line in lines[2:7]] == [
        ["page", "format", "tokens", "owners", "bytes"],
        ["0", "INT8", "32", "2", f"{eight:,}"],
        ["1 to 2", "INT8", "32", "1", f"2 x {eight:,}"],
        ["3", "INT4", "32", "1", f"{four:,}"],
        ["4", "FLOAT16", "7", "1", f"{half:,}"],
    ]
    assert lines[7] == f"  INT8: 3 pages, {3 * eight:,} bytes"


def test_errors_are_those_of_the_valid_tokens(files) -> None:
    path, floats = files
    content = json.loads(run(path, "--error", floats, "--json"))
    (cache,) = content["caches"]
    stored, before = PagedCache.load(path), PagedCache.load(floats)
    for page, row in enumerate(cache["pages"]):
        fill = stored.page(page).fill
        a, b = (c.page(page).decode(np.float64)[:, :, :fill] for c in (before, stored))
        exact = [np.sqrt(((b - a)[h] ** 2).mean() / (a[h] ** 2).mean()) for h in (0, 1)]
        assert row["error"]["key"] == pytest.approx(exact[0], rel=1e-2, abs=1e-9)
        assert row["error"]["value"] == pytest.approx(exact[1], rel=1e-2, abs=1e-9)
        assert row["error"]["largest"] == pytest.approx(np.abs(b - a).max(), rel=0.1, abs=1e-9)
    errors = [row["error"]["key"] for row in cache["pages"]]
    assert errors[4] == 0 < errors[0] < errors[3]


def test_the_error_of_a_page_grows_with_what_its_format_drops(files) -> None:
    """Case 80: an INT2 page that was scaled for small numbers shows it."""
    _, floats = files
    rows = {}
    for name in ("INT8", "INT4", "INT2"):
        cache = PagedCache.load(floats)
        cache.convert(0, name)
        cache.save(floats.parent / name)
        rows[name] = page_facts.read(floats.parent / name, floats)[0].pages[0].error
    assert rows["INT8"].key < rows["INT4"].key < rows["INT2"].key


def test_an_id_that_the_copy_lacks_is_not_compared(files) -> None:
    path, floats = files
    copy = PagedCache.load(floats)
    copy.free(3)
    copy.save(floats)
    assert page_facts.read(path, floats)[0].pages[3].error is None
    assert "-" in words(run(path, "--error", floats).splitlines()[6])


def test_several_caches_are_compared_by_name(tmp_path: Path, files) -> None:
    path, floats = files
    both, other = tmp_path / "both", tmp_path / "other"
    checkpoint.save(both, {"a": PagedCache.load(path), "b": PagedCache.load(path)})
    checkpoint.save(other, {"b": PagedCache.load(floats), "c": PagedCache.load(floats)})
    done = CliRunner().invoke(app, ["pages", str(both), "--error", str(other)])
    assert done.exit_code == 1 and "no such cache: a" in done.output
    assert len(page_facts.read(both)) == 2


def test_what_is_no_saved_state_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("hello")
    done = CliRunner().invoke(app, ["pages", str(path)])
    assert done.exit_code == 1 and "no saved state" in done.output
    done = CliRunner().invoke(app, ["pages", str(tmp_path / "missing")])
    assert done.exit_code == 1
    done = CliRunner().invoke(app, ["pages", str(path), "--html", str(tmp_path / "no" / "x")])
    assert done.exit_code == 2


def found(document: Element, tag: str, kind: str) -> list[Element]:
    return [x for x in document.iter(tag) if kind in (x.get("class") or "").split()]


def test_a_browser_shows_a_cell_for_each_page(files) -> None:
    path, floats = files
    html = path.with_suffix(".html")
    assert run(path, "--error", floats, "--html", html) == f"{html}: ok\n"
    document, log = browser.opened(html)
    assert not log
    cells = [x for x in document.iter("g")]
    assert len(cells) == 5
    assert [len(found(cell, "circle", "owners")) for cell in cells] == [1, 0, 0, 0, 0]
    widths = [[float(r.get("width") or 0) for r in cell.iter("rect")][:2] for cell in cells]
    assert widths[0] == [14, 14] and widths[4][1] == pytest.approx(14 * 7 / 32, abs=0.01)
    heights = [float(found(c, "rect", "error")[0].get("height") or 0) for c in cells]
    assert heights[4] == 0 < heights[0] < heights[3]


def test_names_stay_text() -> None:
    rows = page_facts.CacheRows("<script>", DIMS, "float16", ())
    html = page_map.render([rows], "<b>.pages")
    assert "<script>" not in html and "<b>" not in html
    assert "http" not in html.replace("http-equiv", "")


def test_the_command_line_runs_on_saved_pages(tmp_path: Path) -> None:
    (tmp_path / "write.py").write_text(
        "from onnx_inplace import formats\n"
        "from onnx_inplace.dsl import FLOAT16, INT64, Alias, Mutable, Paged, kv, model\n"
        "@model\n"
        "def write(cache: Mutable[Paged[FLOAT16[2, 2, 32, 64], formats.INT8]], page: INT64[()],\n"
        "          x: FLOAT16[2, 2, 'n', 64]) -> Alias['cache']:\n"
        "    return kv.PagedCacheUpdate(cache, page, x, 0)\n"
    )
    np.save(tmp_path / "x.npy", np.ones((2, 2, 5, 64), np.float16))
    runner, pages = CliRunner(), tmp_path / "cache.pages"
    model = str(tmp_path / "write.onnx")
    assert not runner.invoke(app, ["compile", f"{tmp_path}/write.py:write", "-o", model]).exit_code
    for page in (0, 1):
        arguments = ["run", model, "--input", f"page={page}", "--input", f"x={tmp_path}/x.npy"]
        arguments += ["--cache", f"cache={pages}"] if page else []
        done = runner.invoke(app, [*arguments, "--save", f"cache={pages}"])
        assert done.exit_code == 0 and "(is cache)" in done.output, done.output
    saved = PagedCache.load(pages)
    assert [saved.page(p).fill for p in saved] == [5, 5]
    done = runner.invoke(app, [*arguments, "--json"])
    assert json.loads(done.output)["results"]["updated_cache"]["pages"] == [0, 1]
    done = runner.invoke(app, [*arguments, "--save", f"cache={tmp_path}/cache.npy"])
    assert done.exit_code == 2 and ".pages" in done.output
