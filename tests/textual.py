"""Programs as ONNX text, where the DSL would not say it, or would not let it be said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from onnx_inplace.compiler import errors, program
from onnx_inplace.compiler.contract import Access

HEADER = '<ir_version: 11, opset_import: ["": 24, "onnx_inplace": 1, "local": 1]>\n'
HERE = errors.Location("textual.py", 1)

Contract = tuple[Sequence[str], Sequence[str | None]]  # lent parameters; per result what it aliases


def declare(
    text: str,
    lent: Sequence[str],
    returns: Sequence[str | None],
    functions: Mapping[str, Contract] | None = None,
) -> program.Declaration:
    """Parse a graph, and functions after it, callees first; declare what is lent and returned."""
    model = ir.serde.deserialize_model(onnx.parser.parse_model(HEADER + text))
    known: list[program.Declaration] = []
    for (_, name, _), function in model.functions.items():
        mutable, results = (functions or {})[name]
        known.append(
            program.Declaration(
                function, _access(function.inputs, mutable), tuple(results), tuple(known), HERE
            )
        )
    main = ir.Function("local", model.graph.name or "main", graph=model.graph, attributes=[])
    access = _access(model.graph.inputs, lent)
    return program.Declaration(main, access, tuple(returns), tuple(known), HERE)


def build(
    text: str,
    lent: Sequence[str],
    returns: Sequence[str | None],
    functions: Mapping[str, Contract] | None = None,
) -> program.Program:
    """Compile a text."""
    return program.build(declare(text, lent, returns, functions))


def _access(inputs: Sequence[ir.Value], lent: Sequence[str]) -> tuple[Access, ...]:
    return tuple(Access.READ_WRITE if v.name in lent else Access.READ_ONLY for v in inputs)
