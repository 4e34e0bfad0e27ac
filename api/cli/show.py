"""A model for readers: what shares storage carries its root and version, as ``first[cache@1]``.

``Listing`` holds what is shown, from the same derivation that proves a file; ``render`` draws it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import onnx_ir as ir
from rich.console import Console
from rich.text import Text

from onnx_inplace.compiler import contract, derivation, facts, integrity, loader, paged_types
from onnx_inplace.compiler.contract import Access, Effect
from onnx_inplace.compiler.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A value, and the storage that it shares.

    Attributes:
        name: of the value.
        type: as text; empty where it is not known or not of interest.
        root: the parameter whose storage it is.
        version: of that root's content, from 0 on.
    """

    name: str
    type: str = ""
    root: str | None = None
    version: int | None = None

    def __str__(self) -> str:
        if self.root is None:
            return self.name
        tag = f"{self.root}@{self.version}"
        return tag if self.name == self.root else f"{self.name}[{tag}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A node.

    Attributes:
        op: with its domain, unless that is ONNX's own.
        inputs: an absent one is None.
        outputs: its results.
        attributes: as text, graphs left out.
        effects: "writes cache", "views cache", "is cache" (control flow and calls).
        source: "file.py:line".
        blocks: its branches or bodies.
    """

    op: str
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    attributes: tuple[str, ...]
    effects: tuple[str, ...]
    source: str
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A graph, a function, or a body: ``access`` has one entry per input of the first two."""

    name: str
    inputs: tuple[Value, ...]
    access: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """What is shown of a model."""

    ir_version: int
    opsets: dict[str, int]
    graph: Block
    functions: tuple[Block, ...]
    weights: tuple[Value, ...]

    @classmethod
    def of(cls, program: Program) -> Listing:
        """Prove the contract of a program, and look at it.

        Raises:
            errors.ContractError: the file does not keep it.
        """
        loader.verify_file(program)
        derived = derivation.Derivation(program.proto, program.weights)
        model = derived.model
        weights = [Value(str(v.name), _type(v)) for v in model.graph.initializers.values()]
        return cls(
            model.ir_version or 0,
            {domain or "ai.onnx": version for domain, version in model.opset_imports.items()},
            _Reader(derived.graph).block(program.name),
            tuple(_Reader(f).block(_function_name(f.block)) for f in derived.functions),
            tuple(weights),
        )

    def to_json(self) -> dict[str, object]:
        """For programs."""
        return {"ok": True, **dataclasses.asdict(self)}


def _function_name(block: Any) -> str:
    return facts.function_scope(block).rstrip(":").replace(":", "::", 1)


def _type(value: ir.Value) -> str:
    if value.type is None:
        return ""
    if isinstance(value.type, paged_types.PagedType):
        return str(paged_types.declaration(value.type, value.shape))
    if not isinstance(value.type, ir.TensorType):
        return str(value.type)
    if value.shape is None:
        return f"{value.type.dtype}[...]"
    dims = (str(d) if isinstance(d, int) else str(d.value or "?") for d in value.shape)
    return f"{value.type.dtype}[{', '.join(dims)}]"


class _Reader:
    """Turns an analysed graph or function into a block."""

    def __init__(self, analysed: facts.Analysed) -> None:
        self.analysed, self.aliases = analysed, analysed.aliases
        numbers: dict[ir.Value, set[int]] = {}
        for value, version in self.aliases.version.items():
            if value in self.aliases.root:
                numbers.setdefault(self.aliases.root[value], set()).add(version)
        self.numbers = {  # versions of one root, counted from 0 on
            (root, version): k
            for root, versions in numbers.items()
            for k, version in enumerate(sorted(versions))
        }

    def value(self, value: ir.Value) -> Value:
        root = self.aliases.root.get(value)
        if root is None or root not in self.analysed.mutable:
            return Value(str(value.name), _type(value))
        version = self.numbers[root, self.aliases.version[value]]
        return Value(str(value.name), _type(value), str(root.name), version)

    def block(self, name: str) -> Block:
        block = self.analysed.block
        return Block(
            name,
            tuple(map(self.value, block.inputs)),
            tuple(access.name for access in self.analysed.access),
            tuple(map(self.node, block)),
            tuple(map(self.value, block.outputs)),
        )

    def body(self, name: str, graph: ir.Graph) -> Block:
        return Block(
            name,
            tuple(map(self.value, graph.inputs)),
            (),
            tuple(map(self.node, graph)),
            tuple(map(self.value, graph.outputs)),
        )

    def node(self, node: ir.Node) -> Node:
        attributes = node.attributes.values()
        source = integrity.source(node)
        return Node(
            f"{node.domain}::{node.op_type}" if node.domain else node.op_type,
            tuple(None if v is None else self.value(v) for v in node.inputs),
            tuple(map(self.value, node.outputs)),
            tuple(f"{a.name}={_attribute(a)}" for a in attributes if not _is_graph(a)),
            tuple(self.effects(node)),
            "" if source is None else str(source),
            tuple(self.body(a.name, a.as_graph()) for a in attributes if _is_graph(a)),
        )

    def effects(self, node: ir.Node) -> Iterator[str]:
        rule = contract.rule(node)
        words = {Effect.WRITE: "writes", Effect.VIEW: "views"}
        word = "is" if rule is None else words[rule.effect]
        roots = (self.value(v).root for v in node.outputs)
        yield from dict.fromkeys(f"{word} {root}" for root in roots if root is not None)


