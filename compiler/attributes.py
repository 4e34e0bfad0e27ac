"""Attributes and shapes as steps keep them: plain values, without the library's types."""

from __future__ import annotations

from collections.abc import Container
from types import MappingProxyType
from typing import Any

import onnx_ir as ir


def values(node: ir.Node) -> MappingProxyType[str, Any]:
    """Attributes as plain Python values; tensors as arrays."""
    return MappingProxyType(
        {
            a.name: a.as_tensor().numpy() if a.type == ir.AttributeType.TENSOR else a.value
            for a in node.attributes.values()
        }
    )


def directions(node: ir.Node, what: str, count: int) -> list[tuple[int, bool]]:
    """Axis and whether it runs backward, for each scanned input or stacked output."""
    axes = node.attributes.get(f"scan_{what}_axes")
    directions = node.attributes.get(f"scan_{what}_directions")
    return [
        (
            axes.as_ints()[k] if axes is not None else 0,
            bool(directions.as_ints()[k]) if directions is not None else False,
        )
        for k in range(count)
    ]


def shape(value: ir.Value, names: Container[str | None]) -> tuple[int | str | None, ...] | None:
    """Numbers, and ``names`` of dimensions of inputs; not the names that inference makes up."""
    if value.shape is None:
        return None
    dims = (d if isinstance(d, int) else d.value for d in value.shape)
    return tuple(d if isinstance(d, int) or d in names else None for d in dims)
