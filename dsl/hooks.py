"""What staged code calls: Python values decide at once, tensors are recorded."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import onnx_ir as ir

from onnx_inplace.compiler.errors import Location
from onnx_inplace.dsl import branches, iteration, loops, places, recorder, tensor
from onnx_inplace.dsl.operations import standard
from onnx_inplace.dsl.tensor import Operand, Tensor
from onnx_inplace.dsl.variables import Variables as variables

__all__ = [
    "and_",
    "choose",
    "compare",
    "decides",
    "for_",
    "if_",
    "iterates",
    "named",
    "not_",
    "or_",
    "range_",
    "returned",
    "variables",
    "while_",
]

Thunk = Callable[[], Any]
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "is_": operator.is_,
    "is_not": operator.is_not,
    "in_": lambda a, b: a in b,
    "not_in": lambda a, b: a not in b,
}
_REASONS = {  # and what to do
    "leaves": (
        "A block that depends on a tensor cannot return, break, continue or have an else after a "
        "loop.",
        "Assign a variable instead, and decide with it.",
    ),
    "binds": (
        "The test of a while over a tensor cannot assign (:=).",
        "Assign before the loop, and at the end of its block.",
    ),
    "target": ("A loop over tensors assigns plain variables.", "Unpack in the block."),
}


def named(x: Any, pattern: str | tuple[Any, ...] | None) -> Any:
    """A value that is assigned gets the name of the variable."""
    if isinstance(pattern, tuple):
        if isinstance(x, tuple | list) and len(x) == len(pattern):
            for element, name in zip(x, pattern, strict=True):
                named(element, name)
    elif pattern is not None:
        if isinstance(x, Tensor):
            recorder.current().call_variable(x.value, pattern)
        elif isinstance(x, iteration.Stack):
            x.called(pattern)
        elif isinstance(x, tuple | list):
            for k, element in enumerate(x):
                if isinstance(element, Tensor):
                    recorder.current().call_variable(element.value, f"{pattern}.{k}")
    return x


def returned(x: Any, names: tuple[str | None, ...], is_tuple: bool, line: int) -> Any:
    """Note what a result is called, and where it is returned."""
    r = recorder.current()
    r.returned = (names, is_tuple, Location(places.user_line().file, line))
    return x


def decides(test: Any, line: int, reason: str) -> Any:
    """The test of a block that leaves: Python executes it, so it is a Python value."""
    if not isinstance(test, Operand):
        return test
    message, repair = _REASONS[reason]
    location = Location(places.user_line().file, line)
    recorder.current().fault(message, location=location, repair=repair)
    return False


def iterates(items: Any, line: int, reason: str) -> Any:
    """What a loop goes over that leaves early."""
    if not isinstance(items, Operand | iteration.Range | iteration.Scanned):
        return items
    message, repair = _REASONS[reason]
    location = Location(places.user_line().file, line)
    recorder.current().fault(message, location=location, repair=repair)
    return ()


def range_(function: Callable[..., Any], *bounds: Any) -> Any:
    """``range(...)``, of tensors a loop of the graph."""
    if function is not builtins.range or not any(isinstance(b, Operand) for b in bounds):
        return function(*bounds)
    return iteration.Range.of(*bounds)


def if_(test: Any, then: Thunk, other: Thunk, assigned: variables) -> None:
    """``if``, over a tensor an If."""
    if isinstance(test, Operand):
        branches.record(test, then, other, assigned)
    elif test:
        then()
    else:
        other()


def for_(items: Any, body: Callable[[Any], None], targets: int, assigned: variables) -> None:
    """``for``, over a range of tensors a Loop, over scanned tensors a Scan."""
    if isinstance(items, iteration.Range | iteration.Scanned):
        loops.record(items, body, targets, assigned)
        return
    for item in items:
        body(item)


def while_(test: Thunk, body: Thunk, assigned: variables) -> None:
    """``while``; as soon as the test is a tensor, a Loop."""
    holds = test()
    while not isinstance(holds, Operand):
        if not holds:
            return
        body()
        holds = test()
    loops.record(iteration.While(holds, test), lambda item: body(), 0, assigned)


def choose(test: Any, then: Thunk, other: Thunk) -> Any:
    """``then if test else other``."""
    if isinstance(test, Operand):
        return branches.choose(test, then, other)
    return then() if test else other()


def not_(x: Any) -> Any:
    """``not x``."""
    return Tensor(standard("Not", x.value)) if isinstance(x, Operand) else not x


def and_(*thunks: Thunk) -> Any:
    """``a and b``."""
    return _logic("And", False, thunks)


def or_(*thunks: Thunk) -> Any:
    """``a or b``."""
    return _logic("Or", True, thunks)


def _logic(name: str, stop: bool, thunks: Iterable[Thunk]) -> Any:
    """Python values stop early as they do; of a tensor all that follows is recorded."""
    rest: Iterator[Thunk] = iter(thunks)
    result = next(rest)()
    for thunk in rest:
        if not isinstance(result, Operand):
            if bool(result) is stop:
                return result
            result = thunk()
            continue
        other = thunk()
        if isinstance(other, Operand):
            result = Tensor(standard(name, result.value, other.value))
        elif not isinstance(other, bool) or result.value.dtype not in (None, ir.DataType.BOOL):
            # Python's `n and 3` is 3 or n; ONNX has only the And of two truths
            recorder.current().fault(
                f"`{name.lower()}` of a tensor wants a BOOL tensor and a bool, not "
                f"{result.value.dtype} and {other!r}.",
                repair="Compare first: `n != 0 and ...`.",
            )
        elif other is stop:
            result = stop
    return result


def compare(names: Sequence[str], first: Any, *thunks: Thunk) -> Any:
    """``a < b < c``: every operand once."""
    left, result = first, None
    for name, thunk in zip(names, thunks, strict=True):
        right = thunk()
        holds = _COMPARISONS[name](left, right)
        result = holds if result is None else _both(result, holds)
        if not isinstance(result, Operand) and not result:
            return result
        left = right
    return result


def _both(a: Any, b: Any) -> Any:
    if isinstance(a, Operand) and isinstance(b, Operand):
        return Tensor(standard("And", a.value, tensor.plain(b)))
    if isinstance(a, Operand):
        return a if b else b
    return b
