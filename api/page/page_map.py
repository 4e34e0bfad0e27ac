"""Saved pages as a picture: a row for each cache, a cell for each page, coloured by its format."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from pathlib import PurePath
from xml.etree.ElementTree import Element

from onnx_inplace.page import amounts, markup
from onnx_inplace.page.markup import e
from onnx_inplace.page.page_facts import CacheRows, PageRow

CELL, GAP, HEIGHT = 14, 2, 18  # px
_ERROR = 26  # px, of the largest error
_KNOWN = ("FLOAT32", "FLOAT16", "BFLOAT16", "FP8_E4M3", "FP8_E5M2", "INT8", "INT4", "INT4T", "INT2")


def render(caches: Sequence[CacheRows], path: str) -> str:
    """The page of a file of saved state. It stands alone: no network, no other file, no script.

    Args:
        caches: what is shown.
        path: of the file, for the title.
    """
    name = PurePath(path).name
    main = e("main", _map(caches), [_details(cache) for cache in caches], id="main")
    skip = e("a", "Skip to the pages", href="#main", class_="skip")
    body = e("body", skip, _header(caches, name), main)
    return markup.document(e("html", _head(name), body, lang="en"))


def _head(name: str) -> Element:
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return e(
        "head",
        e("meta", charset="utf-8"),
        e("meta", http_equiv="Content-Security-Policy", content=policy),
        e("meta", name="viewport", content="width=device-width, initial-scale=1"),
        e("meta", name="color-scheme", content="light dark"),
        e("title", f"{name}: pages"),
        e("style", _file("page.css") + _file("map.css")),
    )


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _header(caches: Sequence[CacheRows], name: str) -> Element:
    pages = sum(len(cache.pages) for cache in caches)
    size = sum(cache.nbytes for cache in caches)
    plain = sum(_plain(cache) for cache in caches)
    shared = sum(page.owners > 1 for cache in caches for page in cache.pages)
    tokens = max((cache.tokens for cache in caches), default=0)
    times = f"{plain / size:.2f} times smaller than FLOAT16" if size else "nothing is stored"
    verdict = f"{_plural(pages, 'page')} in {_plural(len(caches), 'cache')}: {times}."
    tiles = [
        ("Bytes", amounts.short(size), f"{amounts.short(plain)} as FLOAT16"),
        ("Tokens", f"{tokens:,}", "of the longest cache"),
        ("Pages", f"{pages:,}", f"{shared:,} with several owners"),
        ("Formats", f"{len(_formats(caches))}", ", ".join(_formats(caches)) or "none"),
    ]
    return e(
        "header",
        e("p", "saved pages", class_="kicker"),
        e("h1", name),
        e("p", verdict, class_="verdict"),
        e(
            "dl",
            [
                e("div", e("dt", title), e("dd", value), e("dd", note, class_="note"))
                for title, value, note in tiles
            ],
            class_="tiles",
        ),
    )


def _plain(cache: CacheRows) -> int:
    """Bytes of the same pages as FLOAT16."""
    two, heads, page_size, head_size = cache.dims
    return len(cache.pages) * two * heads * page_size * head_size * 2


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _formats(caches: Sequence[CacheRows]) -> list[str]:
    """In the order of the list above, then others."""
    names = dict.fromkeys(page.format for cache in caches for page in cache.pages)
    order = {name: k for k, name in enumerate(_KNOWN)}
    return sorted(names, key=lambda name: (order.get(name, len(order)), name))


def _class(name: str) -> str:
    return f"f-{name.lower()}" if name in _KNOWN else "f-other"


# -- the picture


def _map(caches: Sequence[CacheRows]) -> Element:
    legend = [
        e("li", e("span", class_=f"swatch {_class(name)}"), name) for name in _formats(caches)
    ]
    compared = any(page.error for cache in caches for page in cache.pages)
    words = "A cell is a page, filled as far as it holds tokens; a dot: it has several owners."
    if compared:
        words += " Below, the error of K (left) and V (right) against the float copy."
    return e(
        "section",
        e("h2", "Map"),
        e("p", words),
        e("ul", legend, class_="formats"),
        e("div", [_lane(cache, compared) for cache in caches], class_="lanes"),
        aria_label="Map",
    )


def _lane(cache: CacheRows, compared: bool) -> Element:
    """One cache: its name, and its pages by id."""
    width = max(len(cache.pages) * (CELL + GAP), 1)
    height = HEIGHT + (_ERROR + 4 if compared else 0)
    largest = max(
        (max(page.error.key, page.error.value) for page in cache.pages if page.error), default=0
    )
    drawing = e(
        "svg",
        [_cell(k, page, cache.dims[2], largest) for k, page in enumerate(cache.pages)],
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=f"{cache.name}: {_plural(len(cache.pages), 'page')}",
    )
    note = f"{amounts.short(cache.nbytes)}, {cache.bits:.2f} bits"
    title = e("div", markup.code(cache.name), e("span", note, class_="note"))
    return e("div", title, e("div", drawing, class_="scroll"), class_="lane")


def _cell(k: int, page: PageRow, page_size: int, largest: float) -> Element:
    x, filled = k * (CELL + GAP), CELL * page.fill / page_size
    kind = _class(page.format)
    title = f"page {page.id}: {page.format}, {page.fill} tokens, {page.nbytes:,} bytes"
    shapes = [
        e("rect", x=x, y=0, width=CELL, height=HEIGHT, rx=2, class_=f"{kind} empty"),
        e("rect", x=x, y=0, width=filled, height=HEIGHT, rx=2, class_=kind),
    ]
    if page.owners > 1:
        title += f", {page.owners} owners"
        shapes.append(e("circle", cx=x + CELL / 2, cy=HEIGHT / 2, r=2.5, class_="owners"))
    if page.error is not None:
        title += f", error {page.error.key:.2%} of K, {page.error.value:.2%} of V"
        for side, error in enumerate((page.error.key, page.error.value)):
            tall = _ERROR * error / largest if largest else 0
            shapes.append(
                e(
                    "rect",
                    x=x + side * CELL / 2,
                    y=HEIGHT + 4,
                    width=CELL / 2 - 1,
                    height=tall,
                    class_="error",
                )
            )
    return e("g", e("title", title), shapes)


# -- in words


def _details(cache: CacheRows) -> Element:
    compared = any(page.error for page in cache.pages)
    titles = ["pages", "format", "tokens", "owners", "bytes each"]
    titles += ["error of K", "of V", "largest"] if compared else []
    dims = ", ".join(map(str, cache.dims))
    return e(
        "section",
        e("h2", cache.name),
        e("p", f"{cache.elem_type}[{dims}], {_plural(cache.tokens, 'token')}"),
        e(
            "div",
            e(
                "table",
                e("thead", e("tr", [e("th", title, scope="col") for title in titles])),
                e("tbody", [_row(run, compared) for run in cache.runs()]),
                class_="page-rows",
            ),
            class_="scroll",
        ),
    )


def _row(run: Sequence[PageRow], compared: bool) -> Element:
    page = run[0]
    ids = f"{page.id}" if len(run) == 1 else f"{page.id} to {run[-1].id}"
    swatch = e("span", class_=f"swatch {_class(page.format)}")
    cells = [
        e("td", ids),
        e("td", swatch, page.format),
        e("td", f"{page.fill}"),
        e("td", f"{page.owners}"),
        e("td", f"{page.nbytes:,}"),
    ]
    if compared and page.error is not None:
        error = page.error
        cells += [e("td", f"{error.key:.3%}"), e("td", f"{error.value:.3%}")]
        cells.append(e("td", f"{error.largest:.3g}"))
    elif compared:
        cells += [e("td", "-") for _ in range(3)]
    return e("tr", cells)
