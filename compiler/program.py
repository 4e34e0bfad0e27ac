"""From a declaration (what an author wrote) to a program (a checked model and its annotated file).

The DSL makes declarations; everything after that is decided here and in the modules that this one calls, in the
order analyse, emit. A declaration that breaks a rule never becomes a program.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from onnx_inplace.compiler import alias, emitter, errors, operators
from onnx_inplace.compiler.contract import Access

LOCATION = "onnx_inplace.location"  # key in ir.Node.meta: the errors.Location of the author's line


@dataclasses.dataclass(frozen=True)
class Declaration:
    """A recorded graph or function and what its author declared about it.

    Attributes:
        function: the recorded nodes; nodes carry their place in ``meta[LOCATION]``.
        access: one per input.
        returns: one per output: the name of the parameter that it must alias, or None for a new value.
        functions: declarations of all functions that it calls, directly or not, callees first, each once.
        location: where the author's ``def`` stands.
    """

    function: ir.Function
    access: tuple[Access, ...]
    returns: tuple[str | None, ...]
    functions: tuple[Declaration, ...]
    location: errors.Location

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


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled model: checked, annotated, ready to be saved, planned or run."""

    name: str
    serialized: bytes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the annotated ``.onnx`` file."""
        Path(path).write_bytes(self.serialized)


def check_function(declaration: Declaration) -> CheckedFunction:
    """Analyse a function.

    Raises:
        errors.ContractError: all findings of the function.
    """
    return CheckedFunction(declaration, _analyse(declaration))


def build(declaration: Declaration) -> Program:
    """Compile a model.

    Raises:
        errors.ContractError: all findings of the model.
    """
    aliases = _analyse(declaration)
    functions = [(f.function, _analyse(f)) for f in declaration.functions]
    graphs = [declaration.function.graph, *(f.graph for f, _ in functions)]
    nodes = [n for g in graphs for n in ir.traversal.RecursiveGraphIterator(g)]
    opset = declaration.function.opset_imports.get("", operators.OPSET)
    bodies = operators.attach_bodies(nodes, opset)
    data = emitter.emit(declaration.function, aliases, functions, bodies)
    return Program(declaration.function.name, data)


def _analyse(declaration: Declaration) -> alias.AliasMap:
    called = {f.function.identifier(): f for f in declaration.functions}

    def callee(node: ir.Node) -> Mapping[int, int] | None:
        f = called.get(node.op_identifier())
        return None if f is None else {a.output_index: a.input_index for a in _analyse(f).result}

    def locate(node: ir.Node | None) -> errors.Location:
        return declaration.location if node is None else node.meta.get(LOCATION, declaration.location)

    inputs = {v.name: v for v in declaration.function.inputs}
    returns = [None if name is None else inputs[name] for name in declaration.returns]
    aliases = alias.analyze(declaration.function, declaration.mutable, returns, callee, locate)
    if aliases.findings:
        raise errors.ContractError(aliases.findings)
    return aliases
