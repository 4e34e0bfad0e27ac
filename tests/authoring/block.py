"""A place in a random program: what can be named there, and the nodes that stand there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from onnx_inplace.compiler import errors, program

DOMAIN, LOCAL = "onnx_inplace", "local"
OPSET = 24
ROWS, CAPACITY, WIDTH = 2, 3, 2
CACHE, TOKEN = (ROWS, CAPACITY, WIDTH), (ROWS, 1, WIDTH)
SHAPES = (CACHE, (12,), (2, 6), (6, 2), (4, 3), (3, 2, 2))  # what a cache can be viewed as
HERE = errors.Location("random_program.py", 1)


@dataclasses.dataclass(frozen=True)
class Name:
    """A value of the program, its shape and type, and the cache that its author believes it to be.

    Numbers decide where things are written: they are INT64, whatever tensors are.
    """

    value: ir.Value
    shape: tuple[int, ...]
    cache: int | None = None
    kind: str = "tensor"  # number: a small scalar; sum: any; truth: BOOL; stack: of unknown length
    dtype: ir.DataType = ir.DataType.INT64


class Block:
    """What can be named at a place of the program, and the nodes written so far."""

    def __init__(
        self,
        fresh: Callable[[str], str],
        outer: Block | None,
        writable: Sequence[int],
        ranks: bool = False,
        element: ir.DataType = ir.DataType.INT64,
    ) -> None:
        self.fresh = fresh
        self.element = element  # of caches and tokens
        self.ranks = ranks  # of a value only the rank is known, not its dimensions
        self.nodes: list[ir.Node] = []
        self.outer_values = outer.values if outer is not None else set()
        self.values: set[ir.Value] = set(self.outer_values)
        self.names: list[Name] = list(outer.names) if outer is not None else []
        self.current: dict[int, Name] = dict(outer.current) if outer is not None else {}
        self.writable = list(writable)  # caches that the author means to write here

    @property
    def tensors(self) -> list[Name]:
        """What can be combined with a cache."""
        return [n for n in self.names if n.dtype == self.element]

    def add(self, name: Name) -> Name:
        self.values.add(name.value)
        self.names.append(name)
        return name

    def node(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        shape: tuple[int, ...],
        *,
        domain: str = "",
        cache: int | None = None,
        kind: str = "tensor",
        hint: str = "v",
        dtype: ir.DataType | None = None,
        **attributes: object,
    ) -> Name:
        value = ir.Value(name=self.fresh(hint))
        kept = {k: a for k, a in attributes.items() if a is not None}
        node = ir.node(op, inputs, kept, domain=domain, outputs=[value])
        node.meta[program.LOCATION] = HERE
        self.nodes.append(node)
        if dtype is None:
            plain = {"truth": ir.DataType.BOOL, "number": ir.DataType.INT64}
            dtype = plain.get(kind, self.element)
        made = self.add(Name(value, shape, cache, kind, dtype))
        typed(value, shape, dtype)
        if self.ranks:
            value.shape = ir.Shape([None] * len(shape))
        return made

    def constant(self, array: np.ndarray, small: bool = True) -> Name:
        kind = "tensor" if array.ndim else "number" if small else "sum"
        tensor = ir.tensor(array)
        return self.node(
            "Constant", [], array.shape, kind=kind, hint="k", dtype=tensor.dtype, value=tensor
        )

    def numbers(self, array: np.ndarray, small: bool = True) -> Name:
        """A constant of the type of caches."""
        return self.constant(array.astype(self.element.numpy()), small)


def typed(
    value: ir.Value, shape: tuple[int, ...], dtype: ir.DataType = ir.DataType.INT64
) -> ir.Value:
    """Declare what a result or a parameter is."""
    value.type = ir.TensorType(dtype)
    value.shape = ir.Shape([f"n{k}" if d < 0 else d for k, d in enumerate(shape)])
    return value


def shape_of(value: ir.Value) -> tuple[int, ...]:
    assert value.shape is not None
    return tuple(d if isinstance(d, int) else CAPACITY for d in value.shape)
