"""Memory over the steps of a run: what is held at each, and where buffers stand in the arena.

Both pictures have one column per moment, in the order of the program.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from xml.etree.ElementTree import Element

from onnx_inplace.compiler import steps
from onnx_inplace.compiler.moments import Moment
from onnx_inplace.page import amounts
from onnx_inplace.page.facts import Row
from onnx_inplace.page.markup import e

_WIDTH, _NARROWEST, _WIDEST = 1040, 5, 56  # of all columns, and of one [px]
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 16, 10, 30
_HEIGHT, _ARENA = 200, 150


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One moment: what it is called, where it leads, and what is held."""

    label: str
    title: str
    link: str | None
    moment: Moment


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """A value in the arena of a block: its columns, first and last, and its bytes."""

    name: str
    first: int
    last: int
    begin: int
    end: int


def columns(
    plan: steps.ExecutionPlan, rows: Sequence[Row], dims: Mapping[str, int]
) -> list[Column]:
    """The moments of a run, with the names of their steps."""
    at = {row.place: row for row in rows}
    found = []
    for moment in plan.moments(**dims):
        row = at.get((moment.block, moment.step))
        if row is not None:
            title, link = f"{row.number} {row.operator}", f"#step-{row.number}"
            found.append(Column(row.number, title, link, moment))
        elif moment.block == 0:
            found.append(Column("end", "results", None, moment))
        else:
            found.append(Column("", "end of a round or branch", None, moment))
    return found


def buffers(
    plan: steps.ExecutionPlan, found: Sequence[Column], dims: Mapping[str, int]
) -> list[tuple[Buffer, ...]]:
    """What stands in the arena of each block that has one."""
    places: dict[int, dict[int, tuple[int, int]]] = {}
    for index, column in enumerate(found):
        steps_ = places.setdefault(column.moment.block, {})
        first, _ = steps_.get(column.moment.step, (index, index))
        steps_[column.moment.step] = first, index
    for steps_ in places.values():  # a step with a body lasts until the next one begins
        order = sorted(steps_)
        for step, following in itertools.pairwise(order):
            steps_[step] = steps_[step][0], steps_[following][0] - 1
    arenas = []
    for block, (layout, lives) in enumerate(zip(plan.layout(**dims), _lives(plan), strict=True)):
        stands = [
            Buffer(
                plan.values[slot].name,
                places[block][max(lives[slot][0], 0)][0],
                places[block][lives[slot][1]][1],
                begin,
                end,
            )
            for slot, (begin, end) in layout.items()
            if end > begin
        ]
        if stands:
            arenas.append(tuple(stands))
    return arenas


def _lives(plan: steps.ExecutionPlan) -> Iterator[Mapping[int, tuple[int, int]]]:
    for use in plan.footprint.block.all():
        yield {item.slot: item.life for item in use.buffers}


# -- drawing


def _wide(count: int) -> float:
    return min(max(_WIDTH / count, _NARROWEST), _WIDEST)


def held(found: Sequence[Column]) -> Element:
    """Bars of values and workspace, a column a moment."""
    wide = _wide(len(found))
    most = max((c.moment.values + c.moment.workspace for c in found), default=0)
    scale = _HEIGHT / most if most else 0
    base = _TOP + _HEIGHT
    drawing = _canvas(
        len(found) * wide, base + _BOTTOM, "Bytes that are held at each step, caches left out"
    )
    drawing.extend(_grid(most, scale, len(found) * wide, base))
    for index, column in enumerate(found):
        m = column.moment
        said = (
            f"{column.title}: buffers {m.buffers:,}, values made anew {m.passing:,}, "
            f"workspace {m.workspace:,} bytes"
        )
        bar = e("a", e("title", said), href=column.link, class_="column", aria_label=said)
        x, y = _LEFT + index * wide, float(base)
        bar.append(_rect(x, _TOP, wide, _HEIGHT, "catch"))
        for size, kind in ((m.buffers, "buffers"), (m.passing, "passing"), (m.workspace, "work")):
            if size:
                y -= size * scale
                bar.append(_rect(x, y, max(wide - (1 if wide > 8 else 0), 1), size * scale, kind))
        drawing.append(bar)
    drawing.extend(_labels(found, wide, base))
    return drawing


def arena(stands: Sequence[Buffer], found: Sequence[Column], number: int) -> Element:
    """Buffers by step and offset; what shares bytes is never alive at one step."""
    wide, top = _wide(len(found)), max(buffer.end for buffer in stands)
    scale, base = _ARENA / top, _TOP + _ARENA
    title = f"Arena {number}: which bytes hold which buffer at which step"
    drawing = _canvas(len(found) * wide, base + _BOTTOM, title)
    drawing.extend(_grid(top, scale, len(found) * wide, base))
    for buffer in stands:
        x, y = _LEFT + buffer.first * wide, base - buffer.end * scale
        width = (buffer.last - buffer.first + 1) * wide
        height = (buffer.end - buffer.begin) * scale
        said = (
            f"{buffer.name}: bytes {buffer.begin:,} to {buffer.end:,}, "
            f"steps {found[buffer.first].label} to {found[buffer.last].label}"
        )
        box = e("g", e("title", said), class_="buffer", aria_label=said)
        box.append(_rect(x + 0.5, y + 0.5, max(width - 1, 1), max(height - 1, 1), "box"))
        if width > 8 * len(buffer.name) + 8 and height > 14:
            middle = y + height / 2 + 4
            box.append(e("text", buffer.name, x=x + 6, y=middle, class_="name"))
        drawing.append(box)
    drawing.extend(_labels(found, wide, base))
    return drawing


def _canvas(width: float, height: float, title: str) -> Element:
    whole = width + _LEFT + _RIGHT
    return e(
        "svg",
        e("title", title),
        width=whole,
        height=height,
        viewBox=f"0 0 {whole:.0f} {height:.0f}",
        role="group",
        class_="chart",
    )


def _rect(x: float, y: float, width: float, height: float, kind: str) -> Element:
    return e("rect", x=x, y=y, width=width, height=height, class_=kind)


def _grid(most: int, scale: float, width: float, base: float) -> Iterator[Element]:
    """Lines at a few round numbers of bytes."""
    for size in _ticks(most):
        y = base - size * scale
        yield e("line", x1=_LEFT, x2=_LEFT + width, y1=y, y2=y, class_="tick" if size else "axis")
        yield e("text", amounts.short(size), x=_LEFT - 8, y=y + 4, class_="amount")


def _ticks(most: int) -> list[int]:
    if not most:
        return [0]
    step = 1
    while most / step > 5:
        step *= 2
    return list(range(0, most + 1, step))


def _labels(found: Sequence[Column], wide: float, base: float) -> Iterator[Element]:
    """Numbers of steps, as many as have room."""
    free = 0.0
    for index, column in enumerate(found):
        middle = _LEFT + (index + 0.5) * wide
        room = 3.5 * len(column.label) + 5
        if column.label and middle - room >= free - 5:
            yield e("text", column.label, x=middle, y=base + 16, class_="label")
            free = middle + room
