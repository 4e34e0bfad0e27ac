"""Runs a model with given sizes, and shows where the time goes: per step, per kind of kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import typer
from rich.text import Text

import onnx_inplace
from onnx_inplace.cli import planned, report, values

if TYPE_CHECKING:
    from onnx_inplace.compiler.steps import ExecutionPlan
    from onnx_inplace.runner.fused.clock import Part
    from onnx_inplace.runner.inputs import Port
    from onnx_inplace.runner.profile import Profile, Timed
    from onnx_inplace.runner.session import Session

_Fuse = Literal["auto", "off", "decode-only"]
_TITLE = 80  # characters of a step
_CHUNK = 1 << 16  # random numbers, repeated in larger arrays


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to run the model, and what was measured."""

    fuse: _Fuse
    profile: Profile


def profile(
    model: Path,
    dims: Mapping[str, int],
    inputs: Mapping[str, Any],
    threads: int,
    fuse: values.Fusing,
    runs: int,
    *,
    json_: bool,
) -> None:
    """Measure, see :func:`measure`, and print tables or JSON."""
    plan, variants = measure(model, dims, inputs, threads, fuse, runs)
    if json_:
        report.print_json(to_json(plan, variants))
    else:
        render(plan, variants, dims)


def measure(
    model: Path,
    dims: Mapping[str, int],
    inputs: Mapping[str, Any],
    threads: int,
    fuse: values.Fusing,
    runs: int,
) -> tuple[ExecutionPlan, list[Variant]]:
    """Profile the model with fused steps, where it has some, and without; or in one way only.

    ``fuse``: as of a session, but ``AUTO`` measures both kinds of steps.

    Caches are full of small random numbers; ordinary inputs that are not given are zeros.

    Raises:
        typer.BadParameter: the size of a dimension is missing, or there is no such input.
        errors.InplaceError: the model cannot be loaded, or does not run with these inputs.
    """
    plan = onnx_inplace.compiler.plan(model)
    found: list[Variant] = []
    storage: dict[str, Any] = {}
    ways: list[_Fuse] = [fuse.value]
    if fuse is values.Fusing.AUTO:
        ways = ["auto", "off"] if plan.fused.regions else ["off"]
    for way in ways:
        session = onnx_inplace.Session(model, threads=threads, fuse=way)
        feeds = _feeds(session, dims, inputs)
        storage = storage or {p.name: _cache(session, p, dims) for p in session.mutable_inputs}
        found.append(Variant(way, onnx_inplace.profile(session, storage, feeds, runs)))
    return plan, found


