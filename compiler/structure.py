"""What the analysis takes for granted of a graph, whatever it means.

Names are defined before they are used, and once; branches and bodies have the inputs and outputs
that their node needs. Most of it is onnx's own checker; it says nothing of the latter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx

from onnx_inplace.compiler.errors import ModelFileError

_OF_ONNXRUNTIME = {"SimplifiedLayerNormalization"}  # registered by it in the standard domain


def check(proto: Any, path: str) -> None:
    """Refuse what is no valid ONNX model.

    Raises:
        ModelFileError: with the reason.
    """
    bare = type(proto)()
    bare.CopyFrom(proto)
    for tensor in bare.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:  # has been checked
            tensor.ClearField("data_location")
            tensor.ClearField("external_data")
            tensor.ClearField("dims")
            tensor.dims.append(0)
    for value in (*bare.graph.input, *bare.graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()  # the checker wants one; none is any rank
    for node in bare.graph.node:
        if node.op_type in _OF_ONNXRUNTIME and not node.domain:
            node.domain = "com.microsoft"  # where the checker lets operators pass it does not know
    try:
        onnx.checker.check_model(bare.SerializeToString())
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise ModelFileError(path, f"this is no valid ONNX model: {str(error).strip()}") from None
    _check_blocks(proto.graph.node, path, frozenset())
    for function in proto.functions:
        names = (*function.attribute, *(a.name for a in function.attribute_proto))
        _check_blocks(function.node, path, frozenset(names))


def _check_blocks(nodes: Iterable[Any], path: str, known: frozenset[str]) -> None:
    """``known``: attributes of the function around, which its nodes can refer to."""
    for node in nodes:
        graphs = {a.name: a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH}
        fault = _missing_input(node) or _unknown_reference(node, known)
        if fault is None and node.domain in ("", "ai.onnx"):
            fault = _fault(node, graphs)
        if fault is not None:
            name = node.output[0] if node.output else node.name
            raise ModelFileError(path, f"this is no valid ONNX model: `{name}`: {fault}.")
        for graph in graphs.values():
            _check_blocks(graph.node, path, known)


def _missing_input(node: Any) -> str | None:
    """An input that is left out, though its operator needs it."""
    if "" not in node.input or not onnx.defs.has(node.op_type, node.domain):
        return None
    formal = onnx.defs.get_schema(node.op_type, node.domain).inputs
    for parameter, name in zip(formal, node.input, strict=False):
        if not name and parameter.option == onnx.defs.OpSchema.FormalParameterOption.Single:
            return f"{node.op_type} needs its input `{parameter.name}`"
    return None


def _unknown_reference(node: Any, known: frozenset[str]) -> str | None:
    """An attribute that takes the value of one that no function around has."""
    for attribute in node.attribute:
        name = attribute.ref_attr_name
        if name and name not in known:
            return f"{attribute.name} refers to an attribute `{name}` of no function"
    return None


def _fault(node: Any, graphs: dict[str, Any]) -> str | None:
    """What is wrong with the blocks of a node."""
    inputs, outputs = len(node.input), len(node.output)
    if node.op_type == "If":
        wanted = {"then_branch": (0, outputs), "else_branch": (0, outputs)}
    elif node.op_type == "Loop":
        if inputs < 2:
            return f"Loop has {inputs} inputs, at least 2 are needed"
        if "" in node.input[2:]:
            return "Loop leaves out the initial value of what it carries"
        wanted = {"body": (inputs, outputs + 1)}
    elif node.op_type == "Scan":
        count = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
        if not 1 <= count <= inputs or inputs - count > outputs:
            return f"Scan has {inputs} inputs, {outputs} outputs and num_scan_inputs {count}"
        if "" in node.input:
            return "Scan leaves out an input"
        wanted = {"body": (inputs, outputs)}
    else:
        return None
    for name, (parameters, results) in wanted.items():
        graph = graphs.get(name)
        if graph is None:
            return f"{node.op_type} has no {name}"
        found = len(graph.input), len(graph.output)
        if found != (parameters, results):
            return (
                f"{name} has {found[0]} inputs and {found[1]} outputs; {node.op_type} needs "
                f"{parameters} and {results}"
            )
        if node.op_type == "Loop" and inputs - 2 > outputs:
            return f"Loop carries {inputs - 2} values and has {outputs} outputs"
    return None
