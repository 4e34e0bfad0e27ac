"""A slice of a graph that finds out, writing nothing, what a run is going to write where.

A token, an int64 vector, goes through the slice in program order: from check to check, out of the
branches of an If, round the bodies of Loop and Scan. What it is and what is done with it decides
a ``Writer``: with checks, it is zero until one finds a violation, which it keeps. Nodes stay only
if a site needs their values; of control nodes, only the ports that are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic

import onnx
import onnx_ir as ir

from onnx_inplace.compiler import contract
from onnx_inplace.compiler.check_nodes import CHECK_DOMAIN, Names, S, Writer
from onnx_inplace.compiler.control import bodies, is_control, ports
from onnx_inplace.compiler.knowledge import Knowledge, forwarded, mentioned
from onnx_inplace.compiler.sizes import Size


class Slicer(Generic[S]):
    """Makes the slice. Requires that everything which the sites need is known (``Knowledge``)."""

    def __init__(
        self,
        model: ir.Model,
        root_of: Mapping[ir.Value, ir.Value],
        knowledge: Knowledge,
        sites: Sequence[S],
        writer: Writer[S],
    ):
        self._model, self._root_of, self._knowledge = model, root_of, knowledge
        self._sites: dict[ir.Node, list[S]] = {}
        for site in sites:
            self._sites.setdefault(site.node, []).append(site)
        self._owner: dict[ir.Graph, ir.Node] = {}
        self._parameters: dict[ir.Value, tuple[ir.Value, ...]] = {}
        self._active: set[ir.Node] = set()  # control nodes that the token goes through
        self._needed: set[ir.Value] = set()
        self._writer, self._names = writer, writer.names
        self.inputs: tuple[str, ...] = ()
        self.sizes: tuple[tuple[str, tuple[Size, ...]], ...] = ()

    def run(self) -> onnx.ModelProto:
        """The slice as a model. Sets ``inputs`` and ``sizes``."""
        graph = self._model.graph
        self._survey(graph)
        self._mark()
        nodes: list[onnx.NodeProto] = []
        first = self._writer.begin(nodes)
        token = self._block(graph, first, nodes)
        given = [v for v in graph.inputs if v in self._needed and not v.is_initializer()]
        self.inputs = tuple(str(v.name) for v in given)
        self.sizes = tuple((name, sizes) for sizes, name in self._writer.sizes.items())
        info = onnx.helper.make_tensor_value_info
        proto = onnx.helper.make_graph(
            nodes,
            "checks",
            [_info(v) for v in given]
            + [info(name, onnx.TensorProto.INT64, [len(s)]) for name, s in self.sizes]
            + ([self._writer.info(first)] if self._writer.given else []),
            [self._writer.info(token)],
            initializer=_tensors(graph, self._needed),
        )
        opsets = {k: v for k, v in self._model.opset_imports.items() if k != contract.DOMAIN}
        function = onnx.parser.parse_function(
            self._writer.function.format(opset=opsets.get("", 25))
        )
        return onnx.helper.make_model(
            proto,
            opset_imports=[
                onnx.helper.make_opsetid(k, v) for k, v in {**opsets, CHECK_DOMAIN: 1}.items()
            ],
            ir_version=self._model.ir_version,
            functions=[function],
        )

    # -- what is needed

    def _survey(self, graph: ir.Graph) -> None:
        """Find the node of every block, and where the parameters of a body come from."""
        for node in graph:
            if not is_control(node):
                continue
            for body in bodies(node):
                self._owner[body] = node
                self._survey(body)
            if node.op_type != "If":
                p = ports(node)
                self._parameters.update({v: (i, r) for i, v, r, _ in p.carried})
                self._parameters.update({element: (sequence,) for sequence, element in p.scanned})
                self._parameters.update({v: () for v in p.own})

    def _mark(self) -> None:
        """Find all values that the sites depend on, and the control nodes around them."""
        wanted: list[ir.Value] = []
        for node, sites in self._sites.items():
            for site in sites:
                wanted += site.needed()
            graph = node.graph
            while graph in self._owner:
                around = self._owner[graph]
                if around not in self._active:
                    self._active.add(around)
                    wanted += self._steering(around)
                graph = around.graph
        while wanted:
            value = wanted.pop()
            if value not in self._needed:
                self._needed.add(value)
                wanted += self._sources(value)

    def _steering(self, node: ir.Node) -> list[ir.Value]:
        """What decides which branch runs, or how often a body does."""
        if node.op_type == "If":
            return [v for v in node.inputs if v is not None]
        p = ports(node)
        known = [s for s, _ in p.scanned if self._knowledge.why_unknown(s) is None]
        return [*p.steering, *p.inner_steering, *known[:1]]

    def _sources(self, value: ir.Value) -> list[ir.Value]:
        """What a value is computed from, one step back."""
        if value in self._parameters:
            return list(self._parameters[value])
        node = value.producer()
        if node is None:
            return []
        source = forwarded(node)
        if source is not None:
            return [source]
        if not is_control(node):
            return list(mentioned(node))
        k = list(node.outputs).index(value)
        if node.op_type == "If":
            return [*self._steering(node), *(body.outputs[k] for body in bodies(node))]
        p = ports(node)
        carried = next(((i, r) for i, _, r, o in p.carried if o is value), None)
        result = carried or tuple(r for r, o in p.stacked if o is value)
        return [*self._steering(node), *result]

    # -- the slice

    def _block(self, graph: ir.Graph, token: str, nodes: list[onnx.NodeProto]) -> str:
        """Append what stays of a block; return the name of the token at its end."""
        for node in graph:
            for site in self._sites.get(node, ()):
                token = self._writer.append(site, token, nodes)
            if is_control(node):
                if node in self._active or any(v in self._needed for v in node.outputs):
                    token = self._control(node, token, nodes)
            elif any(v in self._needed for v in node.outputs):
                nodes.append(_plain(node))
        return token

    def _control(self, node: ir.Node, token: str, nodes: list[onnx.NodeProto]) -> str:
        after = self._names.new("token") if node in self._active else None
        make = self._branch if node.op_type == "If" else self._repeat
        nodes.append(make(node, token, after))
        return after or token

    def _branch(self, node: ir.Node, token: str, after: str | None) -> onnx.NodeProto:
        condition = node.inputs[0]
        assert condition is not None
        kept = [k for k, v in enumerate(node.outputs) if v in self._needed]
        branches = {}
        for key, body in zip(("then_branch", "else_branch"), bodies(node), strict=True):
            results = [body.outputs[k] for k in kept]
            branches[key] = self._body(body, [], [], [], results, [], token, after is not None)
        outputs = [str(node.outputs[k].name) for k in kept] + ([after] if after else [])
        return onnx.helper.make_node("If", [str(condition.name)], outputs, **branches)

    def _repeat(self, node: ir.Node, token: str, after: str | None) -> onnx.NodeProto:
        p, needed = ports(node), self._needed
        carried = [c for c in p.carried if c[1] in needed or c[3] in needed]
        stacked = [k for k, (_, output) in enumerate(p.stacked) if output in needed]
        scanned = [k for k, (sequence, element) in enumerate(p.scanned) if element in needed]
        if node.op_type == "Scan" and not scanned:  # it takes a sequence to say how many steps
            known = (k for k, (s, _) in enumerate(p.scanned) if s in needed)
            scanned = [next(known)]
        inner = self._names.new("token") if after else token
        body = self._body(
            bodies(node)[0],
            p.own,
            [*(parameter for _, parameter, _, _ in carried)],
            [p.scanned[k][1] for k in scanned],
            [*p.inner_steering, *(result for _, _, result, _ in carried)],
            [p.stacked[k][0] for k in stacked],
            inner,
            after is not None,
            parameter=after is not None,
            scan=node.op_type == "Scan",
            stops=self._writer.stops
            and node.op_type == "Loop"
            and after is not None
            and not stacked,
        )
        steering = node.inputs[:2] if node.op_type == "Loop" else ()
        inputs = ["" if v is None else str(v.name) for v in steering]
        inputs += [str(initial.name) for initial, _, _, _ in carried] + ([token] if after else [])
        inputs += [str(p.scanned[k][0].name) for k in scanned]
        outputs = [str(output.name) for _, _, _, output in carried] + ([after] if after else [])
        outputs += [str(p.stacked[k][1].name) for k in stacked]
        result = onnx.helper.make_node(node.op_type, inputs, outputs, body=body)
        if node.op_type == "Scan":
            result.attribute.extend(_scan_attributes(node, scanned, stacked))
        return result

    def _body(
        self,
        body: ir.Graph,
        own: Sequence[ir.Value],
        inputs: Sequence[ir.Value],
        elements: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
        stacked: Sequence[ir.Value],
        token: str,
        leaves: bool,
        *,
        parameter: bool = False,
        scan: bool = False,
        stops: bool = False,
    ) -> onnx.GraphProto:
        """What stays of a branch or body; the token stands between the two kinds of ports.

        A body that ``stops`` makes no further round once its token holds a violation: the first
        one is what is reported, and a loop without an end would never report it.
        """
        nodes: list[onnx.NodeProto] = []
        self._writer.open()
        last = self._block(body, token, nodes)
        self._writer.close()
        state = self._writer.info(token)
        info = _info_with_shape if scan else _info
        returned = []
        if leaves:  # a result must be made inside, even where no check changes the token
            name = self._names.new("token")
            nodes.append(onnx.helper.make_node("Identity", [last], [name]))
            returned = [self._writer.info(name)]
            if not scan:
                returned[0].type.tensor_type.ClearField("shape")
        results = [*map(info, outputs)]
        if stops:
            going = self._names.new("going")
            nodes.extend(_unless_violated(last, results[0].name, going, self._names))
            results[0] = onnx.helper.make_tensor_value_info(going, onnx.TensorProto.BOOL, None)
        return onnx.helper.make_graph(
            nodes,
            body.name or "body",
            [
                *map(_scalar, own),
                *map(_info, inputs),
                *([state] if parameter else []),
                *map(_info, elements),
            ],
            [*results, *returned, *map(info, stacked)],
            initializer=_tensors(body, self._needed),
        )


def _unless_violated(
    token: str, condition: str, result: str, names: Names
) -> Iterable[onnx.NodeProto]:
    """``result``: the condition holds, and the token is zero."""
    first, number, clean = (names.new(base) for base in ("first", "number", "clean"))
    yield onnx.helper.make_node("Constant", [], [first], value_int=0)
    yield onnx.helper.make_node("Gather", [token, first], [number])
    yield onnx.helper.make_node("Equal", [number, first], [clean])
    yield onnx.helper.make_node("And", [condition, clean], [result])


def _plain(node: ir.Node) -> onnx.NodeProto:
    """A node as it is; what hands on a value is Identity."""
    source = forwarded(node)
    if source is not None:
        return onnx.helper.make_node("Identity", [str(source.name)], [str(node.outputs[0].name)])
    proto = ir.serde.serialize_node(node)
    proto.ClearField("metadata_props")
    return proto


def _info(value: ir.Value) -> onnx.ValueInfoProto:
    """Name, type and rank. Sizes are left to the run: what is carried may change its own."""
    if isinstance(value.type, ir.TensorType):
        rank = None if value.shape is None else [None] * len(value.shape)
        return onnx.helper.make_tensor_value_info(str(value.name), value.type.dtype.value, rank)
    if value.type is None:
        return onnx.ValueInfoProto(name=str(value.name))
    return _info_with_shape(value)


def _info_with_shape(value: ir.Value) -> onnx.ValueInfoProto:
    """With the shape: onnxruntime asks for it in the body of a Scan, where none may change."""
    info = ir.serde.serialize_value(value)
    info.ClearField("metadata_props")
    return info


def _scalar(value: ir.Value) -> onnx.ValueInfoProto:
    """Iteration number and condition of a Loop, which onnxruntime wants with their shape."""
    dtype = onnx.TensorProto.INT64 if value.dtype is None else value.dtype.value
    return onnx.helper.make_tensor_value_info(str(value.name), dtype, [])


def _tensors(graph: ir.Graph, needed: set[ir.Value]) -> list[onnx.TensorProto]:
    found = []
    for value in graph.initializers.values():
        if value in needed and value.const_value is not None:
            # with its bytes: the slice is loaded from memory, and reads no file
            tensor = ir.serde.serialize_tensor(
                ir.Tensor(value.const_value.numpy(), value.const_value.dtype)
            )
            tensor.name = str(value.name)
            found.append(tensor)
    return found


def _scan_attributes(
    node: ir.Node, scanned: list[int], stacked: list[int]
) -> Iterable[onnx.AttributeProto]:
    """Axes and directions of the sequences that stay."""
    yield onnx.helper.make_attribute("num_scan_inputs", len(scanned))
    for name, kept in (
        ("scan_input_axes", scanned),
        ("scan_input_directions", scanned),
        ("scan_output_axes", stacked),
        ("scan_output_directions", stacked),
    ):
        if name in node.attributes and kept:
            given = node.attributes[name].as_ints()
            yield onnx.helper.make_attribute(name, [given[k] for k in kept])