def _feeds(session: Session, dims: Mapping[str, int], given: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [name for name in given if name not in {port.name for port in session.inputs}]
    if unknown:
        names = ", ".join(port.name for port in session.inputs)
        message = f"{unknown[0]}: the model's ordinary inputs are {names or 'none'}"
        raise typer.BadParameter(message, param_hint="--input")
    found = {}
    for port in session.inputs:
        value = given.get(port.name, session.defaults.get(port.name))
        if isinstance(value, np.ndarray):
            value = values.typed(value, port.dtype)
        found[port.name] = np.zeros(_shape(port, dims), port.dtype) if value is None else value
    return found


def _shape(port: Port, dims: Mapping[str, int]) -> tuple[int, ...]:
    shape = port.shape or ()
    missing = [str(d) for d in shape if not isinstance(d, int) and d not in dims]
    if missing or port.shape is None:
        message = f"{port}: give the size of {', '.join(missing) or 'all dimensions'}, or --input"
        raise typer.BadParameter(message, param_hint="--dims")
    return tuple(d if isinstance(d, int) else dims[str(d)] for d in shape)


def _cache(session: Session, port: Port, dims: Mapping[str, int]) -> Any:
    """Storage. Zeros would not do: memory that was never written is one page of the system."""
    cache = session.allocate(port.name, **{d: dims[d] for d in port.dims if d in dims})
    if isinstance(cache, np.ndarray) and np.issubdtype(port.dtype, np.integer):
        cache[...] = 1
    elif isinstance(cache, np.ndarray):
        numbers = 0.1 * np.random.default_rng(0).standard_normal(_CHUNK, np.float32)
        cache.reshape(-1)[:] = np.resize(numbers.astype(port.dtype), cache.size)
    return cache


# -- for terminals


def render(plan: ExecutionPlan, variants: list[Variant], dims: Mapping[str, int]) -> None:
    """A table for each variant."""
    console = report.wide_console()
    first = variants[0].profile
    given = ", ".join(f"{name} = {size}" for name, size in dims.items())
    threads = f"{first.threads} thread{'s' if first.threads > 1 else ''}"
    console.print(Text(f"{given or 'no dimensions'}; {threads}, {first.runs} runs", "dim"))
    for variant in variants:
        console.print(_title(variant))
        console.print(Text("        ms      wait        MB      GB/s", "dim"))
        for count, seconds, nbytes, kind in _kinds(variant.profile):
            console.print(_numbers(seconds, None, nbytes).append(f"all {count} {kind}"))
        for timed in variant.profile.steps:
            for line in _lines(plan, timed):
                console.print(line)


def _title(variant: Variant) -> Text:
    p = variant.profile
    text = Text(f'fuse="{variant.fuse}": {1e3 * p.seconds:.2f} ms a run', "bold")
    text.append(
        f", {p.nbytes / 1e6:,.1f} MB at {p.speed / 1e9:.1f} GB/s: {p.speed / p.machine:.2f} of "
        f"the {p.machine / 1e9:.1f} at which this machine reads as many",
        "not bold",
    )
    return text


def _kinds(p: Profile) -> Iterator[tuple[int, float, int, str]]:
    """Steps of the main block together, by what they are, where several are the same."""
    found: dict[str, list[Timed]] = {}
    for timed in p.steps:
        if not timed.depth:
            found.setdefault(planned.kind(timed.step), []).append(timed)
    for kind, all_ in found.items():
        if len(all_) > 1:
            yield len(all_), sum(t.seconds for t in all_), sum(t.nbytes for t in all_), kind


def _lines(plan: ExecutionPlan, timed: Timed) -> Iterator[Text]:
    text = _numbers(timed.seconds, None, timed.nbytes)
    title = planned.headline(plan, timed.step)
    title.truncate(_TITLE, overflow="ellipsis")  # a fused step has hundreds of outputs
    text.append("  " * timed.depth).append_text(title)
    if timed.incomplete:
        text.append(f"  {timed.incomplete} runs with a late thread are not in the parts", "dim")
    yield text
    for part in timed.parts:
        text = _numbers(part.work + part.wait, part.wait, part.nbytes)
        yield text.append(f"{'  ' * timed.depth}  {part.count} {part.kind}", "dim")


def _numbers(seconds: float, wait: float | None, nbytes: int) -> Text:
    speed = f"{nbytes / seconds / 1e9:10.1f}" if nbytes and seconds else " " * 10
    waited = " " * 10 if wait is None else f"{1e3 * wait:10.3f}"
    return Text(f"{1e3 * seconds:10.3f}{waited}{nbytes / 1e6:10.2f}{speed}  ")


# -- for programs


def to_json(plan: ExecutionPlan, variants: list[Variant]) -> dict[str, object]:
    """Seconds, bytes, and bytes a second."""
    return {"ok": True, "profile": [_variant(plan, variant) for variant in variants]}


def _variant(plan: ExecutionPlan, variant: Variant) -> dict[str, object]:
    p = variant.profile
    return {
        "fuse": variant.fuse,
        "threads": p.threads,
        "runs": p.runs,
        "seconds": p.seconds,
        "bytes": p.nbytes,
        "bytes_per_second": p.speed,
        "machine_bytes_per_second": p.machine,
        "steps": [_timed(plan, timed) for timed in p.steps],
    }


def _timed(plan: ExecutionPlan, timed: Timed) -> dict[str, object]:
    return {
        "step": planned.headline(plan, timed.step).plain,
        "depth": timed.depth,
        "calls": timed.calls,
        "seconds": timed.seconds,
        "bytes": timed.nbytes,
        "incomplete": timed.incomplete,
        "parts": [_part(part) for part in timed.parts],
    }


def _part(part: Part) -> dict[str, object]:
    return {
        "kind": part.kind,
        "count": part.count,
        "work_seconds": part.work,
        "wait_seconds": part.wait,
        "bytes": part.nbytes,
    }
