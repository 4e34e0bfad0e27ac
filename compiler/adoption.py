"""Contracts for models that others made: find the states, say so, write the contract, prove it.

An output continues an input because a writing operator makes it from the input's storage, because
their names say so, or because the caller says so. Equal types and shapes alone are a suggestion and
no more: an audio frame and its mask have them too. Every pair is proven by the analysis that
``load`` makes; nothing here is taken for granted by it.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping
from typing import Any

import onnx
import onnx.inliner
import onnx_ir as ir

from onnx_inplace.compiler import (
    contract,
    declared_types,
    derivation,
    emitter,
    integrity,
    loader,
    naming,
    operators,
    page_declarations,
    producers,
    recovery,
    schema,
)
from onnx_inplace.compiler.errors import ContractError, Finding
from onnx_inplace.compiler.program import Program

_DEFAULTS = 4  # the IR version from which on an initializer that is an input is only its default
CAPACITY = "max_length"  # what an axis is called that a model names before and after a write


class Found(enum.Enum):
    """Why an output is taken for the next content of an input."""

    REQUEST = "asked for"
    OPERATOR = "storage"
    NAME = "name"


class Way(enum.Enum):
    """How an output comes to be in its root's storage."""

    OPERATOR = "written in place"
    VIEW = "unchanged"
    ASSIGN = "assigned"


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """One output that is the storage of one input.

    Attributes:
        output: name of the graph output.
        root: name of the graph input.
        found: why they are taken for one state.
        way: how the new content comes into the storage.
        copied: bytes that a step copies for it, a number or a product with dimension names.
    """

    output: str
    root: str
    found: Found
    way: Way
    copied: str


@dataclasses.dataclass(frozen=True, eq=False)
class Adoption:
    """A model with its new contract.

    Attributes:
        program: the annotated model.
        pairs: what it declares, in the order of outputs.
        suggestions: (output, input) of equal type and shape that nothing else speaks for.
    """

    program: Program
    pairs: tuple[Pair, ...]
    suggestions: tuple[tuple[str, str], ...]


def annotate(
    source: str | os.PathLike[str] | bytes | Program,
    target: str | os.PathLike[str] | None = None,
    aliases: Mapping[str, str | None] | None = None,
) -> Adoption:
    """Write the contract of its states into a model that has none, and prove it.

    Args:
        source: a file, its bytes, or a program.
        target: where to save the result; None: nowhere.
        aliases: input by output, beside what is found; None: the output is a new value.

    Raises:
        errors.ContractError: a state cannot be in place (E110, with the bytes that a step would
            copy), ``aliases`` name nothing (E117), or the model breaks another rule.
        errors.ModelFileError: this is no model.
    """
    program = loader.open_program(source)
    proto = _copy(program.proto)
    _refuse(integrity.unknown_fields(proto))
    requested = {**derivation.declared(proto).outputs, **(aliases or {})}
    proto = _prepared(proto)
    _refuse(_unknown_names(proto, requested))
    known = declared_types.inferred(proto)
    declared_types.mend(proto, known)
    storage = _storage(proto, program)
    found = _find(proto, storage, requested)
    pairs, refused = _ways(proto, storage, found)
    _refuse(refused)
    _write(proto, pairs, known)
    pairs = [_measured(proto, pair) for pair in pairs]
    adopted = recovery.annotated(Program(program.name, proto, program.weights))
    loader.load(adopted)
    if target is not None:
        adopted.save(target)
    return Adoption(adopted, tuple(pairs), tuple(_suggestions(proto, pairs, requested)))


def _refuse(findings: list[Finding]) -> None:
    if findings:
        raise ContractError(findings)


def _copy(proto: Any) -> Any:
    copied = type(proto)()
    copied.CopyFrom(proto)
    return copied


