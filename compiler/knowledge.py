"""Which values of a graph can be computed before a run has written anything.

A value is *known* when it follows from inputs, small constants, and what the storage held before
the run. What is read from storage that this run has written is not; an Assign hands on its value,
so that a counter is. A value that needs a large weight counts as unknown: computing it twice would
cost more than the check is worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx_ir as ir

from onnx_inplace.compiler import contract
from onnx_inplace.compiler.contract import Effect
from onnx_inplace.compiler.control import bodies, is_control, ports, present

LARGE = 1 << 20  # bytes
RANDOM = {
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}
_LIBRARY = {"", "ai.onnx", "ai.onnx.ml", "com.microsoft"}  # domains that onnxruntime executes
_FORWARDS = {(contract.DOMAIN, "Assign"): 1, (contract.DOMAIN, "Copy"): 0}
"""Operators of ours whose result is one of their inputs, as a value."""


def forwarded(node: ir.Node) -> ir.Value | None:
    """The input that an operator of ours gives back as a value."""
    port = _FORWARDS.get((node.domain, node.op_type))
    return None if port is None else node.inputs[port]


def mentioned(node: ir.Node) -> Iterator[ir.Value]:
    """Values that a node and its bodies name, those included that the bodies make."""
    yield from present(node.inputs)
    for body in bodies(node):
        for inner in body:
            yield from mentioned(inner)
        yield from body.outputs


class Knowledge:
    """Known and unknown values of one graph."""

    def __init__(
        self, graph: ir.Graph, root_of: Mapping[ir.Value, ir.Value], mutable: Iterable[ir.Value]
    ):
        """Decide about every value of ``graph`` and of its bodies."""
        self._storage = set(mutable)
        self._root_of = root_of
        self._unknown: dict[ir.Value, str] = {
            v: f"`{v.name}` has {v.const_value.nbytes:,} bytes"
            for v in graph.initializers.values()
            if v.const_value is not None and v.const_value.nbytes > LARGE
        }
        self._unsteered: dict[ir.Node, str] = {}
        # What is carried round a loop may become unknown only by what its body does with it.
        size = -1
        while size != len(self._unknown) + len(self._unsteered):
            size = len(self._unknown) + len(self._unsteered)
            self._block(graph)

    def why_unknown(self, value: ir.Value) -> str | None:
        """The reason why a value cannot be computed before the run; None when it can."""
        return self._unknown.get(value)

    def why_unsteered(self, node: ir.Node) -> str | None:
        """The reason why it is not known which branch runs, or how often a body does."""
        return self._unsteered.get(node)

    def _block(self, graph: ir.Graph) -> None:
        for node in graph:
            if is_control(node):
                for body in bodies(node):
                    self._block(body)
                if node.op_type == "If":
                    self._branch(node)
                else:
                    self._repeat(node)
            else:
                self._operator(node)

    def _operator(self, node: ir.Node) -> None:
        rule = contract.rule(node)
        source = forwarded(node)
        if source is not None:
            reason = self._unknown.get(source)
        elif rule is not None and rule.effect is Effect.WRITE and self._on_storage(node.outputs):
            root = next(self._root_of[v] for v in node.outputs if v in self._root_of)
            reason = f"`{root.name}` is written before it is read"
        elif node.domain == "" and node.op_type in RANDOM:
            reason = f"{node.op_type} is not repeatable"
        elif node.domain not in _LIBRARY:
            reason = f"{node.domain}::{node.op_type} runs in a kernel"
        elif node.op_type in _READERS and self._on_storage(present(node.inputs)):
            reason = f"{node.op_type} reads storage in a kernel"
        else:
            reason = self._first(mentioned(node))
        self._mark(node.outputs, reason)

    def _branch(self, node: ir.Node) -> None:
        reason = self._first(present(node.inputs))
        if reason is not None:
            self._unsteered[node] = reason
        for output, results in zip(
            node.outputs, zip(*(b.outputs for b in bodies(node)), strict=True), strict=True
        ):
            self._mark([output], reason or self._first(results))

    def _repeat(self, node: ir.Node) -> None:
        p = ports(node)
        reason = self._first((*p.steering, *p.inner_steering))
        sequences = [self._unknown.get(sequence) for sequence, _ in p.scanned]
        if sequences and all(sequences):
            reason = sequences[0]  # one known sequence is enough to know how many steps there are
        if reason is not None:
            self._unsteered[node] = reason
        for initial, parameter, result, output in p.carried:
            inside = reason or self._first((initial, result))
            self._mark([parameter, output], inside)
        for sequence, element in p.scanned:
            self._mark([element], reason or self._unknown.get(sequence))
        for result, output in p.stacked:
            self._mark([output], reason or self._unknown.get(result))
        self._mark(p.own, reason)

    def _on_storage(self, values: Iterable[ir.Value]) -> bool:
        return any(self._root_of.get(v) in self._storage for v in values)

    def _first(self, values: Iterable[ir.Value]) -> str | None:
        return next((self._unknown[v] for v in values if v in self._unknown), None)

    def _mark(self, values: Iterable[ir.Value], reason: str | None) -> None:
        if reason is not None:
            for value in values:
                self._unknown.setdefault(value, reason)


_READERS = {"Attention", "GroupQueryAttention"}
