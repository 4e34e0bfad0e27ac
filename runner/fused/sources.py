"""What repacked weights were made from, as digests: of all bytes, or of signs that none changed.

All weights of a model are as much as their copies. To read them for a digest costs as much as to
read the copies, so a file is read again only where its size, times or identity are others than
they were. Times are coarse: those of a file that was changed less than ``SETTLED`` before it was
read prove nothing, because another change could have given it the same ones.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from onnx_inplace.compiler import matrices, recovered, weights
from onnx_inplace.compiler.matrices import ProductWeights
from onnx_inplace.numba_kernels.fused import panels
from onnx_inplace.runner.fused import blob
from onnx_inplace.runner.fused import matrices as packing

SETTLED = 2_000_000_000
"""[ns] The coarsest clock of a file system in use, FAT's."""

_PIECE = 1 << 20  # [bytes] read at once

Stamps = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Sources:
    """All tensors of some products.

    Attributes:
        outline: digest of everything but the content of files.
        stamps: of the files, or nothing where they prove nothing.
    """

    products: Sequence[ProductWeights]
    outline: str
    stamps: Stamps

    def key(self) -> str:
        """Digest of everything. Reads all files."""
        return _digest(self.products, files=True)


def of(products: Sequence[ProductWeights]) -> Sources:
    """What is known without reading a file.

    Raises:
        OSError: a file is missing.
    """
    tensors = (t for p in products for t in p.every)
    files = dict.fromkeys(Path(t.path) for t in tensors if isinstance(t, ir.ExternalTensor))
    before = time.time_ns() - SETTLED
    states = [os.stat(path) for path in files]
    settled = all(max(s.st_mtime_ns, s.st_ctime_ns) < before for s in states)
    stamps = tuple((s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev) for s in states)
    return Sources(products, _digest(products, files=False), stamps if settled else ())


def _digest(products: Sequence[ProductWeights], *, files: bool) -> str:
    state = hashlib.blake2b(f"{blob.VERSION} {sys.byteorder}".encode(), digest_size=32)
    state.update(_code())
    done: dict[int, bytes] = {}
    for product in products:
        state.update(f"\n{product.form}\n".encode())
        for tensor in product.every:
            if tensor is not None:
                if id(tensor) not in done:
                    done[id(tensor)] = _content(tensor, files)
                state.update(done[id(tensor)])
    return state.hexdigest()


@functools.cache
def _code() -> bytes:
    """Of the modules that decide how weights lie: after a change of one, no old copy is found."""
    state = hashlib.blake2b(digest_size=32)
    for module in (matrices, recovered, panels, packing):
        state.update(Path(str(module.__file__)).read_bytes())
    return state.digest()


def _content(tensor: ir.TensorProtocol, files: bool) -> bytes:
    state = hashlib.blake2b(digest_size=32)
    if not isinstance(tensor, ir.ExternalTensor):
        for piece in weights.pieces(tensor):
            state.update(piece)
        return state.digest()
    if not files:
        state.update(f"{tensor.location} {tensor.offset or 0} {tensor.nbytes}".encode())
        return state.digest()
    left, buffer = tensor.nbytes, memoryview(bytearray(min(_PIECE, max(tensor.nbytes, 1))))
    with open(tensor.path, "rb", buffering=0) as file:  # not mapped: what is mapped stays resident
        file.seek(tensor.offset or 0)
        while left:
            count = file.readinto(buffer[: min(left, len(buffer))])
            if not count:
                raise EOFError(f"{tensor.path} ends inside of `{tensor.name}`")
            state.update(buffer[:count])
            left -= count
    return state.digest()