def _prepared(proto: Any) -> Any:
    """Without facts, and without functions of the author: states may be written inside of them."""
    recovery.clear_facts(proto)
    if proto.ir_version < _DEFAULTS:
        constants = {t.name for t in proto.graph.initializer}
        inputs = [v for v in proto.graph.input if v.name not in constants]
        del proto.graph.input[:]
        proto.graph.input.extend(inputs)
    if any(True for _ in derivation.own_functions(proto)):
        stock = onnx.ModelProto.FromString(proto.SerializeToString())
        names = {(f.domain, f.name) for f in derivation.own_functions(proto)}
        inlined = onnx.inliner.inline_selected_functions(stock, sorted(names))
        proto = schema.ModelProto.FromString(inlined.SerializeToString())
    return proto


def _unknown_names(proto: Any, requested: Mapping[str, str | None]) -> list[Finding]:
    inputs = {v.name for v in proto.graph.input} - {t.name for t in proto.graph.initializer}
    outputs = {v.name for v in proto.graph.output}
    findings = []
    for output, root in requested.items():
        if output not in outputs:
            message = f"`{output}` is no output; there are {', '.join(sorted(outputs))}."
            findings.append(Finding("E117", message))
        elif root is not None and root not in inputs:
            message = f"`{root}` is no input; there are {', '.join(sorted(inputs))}."
            findings.append(Finding("E117", message))
    return findings


# -- finding


@dataclasses.dataclass(frozen=True, slots=True)
class _Storage:
    """The input whose storage an output is when every input may be written."""

    root: str
    written: bool
    reshaped: bool


def _storage(proto: Any, program: Program) -> dict[str, _Storage]:
    """By output; what the analysis says of a copy of the model in which all inputs are lent."""
    lent = _copy(proto)
    initializers = {t.name for t in proto.graph.initializer}
    for info in lent.graph.input:
        is_pages = page_declarations.read(info.type) is not None
        if info.name not in initializers and (declared_types.element_type(info) or is_pages):
            info.access = schema.READ_WRITE
    summary = derivation.Derivation(lent, program.weights).graph.aliases.summary
    found = {}
    for info, result in zip(lent.graph.output, summary.results, strict=True):
        if result is not None:
            parameter = summary.parameters[result.parameter]
            name = str(parameter.value.name)
            found[info.name] = _Storage(name, parameter.written, result.reshaped)
    return found


def _find(
    proto: Any, storage: Mapping[str, _Storage], requested: Mapping[str, str | None]
) -> dict[str, tuple[str, Found]]:
    inputs = {v.name: v for v in proto.graph.input}
    outputs = {v.name: v for v in proto.graph.output}
    found = {o: (i, Found.REQUEST) for o, i in requested.items() if i is not None}
    for output, place in storage.items():
        if output not in requested and place.written:
            found[output] = (place.root, Found.OPERATOR)
    used = {root for root, _ in found.values()}
    free = [n for n in inputs if n not in used]
    open_ = [n for n in outputs if n not in found and n not in requested]
    for output, root in naming.pairs(free, open_).items():
        if declared_types.fits(inputs[root], outputs[output]):
            found[output] = (root, Found.NAME)
    roots = {root for root, _ in found.values()}
    for output, place in storage.items():  # a second name of what is returned already
        if output not in found and output not in requested and place.root in roots:
            found[output] = (place.root, Found.OPERATOR)
    return {name: found[name] for name in outputs if name in found}


def _suggestions(
    proto: Any, pairs: list[Pair], requested: Mapping[str, str | None]
) -> list[tuple[str, str]]:
    roots, taken = {p.root for p in pairs}, {p.output for p in pairs} | set(requested)
    return [
        (output.name, info.name)
        for output in proto.graph.output
        for info in proto.graph.input
        if output.name not in taken and info.name not in roots
        if declared_types.equal(output, info)
    ]


# -- judging


def _ways(
    proto: Any, storage: Mapping[str, _Storage], found: Mapping[str, tuple[str, Found]]
) -> tuple[list[Pair], list[Finding]]:
    outputs = {v.name: v for v in proto.graph.output}
    making = producers.Producers(proto.graph)
    pairs, findings = [], []
    for output, (root, why) in found.items():
        place = storage.get(output)
        if place is not None and place.root == root:
            way = Way.OPERATOR if place.written else Way.VIEW
            pairs.append(Pair(output, root, why, way, "0"))
            continue
        obstacle = making.obstacle(output, root)
        if obstacle is not None:
            size = declared_types.size(outputs[output])
            message = f"`{output}` cannot be the storage of `{root}`: {obstacle.reason}"
            message += f" Every step would copy {size} bytes."
            findings.append(Finding("E110", message, None, obstacle.repair))
            continue
        pairs.append(Pair(output, root, why, Way.ASSIGN, ""))
    return pairs, findings


