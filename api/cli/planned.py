"""A plan for readers: steps, memory, what copies or reads too much, what is proved or checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import assert_never

import onnx
from rich.console import Console
from rich.text import Text

from onnx_inplace.cli.values import Fusing
from onnx_inplace.compiler import errors, notes, steps
from onnx_inplace.compiler.fused import ROWS, Fused
from onnx_inplace.compiler.memory import Bytes, Memory
from onnx_inplace.compiler.new_pages import NewPages

_Note = notes.Copied | notes.Fallback | notes.Condition | NewPages


def render(
    plan: steps.ExecutionPlan, path: str, dims: Mapping[str, int], threads: int, fuse: Fusing
) -> None:
    """Draw a plan; colours only on a terminal, and no line is broken or cut.

    Raises:
        errors.BindingError: the model has no such dimension, or nothing for ``DECODE_ONLY``.
        errors.ContractError: no run with these dimensions is possible.
    """
    memory, block = plan.memory(threads, fuse.value, **dims), _main(plan, fuse)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(Text(path, "dim"))
    for depth, line in _block(plan, block, 1):
        console.print(Text("  " * depth).append_text(line))
    console.print(Text.assemble(("memory [bytes]", "bold"), _given(dims)))
    rows = memory_rows(memory)
    titles, amounts = (max(len(row[column]) for row in rows) for column in (0, 1))
    for part, size, meaning in rows:
        console.print(Text(f"  {part:{titles}}  {size:{amounts}}  ").append(meaning, "dim"))
    for title, found in _notes(plan).items():
        console.print(Text.assemble((title, "bold"), ": none" if not found else ":"))
        for note in found:
            console.print(Text(f"  {note}").append_text(_place(note.location)))
    if fuse is Fusing.OFF:
        return
    console.print(Text.assemble((f'fused, with fuse="{fuse.value}"', "bold"), f": {_fused(plan)}"))
    for refusal in plan.fused.refusals:
        console.print(Text(f"  not {refusal}").append_text(_place(refusal.location)))


def _main(plan: steps.ExecutionPlan, fuse: Fusing) -> steps.Block:
    """The steps that a session is loaded with; with ``AUTO``, those of runs with many rows."""
    if fuse is not Fusing.DECODE_ONLY:
        return plan.block
    if plan.fused.block is None:
        raise errors.BindingError(
            f'fuse="{fuse.value}": nothing of this model can be fused. Use fuse="auto".', "fuse"
        )
    return plan.fused.block


def _fused(plan: steps.ExecutionPlan) -> str:
    """What runs in one call each, and when."""
    regions = plan.fused.regions
    if not regions:
        return "nothing"
    nodes = ", ".join(str(region.nodes) for region in regions)
    rows = ", ".join(str(size) for size in plan.fused.rows)
    return f"{nodes} nodes in one call each, while {rows} are at most {ROWS}"


def to_json(
    plan: steps.ExecutionPlan, dims: Mapping[str, int], threads: int, fuse: Fusing
) -> dict[str, object]:
    """For programs.

    Raises:
        errors.BindingError: the model has no such dimension, or nothing for ``DECODE_ONLY``.
        errors.ContractError: no run with these dimensions is possible.
    """
    memory, block = plan.memory(threads, fuse.value, **dims), _main(plan, fuse)
    lines = ["  " * (depth - 1) + line.plain for depth, line in _block(plan, block, 1)]
    texts = {title: [str(note) for note in found] for title, found in _notes(plan).items()}
    sizes = {name: _json(getattr(memory, name)) for name, _, _ in _PARTS}
    lists = {"unknown": list(memory.unknown), "estimates": list(memory.estimates)}
    counted = {**sizes, "weights_in": dict(memory.weights_in), **lists}
    fused = {
        "nodes": [region.nodes for region in plan.fused.regions],
        "rows": [str(size) for size in plan.fused.rows],
        "refusals": [str(refusal) for refusal in plan.fused.refusals],
    }
    return {"ok": True, "steps": lines, "memory": counted, **texts, "fused": fused}


_PARTS = (
    ("caches", "caches", "lent by the caller, written in place"),
    ("values", "values", "buffers, results, what passes between steps"),
    ("workspace", "workspace", "temporary, at the peak"),
    ("pages", "new pages", "of paged caches"),
    ("peak", "peak", "what running takes: all of the above"),
    ("weights", "weights", "of the model, and copies in other forms"),
    ("total", "total", "peak and weights"),
    ("extra_cache_bytes", "copies of caches", "part of values"),
)


def memory_rows(memory: Memory) -> list[tuple[str, str, str]]:
    """Title, amount and meaning of each part; formulas where dimensions are missing."""
    rows = []
    for name, title, note in _PARTS:
        rows.append((title, amount(getattr(memory, name)), note))
        if name == "weights" and len(memory.weights_in) > 1:
            rows += [("", amount(size), form) for form, size in memory.weights_in.items()]
    if memory.unknown:
        rows.append(("not counted", ", ".join(memory.unknown), "depends on data"))
    if memory.estimates:
        rows.append(("estimated", ", ".join(memory.estimates), "kernels may take workspace"))
    return rows


def amount(size: Bytes) -> str:
    """Bytes for readers: a number, or a formula."""
    number = _json(size)
    return f"{number:,}" if isinstance(number, int) else number


def _json(size: Bytes) -> int | str:
    return int(size) if isinstance(size, int) or size.is_Integer else str(size)


def _given(dims: Mapping[str, int]) -> str:
    given = ", ".join(f"{name} = {size}" for name, size in dims.items())
    return f" with {given}:" if given else ":"


def _notes(plan: steps.ExecutionPlan) -> dict[str, Sequence[_Note]]:
    found: dict[str, Sequence[_Note]] = {
        "copies": plan.copies,
        "read over the whole capacity": plan.fallbacks,
        "proved": plan.proofs,
        "checked in a run": plan.conditions,
    }
    if plan.new_pages:
        found["new pages"] = plan.new_pages
    return found


def _place(location: object) -> Text:
    return Text("" if location is None else f"  # {location}", "dim")


def _block(plan: steps.ExecutionPlan, block: steps.Block, depth: int) -> Iterator[tuple[int, Text]]:
    for step in block.steps:
        yield from ((depth + inner, line) for inner, line in _step(plan, step))


def kind(step: steps.Step) -> str:
    """What a step is, without what it works on."""
    match step:
        case steps.SubSession():
            return "onnxruntime"
        case steps.Kernel() | steps.View():
            return step.op_type
        case Fused():
            return "fused"
        case steps.Branch():
            return "If"
        case steps.Repeat():
            return "Loop"
        case steps.ScanStep():
            return "Scan"
        case _:
            assert_never(step)


def headline(plan: steps.ExecutionPlan, step: steps.Step) -> Text:
    """A step in one line, without what stands in its branches and bodies."""
    return next(_step(plan, step))[1]


def _step(plan: steps.ExecutionPlan, step: steps.Step) -> Iterator[tuple[int, Text]]:
    def names(slots: Iterable[int | None]) -> str:
        return ", ".join("-" if slot is None else plan.values[slot].name for slot in slots)

    def line(outputs: Iterable[int | None], what: str, inputs: Iterable[int | None]) -> Text:
        head = Text(names(outputs)).append(" = ", "dim")
        return head.append(what, "bold").append(f"({names(inputs)})")

    match step:
        case steps.SubSession():
            nodes = onnx.ModelProto.FromString(step.model).graph.node
            types = ", ".join(sorted({n.op_type for n in nodes}))
            text = line(
                (p.slot for p in step.outputs), "onnxruntime", (p.slot for p in step.inputs)
            )
            yield 0, text.append(f"  {len(nodes)} nodes: {types}", "dim")
        case steps.Kernel():
            name = f"{step.domain}::{step.op_type}" if step.domain else step.op_type
            text = line(step.outputs, name, step.inputs)
            roots = ", ".join(dict.fromkeys(step.roots.values()))
            text.append(f"  writes {roots}" if roots else "  reads in place", "bold yellow")
            yield 0, text.append_text(_place(step.location))
        case Fused():
            text = line((k.slot for k in step.outputs), "fused", (k.slot for k in step.inputs))
            yield 0, text.append(f"  {step.nodes} nodes in one call", "bold yellow")
        case steps.View():
            text = line([step.output], step.op_type, [step.source])
            yield 0, text.append(f"  views {step.root}").append_text(_place(step.location))
        case steps.Branch():
            text = line(step.outputs, "If", [step.condition])
            yield 0, text.append(_carries(step.roots)).append_text(_place(step.location))
            for title, block in (("then:", step.then), ("else:", step.otherwise)):
                yield 1, Text(title, "cyan")
                yield from _block(plan, block, 2)
        case steps.Repeat():
            outputs = (*step.outputs, *(s.slot for s in step.stacked))
            text = line(outputs, "Loop", (step.count, step.condition, *step.initial))
            yield 0, text.append(_carries(step.roots)).append_text(_place(step.location))
            yield from _block(plan, step.body, 1)
        case steps.ScanStep():
            outputs = (*step.outputs, *(s.slot for s in step.stacked))
            text = line(outputs, "Scan", (*step.initial, *(s.slot for s in step.scanned)))
            yield 0, text.append(_carries(step.roots)).append_text(_place(step.location))
            yield from _block(plan, step.body, 1)
        case _:
            assert_never(step)


def _carries(roots: Mapping[int, str]) -> str:
    return f"  is {', '.join(dict.fromkeys(roots.values()))}" if roots else ""
