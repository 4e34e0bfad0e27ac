"""Loaded model -> steps. Decides order and partition; executes nothing.

Program order is kept: a read of version k stands after write k and before write k + 1 without any edge.
Values live in numbered slots, so that names of inlined functions and of bodies cannot collide.
"""
from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir

from onnx_inplace.compiler import contract, loader


@dataclasses.dataclass
class Standard:
    """A maximal run of ordinary nodes: one onnxruntime sub-session."""

    model: bytes
    inputs: list[tuple[str, int]]
    outputs: list[tuple[str, int]]


@dataclasses.dataclass
class Write:
    """A kernel step; ``cache`` and ``output`` are one storage."""

    op_type: str
    root: str
    axis: int
    cache: int
    values: int
    position: int
    output: int


@dataclasses.dataclass
class Read:
    """A kernel step that reads caches and makes a new value."""

    op_type: str
    inputs: list[int | None]
    output: int
    attributes: dict[str, object]


@dataclasses.dataclass
class Forward:
    """The output is the input: Identity of a root."""

    source: int
    output: int


@dataclasses.dataclass
class Branch:
    """If whose branches touch a root."""

    condition: int
    bodies: list[Block]
    outputs: list[int]


@dataclasses.dataclass
class Repeat:
    """Loop whose body touches a root."""

    count: int | None
    condition: int | None
    initial: list[int]
    formals: list[int]
    body: Block
    outputs: list[int]
    stacked: list[int]


@dataclasses.dataclass
class Block:
    """Steps in program order; ``outputs`` are slots."""

    steps: list
    outputs: list[int]


@dataclasses.dataclass
class Plan:
    """What a session executes."""

    slots: int
    constants: dict[int, object]
    inputs: list[ir.Value]
    outputs: list[tuple[str, str | None]]  # (name, root)
    mutable: list[str]
    block: Block
    slot: dict[ir.Value, int]


def plan(loaded: loader.Loaded) -> Plan:
    """Partition the model."""
    return _Planner(loaded).run()


def writes(node: ir.Node, aliases) -> bool:
    """Whether a node is a write in place."""
    key = (node.domain, node.op_type)
    return key in contract.WRITES or key in contract.MAY_WRITE and node.outputs[0] in aliases.root


def inner_graphs(node: ir.Node):
    return [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]


def captures(node: ir.Node) -> list[ir.Value]:
    """Values a node needs: its inputs and what its bodies take from outside."""
    needed = [v for v in node.inputs if v is not None]
    for graph in inner_graphs(node):
        inside = set(graph.inputs) | set(graph.initializers.values())
        for inner in graph:
            needed += [v for v in captures(inner) if v not in inside]
            inside.update(inner.outputs)
        needed += [v for v in graph.outputs if v not in inside]
        needed = [v for v in needed if v not in inside]
    return list(dict.fromkeys(needed))


