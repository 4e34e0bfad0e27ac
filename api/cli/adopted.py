"""What ``annotate`` shows: which output was taken for which state, why, and what that costs."""

from __future__ import annotations

from rich.table import Table

from onnx_inplace.cli import report
from onnx_inplace.compiler import Adoption


def to_json(adoption: Adoption) -> dict[str, object]:
    """All that was found."""
    return {
        "pairs": [
            {
                "output": pair.output,
                "root": pair.root,
                "found_by": pair.found.value,
                "way": pair.way.value,
                "copied": pair.copied,
            }
            for pair in adoption.pairs
        ],
        "suggestions": [{"output": output, "root": root} for output, root in adoption.suggestions],
    }


def render(adoption: Adoption) -> None:
    """A table of pairs, and what else could be one."""
    console = report.wide_console()
    if adoption.pairs:
        table = Table(
            "output", "is the storage of", "found by", "", "bytes copied a step", box=None
        )
        for pair in adoption.pairs:
            table.add_row(pair.output, pair.root, pair.found.value, pair.way.value, pair.copied)
        console.print(table)
    else:
        console.print("No state was found.")
    for output, root in adoption.suggestions:
        console.print(
            f"`{output}` has type and shape of `{root}`: --alias {output}={root} if it is"
        )
