"""What a run has written so far, in case that it fails half-way.

The last slot of a run is its journal, a list. Every step that writes storage adds an entry when it
has written, so that a failing run knows whether a byte has changed, and which. The rounds of a long
loop share entries, so that a journal has a bound: ``MOST`` entries and those of one round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from onnx_inplace.compiler import errors, steps
from onnx_inplace.compiler.fused import Operation
from onnx_inplace.runner.actions import Action, Slots

JOURNAL = -1
"""The slot that holds the journal, for every run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """One write of a run.

    Attributes:
        root: name of the mutable parameter.
        operator: that wrote.
        position: first token, of each row where there are rows; None: anywhere in the storage.
        length: tokens from there on; None likewise. Where rounds of a loop share an entry, all that
            they wrote lies within.
        location: the author's line, where it is known: which layer it was.
    """

    root: str
    operator: str
    position: int | list[int] | None
    length: int | None
    location: str | None

    def __str__(self) -> str:
        where = "" if self.location is None else f" ({self.location})"
        if self.position is None:
            return f"{self.operator} of `{self.root}`{where}"
        return f"{self.operator} of `{self.root}`, {self.length} tokens at {self.position}{where}"


TOKENS = {("onnx_inplace", "CacheUpdate"), ("", "TensorScatter")}
"""Operators that write (storage, values, position) along an axis."""


def noted(step: steps.Kernel, action: Action) -> Action:
    """An action that notes in the journal that it has written, and whose errors say the line."""
    if not step.roots:
        note = None
    elif (step.domain, step.op_type) in TOKENS and len(step.inputs) > 2:
        note = _tokens(step)
    else:
        note = _anywhere(step)

    def act(slots: Slots) -> None:
        try:
            action(slots)
            if note is not None:
                slots[JOURNAL].append(note(slots))
        except errors.PlacedError as error:
            error.at(step.location)
            raise
        except errors.InplaceError:
            raise  # a kernel checks first: it has refused, and written nothing
        except BaseException:  # an interrupt may come between the write and its note, too
            if note is not None:
                slots[JOURNAL].append(note(slots))
            raise

    return act


def read(slots: Slots) -> tuple[Written, ...]:
    """All writes of a run, in order."""
    return tuple(_written(*entry) for entry in _each(slots[JOURNAL]))


Entry = tuple["steps.Kernel | Operation", "int | list[int] | None", "int | None"]
"""Who wrote, from which position on, and how many tokens; None: anywhere."""


@dataclasses.dataclass(frozen=True, slots=True)
class Together:
    """Writes of many layers as one entry: they share few positions, and hardly any run fails.

    Attributes:
        writes: who wrote, the index of the position, or None, and how many tokens.
        positions: as numbers.
    """

    writes: Sequence[tuple[steps.Kernel | Operation, int | None, int | None]]
    positions: Sequence[int | list[int]]

    def entries(self) -> list[Entry]:
        """One entry for each write, in order."""
        return [
            (who, None if at is None else self.positions[at], length)
            for who, at, length in self.writes
        ]


def _each(entries: Sequence[Entry | Together]) -> Iterator[Entry]:
    for entry in entries:
        if isinstance(entry, Together):
            yield from entry.entries()
        else:
            yield entry


MOST = 1024
"""Entries beyond which the rounds of a loop share them."""


def end_round(slots: Slots) -> None:
    """Keep the bound, between two rounds of a loop."""
    entries = slots[JOURNAL]
    if len(entries) > MOST:
        entries[:] = _shared(entries)


def _shared(entries: Sequence[Entry | Together]) -> list[Entry]:
    """One entry for each step, in the order of their first writes."""
    found: dict[int, Entry] = {}
    for entry in _each(entries):
        step, position, length = entry
        key = id(step)
        found[key] = (step, *_cover(found.get(key, entry)[1:], (position, length)))
    return list(found.values())


_Range = tuple["int | list[int] | None", "int | None"]


def _cover(a: _Range, b: _Range) -> _Range:
    """The smallest range that holds both; of rows, one length for all of them."""
    (p, n), (q, m) = a, b
    if n is None or m is None:
        return None, None
    if isinstance(p, int) and isinstance(q, int):
        first = min(p, q)
        return first, max(p + n, q + m) - first
    if isinstance(p, list) and isinstance(q, list) and len(p) == len(q):
        rows = [min(pair) for pair in zip(p, q, strict=True)]
        ends = (max(x + n, y + m) for x, y in zip(p, q, strict=True))
        return rows, max((end - row for end, row in zip(ends, rows, strict=True)), default=0)
    return None, None


def _tokens(step: steps.Kernel) -> Callable[[Slots], Entry]:
    _, values, position = step.inputs[:3]
    axis = step.attributes.get("axis", -2)
    if values is None or position is None:
        return _anywhere(step)

    def note(slots: Slots) -> Entry:
        # as numbers, not as the array: that may be a buffer which the run uses again
        return step, slots[position].tolist(), slots[values].shape[axis]

    return note


def _anywhere(step: steps.Kernel) -> Callable[[Slots], Entry]:
    entry: Entry = step, None, None
    return lambda slots: entry


def _written(
    step: steps.Kernel | Operation, position: int | list[int] | None, length: int | None
) -> Written:
    root = next(iter(step.roots.values()))
    location = None if step.location is None else str(step.location)
    return Written(root, step.op_type, position, length, location)
