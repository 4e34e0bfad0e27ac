"""Will every write fit? Decides, before the first write, what a run will write where.

The model is sliced backward from the positions of its writes. In the slice a cache is replaced by five numbers
``(bad, position, length, capacity, batch)``, carried along exactly the ports that carried the cache, and a write by a
check that fills them in at the first violation. If and Loop stay what they are. The slice writes nothing and is
an ordinary ONNX model. It does not exist when a position or a condition depends on what a cache holds.
"""
from __future__ import annotations

import dataclasses

import onnx
import onnx_ir as ir

from onnx_inplace.compiler import contract, loader, planner

CHECK = """
<domain: "check", opset_import: ["" : 24]>
Check (state, position, length, capacity) => (updated) {
    zero = Constant <value_int: int = 0> ()
    one = Constant <value_ints: ints = [1]> ()
    all = Constant <value_ints: ints = [-1]> ()
    positions = Reshape (position, all)
    room = Sub (capacity, length)
    low = Less (positions, zero)
    high = Greater (positions, room)
    bad = Or (low, high)
    number = Cast <to: int = 7> (bad)
    row = ArgMax <axis: int = 0, keepdims: int = 0> (number)
    any = Gather (bad, row)
    first = Gather (state, zero)
    clean = Equal (first, zero)
    take = And (any, clean)
    worst = Gather (positions, row)
    p = Reshape (worst, one)
    l = Reshape (length, one)
    c = Reshape (capacity, one)
    r = Reshape (row, one)
    found = Concat <axis: int = 0> (one, p, l, c, r)
    updated = Where (take, found, state)
}"""


@dataclasses.dataclass
class Direct:
    """A write at the top level whose position is an input."""

    root: str
    position: int | str
    length: int | str
    axis: int


@dataclasses.dataclass
class Checks:
    """``direct`` are plain comparisons; ``model`` is the slice, for everything else."""

    direct: list[Direct]
    model: bytes | None = None
    inputs: list[str] = dataclasses.field(default_factory=list)
    dims: list[str] = dataclasses.field(default_factory=list)
    capacities: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)
    roots: list[str] = dataclasses.field(default_factory=list)
    unknown: str | None = None  # why there is no slice


class NotKnown(Exception):
    """A position depends on what a cache holds."""


def build(loaded: loader.Loaded) -> Checks:
    """Make the checks of a model."""
    s = _Slice(loaded)
    direct = s.direct()
    if direct is not None:
        return Checks(direct)
    try:
        return s.slice()
    except NotKnown as reason:
        return Checks([], unknown=str(reason))


