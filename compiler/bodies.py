"""Functional bodies in a file: stock runtimes must compute what we compute.

A function that stands under the name of an operator with an alias rule is either that operator's
meaning, as we would write it, or it changes the contract (E121).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from onnx_inplace.compiler import contract, derivation, facts, integrity, operators
from onnx_inplace.compiler.errors import Finding

_CONTROL_FLOW = {("", "If"), ("", "Loop"), ("", "Scan")}


def foreign(proto: Any) -> list[Finding]:
    """Functions and nodes in our name that this version does not know."""
    findings = []
    imports = [o for block in (proto, *proto.functions) for o in block.opset_import]
    for version in sorted({o.version for o in imports if o.domain == contract.DOMAIN}):
        if version != contract.VERSION:
            message = f"{contract.DOMAIN} {version} is imported; {contract.VERSION} is known here."
            findings.append(Finding("E126", message))
    for function in proto.functions:
        key = ("" if function.domain == "ai.onnx" else function.domain, function.name)
        redefined = key in contract.RULES or key in _CONTROL_FLOW or key[0] == contract.DOMAIN
        if redefined and not operators.is_defined(*key):
            message = f"function {facts.function_scope(function)} redefines an operator."
            findings.append(Finding("E121", message))
    for _, node in derivation.all_nodes(proto):
        if node.domain == contract.DOMAIN and not operators.is_known(node.domain, node.op_type):
            message = f"{node.domain}::{node.op_type} is no operator that this version knows."
            findings.append(Finding("E126", message, integrity.source(node)))
    return findings


def changed(model: ir.Model) -> list[Finding]:
    """Bodies that are not what the nodes that call them mean."""
    findings = []
    stored: dict[ir.OperatorIdentifier, object] = {}
    meant: dict[bytes, object] = {}  # by message: many nodes mean the same
    for node in _nodes(model):
        identifier = node.op_identifier()
        function = model.functions.get(identifier)
        if function is None or not operators.has_body(node):
            continue
        if identifier not in stored:
            stored[identifier] = _canonical(function)
        name = f"the functional body of {node.op_type} {node.overload}".rstrip()
        opset = function.opset_imports.get("", operators.OPSET)
        try:
            message = operators.body_message(node, opset)
        except operators.NoBody as error:
            fault = f"{name} cannot be what this node means: {error}."
        else:
            text = message.SerializeToString(deterministic=True)
            if text not in meant:
                meant[text] = _canonical(ir.serde.deserialize_function(message))
            same = stored[identifier] == meant[text]
            fault = "" if same else f"{name} is not what this node means."
        if fault:
            findings.append(Finding("E121", fault, integrity.source(node)))
    return findings


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from ir.traversal.RecursiveGraphIterator(model.graph)
    for function in model.functions.values():
        if not derivation.is_body(function.domain, function.name):
            yield from ir.traversal.RecursiveGraphIterator(function)


def _canonical(function: ir.Function) -> object:
    """A function without the names of its values."""
    number: dict[ir.Value | None, int] = {None: -1}

    def numbers(values: Any) -> tuple[int, ...]:
        return tuple(number.setdefault(v, len(number)) for v in values)

    inputs = numbers(function.inputs)
    nodes = []
    for node in function:
        attributes = sorted(
            (a.name, ir.serde.serialize_attribute(a).SerializeToString(deterministic=True))
            for a in node.attributes.values()
        )
        identifier = node.op_identifier()
        nodes.append((identifier, numbers(node.inputs), numbers(node.outputs), attributes))
    return inputs, nodes, numbers(function.outputs), sorted(function.attributes)
