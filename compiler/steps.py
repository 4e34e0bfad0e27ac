"""The plan: what a run does, in which order, on which values. Facts only: nothing is decided.

Every value of the flat graph and of its bodies has a *slot*, a number that is unique in the whole
plan, so that names of inlined functions and of sibling bodies cannot collide. A step reads slots
and fills slots. Steps of one block run one after the other; the planner has put every read of a
version between the write that makes it and the next write of its root, so the order of the steps
is all that a runner must keep.

Two kinds of sharing are kept apart. ``ExecutionPlan.must_alias`` is required: the output *is* the
caller's storage. ``ExecutionPlan.inplace_reuse`` is opportunistic: a value whose storage may serve
another value once it is dead, or may not.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import onnx_ir as ir

from onnx_inplace.compiler.calls import Call
from onnx_inplace.compiler.contract import OutputAlias
from onnx_inplace.compiler.errors import Location
from onnx_inplace.compiler.fused import NOTHING, Fused, Fusion
from onnx_inplace.compiler.memory import Footprint, Memory
from onnx_inplace.compiler.moments import Moment, moments
from onnx_inplace.compiler.new_pages import NewPages
from onnx_inplace.compiler.notes import Condition, Copied, Fallback
from onnx_inplace.compiler.paged_types import PageType

Shape: TypeAlias = "tuple[int | str | None, ...]"
"""Dimensions: a number, the name of a dimension of an input, or None where neither is known."""


class Storage(enum.Enum):
    """Who owns the bytes of a value while a plan runs."""

    CALLER = enum.auto()  # a graph input, or a value that is the storage of one
    CONSTANT = enum.auto()  # a weight or a constant; never written
    # the runner's: one shape per tuple of input dimensions, overwritten by the next run
    BUFFER = enum.auto()
    # made new by every execution of its step: it leaves its block, or its shape depends on data
    FRESH = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """What is known of a slot.

    Attributes:
        slot: index into the slots of a run, and into ``ExecutionPlan.values``.
        name: unique in the plan; the author's name where that was unique.
        dtype: element type; None for a sequence, an optional value, or where inference found none.
        shape: see ``Shape``; None where the rank is unknown. Of a paged cache, that of a page.
        root: the graph input whose storage it is, or None for storage of its own.
        storage: who owns the bytes.
        fixed: whether all runs with the same input dimensions give it the same shape.
        version: of the root's content; names of one version hold the same bytes. Only with a root.
        pages: of a paged cache; its dtype is None.
    """

    slot: int
    name: str
    dtype: ir.DataType | None
    shape: Shape | None
    root: str | None
    storage: Storage
    fixed: bool
    version: int | None = None
    pages: PageType | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Weight:
    """An initializer of a sub-session, by the name that its model uses.

    ``shared``: other sub-sessions or kernel steps use the same tensor; there must be one copy of
    it in memory.
    """

    name: str
    tensor: ir.TensorProtocol
    shared: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    """The name by which a sub-session's model knows a slot."""

    name: str
    slot: int


