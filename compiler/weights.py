"""Weights of a model outside of its protobuf messages.

A message cannot hold more than 2 GiB, and every copy of a message copies its weights. So a large
weight is detached as soon as it is seen: the message keeps type, shape and a reference, the data
stays where it is (the author's array, or the file, mapped). Decides where large weights stand on
disk; what is large, the caller may say.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_inplace.compiler.errors import WeightsError

LARGE = 64 << 10  # [bytes] weights from this size on are detached, and saved beside the model
LIMIT = 2**31 - 1  # [bytes] that a protobuf message may have
ALIGNMENT = 4096  # [bytes] of every weight in the file: a page, so that it can be mapped alone
PIECE = 16 << 20  # [bytes] written at once

Weights = Mapping[str, ir.TensorProtocol]


@contextlib.contextmanager
def detached(graph: ir.Graph, size: int = LARGE) -> Iterator[dict[str, ir.TensorProtocol]]:
    """Within the block initializers of ``size`` bytes and more are references; yields the data."""
    taken: dict[str, ir.TensorProtocol] = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.dtype != ir.DataType.STRING and tensor.nbytes >= size:
            taken[name] = tensor
            value.const_value = ir.ExternalTensor(
                "",
                None,
                tensor.nbytes,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=name,
            )
    try:
        yield taken
    finally:
        for name, tensor in taken.items():
            graph.initializers[name].const_value = tensor


def take(model: Any, folder: Path | None) -> dict[str, ir.TensorProtocol]:
    """Detach the large initializers of a ModelProto, in the message, and return their data.

    Large external data is mapped, not read; small one is read into the message. Its files are
    looked for in ``folder``.

    Raises:
        WeightsError: external data is missing, too short, or outside of ``folder``.
    """
    files: dict[str, int] = {}
    for nodes in (model.graph.node, *(f.node for f in model.functions)):
        for tensor in _inner_tensors(nodes):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                _embed(tensor, _tensor(tensor, folder, files))  # it has no initializer to hang on
    taken: dict[str, ir.TensorProtocol] = {}
    for proto in model.graph.initializer:
        external = proto.data_location == onnx.TensorProto.EXTERNAL
        if not external and (proto.data_type == ir.DataType.STRING or proto.ByteSize() < LARGE):
            continue
        data = _tensor(proto, folder, files)
        if external and data.nbytes < LARGE:
            _embed(proto, data)
            continue
        taken[proto.name] = data
        _refer(proto, "", None, data.nbytes)
    return taken


def _inner_tensors(nodes: Iterable[Any]) -> Iterator[Any]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from attribute.g.initializer
                yield from _inner_tensors(attribute.g.node)


def _tensor(proto: Any, folder: Path | None, files: dict[str, int]) -> ir.TensorProtocol:
    """The data of a TensorProto, mapped if it is external; ``files``: sizes of those seen."""
    stock = onnx.TensorProto.FromString(proto.SerializeToString())
    base = "" if folder is None else os.fspath(folder.absolute())
    tensor = ir.serde.deserialize_tensor(stock, base)
    if isinstance(tensor, ir.ExternalTensor):
        _check_file(tensor, folder, files)
    return tensor


def _embed(proto: Any, data: ir.TensorProtocol) -> None:
    """Replace the reference of a TensorProto by its data."""
    proto.ClearField("external_data")
    proto.ClearField("data_location")
    proto.raw_data = data.tobytes()


def _check_file(tensor: ir.ExternalTensor, folder: Path | None, files: dict[str, int]) -> None:
    """Whether a tensor lies in a file of ``folder``; ``files``: sizes of those that do."""
    location = Path(tensor.location)
    if folder is None:
        raise WeightsError(
            f"weight `{tensor.name}` stands in the file {location}: load the model by its path"
        )
    if not tensor.location or location.is_absolute() or ".." in location.parts:
        raise WeightsError(
            f"weight `{tensor.name}` refers to {str(tensor.location)!r}, not inside of its folder"
        )
    size = files.get(str(location))
    if size is None:
        size = files[str(location)] = _file_size(str(tensor.name), folder, location)
    offset, length = (
        tensor.offset or 0,
        tensor.length if tensor.length is not None else tensor.nbytes,
    )
    if offset < 0 or length != tensor.nbytes or offset > size - length:
        raise WeightsError(
            f"weight `{tensor.name}` has {tensor.nbytes} bytes; the model says {length} from "
            f"{offset} on in {folder / location}, which has {size}"
        )


def _file_size(name: str, folder: Path, location: Path) -> int:
    try:
        path = (folder / location).resolve(strict=True)
        size = path.stat().st_size
    except OSError as error:
        raise WeightsError(f"weight `{name}`: {folder / location}: {error.strerror}") from None
    if not path.is_relative_to(folder.resolve()):
        raise WeightsError(
            f"weight `{name}`: {folder / location} leads out of its folder, to {path}"
        )
    return size


def _refer(proto: Any, location: str, offset: int | None, length: int) -> None:
    """Replace the data of a TensorProto by a reference."""
    for field in (
        "raw_data",
        "float_data",
        "int32_data",
        "int64_data",
        "double_data",
        "uint64_data",
        "external_data",
    ):
        proto.ClearField(field)
    proto.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            proto.external_data.add(key=key, value=str(value))


def attach(graph: ir.Graph, weights: Weights) -> None:
    """Give the initializers of ``graph`` their data."""
    for name, tensor in weights.items():
        graph.initializers[name].const_value = tensor


def embed(model: Any, weights: Weights) -> bytes:
    """Serialize with all data inside.

    Raises:
        WeightsError: the result would be larger than a protobuf message may be.
    """
    total = sum(tensor.nbytes for tensor in weights.values())
    if total + model.ByteSize() > LIMIT:
        raise WeightsError(
            f"{total} bytes of weights do not fit into one message: save the model to a file"
        )
    whole = type(model)()
    whole.CopyFrom(model)
    for proto in whole.graph.initializer:
        if proto.name in weights:
            _embed(proto, weights[proto.name])
    return bytes(whole.SerializeToString(deterministic=True))


def write(model: Any, weights: Weights, path: Path) -> Any:
    """Write ``weights`` into one file beside ``path``; returns ``model`` with references to it.

    The file is called after the model and its own content: two models in one folder never share a
    name with different content, saving again changes no byte, and a crash between the two files
    leaves the old pair whole.
    """
    referring = type(model)()
    referring.CopyFrom(model)
    ordered = [proto for proto in referring.graph.initializer if proto.name in weights]
    with replacing(path.parent) as (file, rename):
        digest = hashlib.blake2b(digest_size=6)
        offsets = []
        for proto in ordered:
            padding = -file.tell() % ALIGNMENT
            _put(file, digest, memoryview(bytes(padding)))
            offsets.append(file.tell())
            for piece in pieces(weights[proto.name]):
                _put(file, digest, piece)
        name = f"{path.name}.{digest.hexdigest()}.data"
        rename(path.parent / name)
    for proto, offset in zip(ordered, offsets, strict=True):
        _refer(proto, name, offset, weights[proto.name].nbytes)
    return referring


def _put(file: IO[bytes], digest: Any, piece: memoryview) -> None:
    digest.update(piece)
    file.write(piece)


def pieces(tensor: ir.TensorProtocol) -> Iterator[memoryview]:
    """The little-endian bytes of a tensor; an array's are not copied as a whole."""
    array = tensor.numpy()
    whole = array.dtype.itemsize * array.size == tensor.nbytes  # else several elements share a byte
    if (
        whole
        and array.flags.c_contiguous
        and array.dtype.byteorder in "=|<"
        and sys.byteorder == "little"
    ):
        data = array.reshape(-1).view(np.uint8).data
    else:
        data = memoryview(tensor.tobytes())
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[tuple[IO[bytes], Any]]:
    """A new file that gets its name when it is complete; without a name it is deleted."""
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", os.fspath(folder))
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".onnx-inplace-")
    target: list[Path] = []
    try:
        with os.fdopen(handle, "wb") as file:
            yield file, target.append
        if target:
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, target[0])
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
