"""Types and shapes of a flat graph, by onnx's own inference.

Four things stand between it and our graphs. Weights may not fit into a protobuf: they take part by
type and shape alone. Bodies do not see the content of constants outside, so these are repeated
inside. And operators that onnx does not know would leave everything behind them unknown: for
inference, and only for it, a node is replaced by standard nodes whose results have the same types
and shapes (an update of a cache by Identity of the cache). And a paged cache is nothing that onnx
could follow through a Scan: there it is a tensor, a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import onnx
import onnx_ir as ir

from onnx_inplace.compiler import contract, control, errors, paged_rules, paged_types, weights

_PAYLOAD = 1024  # [bytes] smaller weights may be shapes or axes and take part with their values
_MICROSOFT = "com.microsoft"

# Operators whose results have the type and shape of an input: {output: input}.
_SAME_AS: dict[tuple[str, str], dict[int, int]] = {
    (contract.DOMAIN, "Copy"): {0: 0},
    (contract.DOMAIN, "PagedAttention"): {0: 0},
    (_MICROSOFT, "GroupQueryAttention"): {0: 0, 1: 3, 2: 4},
    (_MICROSOFT, "MultiHeadAttention"): {0: 0},
    (_MICROSOFT, "RotaryEmbedding"): {0: 0},
    (_MICROSOFT, "SkipLayerNormalization"): {0: 0, 3: 0},
    (_MICROSOFT, "SkipSimplifiedLayerNormalization"): {0: 0, 3: 0},
    (_MICROSOFT, "BiasGelu"): {0: 0},
    (_MICROSOFT, "FastGelu"): {0: 0},
    (_MICROSOFT, "Gelu"): {0: 0},
    (_MICROSOFT, "QuickGelu"): {0: 0},
    ("", "SimplifiedLayerNormalization"): {0: 0},
}


def infer(model: ir.Model) -> None:
    """Set type and shape of every value that inference can reach; names must be unique.

    Shapes that the graph held for intermediate values are dropped first, they are found again.

    Raises:
        errors.ModelFileError: types contradict each other.
    """
    with weights.detached(model.graph, _PAYLOAD):
        proto = ir.serde.serialize_model(model)
    values = list(_values(model.graph))
    pages = {str(v.name): v for v in values if paged_types.is_paged(v)}
    _show_pages(proto.graph, pages)
    _stand_in(proto.graph, proto.graph)
    _show_gathered(proto.graph, model.graph)
    _forget_values(proto.graph)
    external = onnx.TensorProto.EXTERNAL
    held = {t.name: t for t in proto.graph.initializer if t.data_location != external}
    _show_constants(proto.graph, held)
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise errors.ModelFileError("model", f"its types do not fit together: {error}") from None
    types: dict[str, onnx.TypeProto] = {}
    for info in _infos(inferred.graph):  # a result stands in two lists, which may differ
        if info.name not in types or info.type.tensor_type.HasField("shape"):
            types[info.name] = info.type
    keep = {*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()}
    for node in model.graph.all_nodes():
        formals = (v for body in control.bodies(node) for v in body.inputs)
        for value in (*node.outputs, *formals):
            found = types.get(value.name or "")
            if value.name in pages:
                continue
            if found is not None and found.WhichOneof("value") is not None:
                # a declared output keeps what its author says; inference may know more of the type
                shape = ir.serde.deserialize_type_proto_for_shape(found)
                value.type = ir.serde.deserialize_type_proto_for_type(found)
                value.shape = value.shape if value in keep and value.shape is not None else shape
            elif value not in keep:
                value.shape = None


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Values of a graph and its bodies, but for weights."""
    yield from graph.inputs
    for node in graph.all_nodes():
        yield from node.outputs
        for body in control.bodies(node):
            yield from body.inputs


def _show_pages(graph: onnx.GraphProto, pages: Mapping[str, ir.Value]) -> None:
    """Let every paged cache be a tensor, a page."""
    for info in _infos(graph):
        if info.name in pages:
            info.type.CopyFrom(_tensor_type(pages[info.name].dtype, pages[info.name].shape))


def _show_gathered(main: onnx.GraphProto, graph: ir.Graph) -> None:
    """What PageGather decodes has the type of an input that is made for it."""
    for node in graph.all_nodes():
        if (node.domain, node.op_type) == (contract.DOMAIN, "PageGather"):
            type_, shape = paged_rules.result(node)
            if type_ is not None:
                tensor = _tensor_type(type_.dtype, shape)
                main.input.add(name=_gathered(str(node.outputs[0].name)), type=tensor)