def _is_graph(attribute: ir.Attr) -> bool:
    return attribute.type == ir.AttributeType.GRAPH


def _attribute(attribute: ir.Attr) -> str:
    if attribute.is_ref():
        return f"@{attribute.ref_attr_name}"
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        small = tensor.size <= 8
        shape = ", ".join(str(d) for d in tensor.shape)
        return str(tensor.numpy().tolist()) if small else f"{tensor.dtype}[{shape}]"
    text = repr(attribute.value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- drawing


def render(listing: Listing, path: str) -> None:
    """Draw a listing; colours only on a terminal, and no line is broken or cut."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    opsets = ", ".join(f"{domain} {version}" for domain, version in listing.opsets.items())
    console.print(Text(f"{path}: IR {listing.ir_version}, {opsets}", "dim"))
    for line in _block_lines(listing.graph, "graph"):
        console.print(line)
    for function in listing.functions:
        console.print()
        for line in _block_lines(function, "function"):
            console.print(line)
    if listing.weights:
        console.print()
        console.print(Text("weights", "bold"))
        for weight in listing.weights:
            console.print(Text(f"  {weight.name}  ").append(weight.type, "dim"))


def _block_lines(block: Block, kind: str) -> Iterator[Text]:
    yield Text.assemble((f"{kind} ", "bold"), (block.name, "bold cyan"))
    width = max((len(str(v)) for v in block.inputs), default=0)
    for value, access in zip(block.inputs, block.access, strict=True):
        mutable = access == Access.READ_WRITE.name
        line = Text("  in   ", "dim").append_text(_value(value))
        line.append(" " * (width - len(str(value)) + 2))
        line.append(f"{access:10}  ", "bold yellow" if mutable else "dim")
        yield line.append(value.type, "dim")
    for node in block.nodes:
        yield from _node_lines(node, 1)
    for value in block.outputs:
        yield Text("  out  ", "dim").append_text(_value(value)).append(f"  {value.type}", "dim")


def _node_lines(node: Node, depth: int) -> Iterator[Text]:
    line = Text("  " * depth)
    line.append_text(_join(node.outputs)).append(" = ", "dim").append(node.op, "bold")
    line.append("(").append_text(_join(node.inputs)).append(")")
    if node.attributes:
        line.append(f" {{{', '.join(node.attributes)}}}", "dim")
    if node.effects:
        line.append(f"  {', '.join(node.effects)}", "bold yellow")
    if node.source:
        line.append(f"  # {node.source}", "dim")
    yield line
    for block in node.blocks:
        head = Text("  " * (depth + 1)).append(block.name, "cyan").append("(")
        yield head.append_text(_join(block.inputs)).append("):")
        for inner in block.nodes:
            yield from _node_lines(inner, depth + 2)
        yield Text("  " * (depth + 2) + "-> ", "dim").append_text(_join(block.outputs))


def _join(values: Iterable[Value | None]) -> Text:
    return Text(", ").join(Text("-") if v is None else _value(v) for v in values)


def _value(value: Value) -> Text:
    text = str(value)
    styled = Text(text)
    if value.root is not None:
        start = 0 if value.name == value.root else len(value.name)
        styled.stylize("green", start, len(text))
    return styled
