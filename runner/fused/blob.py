"""A file of repacked weights: written whole or not at all, checked before it is used, mapped.

A head says what the file is for and where each part lies; the rest is the parts, as kernels read
them, so that a process maps the file and shares its pages with every other one. What the head says
is proven by a digest, how long the file is by its size. The digest of the parts is compared only
where the file's time is not the one that its writer gave it: whatever changes a file changes that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnx_inplace.compiler import weights
from onnx_inplace.runner.actions import Array

VERSION = 1
"""Of this format and of what ``numba_kernels.fused.panels`` makes: another number, another file."""

_MAGIC = b"onnx-inplace fused weights"
_START = struct.Struct("<32sQ32s")  # magic, bytes of the head, digest of the head
_PAGE = 4096  # [bytes] the parts begin on a page


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """What a file says of itself.

    Attributes:
        key: digest of all that the parts were made from.
        outline: digest of the same without what stands in files.
        stamps: how those files looked when they were read, or nothing where that cannot be relied
            on.
        parts: one for each product, in JSON.
        size: [bytes] of all parts.
        digest: of all parts.
        time: [ns] of the last change that its writer gave it.
        version: ``VERSION``.
    """

    key: str
    outline: str
    stamps: tuple[tuple[int, ...], ...]
    parts: tuple[dict[str, Any], ...]
    size: int
    digest: str
    time: int
    version: int


@dataclasses.dataclass(frozen=True, slots=True)
class Blob:
    """A file that is what its head says; ``data`` is mapped, and cannot be written.

    ``touched``: its time was another one, so all of it has been read and compared.
    """

    head: Head
    data: Array
    touched: bool


def digest(data: Any) -> str:
    """Of bytes, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def read(path: Path) -> Blob | None:
    """Map a file; None: there is none, or it is damaged, or of another version."""
    try:
        with open(path, "rb") as file:
            return _read(file.fileno(), os.fstat(file.fileno()))
    except (OSError, ValueError, TypeError, KeyError, struct.error):
        return None


def _read(file: int, state: os.stat_result) -> Blob | None:
    whole = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
    magic, length, expected = _START.unpack_from(whole)
    if magic.rstrip(b"\0") != _MAGIC or length > state.st_size - _START.size:
        return None
    text = whole[_START.size : _START.size + length]
    if bytes.fromhex(digest(text)) != expected:
        return None
    fields = json.loads(text)
    stamps = tuple(tuple(stamp) for stamp in fields.pop("stamps"))
    head = Head(**fields | {"stamps": stamps, "parts": tuple(fields["parts"])})
    begin = _begin(length)
    if head.version != VERSION or state.st_size != begin + head.size:
        return None
    data = np.frombuffer(whole, np.uint8, head.size, begin)
    touched = state.st_mtime_ns != head.time
    if touched and digest(data) != head.digest:
        return None
    if hasattr(mmap, "MADV_WILLNEED"):  # pages of the disk are on their way before a run asks
        whole.madvise(mmap.MADV_WILLNEED)
    return Blob(head, data, touched)


def write(
    path: Path,
    key: str,
    outline: str,
    stamps: Sequence[tuple[int, ...]],
    parts: Sequence[dict[str, Any]],
    data: Array,
) -> None:
    """Write a file in place of whatever has this name.

    Raises:
        OSError: it cannot be written.
    """
    now = time.time_ns()
    head = Head(key, outline, tuple(stamps), tuple(parts), data.size, digest(data), now, VERSION)
    text = json.dumps(dataclasses.asdict(head)).encode()
    start = _START.pack(_MAGIC, len(text), bytes.fromhex(digest(text)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with weights.replacing(path.parent) as (file, rename):
        file.write(start + text)
        file.write(bytes(_begin(len(text)) - file.tell()))
        file.write(data.data)
        file.flush()
        os.fsync(file.fileno())  # a name must not survive a crash that the bytes do not
        os.utime(file.fileno(), ns=(now, now))
        rename(path)


def _begin(length: int) -> int:
    """Where the parts begin, behind a head of ``length`` bytes."""
    return -(-(_START.size + length) // _PAGE) * _PAGE