def _measured(proto: Any, pair: Pair) -> Pair:
    """With the bytes that are copied, now that all names of sizes are known."""
    if pair.way is not Way.ASSIGN:
        return pair
    root = next(v for v in proto.graph.input if v.name == pair.root)
    return dataclasses.replace(pair, copied=declared_types.size(root))


# -- writing


def _write(proto: Any, pairs: list[Pair], known: Mapping[str, Any]) -> None:
    """Declarations, Assign where a state is computed, and what an Assign needs.

    All that may fail stands before the first Assign.
    """
    inputs = {v.name: v for v in proto.graph.input}
    outputs = {v.name: v for v in proto.graph.output}
    capacity = None if CAPACITY in _dimension_names(proto) else CAPACITY
    proven = {
        p.output
        for p in pairs
        if p.output in known and declared_types.equal(inputs[p.root], known[p.output])
    }
    for pair in pairs:
        root, output = inputs[pair.root], outputs[pair.output]
        declared_types.unify(root, output, capacity if pair.way is Way.OPERATOR else None)
        root.access = schema.READ_WRITE
        if pair.output != pair.root:
            output.alias_of = pair.root
    assigned = [pair for pair in pairs if pair.way is Way.ASSIGN]
    values = []
    for pair in assigned:
        value = producers.rename(proto.graph, pair.output)
        if pair.output not in proven:
            value = _shaped(proto.graph, value, inputs[pair.root])
        values.append(value)
    for pair, value in zip(assigned, values, strict=True):
        proto.graph.node.add(
            name=f"assign_{pair.root}",
            op_type="Assign",
            domain=contract.DOMAIN,
            input=[pair.root, value],
            output=[pair.output],
        )
    if assigned:
        _import(proto)


def _shaped(graph: Any, value: str, root: Any) -> str:
    """``value`` in the shape of ``root``.

    The caller of the model feeds it back as ``root``, so it has that shape, but the file does not
    prove it. Left open, it would be a condition that a run checks before it writes, and to know the
    shape it would have to compute the value twice. A Reshape proves it, and fails before any write.
    """
    shape = producers.fresh(graph, f"{root.name}_shape")
    graph.node.add(name=shape, op_type="Shape", input=[root.name], output=[shape])
    shaped = producers.fresh(graph, f"{value}_shaped")
    graph.node.add(name=shaped, op_type="Reshape", input=[value, shape], output=[shaped])
    graph.value_info.add(name=shaped).type.CopyFrom(root.type)
    return shaped


def _dimension_names(proto: Any) -> set[declared_types.Dim]:
    infos = (*proto.graph.input, *proto.graph.output)
    return {dim for info in infos for dim in declared_types.dims(info) or ()}


def _import(proto: Any) -> None:
    """The domain of Assign and its functional body, so that stock runtimes run the file too."""
    opsets = {o.domain: o.version for o in proto.opset_import}
    opset = opsets.get("", opsets.get("ai.onnx", 1))
    if contract.DOMAIN not in opsets:
        proto.opset_import.add(domain=contract.DOMAIN, version=contract.VERSION)
    proto.ir_version = max(proto.ir_version, emitter.OLDEST_IR)
    if any((f.domain, f.name) == (contract.DOMAIN, "Assign") for f in proto.functions):
        return
    node = ir.node(
        "Assign", [ir.Value(name="state"), ir.Value(name="value")], domain=contract.DOMAIN
    )
    body = ir.serde.serialize_function(operators.body(node, opset))
    proto.functions.append(schema.FunctionProto.FromString(body.SerializeToString()))
    proto.functions[-1].overload = ""
