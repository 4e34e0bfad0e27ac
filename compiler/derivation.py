"""The contract of a file again, from the rules of operators and what the file declares.

Nothing of what the file says about intermediate values is used: only access of parameters, roots
of results, and, for operators that nobody here has a rule for, their ``output_alias``.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import onnx
import onnx_ir as ir

from onnx_inplace.compiler import (
    alias,
    contract,
    declarations,
    errors,
    facts,
    integrity,
    page_contract,
    weights,
)
from onnx_inplace.compiler.contract import Access
from onnx_inplace.compiler.errors import Finding, ModelFileError
from onnx_inplace.compiler.facts import Analysed

Identifier = tuple[str, str, str]  # domain, name, overload
# Metadata of ir nodes that we have no rule for: their contract, as "output:input,..."
PORTS = "onnx_inplace.output_alias"


def is_body(domain: str, name: str) -> bool:
    """Whether a function is the functional body of an operator that has an alias rule."""
    return domain == contract.DOMAIN or (domain, name) in contract.RULES


def own_functions(proto: Any) -> Iterator[Any]:
    """FunctionProtos that an author declared."""
    return (f for f in proto.functions if not is_body(f.domain, f.name))


def declared(proto: Any) -> declarations.Declarations:
    """What the typed fields declare."""
    return declarations.of_model(proto, map(facts.function_scope, own_functions(proto)))


def declared_returns(proto: Any) -> Mapping[str, str]:
    """Root of every graph output that has one."""
    return declared(proto).outputs


def all_nodes(proto: Any) -> Iterator[tuple[str, Any]]:
    """NodeProtos of the graph and of functions that an author declared, with their scope."""

    def walk(nodes: Any, scope: str) -> Iterator[tuple[str, Any]]:
        for node in nodes:
            yield scope, node
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    inner = facts.body_scope(scope, facts.label(node.output), attribute.name)
                    yield from walk(attribute.g.node, inner)

    yield from walk(proto.graph.node, "")
    for function in own_functions(proto):
        yield from walk(function.node, facts.function_scope(function))


def unreadable(error: Exception) -> ModelFileError:
    """What a library, or the analysis, says about a model that it cannot represent."""
    reason = str(error.__cause__ or error).strip().splitlines()[0]
    return ModelFileError("model", f"this is no model that can be read: {reason}")


class Derivation:
    """All facts again, from operator rules and declarations.

    Attributes:
        model: the file as onnx-ir.
        graph: the analysed graph.
        functions: the analysed functions.
        findings: rules that graph and functions break.
    """

    def __init__(self, proto: Any, large: weights.Weights):
        self.findings: list[Finding] = []
        try:
            self.model = ir.serde.deserialize_model(
                onnx.ModelProto.FromString(proto.SerializeToString())
            )
        except (ir.serde.SerdeError, ValueError, KeyError, TypeError) as error:
            raise unreadable(error) from None
        weights.attach(self.model.graph, large)
        self._pages = page_contract.Declared(proto)
        self._pages.forget(proto, self.model)
        self._pages.inputs(proto.graph.input, self.model.graph.inputs, "")
        mark_foreign(proto, self.model)
        found = declared(proto)
        self._protos = {facts.function_scope(f): f for f in own_functions(proto)}
        self._declarations = found
        self._done: dict[str, Analysed | None] = {}
        self._faulty: set[str] = set()  # functions that break a rule, or call one that does
        self._calls_faulty = False  # the block that is being analysed does
        for function in self.model.functions.values():
            self._function(function)
        returns = [found.outputs.get(str(v.name)) for v in self.model.graph.outputs]
        access = [Access[found.inputs[str(v.name)]] for v in self.model.graph.inputs]
        self.graph = self._analyse(self.model.graph, access, returns)
        self.functions = [f for f in self._done.values() if f is not None]
        if self._pages.findings:  # of values that are not known to be pages, nothing else is true
            self.findings = self._pages.findings

    def facts(self) -> facts.Facts:
        """What the file must say."""
        return facts.of_model(self.graph, self.functions)

    def _function(self, function: ir.Function) -> Analysed | None:
        """A function's summary is needed at its calls: callees come first."""
        scope = facts.function_scope(function)
        if scope in self._done or scope not in self._protos:
            return self._done.get(scope)
        self._done[scope] = None  # a function that calls itself gets no summary
        proto, declaration = self._protos[scope], self._declarations.functions[scope]
        infos = {info.name: info for info in proto.value_info}
        for value in function.inputs:
            if value.name in infos and infos[value.name].HasField("type"):
                info = onnx.ValueInfoProto.FromString(infos[value.name].SerializeToString())
                try:
                    ir.serde.deserialize_value_info_proto(info, value)
                except (ir.serde.SerdeError, ValueError) as error:
                    raise unreadable(error) from None
        self._pages.inputs(proto.value_info, function.inputs, f" in {scope}")
        roots = {
            k: str(function.inputs[i].name)
            for k, i in declaration.alias.items()
            if i < len(function.inputs)
        }
        returns = [roots.get(k) for k in range(len(function.outputs))]
        before, around = len(self.findings), self._calls_faulty
        self._calls_faulty = False
        self._done[scope] = self._analyse(
            function, [Access[a] for a in declaration.access], returns
        )
        if self._calls_faulty or len(self.findings) > before:
            self._faulty.add(scope)
        self._calls_faulty = around
        return self._done[scope]

    def _analyse(
        self, block: ir.Graph | ir.Function, access: list[Access], returns: list[str | None]
    ) -> Analysed:
        inputs = {v.name: v for v in block.inputs}
        mutable = [v for v, a in zip(block.inputs, access, strict=True) if a is Access.READ_WRITE]
        roots = [None if name is None else inputs.get(name) for name in returns]
        try:
            aliases = alias.analyze(block, mutable, roots, self._callee, locate, foreign_ports)
        except ValueError as error:  # a call leaves out an input that is needed inside
            raise unreadable(error) from None
        if not self._calls_faulty:  # else nobody knows what its calls do: one finding for one fault
            self.findings += aliases.findings
        return Analysed(block, aliases, tuple(access))

    def _callee(self, node: ir.Node) -> alias.Summary | None:
        function = self.model.functions.get(node.op_identifier())
        if function is not None and not is_body(node.domain, node.op_type):
            analysed = self._function(function)
            self._calls_faulty |= facts.function_scope(function) in self._faulty
            return None if analysed is None else analysed.aliases.summary
        return None