def _tensor_type(dtype: ir.DataType | None, shape: ir.Shape | None) -> onnx.TypeProto:
    assert dtype is not None
    dims = None if shape is None else [d if isinstance(d, int) else d.value for d in shape]
    return onnx.helper.make_tensor_type_proto(dtype.value, dims)


def _gathered(name: str) -> str:
    return f"pages of {name}"


def _forget_values(graph: onnx.GraphProto) -> None:
    """Keep of intermediate values only the element types that operators unknown to onnx give.

    A type without a shape would stay without one: inference does not complete what it is told.
    """
    foreign = {
        name
        for node in graph.node
        if not onnx.defs.has(node.op_type, node.domain)
        for name in node.output
    }
    kept = [info for info in graph.value_info if info.name in foreign]
    del graph.value_info[:]
    for info in kept:
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    graph.value_info.extend(kept)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _forget_values(attribute.g)


def _show_constants(graph: onnx.GraphProto, constants: dict[str, onnx.TensorProto]) -> None:
    """Repeat in every body the constants that it takes from outside, shapes and axes above all.

    Inference of a body knows the types of what stands around it, not the content.
    """
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                body = attribute.g
                used = dict.fromkeys(name for inner in body.node for name in inner.input)
                body.initializer.extend(constants[name] for name in used if name in constants)
                _show_constants(body, constants)


def _infos(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """Everything that inference says about values, bodies included."""
    yield from (*graph.input, *graph.value_info, *graph.output)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _infos(attribute.g)


def _stand_in(graph: onnx.GraphProto, main: onnx.GraphProto) -> None:
    """Replace what onnx does not know, in this graph and in its bodies."""
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _stand_in(attribute.g, main)
        nodes += _replacement(node, main)
    del graph.node[:]
    graph.node.extend(nodes)


def _replacement(node: onnx.NodeProto, main: onnx.GraphProto) -> list[onnx.NodeProto]:
    key = (node.domain, node.op_type)
    special = _SPECIAL.get(key)
    if special is not None:
        return special(node, main)
    same = _SAME_AS.get(key)
    if same is None and node.domain and key in contract.RULES:
        same = {a.output_index: a.input_index for a in contract.RULES[key].aliases}
    if same is None:
        return [node]
    found = _packed_attention(node, main) if node.op_type == "GroupQueryAttention" else []
    for output, port in same.items():
        if found and output == 0:
            continue
        if (
            output < len(node.output)
            and node.output[output]
            and port < len(node.input)
            and node.input[port]
        ):
            found.append(
                onnx.helper.make_node("Identity", [node.input[port]], [node.output[output]])
            )
    return found


def _packed_attention(node: onnx.NodeProto, main: onnx.GraphProto) -> list[onnx.NodeProto]:
    """GroupQueryAttention that finds keys and values behind the queries: its result is narrower."""
    if len(node.input) > 2 and node.input[1]:
        return []
    heads = next((a.i for a in node.attribute if a.name == "num_heads"), 0)
    past = next((v for v in main.input if len(node.input) > 3 and v.name == node.input[3]), None)
    dims = [] if past is None else past.type.tensor_type.shape.dim
    width = heads * dims[3].dim_value if len(dims) == 4 else 0
    name = f"width of {node.output[0]}"
    shape = [None, width or None]
    main.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    return [onnx.helper.make_node("MatMul", [node.input[0], name], [node.output[0]])]


def _matmul_nbits(node: onnx.NodeProto, main: onnx.GraphProto) -> list[onnx.NodeProto]:
    """MatMulNBits(A [..., K], packed [N, ...]) -> [..., N]."""
    attributes = {a.name: a.i for a in node.attribute}
    name = f"weight of {node.output[0]}"
    shape = [attributes["K"], attributes["N"]]
    main.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    return [onnx.helper.make_node("MatMul", [node.input[0], name], [node.output[0]])]


def _page_gather(node: onnx.NodeProto, main: onnx.GraphProto) -> list[onnx.NodeProto]:
    name = _gathered(node.output[0])
    return [onnx.helper.make_node("Identity", [name], [node.output[0]])]


_SPECIAL: dict[
    tuple[str, str], Callable[[onnx.NodeProto, onnx.GraphProto], list[onnx.NodeProto]]
] = {
    (_MICROSOFT, "MatMulNBits"): _matmul_nbits,
    (contract.DOMAIN, "PageGather"): _page_gather,
}