@dataclasses.dataclass(frozen=True)
class SubSession:
    """A maximal set of nodes without alias facts, for a library (onnxruntime) to execute.

    ``model`` is a serialized ModelProto. ``weights`` are declared as its initializers without
    their payload (external data without a file): the runner supplies them.

    ``packs``: whether the library may keep copies of weights in a form of its own. Not if another
    step needs one of them as it is: there would be two.
    """

    model: bytes
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    weights: tuple[Weight, ...]
    packs: bool = True


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One node that a kernel of ours executes: it writes a root, or reads one as only a kernel can.

    Attributes:
        domain: of the operator.
        op_type: of the operator; ``runner.registry`` finds the kernel by domain and type.
        version: of the operator's domain, as the model imports it.
        inputs: slots; None where an optional input is absent.
        outputs: slots; None where an optional output is not wanted.
        attributes: plain Python values by name; only those that the node has.
        aliases: outputs that must be the storage of an input.
        roots: name of the root, by index of the aliased output.
        values: what is known of every slot that the step names.
        location: the author's line, where it is known.
    """

    domain: str
    op_type: str
    version: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    attributes: Mapping[str, Any]
    aliases: tuple[OutputAlias, ...]
    roots: Mapping[int, str]
    values: Mapping[int, Value]
    location: Location | None


@dataclasses.dataclass(frozen=True)
class View:
    """``output`` is the storage of ``source`` in another shape.

    One of Identity, Reshape, Squeeze, Unsqueeze, Flatten, applied to a root.

    ``parameter`` is the slot of the shape or of the axes, where the operator takes one as an input.
    """

    op_type: str
    source: int
    parameter: int | None
    output: int
    attributes: Mapping[str, Any]
    root: str
    location: Location | None


@dataclasses.dataclass(frozen=True)
class Block:
    """Steps in order. ``outputs`` are the results of the graph, branch or body.

    ``lifetimes``: by slot, the first step that fills and the last step that reads it, as indices
    into ``steps``; values that exist before the block begin at -1, results end at ``len(steps)``.
    Only values of this block.

    ``calls``: for each step, the calls that all of its nodes were inlined from, outermost first.
    """

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    lifetimes: Mapping[int, tuple[int, int]]
    calls: tuple[tuple[Call, ...], ...]


@dataclasses.dataclass(frozen=True)
class Branch:
    """An If that the plan executes: a branch writes, reads or returns a root."""

    condition: int
    then: Block
    otherwise: Block
    outputs: tuple[int, ...]
    roots: Mapping[int, str]
    location: Location | None


@dataclasses.dataclass(frozen=True, slots=True)
class Scanned:
    """A sequence that a Scan takes apart along ``axis``, from its end if ``reverse``."""

    slot: int
    axis: int
    reverse: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Stacked:
    """What a Loop or Scan puts together from one element of each round.

    Attributes:
        slot: of the whole.
        axis: of the whole, along which the elements stand.
        reverse: whether the first element stands at the end.
        dtype: of the elements; None where it is not known.
        shape: of an element, as far as it is known; without any round nothing else tells.
    """

    slot: int
    axis: int
    reverse: bool
    dtype: ir.DataType | None
    shape: Shape | None


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A Loop that the plan executes.

    Attributes:
        count: slot of the maximal trip count, or None.
        condition: slot of the initial condition, or None.
        initial: slots of the initial carried values.
        number: slot that the body reads its iteration number from.
        going: slot that the body reads the condition from.
        carried: slots that the body reads carried values from.
        body: its outputs are the next condition, the carried values, then what is stacked.
        outputs: slots of the final carried values.
        stacked: outputs with one element of each round.
        roots: name of the root, by index of the carried value.
        location: the author's line, where it is known.
    """

    count: int | None
    condition: int | None
    initial: tuple[int, ...]
    number: int
    going: int
    carried: tuple[int, ...]
    body: Block
    outputs: tuple[int, ...]
    stacked: tuple[Stacked, ...]
    roots: Mapping[int, str]
    location: Location | None


@dataclasses.dataclass(frozen=True)
class ScanStep:
    """A Scan that the plan executes.

    Attributes:
        initial: slots of the initial carried values.
        scanned: inputs that are taken apart.
        carried: slots that the body reads carried values from.
        elements: slots that the body reads one element of each of ``scanned`` from.
        body: its outputs are the carried values, then what is stacked.
        outputs: slots of the final carried values.
        stacked: outputs with one element of each round.
        roots: name of the root, by index of the carried value.
        location: the author's line, where it is known.
    """

    initial: tuple[int, ...]
    scanned: tuple[Scanned, ...]
    carried: tuple[int, ...]
    elements: tuple[int, ...]
    body: Block
    outputs: tuple[int, ...]
    stacked: tuple[Stacked, ...]
    roots: Mapping[int, str]
    location: Location | None