def mark_foreign(proto: Any, model: ir.Model) -> None:
    """Keep the contract of nodes that we have no rule for where the passes on onnx-ir keep it."""

    def walk(protos: Any, nodes: Any) -> None:
        for stored, node in zip(protos, nodes, strict=True):
            if stored.output_alias and is_foreign(node.op_identifier(), model.functions):
                text = ",".join(f"{a.output_index}:{a.input_index}" for a in stored.output_alias)
                node.metadata_props[PORTS] = text
            for attribute in stored.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    walk(attribute.g.node, node.attributes[attribute.name].as_graph())

    walk(proto.graph.node, model.graph)
    for function in own_functions(proto):
        walk(function.node, model.functions[function.domain, function.name, function.overload])


def is_foreign(identifier: Identifier, functions: Container[Identifier]) -> bool:
    """Whether the file alone says what a node aliases: no rule, no function, none of ONNX."""
    domain, op_type, _ = identifier
    return (
        domain not in ("", "ai.onnx", contract.DOMAIN)
        and (domain, op_type) not in contract.RULES
        and identifier not in functions
    )


def foreign_ports(node: ir.Node) -> list[contract.OutputAlias]:
    """Aliases of a node whose contract is its own ``output_alias``."""
    text = node.metadata_props.get(PORTS)
    pairs = (pair.split(":") for pair in text.split(",")) if text else ()
    return [contract.OutputAlias(int(output), int(source)) for output, source in pairs]


def locate(node: ir.Node | None) -> errors.Location | None:
    """Where the author wrote a node, as far as the file says."""
    return None if node is None else integrity.source(node)
