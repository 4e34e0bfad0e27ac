"""From a declaration (what an author wrote) to a program (a checked model, annotated).

The DSL makes declarations; everything after that is decided here and in the modules that this one
calls, in the order analyse, attach functional bodies, emit. A declaration that breaks a rule never
becomes a program.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import weakref
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnx_inplace.compiler import (
    alias,
    capacity,
    emitter,
    errors,
    extents,
    facts,
    files,
    operators,
    weights,
)
from onnx_inplace.compiler.contract import Access

LOCATION = emitter.LOCATION  # key in ir.Node.meta: the errors.Location of the author's line


@dataclasses.dataclass(frozen=True, eq=False)
class Declaration:
    """A recorded graph or function and what its author declared about it.

    Attributes:
        function: the recorded nodes; nodes carry their place in ``meta[LOCATION]``.
        access: one per input.
        returns: one per output: the name of the parameter that it must alias, or None for a new
            value.
        functions: declarations of all functions that it calls, directly or not, callees first, each
            once.
        location: where the author's ``def`` stands.
        returned: where its ``return`` stands, if there is one.
    """

    function: ir.Function
    access: tuple[Access, ...]
    returns: tuple[str | None, ...]
    functions: tuple[Declaration, ...]
    location: errors.Location
    returned: errors.Location | None = None

    @property
    def mutable(self) -> list[ir.Value]:
        """Inputs that the caller lends for writing."""
        pairs = zip(self.function.inputs, self.access, strict=True)
        return [value for value, access in pairs if access is Access.READ_WRITE]


@dataclasses.dataclass(frozen=True)
class CheckedFunction:
    """A function that keeps the rules, with what the analysis found."""

    declaration: Declaration
    aliases: alias.AliasMap


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A model with its contract: in memory what an annotated file is on disk.

    Attributes:
        name: of the graph.
        proto: the annotated ``schema.ModelProto``; large weights are references in it.
        weights: the large weights, by initializer. Arrays of the author, or mapped from a file.
    """

    name: str
    proto: Any = dataclasses.field(repr=False)
    weights: weights.Weights = dataclasses.field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the annotated file: ``.onnx``, ``.textproto`` or ``.json``.

        Weights of 64 KiB and more go into one file beside it, called ``{path}.{digest}.data``.
        """
        files.write(self.proto, self.weights, path)

    @functools.cached_property
    def serialized(self) -> bytes:
        """The bytes of an ``.onnx`` file with all weights inside.

        Raises:
            ValueError: they are more than a protobuf message may have.
        """
        return weights.embed(self.proto, self.weights)


def save(program: Program, path: str | os.PathLike[str]) -> None:
    """Write a program, see ``Program.save``."""
    program.save(path)


def check_function(declaration: Declaration) -> CheckedFunction:
    """Analyse a function.

    Raises:
        errors.ContractError: all findings of the function.
    """
    return CheckedFunction(declaration, _analyse(declaration)[-1].aliases)


def build(declaration: Declaration) -> Program:
    """Compile a model.

    Raises:
        errors.ContractError: all findings of the model.
    """
    *functions, model = _analyse(declaration)
    graph = dataclasses.replace(model, block=declaration.function.graph)
    blocks = [*(f.block for f in functions), graph.block]
    nodes = [n for block in blocks for n in ir.traversal.RecursiveGraphIterator(block)]
    opset = declaration.function.opset_imports.get("", operators.OPSET)
    try:
        bodies = operators.attach_bodies(nodes, opset)
    except operators.NoBody as error:  # an opset that is too old
        finding = errors.Finding("E100", f"{error}.", declaration.location)
        raise errors.ContractError([finding]) from None
    name = declaration.function.name
    return Program(name, *emitter.emit(graph, functions, bodies, name))


# A function is analysed once, however many functions and models call it.
_analysed: weakref.WeakKeyDictionary[Declaration, facts.Analysed] = weakref.WeakKeyDictionary()


def _analyse(declaration: Declaration) -> list[facts.Analysed]:
    """Every function, callees first, the declaration itself last."""
    done: dict[ir.OperatorIdentifier, facts.Analysed] = {}
    for current in (*declaration.functions, declaration):
        analysed = _analysed.get(current)
        if analysed is None:
            analysed = _analysed[current] = _analyse_one(current, done)
        done[current.function.identifier()] = analysed
    return list(done.values())


def _analyse_one(
    declaration: Declaration, done: Mapping[ir.OperatorIdentifier, facts.Analysed]
) -> facts.Analysed:
    def callee(node: ir.Node) -> alias.Summary | None:
        called = done.get(node.op_identifier())
        return None if called is None else called.aliases.summary

    def locate(node: ir.Node | None) -> errors.Location:
        found = None if node is None else node.meta.get(LOCATION)
        return found if isinstance(found, errors.Location) else declaration.location

    inputs = {v.name: v for v in declaration.function.inputs}
    returns = [None if name is None else inputs[name] for name in declaration.returns]
    aliases = alias.analyze(
        declaration.function,
        declaration.mutable,
        returns,
        callee,
        locate,
        returned=declaration.returned,
    )
    graph = declaration.function.graph
    known = extents.Extents(graph, aliases.source)
    judgements = capacity.judge(graph, aliases.owner, declaration.mutable, known)
    exceeded = capacity.findings(judgements, locate)
    if aliases.findings or exceeded:
        raise errors.ContractError([*aliases.findings, *exceeded])
    return facts.Analysed(declaration.function, aliases, declaration.access)
