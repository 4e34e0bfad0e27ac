"""Facts of fused steps: what one call of a precompiled interpreter executes. Nothing decides here.

A fused step is an alternative to ordinary steps of a plan, for runs with few rows. It holds
operations on values of its own numbering; those at its border have slots of the plan. The runner
turns them into a table of instructions when the dimensions of a run are known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onnx_inplace.compiler import sizes
from onnx_inplace.compiler.errors import Location
from onnx_inplace.compiler.paged_types import PageType
from onnx_inplace.compiler.sizes import Shape, Size

if TYPE_CHECKING:
    from onnx_inplace.compiler.steps import Block

ROWS = 4
"""Runs of at most so many rows of a product take fused steps; more pay a library's kernels."""

DOMAIN = "onnx_inplace.fused"
"""Of operations that stand for several nodes of the model; no node has it."""


VIEWS = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})
"""Operators whose result is the storage of their input."""


@dataclasses.dataclass(frozen=True, slots=True)
class FusedValue:
    """What is known of a value that a fused step reads or makes.

    Attributes:
        name: as in the plan.
        dtype: element type; None where it is not known.
        shape: in terms of the dimensions of the inputs; None where a run decides.
        constant: the tensor of a weight.
        content: integers that the dimensions decide, such as the target of a Reshape.
        root: the graph input whose storage it is.
        pages: of a paged cache.
    """

    name: str
    dtype: ir.DataType | None
    shape: Shape | None
    constant: ir.TensorProtocol | None = None
    content: tuple[Size, ...] | None = None
    root: str | None = None
    pages: PageType | None = None


@dataclasses.dataclass(frozen=True)
class Operation:
    """One node, or several that a pattern joined, on values of its fused step.

    Attributes:
        domain: of the operator; ``DOMAIN`` for what a pattern made.
        op_type: of the operator.
        version: of the operator's domain, as the model imports it.
        inputs: indices into ``Fused.values``; None where an optional input is absent.
        outputs: likewise.
        attributes: plain Python values by name.
        roots: name of the root, by index of the output that is its storage.
        location: the author's line, where it is known.
    """

    domain: str
    op_type: str
    version: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    attributes: Mapping[str, Any]
    roots: Mapping[int, str] = dataclasses.field(default_factory=dict)
    location: Location | None = None

    @property
    def writes(self) -> bool:
        """Whether it writes storage of a root, and is no mere view of it."""
        return bool(self.roots) and self.op_type not in VIEWS


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """``value`` of a fused step is the plan's ``slot``."""

    value: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Fused:
    """Operations that are executed in one call, in order.

    ``inputs`` are made before it, ``outputs`` are used after it; ``nodes`` counts those of the
    model.
    """

    values: tuple[FusedValue, ...]
    operations: tuple[Operation, ...]
    inputs: tuple[Link, ...]
    outputs: tuple[Link, ...]
    nodes: int

    @property
    def written(self) -> frozenset[str]:
        """Roots whose storage it writes."""
        writes = [o for o in self.operations if o.writes]
        return frozenset(root for o in writes for root in o.roots.values())

    @property
    def dims(self) -> frozenset[str]:
        """Dimensions on which its instructions depend."""
        used = {k for o in self.operations for k in (*o.inputs, *o.outputs) if k is not None}
        used |= {link.value for link in (*self.inputs, *self.outputs)}
        values = [self.values[k] for k in used]
        return sizes.names(n for v in values for n in (*(v.shape or ()), *(v.content or ())))


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """A node that stays an ordinary step, and why."""

    node: str
    reason: str
    location: Location | None

    def __str__(self) -> str:
        return f"{self.node}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Fusion:
    """What of a plan can run fused.

    Attributes:
        block: the steps of such a run, in place of ``ExecutionPlan.block``; None: nothing is fused.
        rows: of all products in fused steps; each must be at most ``ROWS``.
        refusals: nodes between or beside fused steps that have no template.
    """

    block: Block | None = dataclasses.field(repr=False)
    rows: tuple[Size, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    @property
    def regions(self) -> tuple[Fused, ...]:
        """The fused steps."""
        return tuple(s for s in self.block.steps if isinstance(s, Fused)) if self.block else ()

    @property
    def dims(self) -> frozenset[str]:
        """Dimensions on which it depends what runs fused, and how."""
        return sizes.names(self.rows).union(*(step.dims for step in self.regions))


NOTHING = Fusion(None)
