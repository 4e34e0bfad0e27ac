"""File -> checked model. Derives the contract again and compares; trusts nobody.

In this order: what contradicts itself (``integrity``), declarations that were lost, rules that the
model breaks, facts that differ from what follows from rules and declarations. The first group with
findings is reported, whole.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnx_inplace.compiler import (
    alias,
    bodies,
    capacity,
    contract,
    declarations,
    derivation,
    facts,
    files,
    flat,
    integrity,
    page_contract,
    structure,
)
from onnx_inplace.compiler.contract import Access
from onnx_inplace.compiler.errors import ContractError, Finding
from onnx_inplace.compiler.extents import Extents
from onnx_inplace.compiler.facts import Where
from onnx_inplace.compiler.program import Program


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """A checked model with all calls inlined (bodies of cache operators are left alone).

    Attributes:
        model: the flat model.
        aliases: what the analysis found on it.
        mutable: graph inputs that the caller lends for writing.
        extents: sizes of its values, as far as the inputs fix them.
        judgements: what is known before a run of each position, index and length.
        program: the model as it stands in the file.
    """

    model: ir.Model = dataclasses.field(repr=False)
    aliases: alias.AliasMap = dataclasses.field(repr=False)
    mutable: list[ir.Value] = dataclasses.field(repr=False)
    extents: Extents = dataclasses.field(repr=False)
    judgements: tuple[capacity.Judgement, ...] = dataclasses.field(repr=False)
    program: Program

    @property
    def name(self) -> str:
        """Name of the graph."""
        return self.program.name

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as it was loaded."""
        self.program.save(path)


Source = str | os.PathLike[str] | bytes | Program | Loaded


def load(source: Source) -> Loaded:
    """Read a model, prove its contract, inline its functions.

    Args:
        source: a path, the bytes of a file, or a program; what is loaded already is given back.

    Raises:
        errors.ContractError: the model breaks a rule, or its contract was lost or changed (E113).
        errors.ModelFileError: this is no model, or its weights are missing.
    """
    if isinstance(source, Loaded):
        return source
    program = open_program(source)
    return _flatten(verify_file(program), program)


def open_program(source: str | os.PathLike[str] | bytes | Program) -> Program:
    """What stands in a file, unproven.

    Raises:
        errors.ModelFileError: this is no model, or its weights are missing.
        errors.ContractError: a name hides another (E114); else it would be no model at all.
    """
    if isinstance(source, Program):
        return source
    proto, large = files.parse(source) if isinstance(source, bytes) else files.read(source)
    _refuse(integrity.hidden_names(proto))
    structure.check(proto, "model" if isinstance(source, bytes) else os.fspath(source))
    return Program(proto.graph.name, proto, large)


@dataclasses.dataclass(frozen=True)
class Verified:
    """A model whose file says what follows from it."""

    model: ir.Model
    access: tuple[Access, ...]
    returns: tuple[str | None, ...]


def verify_file(program: Program) -> Verified:
    """Compare a file with what follows from it.

    Raises:
        errors.ContractError: all findings of the first group that has any.
    """
    proto = program.proto
    _refuse(integrity.contradictions(proto))
    _refuse(integrity.unknown_fields(proto))
    _refuse(_lost_declarations(proto))
    _refuse(integrity.misplaced(proto))
    _refuse(bodies.foreign(proto))
    _refuse(_unmarked_nodes(proto))
    derived = derivation.Derivation(proto, program.weights)
    _refuse(derived.findings)
    _refuse(list(_differences(proto, derived.facts())))
    _refuse(page_contract.differences(proto, derived.model))
    _refuse(bodies.changed(derived.model))
    graph = derived.graph
    declared = derivation.declared_returns(proto)
    returns = tuple(declared.get(str(v.name)) for v in graph.block.outputs)
    return Verified(derived.model, graph.access, returns)


def _refuse(findings: list[Finding]) -> None:
    if findings:
        raise ContractError(findings)


# -- comparison


def read_contract(proto: Any) -> declarations.Declarations | None:
    """The JSON contract; None where there is none.

    Raises:
        ValueError: it cannot be read, is not canonical, or stands there twice.
    """
    texts = [p.value for p in proto.metadata_props if p.key == declarations.CONTRACT]
    if not texts:
        return None
    found = declarations.Declarations.from_json(texts[0])
    if len(texts) > 1 or found.to_json() != texts[0]:
        raise ValueError("it is not in canonical form, or stands there twice")
    return found


