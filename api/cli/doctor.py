"""Which facts of a model survive which tool, and what ``restore`` brings back."""

from __future__ import annotations

import dataclasses
from collections import Counter

from rich.table import Table

from onnx_inplace.cli import report, tools
from onnx_inplace.compiler import declarations, derivation, errors, facts, loader, recovery
from onnx_inplace.compiler.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What a tool does to a model.

    Attributes:
        tool: what was run.
        failure: why it gave no model; None: it gave one.
        total: facts of the model by kind.
        kept: those that are the same afterwards.
        contract: the JSON contract is the same.
        loads: the contract is whole, ``load`` takes the result.
        restores: the contract is whole after ``restore``.
        reason: why it is not.
    """

    tool: str
    failure: str | None
    total: dict[str, int]
    kept: dict[str, int]
    contract: bool = False
    loads: bool = False
    restores: bool = False
    reason: str | None = None


def examine(program: Program) -> list[Verdict]:
    """Run a checked program through every tool."""
    data = program.serialized
    return [_examine(program, data, name) for name in tools.TOOLS]


def _examine(program: Program, data: bytes, tool: str) -> Verdict:
    before = facts.stored(program.proto)
    total = dict(Counter(place.where.value for place in before))
    try:
        with tools.quiet():
            result = tools.TOOLS[tool](data)
        after = loader.open_program(result)
    except Exception as error:  # whatever a tool raises is what there is to report
        lines = str(error).strip().splitlines() or [""]
        return Verdict(tool, f"{type(error).__name__}: {lines[0]}", total, {})
    left = facts.stored(after.proto)
    same = (place for place, fact in before.items() if left.get(place) == fact)
    return Verdict(
        tool,
        None,
        total,
        dict(Counter(place.where.value for place in same)),
        _contract(after) == _contract(program) is not None,
        _refusal(after, program) is None,
        (refusal := _refusal_of_restored(after, program)) is None,
        refusal,
    )


def _contract(program: Program) -> str | None:
    found = [p.value for p in program.proto.metadata_props if p.key == declarations.CONTRACT]
    return str(found[0]) if found else None


def _refusal(program: Program, original: Program) -> str | None:
    """Why a program is not what the original was; a model without any facts loads too."""
    try:
        loader.load(program)
    except errors.InplaceError as error:
        return _first(error)
    mine, theirs = derivation.declared(program.proto), derivation.declared(original.proto)
    if (mine.inputs, mine.outputs) != (theirs.inputs, theirs.outputs):
        return "it declares something else"
    return None


def _refusal_of_restored(program: Program, original: Program) -> str | None:
    try:
        restored = recovery.restore(program)
    except errors.InplaceError as error:
        return _first(error)
    return _refusal(restored, original)


def _first(error: errors.InplaceError) -> str:
    if isinstance(error, errors.ContractError):
        return f"{error.findings[0].code}: {error.findings[0].message}"
    return str(error).splitlines()[0]


# -- output


def to_json(verdicts: list[Verdict]) -> list[dict[str, object]]:
    """All verdicts."""
    return [dataclasses.asdict(verdict) for verdict in verdicts]


def render(verdicts: list[Verdict]) -> None:
    """A table, and below it what cannot be brought back."""
    console = report.wide_console()
    kinds = list(verdicts[0].total)
    table = Table("tool", *kinds, "JSON", "loads", "restore", box=None)
    for verdict in verdicts:
        if verdict.failure is not None:
            table.add_row(verdict.tool, *["-"] * (len(kinds) + 2), "gave no model")
            continue
        counts = [f"{verdict.kept.get(k, 0)}/{verdict.total[k]}" for k in kinds]
        flags = [verdict.contract, verdict.loads, verdict.restores]
        table.add_row(verdict.tool, *counts, *("yes" if flag else "no" for flag in flags))
    console.print(table)
    for verdict in verdicts:
        if reason := verdict.failure or verdict.reason:
            console.print(f"{verdict.tool}: {reason}")
