"""What the tests of the DSL ask of a program: its nodes, its results, why it was refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest

from onnx_inplace import errors
from onnx_inplace.compiler import Program


def proto(program: Program) -> onnx.ModelProto:
    """The file, as stock onnx reads it."""
    return onnx.ModelProto.FromString(program.serialized)


def stock(program: Program, /, **feeds: object) -> dict[str, np.ndarray]:
    """Results by name, from stock onnxruntime: functional, out of place."""
    session = onnxruntime.InferenceSession(program.serialized, providers=["CPUExecutionProvider"])
    types = {
        i.name: onnx.helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type)
        for i in proto(program).graph.input
    }
    arrays = {name: np.asarray(value, types[name]) for name, value in feeds.items()}
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, arrays), strict=True))


def reference(program: Program, /, **feeds: object) -> list[np.ndarray]:
    """Results from onnx.reference."""
    types = {
        i.name: onnx.helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type)
        for i in proto(program).graph.input
    }
    arrays = {name: np.asarray(value, types[name]) for name, value in feeds.items()}
    return list(onnx.reference.ReferenceEvaluator(proto(program)).run(None, arrays))


def one(program: Program, /, **feeds: object) -> np.ndarray:
    """The only result."""
    [result] = stock(program, **feeds).values()
    return result


def walk(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those of blocks included."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from walk(attribute.g)


def operators(program: Program) -> list[str]:
    """Types of the nodes of the graph, in order."""
    return [node.op_type for node in proto(program).graph.node]


def shapes(program: Program) -> list[tuple[int | str | None, ...]]:
    """Shapes of the outputs."""
    return [
        tuple(d.dim_value or d.dim_param or None for d in o.type.tensor_type.shape.dim)
        for o in proto(program).graph.output
    ]


def outputs(program: Program) -> list[str]:
    """Names of the outputs."""
    return [o.name for o in proto(program).graph.output]


def inputs(program: Program) -> list[str]:
    """Names of the inputs."""
    return [i.name for i in proto(program).graph.input]


def refused(declare: Callable[[], object]) -> list[tuple[str, int]]:
    """Code and line of every finding; lines are counted from ``declare``'s first."""
    return [(f.code, line) for f, line in _findings(declare)]


def reasons(declare: Callable[[], object]) -> str:
    """The messages of all findings."""
    return "\n".join(f.message for f, _ in _findings(declare))


def _findings(declare: Callable[[], object]) -> list[tuple[errors.Finding, int]]:
    with pytest.raises(errors.ContractError) as caught:
        declare()
    first = declare.__code__.co_firstlineno
    found = []
    for f in caught.value.findings:
        assert f.location is not None, f.message
        assert f.location.file == declare.__code__.co_filename, f.message
        found.append((f, f.location.line - first))
    return found
