"""Pictures of what was measured: from the JSON of ``decode.py`` and ``cache_bytes.py`` to SVG.

    python benchmarks/pictures.py build/benchmarks docs/pictures

The colours are readable on white and on black, the ground is transparent. Needs the extra
`pictures` (matplotlib).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

INK = "#7d8590"  # text and axes: enough contrast on both grounds


class Line(NamedTuple):
    """How a variant is drawn."""

    label: str
    color: str
    style: str = "-"


DECODING = {
    "in place, INT8, fuse=auto": Line("onnx-inplace, INT8 pages", "#2da44e"),
    "in place, float16, fuse=auto": Line("onnx-inplace, float16", "#2f81f7"),
    "in place, float16, fuse=off": Line('onnx-inplace, float16, fuse="off"', "#2f81f7", "--"),
    "llama.cpp": Line("llama.cpp, float16", "#d4730b"),
    "llama.cpp, flash attention": Line("llama.cpp, float16, flash attention", "#d4730b", "--"),
    "onnxruntime-genai": Line("onnxruntime-genai, float32", "#cf4a6b"),
}
BYTES = {
    "onnxruntime-genai, float32": Line(
        "onnxruntime-genai, float32, for the longest text", "#cf4a6b"
    ),
    "llama.cpp, float16": Line("llama.cpp, float16, for the longest text", "#d4730b"),
    "FLOAT16 pages": Line("onnx-inplace, FLOAT16 pages", "#2f81f7"),
    "INT8 pages": Line("onnx-inplace, INT8 pages", "#2da44e"),
    "FLOAT16, INT8, INT4 by age": Line("onnx-inplace, FLOAT16, INT8, INT4 by age", "#a371f7"),
}

Rows = list[dict[str, Any]]


def read(paths: Iterable[Path], benchmark: str) -> Rows:
    """Rows of all records of a benchmark; of two for one thing, the later file counts."""
    rows: Rows = []
    for path in sorted(paths, key=lambda p: p.stat().st_mtime):
        record = json.loads(path.read_text())
        if record["benchmark"] == benchmark:
            rows += record["rows"]
    return rows


def axes(title: str, x: str, y: str) -> Axes:
    """An empty picture."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "onnx-inplace", "font.size": 11})
    plt.switch_backend("svg")
    figure, drawn = plt.subplots(figsize=(7.6, 4.6), layout="constrained")
    figure.patch.set_alpha(0)
    drawn.set_facecolor("none")
    drawn.set_title(title, color=INK, loc="left", fontsize=12)
    drawn.set_xlabel(x, color=INK)
    drawn.set_ylabel(y, color=INK)
    drawn.tick_params(colors=INK)
    drawn.grid(color=INK, alpha=0.25, linewidth=0.6)
    for name, spine in drawn.spines.items():
        spine.set_color(INK)
        spine.set_visible(name in ("left", "bottom"))
    drawn.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    drawn.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    return drawn


def draw(drawn: Axes, points: dict[str, dict[float, float]], lines: dict[str, Line]) -> None:
    """One line for each variant that was measured, with a legend."""
    for name, line in lines.items():
        if name in points:
            x, y = zip(*sorted(points[name].items()), strict=True)
            drawn.plot(x, y, line.style, color=line.color, label=line.label, marker="o", lw=2, ms=4)
    drawn.set_ylim(bottom=0)
    drawn.set_xlim(left=0)
    drawn.figure.legend(
        loc="outside lower center", ncol=2, frameon=False, labelcolor=INK, fontsize=10
    )


def save(drawn: Axes, path: Path) -> None:
    """Write SVG: the same bytes for the same numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = drawn.figure
    figure.savefig(path, metadata={"Date": None}, transparent=True)
    plt.close("all")
    print(path)


def decoding(rows: Rows, threads: int, path: Path) -> None:
    """Tokens/s against context length."""
    points: dict[str, dict[float, float]] = {}
    for row in rows:
        if row["threads"] == threads and "ms" in row:
            points.setdefault(row["variant"], {})[row["position"]] = 1e3 / row["ms"]
    plural = "s" if threads > 1 else ""
    title = f"SmolLM2-135M, 4-bit weights, {threads} thread{plural}"
    drawn = axes(title, "context [tokens]", "tokens/s")
    draw(drawn, points, DECODING)
    save(drawn, path)


def cache_bytes(rows: Rows, path: Path) -> None:
    """MiB of the caches against context length."""
    points: dict[str, dict[float, float]] = {}
    for row in rows:
        points.setdefault(row["variant"], {})[row["tokens"]] = row["bytes"] / 2**20
    drawn = axes("Caches of SmolLM2-135M, all 30 layers", "context [tokens]", "MiB")
    draw(drawn, points, BYTES)
    save(drawn, path)


def main(arguments: list[str] | None = None) -> bool:
    """Draw what there are records of."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, help="folder of JSON files")
    parser.add_argument("pictures", type=Path, help="folder for SVG files")
    given = parser.parse_args(arguments)
    records = sorted(given.records.glob("*.json"))
    rows = read(records, "decode")
    for threads in sorted({row["threads"] for row in rows}):
        decoding(rows, threads, given.pictures / f"decoding_{threads}.svg")
    sizes = read(records, "cache_bytes")
    if sizes:
        cache_bytes(sizes, given.pictures / "bytes.svg")
    return bool(rows or sizes)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
