"""Binary, text and JSON files of annotated models, read and written whole or not at all.

Decides nothing about what a model says; ``integrity`` and ``loader`` judge that. Large weights are
not read, they are mapped where they stand.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx_ir as ir
from google.protobuf.message import DecodeError, Message

from onnx_inplace.compiler import schema, weights
from onnx_inplace.compiler.errors import ModelFileError

TEXT, JSON = (".textproto", ".txtpb", ".pbtxt"), (".json", ".onnxjson")

Parts = tuple[Any, weights.Weights]  # the message without its large weights, and these


def read(path: str | os.PathLike[str]) -> Parts:
    """A model from a file; its suffix tells the form.

    Raises:
        ModelFileError: no such file, or it is no model.
    """
    try:
        path = Path(path)
    except TypeError:
        raise TypeError(
            f"a model is a path, the bytes of a file or a program, not {type(path).__name__}"
        ) from None
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelFileError(os.fspath(path), error.strerror or str(error)) from None
    return parse(data, path)


def parse(data: bytes, path: Path | None = None) -> Parts:
    """A model from bytes; ``path`` is where they were read from, if they were.

    Raises:
        ModelFileError: the bytes are no model.
    """
    name = "model" if path is None else os.fspath(path)
    suffix = "" if path is None else path.suffix
    try:
        if suffix in TEXT:
            model = schema.from_text(data.decode())
        elif suffix in JSON:
            model = schema.from_json(data.decode())
        else:
            valid = schema.has_valid_text(data)  # before: two messages are never alive
            model = schema.ModelProto.FromString(data)
            if not valid and (broken := _broken_text(model, "model")) is not None:
                raise ValueError(f"{broken} is no UTF-8 text.")
    except (DecodeError, ValueError) as error:
        raise ModelFileError(name, f"this is no ONNX model: {error}") from None
    if not model.HasField("graph") or not model.ir_version:
        raise ModelFileError(name, "this is no ONNX model: it has no graph.")
    try:
        return model, weights.take(model, None if path is None else path.parent)
    except (ValueError, ir.serde.SerdeError) as error:
        raise ModelFileError(name, _reason(error)) from None


def _broken_text(message: Message, path: str) -> str | None:
    """Where a string is no text: protobuf gives its bytes, which nobody expects."""
    for field, value in message.ListFields():
        if field.name == "raw_data":
            continue
        for item in schema.each(value):
            where = f"{path}.{field.name}"
            if field.message_type is not None:
                if (found := _broken_text(item, where)) is not None:
                    return found
            elif isinstance(item, bytes) and field.type == field.TYPE_STRING:
                return where
            elif not isinstance(item, str):
                break  # numbers
    return None


def _reason(error: Exception) -> str:
    """What went wrong, and with which weight."""
    cause = error.__cause__
    return str(error) if cause is None else f"{error}: {cause}"


def write(model: Any, large: weights.Weights, path: str | os.PathLike[str]) -> None:
    """Write a model; its large weights go into one file beside it. The suffix tells the form.

    An existing file keeps its content until the new one is complete.
    """
    path = Path(path)
    if large:
        model = weights.write(model, large, path)
    if path.suffix in TEXT:
        data = schema.to_text(model).encode()
    elif path.suffix in JSON:
        data = schema.to_json(model).encode()
    else:
        data = model.SerializeToString(deterministic=True)
    with weights.replacing(path.parent) as (file, rename):
        file.write(data)
        rename(path)
