"""What makes a value of a graph that somebody else wrote, and why that cannot be in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import onnx

from onnx_inplace.compiler import contract
from onnx_inplace.compiler.contract import Effect


@dataclasses.dataclass(frozen=True, slots=True)
class Obstacle:
    """Why an output cannot be the storage of an input, and what to do about it."""

    reason: str
    repair: str


class Producers:
    """The nodes of a graph by what they make (bodies of control flow are not looked into)."""

    def __init__(self, graph: Any) -> None:
        self._node = {name: node for node in graph.node for name in node.output if name}

    def obstacle(self, output: str, root: str) -> Obstacle | None:
        """Why ``output`` cannot be in the storage of ``root``; None: it can be assigned to it."""
        if output not in self._node:
            return Obstacle(
                "no node makes it, it is an input or a constant itself.",
                "Let a node make it: Identity.",
            )
        value = self._behind_views(output)
        node = self._node.get(value)
        if node is None:
            return None
        if node.op_type == "Concat" and any(self._behind_views(i) == root for i in node.input):
            return Obstacle(
                f"Concat makes a longer one of `{root}` and new values.",
                "Export the model with a cache of fixed capacity: TensorScatter, or"
                " com.microsoft GroupQueryAttention, write new values where they belong.",
            )
        source = self._scattered_into(node, value)
        if source is not None and self._comes_from(source, root):
            made_by = self._node[self._behind_views(source)].op_type
            return Obstacle(
                f"{node.op_type} writes into what {made_by} makes of `{root}`.",
                f"Let {node.op_type} take `{root}` itself, or a Reshape of it.",
            )
        return None

    def _behind_views(self, value: str) -> str:
        """The value whose storage this one is another name of."""
        while (node := self._node.get(value)) is not None:
            rule = contract.RULES.get((_domain(node), node.op_type))
            if rule is None or rule.effect is not Effect.VIEW:
                break
            value = node.input[0]
        return value

    def _scattered_into(self, node: Any, value: str) -> str | None:
        rule = contract.RULES.get((_domain(node), node.op_type))
        reduced = any(a.name == "reduction" and a.s not in (b"", b"none") for a in node.attribute)
        if rule is None or rule.effect is not Effect.WRITE or reduced:
            return None
        for pair in rule.aliases:
            if pair.output_index < len(node.output) and node.output[pair.output_index] == value:
                return str(node.input[pair.input_index])
        return None

    def _comes_from(self, value: str, root: str) -> bool:
        """Whether ``value`` is made of ``root``, along first inputs, by something."""
        start = self._behind_views(value)
        if start not in self._node:
            return False
        while (node := self._node.get(value)) is not None and node.input:
            value = node.input[0]
        return value == root


def _domain(node: Any) -> str:
    return "" if node.domain == "ai.onnx" else str(node.domain)


def rename(graph: Any, name: str) -> str:
    """Free a name of a graph for another node; returns what its value is called from now on."""
    new = fresh(graph, f"{name}_value")
    for node in graph.node:
        _replace(node.output, name, new)
        _replace_uses(node, name, new)
    for info in graph.value_info:
        if info.name == name:
            info.name = new
    return new


def fresh(graph: Any, name: str) -> str:
    """A name that nothing in a graph has, as close to ``name`` as that allows."""
    taken = set(_names(graph))
    while name in taken:
        name += "_"
    return name


def _names(graph: Any) -> Iterator[str]:
    for items in (graph.input, graph.output, graph.initializer, graph.value_info):
        yield from (item.name for item in items)
    for node in graph.node:
        yield from node.output
        yield from node.input
        for body in _bodies(node):
            yield from _names(body)


def _bodies(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def _replace_uses(node: Any, name: str, new: str) -> None:
    _replace(node.input, name, new)
    for body in _bodies(node):
        for inner in body.node:
            _replace_uses(inner, name, new)
        for info in body.output:
            if info.name == name:
                info.name = new


def _replace(names: Any, name: str, new: str) -> None:
    for k, known in enumerate(names):
        if known == name:
            names[k] = new