Step: TypeAlias = "SubSession | Kernel | View | Branch | Repeat | ScanStep | Fused"
"""One unit of the plan. ``Fused`` stands in ``Fusion.block`` only."""


@dataclasses.dataclass(frozen=True, slots=True)
class MustAlias:
    """The value of ``slot`` is the storage of ``root``; it is never released or reused."""

    slot: int
    root: str


@dataclasses.dataclass(frozen=True, slots=True)
class WriteAfterRead:
    """``reader`` reads an old version of ``root``, so it stands before what makes ``writer``."""

    root: str
    reader: str
    writer: str


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """A graph input. ``mutable``: the caller lends its storage for writing; ``pages``: as Value."""

    name: str
    slot: int
    mutable: bool
    pages: PageType | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """A graph output. ``root`` is the input whose storage it is, or None for storage of its own."""

    name: str
    slot: int
    root: str | None


@dataclasses.dataclass(frozen=True)
class ExecutionPlan:
    """What a session executes.

    Attributes:
        values: one per slot.
        constants: by slot, tensors that steps other than sub-sessions read.
        inputs: in order of the graph.
        outputs: in order of the graph.
        block: the steps.
        must_alias: values that are the storage of a root.
        inplace_reuse: slots whose storage may serve other values when ``Block.lifetimes`` says
            that they are dead.
        write_after_read: reads of old versions that stand before the write.
        copies: what copies a root.
        fallbacks: what runs over the whole capacity.
        conditions: what is left to run time.
        new_pages: pages that a run may add to paged caches.
        proofs: what holds in every run, of positions, indices and lengths.
        footprint_of: computes ``footprint``, once, when somebody asks.
        fused: the other steps of runs with few rows.
    """

    values: tuple[Value, ...]
    constants: Mapping[int, ir.TensorProtocol]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    block: Block
    must_alias: tuple[MustAlias, ...]
    inplace_reuse: frozenset[int]
    write_after_read: tuple[WriteAfterRead, ...]
    copies: tuple[Copied, ...]
    fallbacks: tuple[Fallback, ...]
    conditions: tuple[Condition, ...]
    proofs: tuple[Condition, ...]
    footprint_of: Callable[[], Footprint] = dataclasses.field(repr=False, compare=False)
    new_pages: tuple[NewPages, ...] = ()
    fused: Fusion = NOTHING

    @property
    def footprint(self) -> Footprint:
        """What ``memory`` is computed from."""
        return self.footprint_of()

    def memory(self, threads: int = 1, fuse: str = "auto", /, **dims: int) -> Memory:
        """What a run needs, before anything is allocated.

        Args:
            threads: how many a run may use; only by position, so that a dimension may have the
                name.
            fuse: what the session is loaded with: its weights depend on it. Only by position.
            **dims: sizes of the dimensions of the inputs; without all of them the answer is in
                formulas of the others. A dimension without a name is called ``input[axis]``.

        Raises:
            errors.BindingError: no such dimension, no size, or no such choice.
            errors.ContractError: no run with these dimensions is possible (E112, E102).
        """
        return self.footprint.memory(dims, threads, fuse)

    def layout(self, **dims: int) -> tuple[Mapping[int, tuple[int, int]], ...]:
        """Begin and end of each buffer in the arena of its block, by slot, for all dimensions.

        Blocks stand in the order of the program, a block before those in it.
        """
        return self.footprint.layout(dims)

    def fused_layout(self, **dims: int) -> tuple[Mapping[int, tuple[int, int]], ...]:
        """``layout`` of what a run with few rows executes; none: there is no such."""
        return self.footprint.fused_layout(dims)

    def moments(self, **dims: int) -> tuple[Moment, ...]:
        """What a run holds at each step, bodies included. Takes all dimensions."""
        return moments(self.footprint, dims)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self.values)

    @property
    def mutable(self) -> tuple[str, ...]:
        """Names of the inputs that the caller lends for writing."""
        return tuple(i.name for i in self.inputs if i.mutable)
