"""File -> checked model. Derives the contract again and compares; trusts nobody.

In this order: what nobody here can read (``integrity``), what contradicts itself, declarations that
were lost, rules that the model breaks, facts that differ from what follows from rules and
declarations (``comparison``). The first group with findings is reported, whole.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import onnx_ir as ir

from onnx_inplace.compiler import (
    alias,
    bodies,
    capacity,
    collector,
    comparison,
    contradictions,
    derivation,
    files,
    flat,
    integrity,
    page_contract,
    structure,
)
from onnx_inplace.compiler.contract import Access
from onnx_inplace.compiler.errors import ContractError, Finding
from onnx_inplace.compiler.extents import Extents
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
        defaults: what inputs are that a run does not bring, by name; none is mutable.
    """

    model: ir.Model = dataclasses.field(repr=False)
    aliases: alias.AliasMap = dataclasses.field(repr=False)
    mutable: list[ir.Value] = dataclasses.field(repr=False)
    extents: Extents = dataclasses.field(repr=False)
    judgements: tuple[capacity.Judgement, ...] = dataclasses.field(repr=False)
    program: Program
    defaults: Mapping[str, ir.TensorProtocol] = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        """Name of the graph."""
        return self.program.name

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as it was loaded."""
        self.program.save(path)


Source = str | os.PathLike[str] | bytes | Program | Loaded


@collector.paused()
def load(source: Source) -> Loaded:
    """Read a model, prove its contract, inline its functions.

    Args:
        source: a path, the bytes of a file, or a program; what is loaded already is given back.

    Raises:
        errors.ContractError: the model breaks a rule, or its contract was lost (E113) or
            changed (E101, E118 to E132).
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
    _refuse(integrity.unknown_fields(proto))
    promised = comparison.read_contract(proto)
    _refuse(contradictions.contradictions(proto))
    declared = [] if promised is None else comparison.declared(proto, promised)
    _refuse([f for f in declared if f.code != "E123"])
    _refuse(contradictions.misplaced(proto))
    _refuse(bodies.foreign(proto))
    _refuse(comparison.unmarked(proto))
    derived = derivation.Derivation(proto, program.weights)
    _refuse(derived.findings)
    _refuse(list(comparison.derived(proto, derived.facts())))
    _refuse(declared)  # the typed fields are what the model does: the JSON contract is wrong
    _refuse(page_contract.differences(proto, derived.model))
    _refuse(bodies.changed(derived.model))
    graph = derived.graph
    roots = derivation.declared_returns(proto)
    returns = tuple(roots.get(str(v.name)) for v in graph.block.outputs)
    return Verified(derived.model, graph.access, returns)


def _refuse(findings: list[Finding]) -> None:
    if findings:
        raise ContractError(findings)


# -- inlining


def _flatten(verified: Verified, program: Program) -> Loaded:
    model = verified.model
    defaults = _take_defaults(model.graph)
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
    return Loaded(model, aliases, mutable, known, judgements, program, defaults)


def _take_defaults(graph: ir.Graph) -> dict[str, ir.TensorProtocol]:
    """Initializers of inputs are no constants: a run may bring another value."""
    defaults = {}
    for value in graph.inputs:
        if value.is_initializer() and value.const_value is not None:
            graph.initializers.pop(str(value.name))
            defaults[str(value.name)], value.const_value = value.const_value, None
    return defaults


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