class _Planner:
    def __init__(self, loaded: loader.Loaded):
        self.model, self.aliases, self.mutable = loaded.model, loaded.aliases, loaded.mutable
        self.slot: dict[ir.Value, int] = {}
        self.constants: dict[int, object] = {}
        self.constant_nodes: dict[ir.Value, ir.Node] = {}

    def run(self) -> Plan:
        graph = self.model.graph
        names = [v.name for v in graph.inputs], [v.name for v in graph.outputs]
        self.unique(graph, set())
        for value in graph.inputs:
            self.number(value)
        for value in graph.initializers.values():
            self.constants[self.number(value)] = value.const_value.numpy()
        block = self.block(graph)
        outputs = [(name, self.aliases.root[v].name if v in self.aliases.root else None)
                   for name, v in zip(names[1], graph.outputs)]
        return Plan(len(self.slot), self.constants, list(graph.inputs), outputs, [v.name for v in self.mutable], block, self.slot)

    def unique(self, graph: ir.Graph, taken: set[str]) -> None:
        """Sibling bodies may use one name twice; sub-sessions must not."""
        for value in (*graph.inputs, *(v for n in graph for v in n.outputs)):
            name, k = value.name or "value", 0
            while name in taken:
                k += 1
                name = f"{value.name}.{k}"
            value.name = name
            taken.add(name)
        for node in graph:
            for inner in inner_graphs(node):
                self.unique(inner, taken)

    def number(self, value: ir.Value) -> int:
        return self.slot.setdefault(value, len(self.slot))

    def block(self, graph: ir.Graph) -> Block:
        """Steps of one graph.

        Special steps keep program order. An ordinary node joins the earliest run that its data allows. That never
        moves a read past a write: a read of version k waits for write k through its data, and only moves forward.
        """
        special: list = []
        runs: list[list[ir.Node]] = [[]]  # runs[k] stands before special[k]
        level: dict[ir.Value, int] = {}
        for node in self.alive(graph):
            if node.domain == "" and node.op_type == "Constant" and {"value", "value_int"} & set(node.attributes):
                self.constant_nodes[node.outputs[0]] = node
                self.constants[self.number(node.outputs[0])] = _constant(node)
                continue
            build = self.special(node)
            if build is None:
                k = max((level.get(v, 0) for v in captures(node)), default=0)
                runs[k].append(node)
            else:
                special.append((node, build))
                runs.append([])
                k = len(special)
            level.update((v, k) for v in node.outputs)
        needed = set(graph.outputs)
        steps: list = []
        for k in range(len(special), -1, -1):
            if k < len(special):
                node, build = special[k]
                needed.update(captures(node))
                steps.append(build())
            if runs[k]:
                steps.append(self.standard(runs[k], needed))
                needed.update(v for node in runs[k] for v in captures(node))
        return Block(steps[::-1], [self.number(v) for v in graph.outputs])

    def alive(self, graph: ir.Graph) -> list[ir.Node]:
        """Nodes that matter. A write always does."""
        needed, found = set(graph.outputs), []
        for node in reversed(graph):
            if any(v in needed or v in self.aliases.root for v in node.outputs):
                needed.update(captures(node))
                found.append(node)
        return found[::-1]

    def special(self, node: ir.Node):
        root = next((self.aliases.root[v] for v in node.outputs if v in self.aliases.root), None)
        if writes(node, self.aliases):
            axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -2
            return lambda: Write(node.op_type, root.name, axis, *(self.number(v) for v in (*node.inputs, *node.outputs)))
        if (node.domain, node.op_type) in contract.FORWARDS and root is not None:
            return lambda: Forward(self.number(node.inputs[0]), self.number(node.outputs[0]))
        if (node.domain, node.op_type) in contract.READS and any(v in self.aliases.root for v in node.inputs):
            attributes = {a.name: a.value for a in node.attributes.values()}
            return lambda: Read(node.op_type, [None if v is None else self.number(v) for v in node.inputs], self.number(node.outputs[0]), attributes)
        if node not in self.aliases.stateful:
            return None
        if node.op_type == "If":
            return lambda: Branch(self.number(node.inputs[0]), [self.block(node.attributes[a].as_graph()) for a in ("then_branch", "else_branch")],
                                  [self.number(v) for v in node.outputs])
        if node.op_type == "Loop":
            return lambda: self.repeat(node)
        raise NotImplementedError(f"{node.op_type} on a mutable value")

    def repeat(self, node: ir.Node) -> Repeat:
        body = node.attributes["body"].as_graph()
        n = len(node.inputs) - 2
        optional = [None if v is None else self.number(v) for v in node.inputs[:2]]
        formals = [self.number(v) for v in body.inputs]
        return Repeat(*optional, [self.number(v) for v in node.inputs[2:]], formals, self.block(body),
                      [self.number(v) for v in node.outputs[:n]], [self.number(v) for v in node.outputs[n:]])

    def standard(self, nodes: list[ir.Node], needed: set[ir.Value]) -> Standard:
        made = dict.fromkeys(v for n in nodes for v in n.outputs)
        taken = dict.fromkeys(v for n in nodes for v in captures(n) if v not in made)
        results = [v for v in made if v in needed]
        constants = [self.constant_nodes[v] for v in taken if v in self.constant_nodes]
        weights = [v for v in taken if v.is_initializer()]
        inputs = [v for v in taken if v not in self.constant_nodes and not v.is_initializer()]
        graph = onnx.helper.make_graph(
            [ir.to_proto(n) for n in (*constants, *nodes)], "run",
            [_info(v) for v in inputs], [_info(v) for v in results],
            initializer=[ir.to_proto(v.const_value) for v in weights])
        imports = [onnx.helper.make_opsetid(d, v) for d, v in self.model.opset_imports.items() if d in {n.domain for n in nodes} | {""}]
        model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=11)
        return Standard(model.SerializeToString(), [(v.name, self.number(v)) for v in inputs], [(v.name, self.number(v)) for v in results])


def _info(value: ir.Value) -> onnx.ValueInfoProto:
    info = ir.to_proto(value)
    if value.type is None:
        raise RuntimeError(f"the type of `{value.name}` is not known")
    info.ClearField("metadata_props")
    return info


def _constant(node: ir.Node) -> np.ndarray:
    if "value" in node.attributes:
        return node.attributes["value"].as_tensor().numpy()
    return np.asarray(node.attributes["value_int"].as_int(), np.int64)
