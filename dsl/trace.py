"""Recording one function: parameters, body, results, and all faults at once."""

from __future__ import annotations

import dataclasses
import inspect
import threading
import traceback
import types
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import onnxscript.evaluator

from onnx_inplace.compiler import contract, program
from onnx_inplace.compiler.contract import Access
from onnx_inplace.compiler.errors import ContractError, Finding, Location
from onnx_inplace.dsl import (
    calls,
    hooks,
    notation,
    parameters,
    prune,
    recorder,
    results,
    source,
    staging,
)
from onnx_inplace.dsl.recorder import Kind, Recorder
from onnx_inplace.dsl.tensor import Tensor

_one_at_a_time = threading.RLock()  # onnxscript's evaluator is one for all threads

# What follows from a value that is missing: not judged in a recording that has faults of its own.
_CONSEQUENCES = frozenset({"E107", "E108", "E109", "E110", "E111"})


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function of the author that is to be recorded.

    Attributes:
        f: the function.
        signature: of ``f``.
        hints: its annotations, evaluated.
        namespace: what they were evaluated in.
        location: where its definition begins.
    """

    f: types.FunctionType
    signature: inspect.Signature
    hints: Mapping[str, Any]
    namespace: Mapping[str, Any]
    location: Location

    @staticmethod
    def of(f: Any, namespace: Mapping[str, Any]) -> Subject:
        """Look at ``f``.

        Raises:
            ContractError: E100, it cannot be recorded.
        """
        f = source.plain_function(f)
        location = source.place(f)
        signature = inspect.signature(f)
        try:
            hints = notation.evaluated(f, namespace)
        except Exception as error:  # whatever the author's annotations raise
            message = f"An annotation of {f.__name__} cannot be evaluated here: {error}."
            raise ContractError([Finding("E100", message, location)]) from error
        for p in signature.parameters.values():
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                message = f"{f.__name__} takes *{p.name}: name every parameter, or take a tuple."
                raise ContractError([Finding("E100", message, location)])
        return Subject(f, signature, hints, namespace, location)

    def attributes(self) -> tuple[str, ...]:
        """Parameters that are Python values."""
        return tuple(
            n
            for n in self.signature.parameters
            if not parameters.is_tensors(self.hints.get(n), self.namespace)
        )


def record(
    subject: Subject,
    kind: Kind,
    name: str,
    domain: str,
    opset: int | None,
    values: Mapping[str, Any],
) -> calls.Recorded:
    """Record ``subject`` with Python ``values`` for its attributes.

    Raises:
        ContractError: all faults of the function, those of the analysis included.
    """
    with _one_at_a_time:
        return _record(Recorder(name, kind, opset, subject.location), subject, domain, values)


def _record(
    r: Recorder, subject: Subject, domain: str, values: Mapping[str, Any]
) -> calls.Recorded:
    declared = _parameters(r, subject, values)
    with recorder.recording(r), r.block(r.name) as block:
        made: dict[str, Tensor] = {}
        for parameter in declared.values():
            for leaf in parameter.leaves():
                type_, shape = leaf.typed()
                value = r.value(leaf.name, type_, shape)
                r.add_input(block, value, leaf.name)
                made[leaf.name] = Tensor(value)
        inputs = {n: t.value for n, t in made.items()}
        arguments = dict(values)
        arguments |= {n: parameters.build(p, made) for n, p in declared.items()}
        found = _run(r, subject, arguments, declared, inputs)
    block.graph.outputs.extend(v for v in found.values if not r.is_unknown(v))
    declaration = _declaration(r, block.graph, domain, declared, found)
    _judge(r, declaration)
    return calls.Recorded(declaration, declared, found)


def _parameters(
    r: Recorder, subject: Subject, values: Mapping[str, Any]
) -> dict[str, parameters.Parameter]:
    declared: dict[str, parameters.Parameter] = {}
    for n, given in subject.signature.parameters.items():
        if n in values:
            continue
        if r.kind is Kind.MODEL and given.default is not given.empty:
            r.fault(
                f"`{n}` is an input of the model and cannot have a default.",
                location=subject.location,
                repair="Leave the default out, and pass the value in every run.",
            )
        try:
            declared[n] = parameters.describe(n, subject.hints.get(n), subject.namespace)
        except parameters.Unusable as error:
            r.fault(f"{error}.", location=subject.location)
    if r.findings:
        raise ContractError(r.findings)
    return declared


def _run(
    r: Recorder,
    subject: Subject,
    arguments: Mapping[str, Any],
    declared: Mapping[str, parameters.Parameter],
    inputs: Mapping[str, ir.Value],
) -> results.Results:
    """Execute the staged function, and take apart what it returns."""
    staged = staging.staged(subject.f, source.definition(subject.f), hooks)
    try:
        with onnxscript.evaluator.default_as(calls.Evaluator()):
            bound = inspect.BoundArguments(subject.signature, OrderedDict(arguments))
            result = staged(*bound.args, **bound.kwargs)
    except ContractError:
        raise
    except Exception as error:
        if r.findings:  # Python went on after a fault, and stumbled over it
            raise ContractError(r.findings) from error
        if isinstance(error, TypeError) and "__array_ufunc__" in str(error):
            r.fault(
                "numpy cannot compute with a tensor.",
                location=_place(error),
                repair="Use the operator of ONNX, for example `op.Tanh(x)` for `np.tanh(x)`.",
            )
            raise ContractError(r.findings) from error
        raise
    return results.collect(
        r, result, subject.hints.get("return"), declared, inputs, subject.namespace
    )


def _place(error: BaseException) -> Location | None:
    """Where an error was raised; what is not Python, as numpy's functions, has no line."""
    frames = traceback.extract_tb(error.__traceback__)
    return Location(frames[-1].filename, frames[-1].lineno or 1) if frames else None


def _declaration(
    r: Recorder,
    graph: ir.Graph,
    domain: str,
    declared: Mapping[str, parameters.Parameter],
    found: results.Results,
) -> program.Declaration:
    writers = {key: any(a is Access.READ_WRITE for a in d.access) for key, d in r.functions.items()}

    def writes(node: ir.Node) -> bool:
        rule = contract.rule(node)
        return writers.get(node.op_identifier(), False) or (
            rule is not None and rule.effect is contract.Effect.WRITE
        )

    prune.prune(graph, writes)
    graph.opset_imports[""] = r.opset
    for node in ir.traversal.RecursiveGraphIterator(graph):
        node.name = node.outputs[0].name if node.outputs else None
        graph.opset_imports.setdefault(node.domain, node.version or 1)
    functions: dict[ir.OperatorIdentifier, program.Declaration] = {}
    for d in r.functions.values():
        for f in (*d.functions, d):
            functions.setdefault(f.function.identifier(), f)
    access = tuple(leaf.access for p in declared.values() for leaf in p.leaves())
    returns = tuple(
        root for v, root in zip(found.values, found.returns, strict=True) if not r.is_unknown(v)
    )
    function = ir.Function(domain, r.name, graph=graph, attributes=[])
    returned = None if r.returned is None else r.returned[2]
    return program.Declaration(
        function, access, returns, tuple(functions.values()), r.location, returned
    )


def _judge(r: Recorder, declaration: program.Declaration) -> None:
    """Report the faults of the recording together with what the analysis finds.

    Raises:
        ContractError: there are any.
    """
    if not r.findings:
        return
    findings = list(r.findings)
    try:
        program.check_function(declaration)
    except ContractError as error:
        findings += [f for f in error.findings if f.code not in _CONSEQUENCES]
    findings.sort(key=lambda f: f.location.line if f.location is not None else 0)
    raise ContractError(findings)
