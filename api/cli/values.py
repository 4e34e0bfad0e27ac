"""What stands behind ``--input``, ``--cache`` and ``--save``: names, numbers, files."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import onnx_inplace

PAGES = ".pages"
"""Ends the names of files that hold a paged cache."""


class Fusing(enum.Enum):
    """What ``Session(fuse=)`` takes; an enum, as typer shows the words of one."""

    AUTO = "auto"
    OFF = "off"
    DECODE_ONLY = "decode-only"


FuseOption = Annotated[Fusing, typer.Option("--fuse", help="What its sessions are loaded with.")]


@dataclasses.dataclass(frozen=True)
class CacheArgument:
    """Storage of a mutable input: a file that is updated in place, or sizes of new zeros."""

    name: str
    path: Path | None
    dims: dict[str, int]


def pairs(values: Iterable[str], option: str, form: str) -> dict[str, str]:
    """``NAME=VALUE`` arguments.

    Raises:
        typer.BadParameter: another form, or a name twice.
    """
    found: dict[str, str] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise typer.BadParameter(f"{text!r} is not {form}", param_hint=option)
        if name in found:
            raise typer.BadParameter(f"{name} is given twice", param_hint=option)
        found[name] = value
    return found


def feed(text: str, name: str) -> Any:
    """An input: the array of a ``.npy`` file, or a number or list as JSON."""
    if text.endswith(".npy"):
        return _load(Path(text), name, "--input", None)
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, bool | int | float | list):
        message = f"{name}: {text!r} is no .npy file, no number and no list of numbers"
        raise typer.BadParameter(message, param_hint="--input")
    return value


def cache(text: str, name: str) -> CacheArgument:
    """Storage: a ``.npy`` or ``.pages`` file, or ``batch:1,max_length:64``."""
    if text.endswith((".npy", PAGES)):
        return CacheArgument(name, Path(text), {})
    form = "neither a .npy or .pages file nor DIMENSION:SIZE"
    return CacheArgument(name, None, sizes(text, "--cache", form, f"{name}: "))


def sizes(
    text: str, option: str, form: str = "not DIMENSION:SIZE", who: str = ""
) -> dict[str, int]:
    """``batch:1,max_length:64``.

    Raises:
        typer.BadParameter: another form.
    """
    found = {}
    for part in text.split(","):
        dim, colon, size = part.rpartition(":")
        if not colon or not size.isdecimal():
            raise typer.BadParameter(f"{who}{part!r} is {form}", param_hint=option)
        found[dim.strip()] = int(size)
    return found


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{end}": factor**power
    for power, letter in enumerate("KMGT", 1)
    for end, factor in (("iB", 1024), ("B", 1000))
}


def amount(text: str, option: str) -> int:
    """Bytes: ``4GiB``, ``500 MB``, ``1073741824``.

    Raises:
        typer.BadParameter: another form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2] not in _UNITS:
        known = ", ".join(unit for unit in _UNITS if unit)
        raise typer.BadParameter(f"{text!r} is no number of {known}", param_hint=option)
    return int(Fraction(found[1]) * _UNITS[found[2]])


def open_cache(argument: CacheArgument) -> np.ndarray[Any, Any]:
    """Map a file so that what is written to the array is written to the file."""
    assert argument.path is not None
    return _load(argument.path, argument.name, "--cache", "r+")


def _load(path: Path, name: str, option: str, mode: str | None) -> np.ndarray[Any, Any]:
    try:
        array = np.load(path, mmap_mode=mode, allow_pickle=False)  # type: ignore[arg-type]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise typer.BadParameter(f"{name}: {path}: {reason}", param_hint=option) from None
    assert isinstance(array, np.ndarray)
    return array


def typed(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """``.npy`` files know no bfloat16 and the like: they come back as bytes of the same size."""
    if array.dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize:
        return array.view(dtype)
    return array


def describe(array: Any, limit: int = 6) -> str:
    """Type, shape, and a few numbers of an array; pages and bytes of a paged cache."""
    if not isinstance(array, np.ndarray):
        return repr(array)
    shape = ", ".join(map(str, array.shape))
    flat = array.reshape(-1)
    shown = " ".join(str(x) for x in flat[:limit].tolist())
    more = " ..." if flat.size > limit else ""
    return f"{array.dtype}[{shape}]  {shown}{more}"


def storage(session: Any, port: Any, argument: CacheArgument | None) -> Any:
    """What a mutable input of a session is given: a new array or paged cache, or that of a file."""
    if argument is not None and argument.path is not None:
        if argument.path.suffix == PAGES:
            return onnx_inplace.PagedCache.load(argument.path)
        return typed(open_cache(argument), port.dtype)
    return session.allocate(port.name, **(argument.dims if argument is not None else {}))
