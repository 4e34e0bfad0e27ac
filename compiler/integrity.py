"""What can be judged before a meaning is derived: unknown fields, facts that contradict each other.

Works on the protobuf message alone and knows no rule of any operator. Ports and names are two
descriptions of one
relation: where both stand they must lead to one root (E101). Whether the relation is true is
    decided in ``loader``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx
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
    findings = []
    for path, number in _unknown(model, "model"):
        message = f"{path} has a field or an enum value that is not known here, number {number}."
        findings.append(Finding("E113", message))
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


# -- contradictions


class _Scope:
    """Names of a graph or function; names of outer scopes are seen from inside."""

    def __init__(self, outer: _Scope | None, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        self.outer = outer
        self.known = set(inputs)
        self.parameters = set(inputs) if outer is None else set()  # inputs of a body are aliases
        self.results = set(outputs) - self.known  # an input may be returned as it is
        self.by_port: dict[str, str] = {}
        self.by_name: dict[str, str] = {}

    def home(self, name: str) -> _Scope | None:
        """The scope that defines ``name``."""
        scope: _Scope | None = self
        while scope is not None and name not in scope.known:
            scope = scope.outer
        return scope


class _Cycle(Exception):
    """``alias_of`` leads back to itself."""


def contradictions(model: Any) -> list[Finding]:
    """E101: facts that cannot all be true, whatever the model means."""
    check = _Contradictions()
    check.graph(model.graph, None, "")
    for function in model.functions:
        check.function(function)
    return check.findings


class _Contradictions:
    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def find(self, message: str, node: Any = None) -> None:
        self.findings.append(Finding("E101", message, None if node is None else source(node)))

    def graph(self, graph: Any, outer: _Scope | None, name: str) -> None:
        scope = _Scope(outer, [v.name for v in graph.input], [v.name for v in graph.output])
        scope.known.update(tensor.name for tensor in graph.initializer)
        infos = [*graph.value_info, *graph.output]
        if outer is not None:  # a body's own input aliases a value outside
            infos += graph.input
        else:
            for value in graph.input:
                if value.alias_of:
                    self.find(f"graph input `{value.name}` has alias_of: it is a root itself.")
        self.block(graph.node, infos, scope, name)

    def function(self, function: Any) -> None:
        scope, name = _Scope(None, function.input, function.output), facts.function_scope(function)
        inputs, outputs = list(function.input), list(function.output)
        if self.ports(function, inputs, outputs, f"function {name}", None):
            for alias in function.output_alias:
                result, parameter = outputs[alias.output_index], inputs[alias.input_index]
                if result != parameter:
                    scope.by_port[result] = parameter
        self.block(function.node, function.value_info, scope, name)

    def block(self, nodes: Iterable[Any], infos: Iterable[Any], scope: _Scope, name: str) -> None:
        nodes = list(nodes)
        for node in nodes:
            scope.known.update(filter(None, node.output))
        for info in infos:
            if not info.alias_of:
                continue
            home = scope.home(info.alias_of)
            if home is not None and info.alias_of in home.results:
                self.find(
                    f"`{info.name}`{_inside(name)} has alias_of `{info.alias_of}`, an output."
                )
                continue
            scope.by_name[info.name] = info.alias_of
        self.cycles(scope, name)
        for node in nodes:
            label = facts.label(node.output)
            if self.ports(
                node, list(node.input), list(node.output), f"`{label}`{_inside(name)}", node
            ):
                for alias in node.output_alias:
                    output = node.output[alias.output_index]
                    declared = scope.by_port.get(output)
                    scope.by_port[output] = node.input[alias.input_index]
                    if declared is not None:
                        self.compare(scope, output, declared, node.input[alias.input_index], node)
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    self.graph(attribute.g, scope, facts.body_scope(name, label, attribute.name))
        for node in nodes:
            for output in node.output:
                port, named = scope.by_port.get(output), scope.by_name.get(output)
                if port is not None and named is not None:
                    self.compare(scope, output, port, named, node)

    def compare(self, scope: _Scope, value: str, port: str, named: str, node: Any) -> None:
        try:
            by_port, by_name = self.root(scope, port), self.root(scope, named)
        except _Cycle:
            return  # has been found
        if by_name is not None and by_port is not None and by_port != by_name:
            self.find(f"`{value}` is `{by_port}` by its port, and `{by_name}` by its name.", node)

    def root(self, scope: _Scope, name: str) -> str | None:
        """The parameter that facts lead to; None: they end elsewhere, so some were lost."""
        seen = set()
        home = scope.home(name)
        while home is not None:
            if (id(home), name) in seen:
                raise _Cycle
            seen.add((id(home), name))
            following = home.by_port.get(name) or home.by_name.get(name)
            if following is None:
                return name if name in home.parameters else None
            name, home = following, home.home(following)
        return None

    def cycles(self, scope: _Scope, name: str) -> None:
        for start in scope.by_name:
            seen, current = {start}, scope.by_name[start]
            while current in scope.by_name and current in scope.known:
                if current in seen:
                    if current == start:
                        self.find(f"alias_of of `{start}`{_inside(name)} leads back to itself.")
                    break
                seen.add(current)
                current = scope.by_name[current]

    def ports(
        self, message: Any, inputs: list[str], outputs: list[str], what: str, node: Any
    ) -> bool:
        """Whether all ports exist, and no output is two inputs. Two outputs may be one input."""
        count = len(self.findings)
        for alias in message.output_alias:
            if alias.kind != schema.MUST_ALIAS:
                self.find(
                    f"{what} has an output_alias of kind {alias.kind}, which says nothing.", node
                )
            for index, values, side in (
                (alias.output_index, outputs, "output"),
                (alias.input_index, inputs, "input"),
            ):
                if not 0 <= index < len(values) or not values[index]:
                    self.find(
                        f"{what} has an output_alias of {side} {index}; it has {len(values)}.", node
                    )
        used = [a.output_index for a in message.output_alias]
        for index in sorted({i for i in used if used.count(i) > 1}):
            self.find(f"{what} has more than one output_alias of output {index}.", node)
        return len(self.findings) == count


# -- places


def misplaced(model: Any) -> list[Finding]:
    """Declarations where none may stand, or about values that none may be about."""
    findings: list[Finding] = []
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    mutable = {v.name for v in graph.input if v.access == schema.READ_WRITE}
    inputs = {v.name for v in graph.input}
    for name in sorted(mutable & weights):
        message = (
            f"graph input `{name}` is READ_WRITE and has an initializer: nobody lends its storage."
        )
        findings.append(Finding("E106", message))
    for place, fact in facts.stored(model).items():
        allowed = place.where is facts.Where.INPUT and not place.scope
        if place.where is facts.Where.VALUE and place.scope.count("/") == 0:
            allowed = any(
                facts.function_scope(f) == place.scope and place.name in f.input
                for f in model.functions
            )
        if isinstance(fact, facts.ValueFact) and fact.access == schema.READ_WRITE and not allowed:
            message = f"{place} is READ_WRITE, and no parameter of a graph or function."
            findings.append(Finding("E106", message))
    for value in graph.output:
        if value.alias_of and value.alias_of not in inputs:
            message = (
                f"graph output `{value.name}` has alias_of `{value.alias_of}`, no graph input."
            )
            findings.append(Finding("E113", message))
        elif value.alias_of and value.alias_of not in mutable:
            message = (
                f"graph output `{value.name}` has alias_of `{value.alias_of}`, a READ_ONLY input."
            )
            findings.append(Finding("E117", message))
    return findings


def _inside(scope: str) -> str:
    return f" in {scope.strip('/')}" if scope else ""


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
