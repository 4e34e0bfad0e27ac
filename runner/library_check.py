"""Whether onnxruntime has kernels for sub-sessions whose weights nobody has asked for yet."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as ort

from onnx_inplace.compiler.steps import SubSession
from onnx_inplace.runner import pools

_PAYLOAD = 1024  # [bytes] smaller tensors may be shapes or axes, which say what a node does


def doubtful(steps: Iterable[SubSession]) -> list[SubSession]:
    """Sub-sessions of which only loading them can say whether onnxruntime runs them.

    Each is tried as a graph without weights, to which no optimizer is applied: where that loads,
    all nodes have kernels. Layers of one structure are tried once, whatever their weights hold.
    """
    verdicts: dict[bytes, bool] = {}
    found = []
    for step in steps:
        model = _without_weights(step)
        structure = _structure(model.graph)
        if structure not in verdicts:
            verdicts[structure] = _loads(model)
        if not verdicts[structure]:
            found.append(step)
    return found


def _without_weights(step: SubSession) -> onnx.ModelProto:
    """The model, its weights inputs of their types."""
    model: onnx.ModelProto = onnx.ModelProto.FromString(step.model)
    graph, names = model.graph, {weight.name for weight in step.weights}
    kept = [t for t in graph.initializer if t.name not in names]
    for tensor in graph.initializer:
        if tensor.name in names:
            graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return model


def _loads(model: onnx.ModelProto) -> bool:
    options = onnxruntime.SessionOptions()
    pools.set_threads(options, 1)
    options.log_severity_level = 4  # faults are raised
    options.enable_cpu_mem_arena = False
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except (ort.Fail, ort.NotImplemented, ort.InvalidGraph, ort.InvalidArgument):
        return False
    return True


def _structure(graph: onnx.GraphProto) -> bytes:
    """The graph with numbers in place of names, in the order in which they are met."""
    numbers: dict[str, str] = {"": ""}

    def number(name: str) -> str:
        return numbers.setdefault(name, str(len(numbers)))

    plain = onnx.GraphProto()
    for ours, theirs in ((graph.input, plain.input), (graph.output, plain.output)):
        for value in ours:
            theirs.add(name=number(value.name), type=value.type)
    for tensor in graph.initializer:
        copy = plain.initializer.add(data_type=tensor.data_type, dims=tensor.dims)
        if tensor.ByteSize() < _PAYLOAD:
            copy.CopyFrom(tensor)
        copy.name = number(tensor.name)
    for node in graph.node:
        inputs, outputs = [number(n) for n in node.input], [number(n) for n in node.output]
        plain.node.add(
            domain=node.domain,
            op_type=node.op_type,
            input=inputs,
            output=outputs,
            attribute=node.attribute,
        )
    found: bytes = plain.SerializeToString(deterministic=True)
    return found
