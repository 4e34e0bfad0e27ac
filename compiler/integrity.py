"""What can be judged of a file before any fact in it is looked at: unknown fields, hidden names.

Works on the protobuf message alone and knows no rule of any operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from onnx_inplace.compiler import facts, schema, schema_fields
from onnx_inplace.compiler.errors import Finding, Location

# Messages that have data and no field of ours: they are not entered.
_OPAQUE = {
    "TensorProto",
    "SparseTensorProto",
    "TensorShapeProto",
    "StringStringEntryProto",
    "OperatorSetIdProto",
}
_OURS = {
    "ValueAliasProto",
    "QuantizedTensorProto",
    "QuantizationProto",
    "Encoding",
    "Layout",
    "QuantizedTensor",
}


def source(node: Any) -> Location | None:
    """Where the author wrote a node: onnx-ir's or a NodeProto."""
    props = node.metadata_props
    text = (
        props.get(facts.SOURCE)
        if hasattr(props, "get")
        else next((p.value for p in props if p.key == facts.SOURCE), None)
    )
    return located(text or "")


def located(text: str) -> Location | None:
    """A place as files say it, ``file.py:12``."""
    file, _, line = text.rpartition(":")
    return Location(file, int(line)) if file and line.isdecimal() else None


# -- unknown fields


def unknown_fields(model: Any) -> list[Finding]:
    """Fields that a reader of this version would overlook, although they belong to the contract.

    An enum value that is not declared is such a field as well: protobuf shows it as the enum's
    default.
    """
    findings: list[Finding] = []
    known = type(model)()
    known.CopyFrom(model)
    known.DiscardUnknownFields()
    if known.ByteSize() == model.ByteSize():  # nothing was discarded, at any depth
        return findings
    for path, number in _unknown(model, "model"):
        message = f"{path} has a field or an enum value that is not known here, number {number}."
        findings.append(Finding("E126", message))
    return findings


def _unknown(message: Message, path: str) -> Iterator[tuple[str, int]]:
    name = message.DESCRIPTOR.name
    for field in UnknownFieldSet(message):
        if name in _OURS or schema_fields.FIRST <= field.field_number <= schema_fields.LAST:
            yield path, field.field_number
    if name in _OPAQUE:
        return
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        for item in schema.each(value):
            named = getattr(item, "name", "") or (
                facts.label(item.output) if hasattr(item, "op_type") else ""
            )
            yield from _unknown(item, f"{path}.{descriptor.name}" + (f"[{named}]" if named else ""))


def hidden_names(model: Any) -> list[Finding]:
    """E114: names that are defined where another value of that name can still be named."""
    findings: list[Finding] = []
    initializers = {t.name for t in model.graph.initializer} - {v.name for v in model.graph.input}
    outer = [*(v.name for v in model.graph.input), *initializers]
    _define(findings, outer, model.graph.node, {})
    for function in model.functions:
        _define(findings, function.input, function.node, {})
    return findings


def _define(
    findings: list[Finding], names: Iterable[str], nodes: Iterable[Any], seen: dict[str, None]
) -> None:
    """One block; ``seen`` holds what can be named at its entry, and holds it again at its end."""
    before = len(seen)

    def define(name: str, node: Any) -> None:
        if name in seen:
            message = f"`{name}` is defined again where the first one can still be named."
            findings.append(Finding("E114", message, None if node is None else source(node)))
        if name:
            seen[name] = None

    for name in names:
        define(name, None)
    for node in nodes:
        for attribute in node.attribute:
            graphs = [attribute.g] if attribute.HasField("g") else attribute.graphs
            for graph in graphs:
                inner = [*(v.name for v in graph.input), *(t.name for t in graph.initializer)]
                _define(findings, dict.fromkeys(inner), graph.node, seen)
        for name in node.output:
            define(name, node)
    while len(seen) > before:
        seen.popitem()
