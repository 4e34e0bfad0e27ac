"""The container of saved state: a head that describes, and bytes behind it. Whole, or refused.

Little-endian everywhere:

    8   magic, with bytes that a transfer as text would change
    4   version of the container
    4   CRC-32 of the 16 bytes that follow and of the head
    8   bytes of the head
    8   bytes of the file
    .   head: a SavedStateProto
    .   the bytes of each array, then of each page, in the order of the head, each at the next
        multiple of 64; between them and nowhere else zeros

The head has a CRC-32 for each of them, so that no bit of the file goes unchecked. What the head
means is decided in ``cache_state`` and ``checkpoint``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np
from google.protobuf.message import DecodeError

from onnx_inplace.compiler import schema
from onnx_inplace.compiler.errors import SavedStateError
from onnx_inplace.runner.storage import ALIGNMENT, Array

MAGIC = b"\x8bONNXKV\n"
VERSION = 1
_FIXED = struct.Struct("<8sII")
_SIZES = struct.Struct("<QQ")
_BEGIN = _FIXED.size + _SIZES.size


class Part(NamedTuple):
    """Bytes of an array or a page: how many there are, and their CRC-32."""

    size: int
    crc32: int


def write(path: str | os.PathLike[str], head: Any, parts: Sequence[Array]) -> None:
    """Write a file: under another name in the same folder, flushed to the disk, then renamed.

    A file of this name keeps its old content until the new one is complete.

    Args:
        path: of the file.
        head: a SavedStateProto with the CRC-32 of each part.
        parts: uint8 arrays.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    target = Path(path)
    encoded = head.SerializeToString(deterministic=True)
    total = _end([part.nbytes for part in parts], _BEGIN + len(encoded))
    sizes = _SIZES.pack(len(encoded), total)
    checksum = zlib.crc32(encoded, zlib.crc32(sizes))
    with _replacing(target) as file:
        file.write(_FIXED.pack(MAGIC, VERSION, checksum) + sizes + encoded)
        for part in parts:
            file.write(bytes(-file.tell() % ALIGNMENT))
            file.write(part.data)


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[IO[bytes]]:
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """The new name is on the disk, too; where folders cannot be opened, the system sees to it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _end(sizes: Sequence[int], begin: int) -> int:
    return (_places(sizes, begin) or [(0, begin)])[-1][1]


def _places(sizes: Sequence[int], begin: int) -> list[tuple[int, int]]:
    """Begin and end of each part."""
    found, at = [], begin
    for size in sizes:
        at += -at % ALIGNMENT
        found.append((at, at + size))
        at += size
    return found


class StateFile:
    """A file of saved state whose head has been checked.

    Attributes:
        path: of the file, for errors.
        head: the SavedStateProto.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Open a file and read its head. Nothing of it is executed or trusted.

        Raises:
            SavedStateError: it is no such file, of another version, cut off, or damaged.
            OSError: it cannot be read.
        """
        self.path = os.fspath(path)
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _BEGIN:
                self.refuse(f"{size} bytes are no saved state")
            # private: what is written to it never reaches the file
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._bytes: Array = np.frombuffer(self._map, np.uint8)
        magic, version, checksum = _FIXED.unpack_from(self._map)
        if magic != MAGIC:
            self.refuse("it is no saved state")
        if version != VERSION:
            self.refuse(f"version {version} is not known here, {VERSION} is")
        length, total = _SIZES.unpack_from(self._map, _FIXED.size)
        if total != size or length > size - _BEGIN:
            self.refuse(f"it has {size} bytes of {total}: it was cut off, or something was added")
        self._begin = _BEGIN + length
        if zlib.crc32(self._bytes[_FIXED.size : self._begin].data) != checksum:
            self.refuse("its head is damaged (CRC-32)")
        self.head = self._parse(self._bytes[_BEGIN : self._begin].tobytes())

    def refuse(self, reason: str) -> NoReturn:
        """Raise the error of this file."""
        raise SavedStateError(self.path, reason)

    def _parse(self, encoded: bytes) -> Any:
        try:
            head = schema.SavedStateProto.FromString(encoded)
        except DecodeError as error:
            self.refuse(f"its head is no SavedStateProto: {error}")
        known = schema.SavedStateProto.FromString(encoded)
        known.DiscardUnknownFields()
        if known.ByteSize() != head.ByteSize():
            self.refuse("its head has fields that are not known here")
        return head

    def parts(self, expected: Sequence[Part]) -> list[Array]:
        """The parts, as the head says they follow. All bytes of the file are checked.

        Returns:
            uint8 arrays that are the file, mapped privately: what is not touched takes no memory.

        Raises:
            SavedStateError: a part is damaged, or the file has other parts.
        """
        places = _places([part.size for part in expected], self._begin)
        end = places[-1][1] if places else self._begin
        if end != len(self._bytes):
            self.refuse(f"{len(self._bytes)} bytes where its head needs {end}")
        found, at = [], self._begin
        for k, ((begin, stop), part) in enumerate(zip(places, expected, strict=True)):
            content = self._bytes[begin:stop]
            if checksum(content) != part.crc32 or self._bytes[at:begin].any():
                self.refuse(f"part {k} is damaged (CRC-32)")
            found.append(content)
            at = stop
        return found


def checksum(part: Array) -> int:
    """CRC-32 of bytes."""
    return zlib.crc32(part.data)
