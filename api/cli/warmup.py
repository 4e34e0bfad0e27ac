"""Compiles what a model needs before anybody waits for it."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from onnx_inplace.cli import report, values
from onnx_inplace.compiler import errors


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: its name, the seconds that it took, whether it was compiled already."""

    name: str
    seconds: float
    kept: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Warmed:
    """What loading a model took.

    Attributes:
        kernels: that it needs, in order.
        seconds: for all of the model: its proof, its plan, weights, kernels.
        folder: where compiled code is kept.
    """

    kernels: tuple[Kernel, ...]
    seconds: float
    folder: Path


def warm(model: Path, threads: int, fuse: values.Fusing) -> Warmed:
    """Load a model, which compiles what it needs and nobody has compiled before.

    Raises:
        errors.BindingError: compiled code cannot be kept.
        errors.InplaceError: the model cannot be loaded.
    """
    # not at the top: who only compiles models waits for neither numba nor onnxruntime
    from onnx_inplace.numba_kernels import cache, memory
    from onnx_inplace.runner.session import Session

    folder = cache.folder()
    if folder is None:
        raise errors.BindingError(
            "compiled code cannot be kept: nothing can be written to its folder. "
            "Name another one with ONNX_INPLACE_CACHE.",
            "ONNX_INPLACE_CACHE",
        )
    before, start = len(memory.made()), time.perf_counter()
    Session(model, threads=threads, fuse=fuse.value)
    seconds = time.perf_counter() - start
    kernels = (Kernel(m.name, m.seconds, m.read) for m in memory.made()[before:])
    return Warmed(tuple(kernels), seconds, folder)


def render(warmed: Warmed, model: Path) -> None:
    """A table of the kernels and what it comes to."""
    table = Table(box=None, pad_edge=False)
    table.add_column("kernel")
    table.add_column("seconds", justify="right")
    table.add_column("")
    for kernel in warmed.kernels:
        state = "was compiled" if kernel.kept else "compiled now"
        table.add_row(kernel.name, f"{kernel.seconds:.3f}", state)
    console: Console = report.wide_console()
    if warmed.kernels:
        console.print(table)
    new = [kernel.seconds for kernel in warmed.kernels if not kernel.kept]
    print(
        f"{model}: {len(warmed.kernels)} kernels, {len(new)} compiled now in {sum(new):.1f} s; "
        f"loaded in {warmed.seconds:.1f} s"
    )
    print(f"kept in {warmed.folder}")


def warmup(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="An annotated model.")],
    threads: Annotated[
        int, typer.Option("--threads", min=1, help="How many threads runs will use.")
    ] = 1,
    fuse: values.FuseOption = values.Fusing.AUTO,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Compile the kernels that a model needs, so that its first session need not wait for them."""
    warmed = warm(model, threads, fuse)
    if json_:
        kernels = [dataclasses.asdict(kernel) for kernel in warmed.kernels]
        content = {"ok": True, "problems": [], "kernels": kernels}
        report.print_json({**content, "seconds": warmed.seconds, "folder": str(warmed.folder)})
    else:
        render(warmed, model)
