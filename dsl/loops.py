"""Recording ``for`` and ``while``: ranges and conditions become Loop, scanned tensors Scan.

The variables that the body assigns are carried. A first recording finds out what they are (a Python
number takes the element type of what it meets, a dimension that changes is not known, what does not
change is not carried); when it fits, it stays, else the body is recorded again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir

from onnx_inplace.compiler.errors import Location
from onnx_inplace.dsl import blocks, literals, places, recorder, structures, tensor
from onnx_inplace.dsl.iteration import Items, Range, Scanned, Stack, While
from onnx_inplace.dsl.tensor import Operand, Tensor
from onnx_inplace.dsl.variables import Undefined, Variables, is_leaf, is_undefined, same

Body = Callable[[Any], None]


@dataclasses.dataclass
class _Carried:
    """One tensor or number that the body may change.

    Attributes:
        name: of the variable, with the place inside of it.
        initial: the value before the loop.
        type: of the parameter of the body.
        shape: of the parameter.
        formal: the parameter of the body.
        result: what the body leaves.
    """

    name: str
    initial: Any
    type: ir.TypeProtocol | None
    shape: ir.Shape | None
    formal: ir.Value
    result: Any = None

    @property
    def dtype(self) -> ir.DataType | None:
        """The element type of the parameter."""
        return None if self.type is None else self.type.dtype

    @property
    def is_unchanged(self) -> bool:
        """Whether the body leaves the variable as it was."""
        x = self.result
        return x is self.formal or (isinstance(x, Tensor) and x.value is self.formal)


def record(items: Items, body: Body, targets: int, variables: Variables) -> None:
    """Record a loop, and assign the variables that it changed."""
    r, location = recorder.current(), places.user_line()
    before = variables.values(location)
    for k in range(targets):
        before[k] = Undefined(
            variables.names[k], "the variable of a loop over tensors has none outside"
        )
    types: dict[str, tuple[ir.TypeProtocol | None, ir.Shape | None]] = {}
    for last in (False, False, False, True):
        with r.attempt() as attempt:
            attempt.kept = last
            recording = _Recording(r, items, variables, before, targets, location, types)
            recording.body(body)
            changed = recording.refined()
            if not changed or last:
                attempt.kept = True
                recording.finish()
                return
        types = changed


class _Recording:
    """One recording of a body."""

    def __init__(
        self,
        r: recorder.Recorder,
        items: Items,
        variables: Variables,
        before: list[Any],
        targets: int,
        location: Location,
        types: dict[str, tuple[ir.TypeProtocol | None, ir.Shape | None]],
    ) -> None:
        self.r, self.items, self.variables, self.before = r, items, variables, before
        self.targets, self.location, self.types = targets, location, types
        self.carried: list[_Carried] = []
        self.after: list[Any] = []
        self.rebound: list[bool] = []
        self.block = recorder.Block(ir.Graph([], [], nodes=[], name=f"body_line_{location.line}"))
        self.condition: ir.Value | None = None

    # -- the body

    def body(self, run: Body) -> None:
        """Record the body."""
        r = self.r
        inside = [
            structures.transform(self.enter, x, Operand, name) if not is_undefined(x) else x
            for name, x in zip(self.variables.names, self.before, strict=True)
        ]
        given = [structures.copied(x, Operand) for x in inside]
        item = self.open()
        self.variables.assign(given)
        with r.reopened(self.block):
            run(self.item(item))
            self.after = self.variables.values(self.location)
            if isinstance(self.items, While):
                again = self.items.test()
                if isinstance(again, Operand):
                    self.condition = blocks.condition(again, "while")
                else:
                    self.condition = r.constant(literals.literal(bool(again), ir.DataType.BOOL))
        pairs = zip(self.variables.names, inside, self.after, strict=True)
        results = {
            id(leaf.value): result
            for name, a, b in pairs
            for leaf, result in self.paired(name, a, b)
        }
        for c in self.carried:
            c.result = results.get(id(c.formal), c.formal)
        self.rebound = [a is not g for a, g in zip(self.after, given, strict=True)]

    def enter(self, x: Any, name: str) -> Any:
        """A tensor or number in a variable becomes a parameter of the body."""
        if not is_leaf(x) or is_undefined(x) or isinstance(x, Stack):
            return x
        value = x.value if isinstance(x, Operand) else None
        weak = value is None or self.r.is_weak(value)
        type_, shape = self.types.get(name, (None, None))
        if name not in self.types:
            type_ = ir.TensorType(literals.default_type(x)) if value is None else value.type
            shape = (
                (None if value.shape is None else value.shape.copy())
                if value is not None
                else (ir.Shape(getattr(x, "shape", ())))
            )
        formal = self.r.value(name, type_, shape)
        c = _Carried(name, x, type_, shape, formal)
        if weak and not literals.is_array(x) and name not in self.types:
            self.r.make_weak(formal)
        if value is not None and self.r.is_unknown(value):
            return x
        self.carried.append(c)
        return Tensor(formal)

    def open(self) -> list[ir.Value]:
        """Give the body its parameters: what a step gets, and what is carried."""
        r, block, items = self.r, self.block, self.items
        own: list[ir.Value] = []
        if isinstance(items, Scanned):
            for c in self.carried:
                r.add_input(block, c.formal, c.name)
            for x, axis in zip(items.inputs, items.axes, strict=True):
                value = x.value
                shape = value.shape
                if shape is not None:
                    dims = list(shape)
                    if -len(dims) <= axis < len(dims):
                        del dims[axis]
                    shape = ir.Shape(dims)
                own.append(r.add_input(block, r.value("item", value.type, shape)))
            return own
        own = [
            r.add_input(block, r.value("step", ir.TensorType(ir.DataType.INT64), ir.Shape([]))),
            r.add_input(
                block, r.value("going", ir.TensorType(ir.DataType.BOOL), ir.Shape([])), "going"
            ),
        ]
        for c in self.carried:
            r.add_input(block, c.formal, c.name)
        return own

    def item(self, own: list[ir.Value]) -> Any:
        """What the loop variable holds."""
        if isinstance(self.items, Scanned):
            return tensor.wrap(own)
        return Tensor(self.items.number(own[0]) if isinstance(self.items, Range) else own[0])

    def paired(self, name: str, inside: Any, after: Any) -> Iterator[tuple[Tensor, Any]]:
        """Parameters of the body with what it leaves in their places."""
        if isinstance(inside, Tensor):
            yield inside, after
            return
        members = structures.children(inside)
        if members is None or not structures.contains(Operand, inside):
            return
        other = structures.children(after)
        names = [n for n, _ in members]
        if other is None or [n for n, _ in other] != names:
            lost = Undefined(name, "the body of the loop changes its structure")
            other = [(n, lost) for n in names]
        for (n, a), (_, b) in zip(members, other, strict=True):
            yield from self.paired(f"{name}.{n}", a, b)

    # -- what was found out

    def refined(self) -> dict[str, tuple[ir.TypeProtocol | None, ir.Shape | None]]:
        """Types of parameters for the next recording; empty: this one fits."""
        r = self.r
        found = {c.name: (c.type, c.shape) for c in self.carried}
        changed = False
        for c in self.carried:
            x = c.result
            if is_undefined(x) or not is_leaf(x) or c.is_unchanged:
                continue
            value = x.value if isinstance(x, Operand) else None
            if value is not None and (r.is_unknown(value) or value.type is None):
                continue
            type_, shape = c.type, c.shape
            if r.is_weak(c.formal):
                dtype = value.dtype if value is not None else literals.default_type([c.initial, x])
                type_ = ir.TensorType(dtype) if dtype is not None else c.type
                changed = changed or type_ != c.type
            new_shape = blocks.common_shape(shape, value.shape) if value is not None else shape
            fits = value is None or value.type == type_
            if fits and new_shape != shape:
                shape, changed = new_shape, True
            found[c.name] = (type_, shape)
        return found if changed else {}

    def is_used(self, c: _Carried) -> bool:
        """Whether the body reads what the variable held before."""
        passed = [x.result for x in self.carried if isinstance(x.result, Tensor) and x is not c]
        found = [*(t.value for t in passed), *self.block.stacked.values(), self.condition]
        return bool(c.formal.uses()) or any(v is c.formal for v in found)

    # -- the node

    def finish(self) -> None:
        """Close the body, emit the node, assign the variables."""
        r = self.r
        still = [c for c in self.carried if c.is_unchanged]
        kept = [c for c in self.carried if not c.is_unchanged and self.is_carried(c)]
        # what is not changed is captured
        outer = {c.formal: self.initial(c) for c in still if self.is_used(c)}
        for c in self.carried:
            if not any(c is k for k in kept):
                self.block.graph.inputs.remove(c.formal)
        for formal, value in outer.items():
            formal.replace_all_uses_with(value)
        with r.reopened(self.block):
            results = [blocks.as_value(r, c.result, c.dtype, c.name) for c in kept]
        for c in still:
            c.result = c.initial
        stacks = [s for s in self.block.stacked if isinstance(s, Stack)]
        stacked = [outer.get(v, v) for v in self.block.stacked.values()]
        if self.condition is not None:
            self.condition = outer.get(self.condition, self.condition)
        outputs = self.emit(kept, [outer.get(v, v) for v in results], stacks, stacked)
        values = {id(c.formal): Tensor(v) for c, v in zip(kept, outputs, strict=False)}
        for s, value in zip(stacks, outputs[len(kept) :], strict=True):
            s.fill(value)
        held = zip(self.variables.names, self.before, self.after, strict=True)
        self.variables.assign([self.leave(k, *names, values) for k, names in enumerate(held)])

    def is_carried(self, c: _Carried) -> bool:
        """Whether the body leaves what it can take again. If not, it must not read it."""
        x = c.result
        dtype = x.dtype if isinstance(x, Operand) and not is_undefined(x) else None
        if is_undefined(x) or not is_leaf(x):
            why = x.reason if is_undefined(x) else "the loop makes it a Python value"
        elif dtype is not None and c.dtype is not None and dtype != c.dtype:
            why = f"it is {c.dtype.name} before the loop, and {dtype.name} after a step"
        else:
            return True
        code = "E102" if dtype else "E100"
        c.result = Undefined(c.name, why, code)
        if self.is_used(c):
            message = f"`{c.name}` cannot be carried by the loop: {why}."
            self.r.fault(message, code, self.location)
            c.result = Tensor(self.r.unknown(c.name))
        return False

    def initial(self, c: _Carried) -> ir.Value:
        """The value before the loop, in the block around it."""
        return blocks.as_value(self.r, c.initial, c.dtype, c.name)

    def emit(
        self,
        kept: list[_Carried],
        results: list[ir.Value],
        stacks: list[Any],
        stacked: list[ir.Value],
    ) -> list[ir.Value]:
        """The Loop or Scan node."""
        r, items, location = self.r, self.items, self.location
        names = [*(c.name for c in kept), *(s.name for s in stacks)]
        initial = [self.initial(c) for c in kept]
        inputs: list[ir.Value | None]
        attributes: list[ir.Attr] = []
        if isinstance(items, Scanned):
            op_type, leading = "Scan", []
            inputs = [*initial, *(x.value for x in items.inputs)]
            attributes = _scan_attributes(items, stacks)
        else:
            op_type = "Loop"
            if any(s.axis != 0 or s.reverse for s in stacks):
                r.fault("stack(axis, reverse) needs `for ... in scan(...)`.", location=location)
            if isinstance(items, Range):
                # left out it would be true as well, but onnx.reference takes no step then
                always = r.constant(literals.literal(True, ir.DataType.BOOL))
                inputs = [items.count, always, *initial]
                leading = [self.block.graph.inputs[1]]
            else:
                assert self.condition is not None
                inputs = [None, blocks.condition(items.first, "while"), *initial]
                leading = [self.condition]
        # onnxruntime 1.32 runs a Scan wrongly that returns a parameter in another one's place
        returns_parameters = op_type != "Scan"
        blocks.close(
            self.block,
            [*leading, *results, *stacked],
            location,
            parameters=returns_parameters,
        )
        if any(r.is_unknown(v) for v in (*leading, *results, *stacked)):
            return [r.unknown(n) for n in names]
        attributes.insert(0, ir.AttrGraph("body", self.block.graph))
        outputs = r.emit(
            "", op_type, inputs, attributes, outputs=names, location=location, infer=False
        )
        inner = self.block.graph.outputs[len(leading) :]
        for k, (value, result) in enumerate(zip(outputs, inner, strict=False)):
            value.type, value.shape = result.type, result.shape
            if k < len(kept):
                value.type, value.shape = kept[k].type or result.type, kept[k].shape
            elif result.shape is not None:
                axis = stacks[k - len(kept)].axis
                dims = list(result.shape)
                at = axis if axis >= 0 else axis + len(dims) + 1
                value.shape = ir.Shape([*dims[:at], self.length(), *dims[at:]])
        return outputs

    def length(self) -> int | ir.SymbolicDim | None:
        """The number of steps, where it is a dimension."""
        if isinstance(self.items, Scanned):
            shape = self.items.inputs[0].value.shape
            if shape is not None and -shape.rank() <= self.items.axes[0] < shape.rank():
                return shape[self.items.axes[0]]
        return None

    def leave(self, k: int, name: str, x: Any, y: Any, values: dict[int, Tensor]) -> Any:
        """What a variable holds after the loop."""
        if k < self.targets:
            return self.before[k]
        if is_undefined(x):
            if is_undefined(y):
                return y
            return Undefined(
                name,
                f"only the loop in line {self.location.line} assigns it, and it may take no step",
            )
        by_name = {c.name: c for c in self.carried}

        def after(leaf: Any, path: str) -> Any:
            c = by_name.get(path)
            if c is None:
                return leaf
            return values.get(id(c.formal), c.result)

        left = structures.transform(after, x, Operand, name)
        if structures.contains(Operand, x) or is_leaf(x):
            return left if self.rebound[k] else structures.update(x, left)
        if not same(x, y):
            self.r.fault(
                f"`{name}` is a Python value that a step of the loop changes: "
                "only tensors can be carried.",
                location=self.location,
            )
        return left


def _scan_attributes(items: Scanned, stacks: list[Any]) -> list[ir.Attr]:
    attributes: list[ir.Attr] = [ir.AttrInt64("num_scan_inputs", len(items.inputs))]
    if any(items.axes):
        attributes.append(ir.AttrInt64s("scan_input_axes", list(items.axes)))
    if items.reverse:
        attributes.append(ir.AttrInt64s("scan_input_directions", [1] * len(items.inputs)))
    if any(s.axis for s in stacks):
        attributes.append(ir.AttrInt64s("scan_output_axes", [s.axis for s in stacks]))
    if any(s.reverse for s in stacks):
        attributes.append(ir.AttrInt64s("scan_output_directions", [int(s.reverse) for s in stacks]))
    return attributes
