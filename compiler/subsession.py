"""A set of ordinary nodes -> the model of one sub-session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir

from onnx_inplace.compiler import control, errors, flat, integrity, substitutes, weights
from onnx_inplace.compiler.extents import Extents
from onnx_inplace.compiler.steps import Port, SubSession, Weight

# Operators that take a constant input as it is. Others may repack it into memory of their own.
_KEEP = {"Add", "Div", "Gather", "GatherElements", "GatherND", "Identity", "Mul", "Slice", "Sub"}
IN_MEMORY = "in memory"  # location of a weight that no file holds; the runner replaces it


def build(
    nodes: Sequence[ir.Node],
    wanted: Sequence[ir.Value],
    model: ir.Model,
    slots: Mapping[ir.Value, int],
    shared: frozenset[ir.Value],
    kept: frozenset[ir.Value],
    known: Extents,
) -> SubSession:
    """The sub-session that computes ``wanted``; ``shared`` are weights that stand elsewhere too.

    ``kept`` are those that are needed there as they are, so that a packed copy would be a second
    one. What is ``known`` of the shapes inside is declared: the library writes a value over a dead
    one only where it knows that they are of one size, and it infers less than we do.

    Raises:
        errors.UnsupportedOperator: the element type of a value that enters is not known.
    """
    opset = model.opset_imports.get("", 1)
    taken = inputs(nodes)
    initializers = [v for v in taken if v.is_initializer()]
    entering = [v for v in taken if not v.is_initializer()]
    graph = onnx.helper.make_graph(
        [proto for node in nodes for proto in substitutes.stand_ins(node, _node(node), opset)],
        "sub_session",
        [_info(v) for v in entering],
        [_info(v) for v in wanted],
        initializer=[_initializer(v) for v in initializers],
        value_info=list(_shapes(nodes, set(wanted), known)),
    )
    functions = list(_functions(nodes, model))
    used = {"", *(n.domain for n in _all(nodes)), *(d for f in functions for d in f.opset_imports)}
    proto = onnx.helper.make_model(
        graph,
        ir_version=max(10, model.ir_version),
        opset_imports=[
            onnx.helper.make_opsetid(domain, version)
            for domain, version in model.opset_imports.items()
            if domain in used
        ],
        functions=[ir.serde.serialize_function(f) for f in functions],
    )
    outside = [v for v in initializers if not _stands_inside(v)]
    return SubSession(
        proto.SerializeToString(deterministic=True),
        tuple(Port(_name(v), slots[v]) for v in entering),
        tuple(Port(_name(v), slots[v]) for v in wanted),
        tuple(Weight(_name(v), _tensor(v), v in shared) for v in outside),
        not _repacked(nodes, {v for v in outside if v in kept}),
    )


def inputs(nodes: Sequence[ir.Node]) -> list[ir.Value]:
    """What the nodes need from outside, in order of first use."""
    made = {v for node in nodes for v in node.outputs}
    taken = dict.fromkeys(v for node in nodes for v in flat.captures(node))
    return [v for v in taken if v not in made]


def leaving(batches: Iterable[Sequence[ir.Node]], results: Iterable[ir.Value]) -> set[ir.Value]:
    """Values that leave the batch that makes them: ``results``, and what other batches need."""
    return {*results, *(v for batch in batches for v in inputs(batch))}


def _node(node: ir.Node) -> onnx.NodeProto:
    """A node whose name says where it comes from: the library's errors quote it."""
    proto = ir.serde.serialize_node(node)
    _name_nodes(proto, node)
    return proto


def _name_nodes(proto: onnx.NodeProto, node: ir.Node) -> None:
    source = integrity.source(node)
    result = node.outputs[0].name if node.outputs else node.name
    proto.name = f"`{result}`" if source is None else f"`{result}` ({source})"
    proto.ClearField("metadata_props")
    for attribute in proto.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            body = node.attributes[attribute.name].as_graph()
            for inner_proto, inner in zip(attribute.g.node, body, strict=True):
                _name_nodes(inner_proto, inner)


def _repacked(nodes: Sequence[ir.Node], weights: set[ir.Value]) -> bool:
    """Whether an operator that uses one of these weights may make a packed copy of it."""
    return any(
        node.op_type not in _KEEP and not weights.isdisjoint(node.inputs) for node in _all(nodes)
    )


def _stands_inside(value: ir.Value) -> bool:
    tensor = _tensor(value)
    if tensor.dtype == ir.DataType.STRING:
        return True
    # elements of less than a byte have no array that a session could share
    return tensor.nbytes < weights.LARGE or tensor.dtype.bitwidth < 8


def _initializer(value: ir.Value) -> onnx.TensorProto:
    tensor = _tensor(value)
    if _stands_inside(value):
        proto = ir.serde.serialize_tensor(tensor)
        proto.name = _name(value)
        return proto
    proto = onnx.TensorProto(name=_name(value), data_type=tensor.dtype.value)
    proto.dims.extend(tensor.shape.numpy())
    proto.data_location = onnx.TensorProto.EXTERNAL
    entries = {"location": IN_MEMORY}
    if isinstance(tensor, ir.ExternalTensor):
        entries = {
            "location": str(tensor.location),
            "offset": str(tensor.offset or 0),
            "length": str(tensor.length or tensor.nbytes),
        }
    for key, text in entries.items():
        proto.external_data.add(key=key, value=text)
    return proto


def _info(value: ir.Value) -> onnx.ValueInfoProto:
    info = ir.serde.serialize_value(value)
    if info.type.WhichOneof("value") is None:
        node = value.producer()
        raise errors.UnsupportedOperator(
            node.domain if node is not None else "",
            node.op_type if node is not None else "a graph input",
            f"the element type of `{value.name}` is not known: declare it in value_info",
        )
    info.ClearField("metadata_props")
    return info


def _shapes(
    nodes: Sequence[ir.Node], wanted: set[ir.Value], known: Extents
) -> Iterator[onnx.ValueInfoProto]:
    for value in (v for node in nodes for v in node.outputs):
        shape = known.partial(value)
        tensor = isinstance(value.type, ir.TensorType) and value.dtype is not None
        if tensor and shape is not None and value.name and value not in wanted:
            assert value.dtype is not None
            dims = [d if d is None or isinstance(d, int) else str(d) for d in shape]
            yield onnx.helper.make_tensor_value_info(value.name, value.dtype.value, dims)


def _functions(nodes: Sequence[ir.Node], model: ir.Model) -> Iterator[ir.Function]:
    """Functions that the nodes call, directly or not; operators of users have such bodies."""
    called = dict.fromkeys(n.op_identifier() for n in _all(nodes))
    done: set[ir.OperatorIdentifier] = set()
    while called:
        identifier, _ = called.popitem()
        function = model.functions.get(identifier)
        if function is None or identifier in done:
            continue
        done.add(identifier)
        called.update(dict.fromkeys(n.op_identifier() for n in function.all_nodes()))
        yield function


def _all(nodes: Sequence[ir.Node]) -> Iterator[ir.Node]:
    for node in nodes:
        yield node
        for graph in control.bodies(node):
            yield from graph.all_nodes()


def _name(value: ir.Value) -> str:
    assert value.name is not None  # flat.flatten has named every value
    return value.name


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None
    return value.const_value
