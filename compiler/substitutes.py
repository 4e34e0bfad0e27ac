"""What stands in a sub-session for a node that onnxruntime cannot compute as ONNX says.

Attention of bfloat16, for which it has no kernel on CPU: inputs are cast to float and results back,
so that the values around keep their type. Attention that gives the masked products of queries and
keys: onnxruntime leaves the causal mask out of that result, so the operator's own body of standard
operators is computed instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx
import onnx_ir as ir

_FLOAT, _BFLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16
_PRODUCTS = 3  # output of Attention: queries times keys, masked or not
_MASKED = (1, 2)  # modes of it that hold the mask, not yet the softmax


def stand_ins(node: ir.Node, proto: onnx.NodeProto, opset: int) -> Iterator[onnx.NodeProto]:
    """The nodes that are computed for ``node``; ``proto`` says the same, in ``opset`` of ONNX."""
    if node.domain or node.op_type != "Attention":
        yield proto
        return
    narrow = [port for port, value in enumerate(node.inputs) if _is_narrow(value)]
    for port in narrow:
        wide = f"{proto.output[0]}.wide.{port}"
        yield onnx.helper.make_node("Cast", [proto.input[port]], [wide], to=_FLOAT)
        proto.input[port] = wide
    casts = []
    for port, value in enumerate(node.outputs):
        if value.name and _is_narrow(value):
            wide, name = f"{value.name}.wide", proto.output[port]
            casts.append(onnx.helper.make_node("Cast", [wide], [name], to=_BFLOAT16))
            proto.output[port] = wide
    if _masks_products(node):
        yield from _body(node, proto, opset, narrow)
    else:
        yield proto
    yield from casts


def _is_narrow(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == ir.DataType.BFLOAT16


def _masks_products(node: ir.Node) -> bool:
    causal, mode = (
        node.attributes[name].as_int() if name in node.attributes else 0
        for name in ("is_causal", "qk_matmul_output_mode")
    )
    wanted = len(node.outputs) > _PRODUCTS and bool(node.outputs[_PRODUCTS].name)
    return wanted and bool(causal) and mode in _MASKED


def _body(
    node: ir.Node, proto: onnx.NodeProto, opset: int, narrow: Sequence[int]
) -> Iterator[onnx.NodeProto]:
    """The body that onnx gives the operator for these attributes and types."""
    schema = onnx.defs.get_schema("Attention", opset, "")
    types = []
    for port, value in enumerate(node.inputs):
        type_ = onnx.TypeProto() if value is None else ir.serde.serialize_value(value).type
        if port in narrow:
            type_.tensor_type.elem_type = _FLOAT
        types.append(type_.SerializeToString())
    arguments = proto.SerializeToString(), types
    text = schema.get_context_dependent_function(*arguments)  # type: ignore[attr-defined]
    body = onnx.FunctionProto.FromString(text)
    names = {"": "", **dict.fromkeys(body.input, "")}  # an input that is left out has no name
    names |= zip(body.input, proto.input, strict=False)
    names |= {f: actual for f, actual in zip(body.output, proto.output, strict=False) if actual}
    for inner in body.node:
        for ports in (inner.input, inner.output):
            for k, name in enumerate(ports):
                ports[k] = names.setdefault(name, f"{proto.output[0]}.{name}")
        yield inner
