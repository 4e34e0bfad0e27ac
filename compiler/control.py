"""Branches and bodies: which graphs a node holds, and how values go through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import onnx_ir as ir


def is_control(node: ir.Node) -> bool:
    """Whether a node has branches or a body that are executed by their own rules."""
    return node.domain == "" and node.op_type in ("If", "Loop", "Scan")


def bodies(node: ir.Node) -> list[ir.Graph]:
    """The graphs that a node holds, in order; of an If: then, else."""
    attributes = node.attributes
    if node.op_type == "If" and is_control(node):
        return [attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    found: list[ir.Graph] = []
    for name in attributes:  # every pass asks every node, and values() takes thrice as long
        attribute = attributes[name]
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found += attribute.as_graphs()
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Ports:
    """How values go through a Loop or Scan.

    Attributes:
        steering: values that decide how often the body runs: outside of it, and inside.
        carried: (initial, parameter of the body, result of the body, output) of every carried
            value.
        scanned: (sequence, element) of every sequence that is taken apart.
        stacked: (result of the body, output) of every sequence that is put together.
        own: parameters of the body that the node itself sets.
    """

    steering: tuple[ir.Value, ...]
    inner_steering: tuple[ir.Value, ...]
    carried: tuple[tuple[ir.Value, ir.Value, ir.Value, ir.Value], ...]
    scanned: tuple[tuple[ir.Value, ir.Value], ...]
    stacked: tuple[tuple[ir.Value, ir.Value], ...]
    own: tuple[ir.Value, ...]


def ports(node: ir.Node) -> Ports:
    """The ports of a Loop or Scan."""
    body = node.attributes["body"].as_graph()
    if node.op_type == "Loop":
        initial = present(node.inputs[2:])
        n = len(initial)
        return Ports(
            steering=tuple(v for v in node.inputs[:2] if v is not None),
            inner_steering=(body.outputs[0],),
            carried=tuple(
                zip(
                    initial, body.inputs[2:], body.outputs[1 : 1 + n], node.outputs[:n], strict=True
                )
            ),
            scanned=(),
            stacked=tuple(zip(body.outputs[1 + n :], node.outputs[n:], strict=True)),
            own=tuple(body.inputs[:2]),
        )
    given = present(node.inputs)
    n = len(given) - node.attributes["num_scan_inputs"].as_int()
    return Ports(
        steering=(),
        inner_steering=(),
        carried=tuple(
            zip(given[:n], body.inputs[:n], body.outputs[:n], node.outputs[:n], strict=True)
        ),
        scanned=tuple(zip(given[n:], body.inputs[n:], strict=True)),
        stacked=tuple(zip(body.outputs[n:], node.outputs[n:], strict=True)),
        own=(),
    )


def present(values: Iterable[ir.Value | None]) -> tuple[ir.Value, ...]:
    """Values without the inputs that are left out."""
    return tuple(v for v in values if v is not None)
