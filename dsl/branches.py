"""Recording ``if``: both branches, and the variables that leave them as outputs of one If."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onnx_inplace.compiler.errors import Location
from onnx_inplace.dsl import blocks, literals, places, recorder, structures
from onnx_inplace.dsl.tensor import Operand, Tensor
from onnx_inplace.dsl.variables import Undefined, Variables, is_leaf, is_undefined, same

Thunk = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class _Slot:
    """A place in a variable that an output of the If fills."""

    index: int


@dataclasses.dataclass
class _Merge:
    """Pairs of what the branches leave, one per output."""

    location: Location
    pairs: list[tuple[str, Any, Any]] = dataclasses.field(default_factory=list)

    def merge(self, name: str, a: Any, b: Any) -> Any:
        """What the variable holds after the If: a value, a slot, or a structure of them."""
        if a is b:
            return a
        for x in (a, b):
            if is_undefined(x):
                return self.undefined(
                    name, "one branch of the if in line {} assigns it, the other does not"
                )
        if same(a, b):
            return a
        if is_leaf(a) and is_leaf(b):
            return self.slot(name, a, b)
        inside, other = structures.children(a), structures.children(b)
        if (
            inside is not None
            and other is not None
            and [n for n, _ in inside] == [n for n, _ in other]
        ):
            pairs = zip(inside, other, strict=True)
            return structures.rebuild(
                a, [self.merge(f"{name}.{n}", x, y) for (n, x), (_, y) in pairs]
            )
        return self.undefined(
            name, "the branches of the if in line {} leave different Python values"
        )

    def slot(self, name: str, a: Any, b: Any) -> Any:
        dtypes = [_own_type(x) for x in (a, b)]
        if None not in dtypes and dtypes[0] != dtypes[1]:
            kinds = " and ".join(d.name for d in dtypes if d is not None)
            return self.undefined(
                name, f"the branches of the if in line {{}} leave {kinds}", "E102"
            )
        self.pairs.append((name, a, b))
        return _Slot(len(self.pairs) - 1)

    def undefined(self, name: str, reason: str, code: str = "E100") -> Undefined:
        return Undefined(name, reason.format(self.location.line), code)


def record(test: Operand, then: Thunk, other: Thunk, variables: Variables) -> None:
    """Record an If, and assign the variables that it changed."""
    r, location = recorder.current(), places.user_line()
    before = variables.values(location)
    recorded: list[recorder.Block] = []
    after: list[list[Any]] = []
    copies: list[list[Any]] = []
    for label, branch in (("then", then), ("else", other)):
        copies.append([structures.copied(x, Operand) for x in before])
        variables.assign(copies[-1])
        with r.block(f"{label}_line_{location.line}") as block:
            branch()
            after.append(variables.values(location))
        recorded.append(block)
    merge = _Merge(location)
    merged = [merge.merge(*v) for v in zip(variables.names, *after, strict=True)]
    outputs = _emit(r, test, recorded, merge, location)
    results = []
    for k, x in enumerate(merged):
        result = _filled(x, outputs)
        if not is_undefined(x) and all(a[k] is c[k] for a, c in zip(after, copies, strict=True)):
            result = structures.update(before[k], result)  # the object that both branches changed
        results.append(result)
    variables.assign(results)


def choose(test: Operand, then: Thunk, other: Thunk) -> Any:
    """Record ``then if test else other``."""
    r, location = recorder.current(), places.user_line()
    recorded, after = [], []
    for label, branch in (("then", then), ("else", other)):
        with r.block(f"{label}_line_{location.line}") as block:
            after.append(branch())
        recorded.append(block)
    merge = _Merge(location)
    merged = merge.merge("choice", *after)
    outputs = _emit(r, test, recorded, merge, location)
    for output in outputs:
        r.forget_variable(output.value)
    return _filled(merged, outputs)


def _filled(x: Any, outputs: list[Tensor]) -> Any:
    return structures.transform(
        lambda leaf, _: outputs[leaf.index] if isinstance(leaf, _Slot) else leaf, x, _Slot
    )


def _emit(
    r: recorder.Recorder,
    test: Operand,
    recorded: list[recorder.Block],
    merge: _Merge,
    location: Location,
) -> list[Tensor]:
    condition = blocks.condition(test, "if")
    columns = [_column(r, recorded, *pair) for pair in merge.pairs]
    for k, block in enumerate(recorded):
        blocks.close(block, [c[k] for c in columns], location)
    if r.is_unknown(condition) or any(r.is_unknown(v) for c in columns for v in c):
        return [Tensor(r.unknown(name)) for name, _, _ in merge.pairs]
    names = [name for name, _, _ in merge.pairs]
    attributes = [
        ir.AttrGraph(name, block.graph)
        for name, block in zip(("then_branch", "else_branch"), recorded, strict=True)
    ]
    results = r.emit(
        "", "If", [condition], attributes, outputs=names, location=location, infer=False
    )
    for k, value in enumerate(results):
        a, b = (block.graph.outputs[k] for block in recorded)
        value.type, value.shape = a.type or b.type, blocks.common_shape(a.shape, b.shape)
        if all(_own_type(x) is None for x in merge.pairs[k][1:]):
            r.make_weak(value)
    return list(map(Tensor, results))


def _own_type(x: Any) -> ir.DataType | None:
    """The element type that ``x`` insists on; None: it takes the one beside it."""
    if not isinstance(x, Operand) or recorder.current().is_weak(x.value):
        return None
    return x.dtype


def _column(
    r: recorder.Recorder, recorded: list[recorder.Block], name: str, a: Any, b: Any
) -> tuple[ir.Value, ir.Value]:
    """One variable as each branch leaves it; a number takes the type that the other branch has."""
    dtype = next((d for d in (_own_type(a), _own_type(b)) if d is not None), None)
    if dtype is None:
        dtype = (
            literals.default_type([a, b])
            if literals.is_number(a) and literals.is_number(b)
            else None
        )
    values = []
    for block, x in zip(recorded, (a, b), strict=True):
        with r.reopened(block):
            values.append(blocks.as_value(r, x, dtype, name))
    return values[0], values[1]
