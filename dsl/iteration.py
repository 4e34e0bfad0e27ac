"""What a loop of the graph goes over: ``range``, ``scan``, a condition; and ``stack``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir

from onnx_inplace.compiler import paged_types
from onnx_inplace.dsl import blocks, literals, recorder
from onnx_inplace.dsl.operations import as_vector, standard
from onnx_inplace.dsl.tensor import Operand


@dataclasses.dataclass(frozen=True)
class Range:
    """``range`` of tensors: how often, and the first number and step where they are not 0 and 1."""

    count: ir.Value
    start: Any
    step: Any

    def number(self, k: ir.Value) -> ir.Value:
        """The number of step ``k``."""
        if isinstance(self.step, ir.Value) or self.step != 1:
            k = standard("Mul", k, self.step)
        if isinstance(self.start, ir.Value) or self.start != 0:
            k = standard("Add", k, self.start)
        return k

    @staticmethod
    def of(*bounds: Any) -> Range:
        """``range(stop)``, ``range(start, stop)``, ``range(start, stop, step)``."""
        r = recorder.current()
        if len(bounds) > 3:
            r.stop(f"range takes three numbers at most, not {len(bounds)}.")
        start, stop, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
        start, stop, step = (_scalar(r, x) for x in (start, stop, step))
        if not isinstance(step, ir.Value) and step == 0:
            r.stop("A range with step 0.")
        if isinstance(start, int) and start == 0 and isinstance(step, int) and step == 1:
            return Range(stop, 0, 1)
        # (stop - start + step -+ 1) / step, cut towards zero: the number of steps, or negative
        towards = (
            standard("Sub", step, standard("Sign", step))
            if isinstance(step, ir.Value)
            else (step - (1 if step > 0 else -1))
        )
        distance: Any = stop
        if any(isinstance(x, ir.Value) for x in (stop, start)):
            distance = standard("Sub", stop, start)
        else:
            distance = stop - start
        if towards != 0 or isinstance(towards, ir.Value):
            distance = standard("Add", distance, towards)
        if isinstance(step, ir.Value) or step != 1:
            distance = standard("Div", distance, step)
        return Range(standard("Max", distance, 0), start, step)


@dataclasses.dataclass(frozen=True)
class While:
    """A condition: its first value, and how it is recorded again at the end of the body."""

    first: Operand
    test: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Scanned:
    """Tensors that a Scan goes along."""

    inputs: tuple[Operand, ...]
    axes: tuple[int, ...]
    reverse: bool

    def __iter__(self) -> Iterator[Any]:
        """Fault: only the for of a model can go along tensors."""
        recorder.current().stop("scan(...) is for the `for` of a @model or @function.")


Items = Range | While | Scanned


def scan(*inputs: Any, axis: int | tuple[int, ...] = 0, reverse: bool = False) -> Any:
    """Go along tensors, step by step: a Scan.

    ``for x, y in scan(xs, ys):`` gives the body one slice of each tensor a step.

    Variables that the body assigns are carried from step to step, and hold their last value
    afterwards; what is wanted of every step is collected with ``stack``.

    Args:
        inputs: one or more tensors; a step gets one slice of each (a tuple, of several).
        axis: along which axis, for all or one each.
        reverse: from the last slice to the first.

    Example:
        states = stack()
        for x in scan(xs):
            state = op.Tanh(op.MatMul(x, w) + state)
            states.append(state)
    """
    r = recorder.current()
    if not inputs or not all(isinstance(x, Operand) for x in inputs):
        r.stop("scan(...) goes along tensors.")
    for x in inputs:
        if paged_types.is_paged(x.value):
            r.stop(
                f"scan(...) goes along tensors, and {recorder.called(x.value)} is a paged cache.",
                "E102",
                "Loop over page ids, and read pages with `kv.PageGather`.",
            )
    axes = (axis,) * len(inputs) if isinstance(axis, int) else tuple(axis)
    if len(axes) != len(inputs):
        r.stop(f"{len(inputs)} tensors and {len(axes)} axes.")
    return Scanned(inputs, axes, reverse)


class Stack(Operand):
    """Collects one tensor per step of a loop; afterwards it is the tensor of all of them."""

    __slots__ = ("_name", "_value", "axis", "reverse")

    def __init__(self, axis: int, reverse: bool) -> None:
        self.axis, self.reverse = axis, reverse
        self._name = "stack"
        self._value: ir.Value | None = None

    def called(self, name: str) -> None:
        """The author's variable."""
        self._name = name if self._name == "stack" else self._name

    @property
    def name(self) -> str:
        """What the author calls it."""
        return self._name

    def append(self, x: Any) -> None:
        """Add the tensor of this step: once, in the body of the loop, not in an if inside."""
        r = recorder.current()
        block = r.blocks[-1]
        if self._value is not None or len(r.blocks) == 1:
            r.fault(f"`{self._name}.append` stands in the body of one loop over tensors.")
        elif self in block.stacked:
            r.fault(f"`{self._name}.append` is called twice in one step.")
        else:
            block.stacked[self] = blocks.as_value(r, x, None, self._name)

    def fill(self, value: ir.Value) -> None:
        """The loop has ended."""
        self._value = value

    @property
    def value(self) -> ir.Value:
        """All steps."""
        r = recorder.current()
        if self._value is None:
            r.fault(f"`{self._name}` has no value before the end of the loop that appends to it.")
            return r.unknown(self._name)
        return self._value


def stack(axis: int = 0, reverse: bool = False) -> Stack:
    """Make a collector: ``append`` to it once per step, and use it as a tensor after the loop.

    Args:
        axis: the new axis, along the steps; other than 0 only of ``scan``.
        reverse: the last step comes first; only of ``scan``.
    """
    return Stack(axis, reverse)


def _scalar(r: recorder.Recorder, x: Any) -> Any:
    """A bound as INT64 of rank 0, or a Python number."""
    if not isinstance(x, Operand):
        if isinstance(x, bool) or not isinstance(literals.plain(x), int):
            r.stop(f"range({x!r}): whole numbers and tensors of them.")
        return literals.plain(x)
    value = x.value
    if r.is_unknown(value):
        return value
    if value.dtype is not None and not literals.is_integer_type(value.dtype):
        r.fault(
            f"range of {recorder.called(value)}, which is {value.dtype.name}: whole numbers count.",
            "E102",
        )
        return r.unknown()
    if value.shape is not None and (value.shape.rank() > 1 or any(d != 1 for d in value.shape)):
        r.fault(
            f"range of {recorder.called(value)}, which has shape {value.shape}: one number.", "E102"
        )
        return r.unknown()
    if value.dtype not in (None, ir.DataType.INT64):
        value = standard("Cast", value, to=ir.DataType.INT64)
    if value.shape is not None and value.shape.rank() == 0:
        return value
    return standard(
        "Reshape", as_vector(value), r.constant(literals.literal([], ir.DataType.INT64))
    )
