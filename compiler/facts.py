"""The facts of the contract: which typed field says what, where.

Decides what stands on disk for a checked model (``of_model``, from the analysis) and finds what
stands in a file (``stored``, from the typed fields). Emission writes the first into the second's
places; loading compares the two. What the author declared, from which all else follows, stands in
``declarations``.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnx_inplace.compiler import alias, schema
from onnx_inplace.compiler.contract import Access

SOURCE = "onnx_inplace.source"  # metadata key of a node: "file.py:line"


class Where(enum.Enum):
    """In which list of a graph or function a fact stands."""

    INPUT = "input"
    OUTPUT = "output"
    VALUE = "value"  # value_info
    NODE = "node"
    FUNCTION = "function"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """What a fact is about.

    Attributes:
        scope: "" is the model's graph; a function is "domain:name:overload"; bodies add
            "/node.attribute".
        where: the list.
        name: of the value; of a node, its first output.
    """

    scope: str
    where: Where
    name: str

    def __str__(self) -> str:
        scope = f" in {self.scope.strip('/')}" if self.scope else ""
        return f"{self.where.value} `{self.name}`{scope}"

    def inside(self, scope: str) -> bool:
        """Whether this place can name the values of ``scope``."""
        return self.scope == scope or self.scope.startswith(f"{scope}/")


@dataclasses.dataclass(frozen=True, slots=True)
class ValueFact:
    """What a ValueInfoProto says."""

    access: int = schema.READ_ONLY
    alias_of: str = ""

    def __str__(self) -> str:
        access = "READ_WRITE" if self.access == schema.READ_WRITE else ""
        alias_of = f"alias_of `{self.alias_of}`" if self.alias_of else ""
        return " ".join(filter(None, (access, alias_of)))


@dataclasses.dataclass(frozen=True, slots=True)
class PortFact:
    """What the ``output_alias`` of a node or function says: (output, input, kind), sorted."""

    ports: tuple[tuple[int, int, int], ...]

    def __str__(self) -> str:
        kinds = {schema.MUST_ALIAS: "", schema.UNDEFINED: " (undefined)"}
        return ", ".join(
            f"output {o} is input {i}{kinds.get(k, f' (kind {k})')}" for o, i, k in self.ports
        )


Fact = ValueFact | PortFact
Facts = dict[Place, Fact]


@dataclasses.dataclass(frozen=True)
class Analysed:
    """A graph or function with what the analysis found about it.

    Attributes:
        block: the model's graph, or a function.
        aliases: of ``block``.
        access: one per input.
    """

    block: ir.Graph | ir.Function
    aliases: alias.AliasMap
    access: tuple[Access, ...]

    @property
    def mutable(self) -> set[ir.Value]:
        """Inputs that may be written."""
        pairs = zip(self.block.inputs, self.access, strict=True)
        return {value for value, access in pairs if access is Access.READ_WRITE}


def function_scope(function: Any) -> str:
    """Scope of an ir.Function or a FunctionProto."""
    return f"{function.domain}:{function.name}:{function.overload}"


def body_scope(scope: str, node: str, attribute: str) -> str:
    """Scope of a graph in an attribute of the node whose label is ``node``."""
    return f"{scope}/{node}.{attribute}"


def label(outputs: Iterable[str | None]) -> str:
    """How a node is called: by its first output that has a name."""
    return next((name for name in outputs if name), "")


# -- facts that follow from the analysis


def of_model(graph: Analysed, functions: Iterable[Analysed]) -> Facts:
    """All facts of a checked model."""
    facts = _of_block(graph, "")
    for value in graph.mutable:
        facts[Place("", Where.INPUT, str(value.name))] = ValueFact(schema.READ_WRITE)
    for function in functions:
        scope = function_scope(function.block)
        facts |= _of_block(function, scope)
        for value in function.mutable:
            facts[Place(scope, Where.VALUE, str(value.name))] = ValueFact(schema.READ_WRITE)
        if ports := _ports(function.aliases.result):
            facts[Place(scope, Where.FUNCTION, scope)] = ports
    return facts


def _ports(aliases: Iterable[Any]) -> PortFact | None:
    ports = tuple(sorted((a.output_index, a.input_index, schema.MUST_ALIAS) for a in aliases))
    return PortFact(ports) if ports else None


def _of_block(analysed: Analysed, scope: str) -> Facts:
    block, root = analysed.block, analysed.aliases.root
    walk = _Walk(analysed.aliases, analysed.mutable)
    walk.nodes(block, block.outputs, block.inputs, scope)
    where = Where.OUTPUT if isinstance(block, ir.Graph) else Where.VALUE
    for value in block.outputs:
        if walk.shares(value):
            walk.alias(scope, where, value, root[value])
    return walk.facts


class _Walk:
    def __init__(self, aliases: alias.AliasMap, mutable: set[ir.Value]) -> None:
        self.aliases, self.mutable = aliases, mutable
        self.results: set[ir.Value] = (
            set()
        )  # of the blocks around; their fact stands in the block's outputs
        self.facts: Facts = {}

    def shares(self, value: ir.Value | None) -> bool:
        """Whether a value is storage that the caller lends. Others promise nothing."""
        return value is not None and self.aliases.root.get(value) in self.mutable

    def alias(self, scope: str, where: Where, value: ir.Value, of: ir.Value) -> None:
        if (
            value.name != of.name
        ):  # a graph may return its input as it is: one value, nothing to say
            self.facts[Place(scope, where, str(value.name))] = ValueFact(alias_of=str(of.name))

    def source(self, value: ir.Value) -> ir.Value:
        """What a value was made from. A result of its block is never named as a source."""
        source = self.aliases.source[value]
        while source in self.results:
            source = self.aliases.source[source]
        return source

    def nodes(
        self,
        block: Iterable[ir.Node],
        outputs: Sequence[ir.Value],
        inputs: Sequence[ir.Value],
        scope: str,
    ) -> None:
        self.results.update(set(outputs) - set(inputs))
        for node in block:
            name = label(v.name for v in node.outputs)
            aliases = self.aliases.node.get(node, ())
            ports = _ports(a for a in aliases if self.shares(node.outputs[a.output_index]))
            if ports is not None:
                self.facts[Place(scope, Where.NODE, name)] = ports
            for value in node.outputs:
                if self.shares(value) and value not in self.results:
                    self.alias(scope, Where.VALUE, value, self.source(value))
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    self.body(attribute.as_graph(), body_scope(scope, name, attribute.name))

    def body(self, body: ir.Graph, scope: str) -> None:
        for value in body.inputs:
            if self.shares(value):
                self.alias(scope, Where.INPUT, value, self.source(value))
        self.nodes(body, body.outputs, body.inputs, scope)
        parameters = {self.aliases.root[v]: v for v in body.inputs if self.shares(v)}
        for value in body.outputs:
            if self.shares(value):
                root = self.aliases.root[value]
                self.alias(scope, Where.OUTPUT, value, parameters.get(root, root))


# -- facts that stand in a file


def stored(model: Any) -> Facts:
    """The typed fields of a ``schema.ModelProto``, in which every value is described once."""
    return dict(_stored(model))


def _stored(model: Any) -> Iterator[tuple[Place, Fact]]:
    yield from _stored_graph(model.graph, "")
    for function in model.functions:
        scope = function_scope(function)
        if function.output_alias:
            yield Place(scope, Where.FUNCTION, scope), _port_fact(function)
        yield from _stored_values(function.value_info, scope, Where.VALUE)
        yield from _stored_nodes(function.node, scope)


def _stored_graph(graph: Any, scope: str) -> Iterator[tuple[Place, Fact]]:
    yield from _stored_values(graph.input, scope, Where.INPUT)
    yield from _stored_values(graph.output, scope, Where.OUTPUT)
    yield from _stored_values(graph.value_info, scope, Where.VALUE)
    yield from _stored_nodes(graph.node, scope)


def _stored_values(values: Iterable[Any], scope: str, where: Where) -> Iterator[tuple[Place, Fact]]:
    for value in values:
        if value.access != schema.READ_ONLY or value.alias_of:
            yield Place(scope, where, value.name), ValueFact(value.access, value.alias_of)


def _stored_nodes(nodes: Iterable[Any], scope: str) -> Iterator[tuple[Place, Fact]]:
    for node in nodes:
        name = label(node.output)
        if node.output_alias:
            yield Place(scope, Where.NODE, name), _port_fact(node)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _stored_graph(attribute.g, body_scope(scope, name, attribute.name))


def _port_fact(message: Any) -> PortFact:
    return PortFact(
        tuple(sorted((a.output_index, a.input_index, a.kind) for a in message.output_alias))
    )
