"""Saved state: arrays and paged caches in one file, written whole, loaded whole or not at all.

    checkpoint.save("chat.state", {"cache": cache, "lengths": lengths})
    state = checkpoint.load("chat.state")              # new storage
    checkpoint.restore("chat.state", {"cache": cache}) # into storage that is there

The container is described in ``state_file``. A file says all that is needed to read it: types,
shapes, page formats. Weights and programs are no part of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_inplace.compiler import errors, schema
from onnx_inplace.runner import cache_state, saved_state, state_file, storage
from onnx_inplace.runner.pages import PagedCache
from onnx_inplace.runner.storage import Array

Path = str | os.PathLike[str]
_POOLED = "load its file with SequencePool.load, or close the pool first"


def save(path: Path, state: Mapping[str, Array | PagedCache]) -> None:
    """Write arrays and paged caches into one file, little-endian, with checksums.

    The file appears, or is replaced, when it is complete and on the disk. Runs on a cache wait
    until it is written; arrays are the caller's to keep still.

    Args:
        path: of the file.
        state: by name. Arrays of any layout and byte order, of any type of ONNX whose elements
            are bytes.

    Raises:
        errors.BindingInUse: a run uses a cache.
        errors.BindingError: something that is neither an array nor a paged cache.
        OSError: the file cannot be written; nothing is left behind.
    """
    head, parts = schema.SavedStateProto(), []
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            content, message = _array(name, value)
            head.arrays.append(message)
            parts.append(content)
        elif not isinstance(value, PagedCache):
            kind = type(value).__name__
            raise errors.BindingError(f"`{name}`: a {kind} cannot be saved.", name)
    caches = {n: c for n, c in state.items() if isinstance(c, PagedCache)}
    with PagedCache.still("saved", caches.values()):
        for name, cache in caches.items():
            message, blocks = cache_state.describe(cache.store, cache.allowed, inline=False)
            message.name = name
            head.caches.append(message)
            parts += blocks
        state_file.write(path, head, parts)


def load(path: Path, *, map: bool = False) -> dict[str, Array | PagedCache]:
    """Read a file into new storage.

    Args:
        path: of the file.
        map: leave pages in the file, which is mapped privately: they take memory when they are
            written, and are read from the disk when they are read. The file may be renamed or
            deleted meanwhile.

    Danger: a mapped file that is made shorter takes its pages with it; reading them ends the
    process. ``save`` never does that: it makes a new file.

    Raises:
        errors.SavedStateError: it is no saved state, or damaged anywhere.
        MemoryError: it finds no room.
        OSError: it cannot be read.
    """
    content = saved_state.read(path)
    found: dict[str, Array | PagedCache] = {}
    for name, saved in content.arrays.items():
        array = found[name] = storage.empty(saved.shape, saved.dtype)
        _fill(array, content.parts[name][0])
    for name, cache in content.caches.items():
        found[name] = PagedCache.of_state(cache, content.parts[name], copy=not map)
    return found


def restore(path: Path, state: Mapping[str, Array | PagedCache]) -> None:
    """Read a file into storage that is there, bound or not: all of it, or nothing changes.

    Arrays must have the type and shape that were saved. A paged cache gets the saved pages under
    their ids in place of its own.

    Raises:
        errors.SavedStateError: the file is damaged, lacks one of ``state``, or holds something
            else under its name.
        errors.ImmutableStorage: an array is read-only.
        errors.BindingInUse: a run uses a cache.
        errors.PageError: a pool of sequences has a cache: its block tables would be wrong.
        errors.PageBudget, MemoryError: the pages find no room.
        OSError: the file cannot be read.
    """
    content = saved_state.read(path)
    caches: list[tuple[PagedCache, str]] = []
    for name, value in state.items():
        if isinstance(value, PagedCache):
            value.membership.refuse(_POOLED)
            if name not in content.caches:
                content.file.refuse(f"it holds no paged cache `{name}`")
            caches.append((value, name))
            continue
        saved = content.arrays.get(name)
        if saved is None:
            content.file.refuse(f"it holds no array `{name}`")
        if (saved.dtype, saved.shape) != (value.dtype.newbyteorder("="), value.shape):
            content.file.refuse(
                f"`{name}` is {saved.dtype}{list(saved.shape)}, and "
                f"{value.dtype}{list(value.shape)} is wanted"
            )
        if not value.flags.writeable:
            raise errors.ImmutableStorage(f"`{name}`: the array is not writable.", name)
    with PagedCache.still("restored", [cache for cache, _ in caches]):
        made = []
        for cache, name in caches:
            try:
                made.append(cache.prepare_state(content.caches[name], content.parts[name]))
            except ValueError as error:
                content.file.refuse(f"`{name}`: {error}")
        for (cache, _), store in zip(caches, made, strict=True):
            cache.take_over(store)
        for name, value in state.items():
            if isinstance(value, np.ndarray):
                _fill(value, content.parts[name][0])


def _array(name: str, value: Array) -> tuple[Array, Any]:
    """Little-endian bytes of an array, and their description."""
    try:
        elem_type = ir.DataType.from_numpy(value.dtype.newbyteorder("="))
    except TypeError:
        elem_type = ir.DataType.STRING
    if elem_type == ir.DataType.STRING or elem_type.bitwidth < 8:
        raise errors.BindingError(f"`{name}`: elements {value.dtype} cannot be saved.", name)
    plain = np.ascontiguousarray(value, dtype=_little(value.dtype))
    content: Array = plain.reshape(-1).view(np.uint8)
    message = schema.SavedStateProto().arrays.add(crc32=state_file.checksum(content))
    message.tensor.name, message.tensor.data_type = name, elem_type.value
    message.tensor.dims.extend(value.shape)
    return content, message


def _fill(target: Array, content: Array) -> None:
    """Copy little-endian bytes into an array of any byte order."""
    target[...] = content.view(_little(target.dtype)).reshape(target.shape)


def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")
