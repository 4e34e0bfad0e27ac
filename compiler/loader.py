"""File -> checked model. Derives the contract again and compares; never trusts emit."""
from __future__ import annotations

import dataclasses

import onnx
import onnx_ir as ir

from onnx_inplace.compiler import alias, contract, emitter, errors, schema


@dataclasses.dataclass
class Loaded:
    """A checked model with all calls inlined (bodies of cache operators are left alone)."""

    model: ir.Model
    aliases: alias.AliasMap
    mutable: list[ir.Value]


def load(serialized: bytes) -> Loaded:
    """Read, compare with what can be derived, inline."""
    annotated = schema.ModelProto.FromString(serialized)
    found = emitter.facts(annotated)
    stored = next((p.value for p in annotated.metadata_props if p.key == emitter.CONTRACT), None)
    if stored != emitter.digest(found):
        raise errors.ContractError([errors.Finding("E113", f"{len(found)} facts in the file, its contract says {stored}.")])
    model = ir.serde.deserialize_model(onnx.ModelProto.FromString(serialized))
    _derive(annotated, model, found)
    access = {v.name for v in annotated.graph.input if v.access == schema.READ_WRITE}
    alias_of = {v.name: v.alias_of for v in annotated.graph.output if v.alias_of}
    ir.passes.common.InlinePass(lambda f: f.domain != contract.DOMAIN)(model)
    model = _infer(model)
    inputs = {v.name: v for v in model.graph.inputs}
    mutable = [v for v in model.graph.inputs if v.name in access]
    returns = [inputs.get(alias_of.get(v.name)) for v in model.graph.outputs]
    aliases = alias.analyze(model.graph, mutable, returns)
    if aliases.findings:
        raise errors.ContractError(aliases.findings)
    return Loaded(model, aliases, mutable)


def _derive(annotated, model: ir.Model, found: list[tuple]) -> None:
    """Analyse functions and graph again; the facts must come out as they are written."""
    protos = {(f.domain, f.name, f.overload): f for f in annotated.functions if f.domain != contract.DOMAIN}
    done: dict = {}

    def function(identifier):
        if identifier not in done and identifier in protos:
            f, proto = model.functions[identifier], protos[identifier]
            access = {v.name for v in proto.value_info if v.access == schema.READ_WRITE}
            alias_of = {v.name: v.alias_of for v in proto.value_info if v.alias_of}
            done[identifier] = f, _analyze(f, access, [alias_of.get(v.name) for v in f.outputs], function)
        return done.get(identifier)

    for identifier in protos:
        function(identifier)
    access = {v.name for v in annotated.graph.input if v.access == schema.READ_WRITE}
    aliases = _analyze(model.graph, access, [v.alias_of for v in annotated.graph.output], function)
    derived = schema.ModelProto.FromString(ir.to_proto(model).SerializeToString())
    emitter.annotate(derived, model.graph, aliases, done)
    difference = set(emitter.facts(derived)) ^ set(found)
    if difference:
        raise errors.ContractError([errors.Finding("E101", str(fact)) for fact in sorted(difference, key=repr)])


def _analyze(graph, access: set[str], alias_of: list, function) -> alias.AliasMap:
    def callee(node: ir.Node):
        known = function(node.op_identifier())
        return known and {a.output_index: a.input_index for a in known[1].result}

    inputs = {v.name: v for v in graph.inputs}
    aliases = alias.analyze(graph, [v for v in graph.inputs if v.name in access], [inputs.get(n) for n in alias_of], callee)
    if aliases.findings:
        raise errors.ContractError(aliases.findings)
    return aliases


def _infer(model: ir.Model) -> ir.Model:
    """Infer again after inlining: symbols of a callee are not symbols of the caller."""
    keep = {*model.graph.inputs, *model.graph.outputs}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        for value in node.outputs:
            if value not in keep:
                value.shape = None
    proto = onnx.shape_inference.infer_shapes(ir.to_proto(model), data_prop=True)
    return ir.serde.deserialize_model(proto)