def _lost_declarations(proto: Any) -> list[Finding]:
    """Typed declarations against the JSON."""
    try:
        promised = read_contract(proto)
    except ValueError as error:
        return [Finding("E113", f"The JSON contract in metadata_props cannot be read: {error}.")]
    if promised is None:
        return []
    found = derivation.declared(proto)
    findings = [
        *_compare("graph input", promised.inputs, found.inputs),
        *_compare("graph output", promised.outputs, found.outputs),
        *_compare("pages of graph input", promised.pages, found.pages),
        *_compare("page format", promised.formats, found.formats),
    ]
    names = {facts.function_scope(f): (f.input, f.output) for f in derivation.own_functions(proto)}
    for scope in sorted({*promised.functions, *names}):
        if scope not in names or scope not in promised.functions:
            who = "the file" if scope in promised.functions else "the contract"
            findings.append(Finding("E113", f"function {scope} is missing in {who}."))
            continue
        inputs, outputs = names[scope]
        sides = []
        for declaration in (promised.functions[scope], found.functions[scope]):
            access = {_at(inputs, k): a for k, a in enumerate(declaration.access)}
            roots = {_at(outputs, o): _at(inputs, i) for o, i in declaration.alias.items()}
            pages = {_at(inputs, k): p for k, p in declaration.pages.items()}
            sides.append((access, roots, pages))
        (said_access, said_roots, said_pages), (access, roots, pages) = sides
        findings += _compare(f"function {scope}, pages of parameter", said_pages, pages)
        findings += _compare(f"function {scope}, parameter", said_access, access)
        findings += _compare(f"function {scope}, result", said_roots, roots)
    return findings


def _at(names: Sequence[str], index: int) -> str:
    return names[index] if index < len(names) else f"number {index}"


def _compare(
    what: str, promised: Mapping[str, object], found: Mapping[str, object]
) -> Iterator[Finding]:
    for name in sorted({*promised, *found}):
        said, stands = promised.get(name), found.get(name)
        if said != stands:
            texts = ["nothing" if x is None else f"`{x}`" for x in (said, stands)]
            message = f"{what} `{name}`: the contract says {texts[0]}, the file {texts[1]}."
            yield Finding("E113", message)


def _unmarked_nodes(proto: Any) -> list[Finding]:
    """Nodes that always write, without a fact."""
    findings = []
    for scope, node in derivation.all_nodes(proto):
        rule = contract.RULES.get((node.domain, node.op_type))
        if rule is not None and not rule.functional and not node.output_alias:
            name = facts.Place(scope, Where.NODE, facts.label(node.output))
            message = f"{node.op_type}, {name}, has lost its output_alias."
            findings.append(Finding("E113", message, integrity.source(node)))
    return findings


def _differences(proto: Any, derived: facts.Facts) -> Iterator[Finding]:
    stored = facts.stored(proto)
    sources = {
        facts.Place(scope, Where.NODE, facts.label(node.output)): integrity.source(node)
        for scope, node in derivation.all_nodes(proto)
    }
    for place in sorted({*stored, *derived}, key=lambda p: (p.scope, p.where.value, p.name)):
        stands, follows = stored.get(place), derived.get(place)
        if stands != follows:
            texts = [str(fact) if fact is not None else "nothing" for fact in (stands, follows)]
            message = f"{place}: the file says {texts[0]}; {texts[1]} follows from the model."
            yield Finding("E113", message, sources.get(place))


# -- inlining


def _flatten(verified: Verified, program: Program) -> Loaded:
    model = verified.model
    try:
        flat.flatten(model)
        aliases = _analyse(model, verified)
    except (ir.serde.SerdeError, ValueError) as error:
        raise derivation.unreadable(error) from None
    _refuse(aliases.findings)
    pairs = zip(model.graph.inputs, verified.access, strict=True)
    mutable = [value for value, access in pairs if access is Access.READ_WRITE]
    known = Extents(model.graph, aliases.source)
    judgements = tuple(
        capacity.judge(model.graph, aliases.owner, mutable, known, capacity.Guarded.OPEN)
    )
    _refuse(capacity.findings(judgements, derivation.locate))
    return Loaded(model, aliases, mutable, known, judgements, program)


def _analyse(model: ir.Model, verified: Verified) -> alias.AliasMap:
    """Roots and versions once more, of the flat graph."""
    inputs = {str(v.name): v for v in model.graph.inputs}
    mutable = [
        v
        for v, a in zip(model.graph.inputs, verified.access, strict=True)
        if a is Access.READ_WRITE
    ]
    returns = [None if name is None else inputs[name] for name in verified.returns]
    return alias.analyze(
        model.graph,
        mutable,
        returns,
        locate=derivation.locate,
        declared=derivation.foreign_ports,
    )