class _Slice:
    def __init__(self, loaded: loader.Loaded):
        self.graph, self.roots, self.stateful = loaded.model.graph, loaded.aliases.root, loaded.aliases.stateful
        self.aliases = loaded.aliases
        self.imports = loaded.model.opset_imports
        self.known = {d.value for v in self.graph.inputs for d in (v.shape or ()) if not isinstance(d, int)}
        self.dims: dict[str, None] = {}
        self.capacities: dict[tuple[str, int], str] = {}
        self.contents: list[ir.Value] = []

    def length(self, values: ir.Value, axis: int) -> int | str | None:
        """Declared length of a write, when shape inference has found it."""
        if values.shape is None:
            return None
        d = values.shape[axis]
        return d if isinstance(d, int) else d.value if d.value in self.known else None

    def direct(self) -> list[Direct] | None:
        found = []
        for node in self.graph:
            if node in self.stateful:
                return None
            if planner.writes(node, self.aliases):
                axis = _axis(node)
                position, length = node.inputs[2], self.length(node.inputs[1], axis)
                if not position.is_graph_input() or length is None:
                    return None
                found.append(Direct(self.roots[node.inputs[0]].name, position.name, length, axis))
        return found

    def slice(self) -> Checks:
        results = [v for v in self.graph.outputs if v in self.roots]
        results = list(dict.fromkeys(results))
        needed = set(results)
        nodes = self.block(self.graph, needed)
        weights = [v for v in needed if v.is_initializer()]
        inputs = [v for v in self.graph.inputs if v in needed and v not in self.roots and not v.is_initializer()]
        inputs += self.contents
        helper = onnx.helper
        zeros = [helper.make_node("Constant", [], [_state(r)], value_ints=[0, 0, 0, 0, 0]) for r in self.graph.inputs if r in needed and r in self.roots]
        scalar = lambda name: helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [])
        graph = helper.make_graph(
            zeros + nodes, "positions",
            [ir.to_proto(v) for v in inputs] + [scalar(f"length.{d}") for d in self.dims] + [scalar(n) for n in self.capacities.values()],
            [helper.make_tensor_value_info(_state(v), onnx.TensorProto.INT64, [5]) for v in results],
            initializer=[ir.to_proto(v.const_value) for v in weights])
        imports = [helper.make_opsetid(d, v) for d, v in {**self.imports, "check": 1}.items() if d != contract.DOMAIN]
        model = helper.make_model(graph, opset_imports=imports, ir_version=11, functions=[onnx.parser.parse_function(CHECK)])
        return Checks([], model.SerializeToString(), [v.name for v in inputs], list(self.dims),
                      [(name, root, axis) for (root, axis), name in self.capacities.items()], [self.roots[v].name for v in results])

    def block(self, graph: ir.Graph, needed: set[ir.Value]) -> list[onnx.NodeProto]:
        """Nodes that ``needed`` depends on; ``needed`` grows to what must come from outside."""
        found: list[list[onnx.NodeProto]] = []
        for node in reversed(graph):
            if any(v in needed for v in node.outputs):
                found.append(self.node(node, needed))
        return [n for group in reversed(found) for n in group]

    def node(self, node: ir.Node, needed: set[ir.Value]) -> list[onnx.NodeProto]:
        make = onnx.helper.make_node
        if planner.writes(node, self.aliases):
            cache, values, position = node.inputs
            axis, name = _axis(node), node.outputs[0].name
            needed |= {cache, position}
            length = self.length(values, axis)
            before = []
            if isinstance(length, int):
                before = [make("Constant", [], [f"length.{name}"], value_int=length)]
                length_name = f"length.{name}"
            elif length is not None:
                self.dims[length] = None
                length_name = f"length.{length}"
            else:
                self.content(values, needed)
                length_name = f"length.{name}"
                before = [make("Shape", [values.name], [f"shape.{name}"]),
                          make("Constant", [], [f"axis.{name}"], value_int=axis),
                          make("Gather", [f"shape.{name}", f"axis.{name}"], [length_name])]
            root = self.roots[cache].name
            capacity = self.capacities.setdefault((root, axis), f"capacity.{root}.{axis}")
            return [*before, make("Check", [_state(cache), position.name, length_name, capacity], [_state(node.outputs[0])], domain="check")]
        if node.outputs[0] in self.roots and (node.domain, node.op_type) in contract.FORWARDS:
            needed.add(node.inputs[0])
            return [make("Identity", [_state(node.inputs[0])], [_state(node.outputs[0])])]
        if node in self.stateful:
            return [self.branch(node, needed) if node.op_type == "If" else self.loop(node, needed)]
        for value in planner.captures(node):
            self.content(value, needed)
        return [ir.to_proto(node)]

    def content(self, value: ir.Value, needed: set[ir.Value]) -> None:
        """A value is needed as such. Of a cache only the content before the run is known."""
        if value not in self.roots:
            needed.add(value)
        elif value is not self.roots[value]:
            raise NotKnown(f"`{value.name}` is read to find a position")
        elif not any(value is v for v in self.contents):
            self.contents.append(value)

    def branch(self, node: ir.Node, needed: set[ir.Value]) -> onnx.NodeProto:
        self.content(node.inputs[0], needed)
        wanted = [k for k, v in enumerate(node.outputs) if v in needed]
        attributes = {}
        for key in ("then_branch", "else_branch"):
            body = node.attributes[key].as_graph()
            attributes[key] = self.body(body, [], [body.outputs[k] for k in wanted], needed)
        return onnx.helper.make_node("If", [node.inputs[0].name], [self.name(node.outputs[k]) for k in wanted], **attributes)

    def loop(self, node: ir.Node, needed: set[ir.Value]) -> onnx.NodeProto:
        body = node.attributes["body"].as_graph()
        n = len(node.inputs) - 2
        if any(v in needed for v in node.outputs[n:]):
            raise NotKnown("a position comes from a stacked output")  # prototype
        wanted = {k for k in range(n) if node.outputs[k] in needed}
        while True:  # a carried value that the wanted ones need is wanted too
            inner = {body.outputs[0], *(body.outputs[1 + k] for k in wanted)}
            self.block(body, inner)
            more = wanted | {k for k in range(n) if body.inputs[2 + k] in inner}
            if more == wanted:
                break
            wanted = more
        order = sorted(wanted)
        graph = self.body(body, [*body.inputs[:2], *(body.inputs[2 + k] for k in order)],
                          [body.outputs[0], *(body.outputs[1 + k] for k in order)], needed)
        initial = [node.inputs[2 + k] for k in order]
        for v in node.inputs[:2]:
            if v is not None:
                self.content(v, needed)
        needed.update(initial)
        return onnx.helper.make_node(
            "Loop", [self.name(v) if v is not None else "" for v in (*node.inputs[:2], *initial)],
            [self.name(node.outputs[k]) for k in order], body=graph)

    def name(self, value: ir.Value) -> str:
        return _state(value) if value in self.roots else value.name

    def body(self, body: ir.Graph, inputs, outputs, needed: set[ir.Value]) -> onnx.GraphProto:
        inner = set(outputs)
        nodes = self.block(body, inner)
        inside = {*body.inputs, *(v for n in body for v in n.outputs)}
        needed |= inner - inside
        return onnx.helper.make_graph(nodes, body.name or "body", [self.info(v) for v in inputs], [self.info(v) for v in outputs])

    def info(self, value: ir.Value) -> onnx.ValueInfoProto:
        if value in self.roots:
            return onnx.helper.make_tensor_value_info(_state(value), onnx.TensorProto.INT64, [5])
        return ir.to_proto(value)


def _axis(node: ir.Node) -> int:
    return node.attributes["axis"].as_int() if "axis" in node.attributes else -2


def _state(value: ir.Value) -> str:
    return f"{value.name}.state"
