"""Types and shapes of the outputs of one node, by ONNX's own inference, once per distinct question.

A decoder asks the same question for each of its layers, so answers are kept. What ONNX cannot say
(operators without a schema, inputs of unknown type) is left open; what it refuses is a
``Mismatch``.
"""

from __future__ import annotations

import functools
import re

import onnx
import onnx_ir as ir

from onnx_inplace.compiler import paged_rules, paged_types

_DATA = 64  # elements; constants up to this size (axes, shapes, bounds) take part in inference

Typed = tuple[ir.TypeProtocol | None, ir.Shape | None]


class Mismatch(Exception):
    """Element types or shapes of the inputs cannot be combined."""


def infer(node: ir.Node) -> None:
    """Set type and shape of the outputs of ``node`` as far as they are known.

    Raises:
        Mismatch: the inputs do not fit.
    """
    if paged_rules.is_paged_operator(node):
        node.outputs[0].type, node.outputs[0].shape = paged_rules.result(node)
        return
    if any(map(paged_types.is_paged, node.inputs)):
        _infer_of_pages(node)
        return
    version = node.version or 1
    if not onnx.defs.has(node.op_type, version, node.domain):
        _infer_contrib(node)
        return
    inputs: list[bytes | None] = []
    data: list[bytes | None] = []
    for value in node.inputs:
        inputs.append(None if value is None else _type(value))
        data.append(None if value is None else _constant(value))
    attributes = tuple(
        ir.serde.serialize_attribute(a).SerializeToString() for a in node.attributes.values()
    )
    question = (
        node.domain,
        node.op_type,
        version,
        tuple(inputs),
        tuple(data),
        attributes,
        len(node.outputs),
    )
    for value, (type_, shape) in zip(node.outputs, _answer(*question), strict=True):
        value.type, value.shape = type_, None if shape is None else shape.copy()


def _infer_of_pages(node: ir.Node) -> None:
    """Identity is another name of the cache. Of other operators nothing is known."""
    source = node.inputs[0]
    if node.op_type == "Identity" and source is not None:
        node.outputs[0].type, node.outputs[0].shape = source.type, source.shape


def _type(value: ir.Value) -> bytes:
    if value.type is None:
        return b""
    proto = ir.serde.serialize_type(value.type)
    if value.shape is not None:
        ir.serde.serialize_shape_into(proto, value.shape)
    return bytes(proto.SerializeToString())


def _constant(value: ir.Value) -> bytes | None:
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > _DATA:
        return None
    return bytes(ir.serde.serialize_tensor(tensor).SerializeToString())


@functools.lru_cache(maxsize=8192)
def _answer(
    domain: str,
    op_type: str,
    version: int,
    inputs: tuple[bytes | None, ...],
    data: tuple[bytes | None, ...],
    attributes: tuple[bytes, ...],
    count: int,
) -> tuple[Typed, ...]:
    schema = onnx.defs.get_schema(op_type, version, domain)
    node = onnx.NodeProto(domain=domain, op_type=op_type)
    node.input.extend("" if t is None else f"i{k}" for k, t in enumerate(inputs))
    node.output.extend(f"o{k}" for k in range(count))
    for a in attributes:
        node.attribute.add().ParseFromString(a)
    types = {f"i{k}": onnx.TypeProto.FromString(t) for k, t in enumerate(inputs) if t}
    values = {f"i{k}": onnx.TensorProto.FromString(d) for k, d in enumerate(data) if d}
    if any(t == b"" for t in inputs):
        return _by_schema(schema, types, count)
    try:
        found = onnx.shape_inference.infer_node_outputs(
            schema,
            node,
            types,
            values,
            opset_imports=[
                onnx.helper.make_opsetid(domain, version),
                onnx.helper.make_opsetid("", max(version, 13)),
            ]
            if domain
            else [onnx.helper.make_opsetid("", version)],
            ir_version=13,
        )
    except onnx.shape_inference.InferenceError as error:
        raise Mismatch(f"{op_type}: {_plain(str(error))}") from None
    answers: list[Typed] = []
    for k, (type_, shape) in enumerate(_by_schema(schema, types, count)):
        proto = found.get(f"o{k}")
        if proto is not None:
            type_ = ir.serde.deserialize_type_proto_for_type(proto)
            shape = ir.serde.deserialize_type_proto_for_shape(proto)
        answers.append((type_, shape))
    if op_type in _SHAPED and answers[0][1] is None:
        answers[0] = (answers[0][0], _unnamed(types.get(f"i{_SHAPED[op_type]}")))
    return tuple(answers)


# Operators whose result has as many dimensions as an input has elements. ONNX says nothing of it
# where that input is no constant.
_SHAPED = {"Reshape": 1, "ConstantOfShape": 0}


def _unnamed(shape: onnx.TypeProto | None) -> ir.Shape | None:
    """As many unknown dimensions as ``shape``, a vector, has elements."""
    if shape is None or len(shape.tensor_type.shape.dim) != 1:
        return None
    rank = shape.tensor_type.shape.dim[0]
    return ir.Shape([None] * rank.dim_value) if rank.HasField("dim_value") else None


def _by_schema(
    schema: onnx.defs.OpSchema, types: dict[str, onnx.TypeProto], count: int
) -> tuple[Typed, ...]:
    """Element types alone: outputs of a type variable that an input binds."""
    bound: dict[str, ir.TypeProtocol | None] = {}
    for k, formal in enumerate(schema.inputs):
        if f"i{k}" in types:
            bound.setdefault(
                formal.type_str, ir.serde.deserialize_type_proto_for_type(types[f"i{k}"])
            )
    formals = list(schema.outputs)
    return tuple(
        (bound.get(formals[min(k, len(formals) - 1)].type_str), None) for k in range(count)
    )


def _plain(message: str) -> str:
    """ONNX's message without its internal prefixes."""
    return re.sub(r"\[\w+Error\]\s*|\(op_type:[^)]*\):?\s*", "", message).strip().rstrip(".") + "."


def _infer_contrib(node: ir.Node) -> None:
    """Operators without a schema in onnx: what can be said of onnxruntime's most used ones."""
    first = next((v for v in node.inputs if v is not None), None)
    if node.domain != "com.microsoft" or first is None:
        return
    for value in node.outputs:
        value.type = first.type
    if node.op_type == "MatMulNBits" and first.shape is not None and "N" in node.attributes:
        columns = node.attributes["N"].as_int()
        node.outputs[0].shape = ir.Shape([*first.shape[:-1], columns])
    elif node.op_type in _LIKE_FIRST and first.shape is not None:
        for k in _LIKE_FIRST[node.op_type]:
            if k < len(node.outputs):
                node.outputs[k].shape = first.shape.copy()
    if node.op_type == "GroupQueryAttention":
        if len(node.inputs) < 2 or node.inputs[1] is None:  # packed: query, key, value in one
            node.outputs[0].shape = None
        for k, value in enumerate(node.outputs[1:3]):
            past = node.inputs[3 + k] if len(node.inputs) > 3 + k else None
            if past is not None:
                value.type, value.shape = past.type, past.shape


_LIKE_FIRST = {  # outputs that have the shape of the first input
    "SimplifiedLayerNormalization": (0,),
    "SkipSimplifiedLayerNormalization": (0, 3),
    "SkipLayerNormalization": (0, 3),
    "RotaryEmbedding": (0,),
    "FastGelu": (0,),
    "QuickGelu": (0,),
    "BiasGelu": (0,),
    "GroupQueryAttention": (0,),
}
