"""Which root every value names, and which roots every block writes; versions are left to ``alias``.

A Loop has to know at its entry what its body overwrites at the end: a name from outside is stale
there from the second iteration on. So this walk comes first. It reports nothing and knows no order;
where a program breaks a rule it takes the author's word (a carried value stays what it started as).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import onnx_ir as ir

from onnx_inplace.compiler import contract, control
from onnx_inplace.compiler.contract import Access, Effect, OutputAlias

Block = ir.Graph | ir.Function


@dataclasses.dataclass(frozen=True, slots=True)
class Restriction:
    """Why a READ_ONLY parameter of a function cannot be given mutable storage.

    Inside of the function the parameter is an ordinary value, and what happens to it is legal. With
    mutable storage in its place it would break rule ``code``.
    """

    code: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """What a function does with a parameter.

    Attributes:
        value: the parameter, with its declared type where there is one.
        access: as declared.
        written: the function overwrites it.
        restriction: of a READ_ONLY parameter; None: mutable storage may be given as well.
    """

    value: ir.Value
    access: Access
    written: bool = False
    restriction: Restriction | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The parameter whose storage a result of a function is; ``reshaped``: under another shape."""

    parameter: int
    reshaped: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What a caller has to know of a function: its parameters, and for each result what it is."""

    parameters: tuple[Parameter, ...]
    results: tuple[Result | None, ...]


Callee = Callable[[ir.Node], Summary | None]
Declared = Callable[[ir.Node], Sequence[OutputAlias]]


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """One output of one node that is the storage of one of its inputs.

    Attributes:
        output: port; None: the node leaves it out, so that what it writes gets no name.
        input: port.
        effect: WRITE or VIEW.
        required: the input must be mutable storage; else the node breaks a rule.
        reshaped: the output has another shape.
    """

    output: int | None
    input: int
    effect: Effect
    required: bool = False
    reshaped: bool = False


def carried_ports(node: ir.Node) -> list[tuple[int, ir.Value, ir.Value]]:
    """(input port, body parameter, body result) of each carried value of a Loop or Scan."""
    body = node.attributes["body"].as_graph()
    if node.op_type == "Loop":
        first, count, formals, results = 2, len(node.inputs) - 2, body.inputs[2:], body.outputs[1:]
    else:
        count = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
        first, formals, results = 0, body.inputs, body.outputs
    ports = range(first, first + count)
    return list(zip(ports, formals[:count], results[:count], strict=True))


class Classes:
    """The walk and what it found.

    Attributes:
        root: of every value that may be the storage of a parameter.
        written: for every block the mutable roots that it writes, at any depth, and the node that
            does it first.
    """

    def __init__(
        self, block: Block, mutable: Sequence[ir.Value], callee: Callee, declared: Declared
    ) -> None:
        self._callee, self._declared = callee, declared
        self._mutable = dict.fromkeys(mutable)
        self.root: dict[ir.Value, ir.Value] = {value: value for value in block.inputs}
        self.written: dict[Block, dict[ir.Value, ir.Node]] = {}
        self._walk(block)

    def has_rule(self, node: ir.Node) -> bool:
        """Whether the operator's own rule counts, not what its file says."""
        return (node.domain, node.op_type) in contract.RULES

    def summary(self, node: ir.Node) -> Summary | None:
        """Of the called function. A function that is an operator's body does not count."""
        return None if self.has_rule(node) else self._callee(node)

    def links(self, node: ir.Node) -> tuple[Link, ...]:
        """Aliases of a node that is no If, Loop or Scan."""
        rule = contract.RULES.get((node.domain, node.op_type))
        if rule is None:
            if (summary := self.summary(node)) is not None:
                return tuple(_links_of_call(node, summary))
            declared = [a for a in self._declared(node) if _exists(node, a)]
            return tuple(Link(*_ports(node, a), Effect.WRITE, required=True) for a in declared)
        if not rule.applies(node):
            return ()
        aliases = [a for a in rule.aliases if _given(node, a) is not None]
        if rule.effect is Effect.VIEW:
            return tuple(
                Link(*_ports(node, a), Effect.VIEW, reshaped=rule.reshapes) for a in aliases
            )
        if rule.functional and not any(self._is_mutable(_given(node, a)) for a in aliases):
            return ()
        return tuple(Link(*_ports(node, a), Effect.WRITE, required=True) for a in aliases)

    def restricted(self, node: ir.Node) -> Iterator[ir.Value]:
        """Inputs that ``node`` would write if they were mutable storage."""
        rule = contract.rule(node)
        if rule is None or rule.effect is Effect.VIEW or self.links(node):
            return
        for a in rule.aliases:
            if (value := _given(node, a)) is not None:
                yield value

    def _is_mutable(self, value: ir.Value | None) -> bool:
        return value in self.root and self.root[value] in self._mutable

    def _walk(self, block: Block) -> dict[ir.Value, ir.Node]:
        written = self.written[block] = {}
        for node in block:
            for root, writer in self._node(node).items():
                written.setdefault(root, writer)
        return written

    def _node(self, node: ir.Node) -> dict[ir.Value, ir.Node]:
        """Roots that ``node`` writes, with the node that does it."""
        if node.domain == "" and node.op_type in ("Loop", "Scan"):
            return self._repeated(node)
        written: dict[ir.Value, ir.Node] = {}
        for graph in control.bodies(node):
            for root, writer in self._walk(graph).items():
                written.setdefault(root, writer)
        if node.domain == "" and node.op_type == "If":
            self._branches(node)
            return written
        for link in self.links(node):
            value = node.inputs[link.input]
            if link.output is not None:
                self._follow(node.outputs[link.output], value)
            if link.effect is Effect.WRITE and value is not None and self._is_mutable(value):
                written.setdefault(self.root[value], node)
        if (summary := self.summary(node)) is not None:
            for value, parameter in zip(node.inputs, summary.parameters, strict=False):
                if value is None or not parameter.written:
                    continue
                if value in self.root and self.root[value] in self._mutable:
                    written.setdefault(self.root[value], node)
        return written

    def _repeated(self, node: ir.Node) -> dict[ir.Value, ir.Node]:
        body = node.attributes["body"].as_graph()
        carried = carried_ports(node)
        for port, formal, _ in carried:
            self._follow(formal, node.inputs[port])
        if node.op_type == "Scan":  # slices of what is scanned
            count = len(carried)
            for value, formal in zip(node.inputs[count:], body.inputs[count:], strict=True):
                self._follow(formal, value)
        written = self._walk(body)
        for k, (port, _, _) in enumerate(carried):
            self._follow(node.outputs[k], node.inputs[port])
        return written

    def _branches(self, node: ir.Node) -> None:
        then, other = (node.attributes[a].as_graph() for a in ("then_branch", "else_branch"))
        for output, a, b in zip(node.outputs, then.outputs, other.outputs, strict=True):
            if self.root.get(a) is self.root.get(b):
                self._follow(output, a)

    def _follow(self, value: ir.Value, source: ir.Value | None) -> ir.Value | None:
        root = None if source is None else self.root.get(source)
        if root is not None:
            self.root[value] = root
        return root


def _links_of_call(node: ir.Node, summary: Summary) -> Iterator[Link]:
    for k, result in enumerate(summary.results):
        if result is None or result.parameter >= len(node.inputs):
            continue
        parameter = summary.parameters[result.parameter]
        effect = Effect.WRITE if parameter.written else Effect.VIEW
        required = parameter.access is Access.READ_WRITE
        ports = _ports(node, OutputAlias(k, result.parameter))
        yield Link(*ports, effect, required, result.reshaped)


def _exists(node: ir.Node, a: OutputAlias) -> bool:
    return 0 <= a.output_index < len(node.outputs) and 0 <= a.input_index < len(node.inputs)


def _given(node: ir.Node, a: OutputAlias) -> ir.Value | None:
    """The input of an alias; inputs may be left out, at the end or in between."""
    return node.inputs[a.input_index] if a.input_index < len(node.inputs) else None


def _ports(node: ir.Node, a: OutputAlias) -> tuple[int | None, int]:
    """Outputs may be left out as well."""
    named = a.output_index < len(node.outputs) and node.outputs[a.output_index].name != ""
    return a.output_index if named else None, a.input_index
