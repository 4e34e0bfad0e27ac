"""What a file of saved state holds: read and checked as a whole, before anything is made of it."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnx_inplace.runner import cache_state
from onnx_inplace.runner.cache_state import SavedCache
from onnx_inplace.runner.state_file import Part, StateFile
from onnx_inplace.runner.storage import Array

Path = str | os.PathLike[str]


class SavedArray(NamedTuple):
    """An array without its bytes."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    part: Part


class Content(NamedTuple):
    """What a file holds; ``parts`` by name: of an array one, of a cache one for each page."""

    file: StateFile
    arrays: dict[str, SavedArray]
    caches: dict[str, SavedCache]
    parts: dict[str, list[Array]]


def read(path: Path) -> Content:
    """Read a file and check every byte of it.

    Raises:
        errors.SavedStateError: it is no saved state, or damaged anywhere.
        OSError: it cannot be read.
    """
    file = StateFile(path)
    try:
        arrays = [_saved_array(message) for message in file.head.arrays]
        caches = [cache_state.read(message) for message in file.head.caches]
    except ValueError as error:
        file.refuse(str(error))
    names = [*(a.name for a in arrays), *(c.name for c in caches)]
    if len(set(names)) < len(names):
        file.refuse("two of its values have one name")
    parts = [a.part for a in arrays] + [page.part for c in caches for page in c.pages]
    found = iter(file.parts(parts))
    by_name = {a.name: [next(found)] for a in arrays}
    by_name.update({c.name: [next(found) for _ in c.pages] for c in caches})
    return Content(file, {a.name: a for a in arrays}, {c.name: c for c in caches}, by_name)


def read_cache(path: Path) -> tuple[StateFile, SavedCache, list[Array]]:
    """The only paged cache of a file.

    Raises:
        errors.SavedStateError: as ``read``, or there is none or more than one.
        OSError: it cannot be read.
    """
    content = read(path)
    if len(content.caches) != 1:
        names = ", ".join(f"`{name}`" for name in content.caches) or "none"
        reason = f"one paged cache is wanted, and it holds {names}"
        content.file.refuse(f"{reason}: `checkpoint.load` or `SequencePool.load` reads it")
    ((name, cache),) = content.caches.items()
    return content.file, cache, content.parts[name]


def _saved_array(message: Any) -> SavedArray:
    tensor = message.tensor
    if not (tensor.HasField("name") and tensor.HasField("data_type") and message.HasField("crc32")):
        raise ValueError("an array without name, type or checksum")
    try:
        dtype = np.dtype(ir.DataType(tensor.data_type).numpy())
    except (ValueError, TypeError):
        raise ValueError(f"`{tensor.name}`: {tensor.data_type} is no element type") from None
    shape = tuple(tensor.dims)
    size = dtype.itemsize
    for n in shape:
        size *= n
    if min(shape, default=0) < 0 or dtype.kind == "O":
        raise ValueError(f"`{tensor.name}` is {dtype}{list(shape)}")
    return SavedArray(tensor.name, dtype, shape, Part(size, message.crc32))
