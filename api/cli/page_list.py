"""How saved pages look in a terminal, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.table import Table

from onnx_inplace.cli import report
from onnx_inplace.page import amounts
from onnx_inplace.page.page_facts import CacheRows, PageRow


def render(caches: Sequence[CacheRows], path: str) -> None:
    """Print a table for each cache. Neighbours that differ in nothing but their id share a row."""
    console = report.wide_console()
    count = f"{len(caches)} paged cache{'s' if len(caches) != 1 else ''}"
    size = sum(cache.nbytes for cache in caches)
    console.print(f"{path}: {count}, {amounts.short(size)}")
    for cache in caches:
        dims = ", ".join(map(str, cache.dims))
        console.print(
            f"{cache.name}: {cache.elem_type}[{dims}], {plural(len(cache.pages), 'page')}, "
            f"{plural(cache.tokens, 'token')}, {cache.nbytes:,} bytes, "
            f"{cache.bits:.2f} bits a number"
        )
        if cache.pages:
            console.print(_table(cache))
        for name, (pages, nbytes) in cache.by_format().items():
            console.print(f"  {name}: {plural(pages, 'page')}, {nbytes:,} bytes")


def plural(count: int, word: str) -> str:
    """``1 page``, ``2 pages``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _table(cache: CacheRows) -> Table:
    compared = any(page.error is not None for page in cache.pages)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for title in ("page", "format", "tokens", "owners", "bytes"):
        table.add_column(title, justify="left" if title == "format" else "right", no_wrap=True)
    if compared:
        for title in ("error of K", "of V", "largest"):
            table.add_column(title, justify="right", no_wrap=True)
    for run in cache.runs():
        page = run[0]
        cells = [_ids(run), page.format, f"{page.fill}", f"{page.owners}"]
        cells.append(f"{page.nbytes:,}" if len(run) == 1 else f"{len(run)} x {page.nbytes:,}")
        if compared:
            cells += _errors(page)
        table.add_row(*cells)
    return table


def _ids(run: Sequence[PageRow]) -> str:
    return f"{run[0].id}" if len(run) == 1 else f"{run[0].id} to {run[-1].id}"


def _errors(page: PageRow) -> list[str]:
    if page.error is None:
        return ["-", "-", "-"]
    return [f"{page.error.key:.3%}", f"{page.error.value:.3%}", f"{page.error.largest:.3g}"]


def to_json(caches: Sequence[CacheRows]) -> list[dict[str, object]]:
    """Plain values."""
    return [{**dataclasses.asdict(cache), "nbytes": cache.nbytes} for cache in caches]
