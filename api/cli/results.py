"""What a run leaves: files that it is saved in, and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from onnx_inplace.cli.values import PAGES

if TYPE_CHECKING:
    from onnx_inplace import Session


def ports(session: Session) -> dict[str, bool]:
    """Results and caches of a model by name: whether each is a paged cache."""
    names = [name for name, _, _ in session.results]
    known = [(port.name, port) for port in session.mutable_inputs]
    known += zip(names, session.outputs, strict=True)
    return {name: hasattr(port, "sparse_ids") for name, port in known}


def check_targets(targets: Mapping[str, str], known: Mapping[str, bool]) -> None:
    """Before the run: afterwards caches have changed, and results would be lost."""
    for name, path in targets.items():
        if name not in known:
            message = f"{name} is no result and no cache; there are {', '.join(known)}"
            raise typer.BadParameter(message, param_hint="--save")
        suffix = PAGES if known[name] else ".npy"
        if not path.endswith(suffix) or not Path(path).parent.is_dir():
            message = f"{path} is no {suffix} file in a folder that exists"
            raise typer.BadParameter(message, param_hint="--save")


def save(values: Mapping[str, Any], targets: Mapping[str, str]) -> None:
    """Write arrays and paged caches."""
    for name, path in targets.items():
        if isinstance(values[name], np.ndarray):
            np.save(path, values[name])
        else:
            values[name].save(path)


def to_json(values: Any, roots: Mapping[str, str]) -> dict[str, object]:
    """Plain values; of arrays the elements, when they are few."""
    return {name: _value(value) | {"alias_of": roots.get(name)} for name, value in values.items()}


def _value(value: Any) -> dict[str, object]:
    if not isinstance(value, np.ndarray):
        return {"pages": list(value), "nbytes": value.nbytes}
    return {
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "values": value.tolist() if value.size <= 64 else None,
    }
