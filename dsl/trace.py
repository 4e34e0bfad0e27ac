"""Tensors record, Python runs. What rewritten functions call, and what stands behind ``op`` and ``kv``."""
from __future__ import annotations

import contextvars
import dataclasses
import inspect
import os
import sys
import typing

import numpy as np
import onnx_ir as ir
from onnxscript import BuilderFeature, TapeBuilder
from onnxscript.values import Op, Opset

from onnx_inplace.compiler.contract import Access
from onnx_inplace.compiler.errors import ContractError, Finding, Location
from onnx_inplace.compiler.program import LOCATION, Declaration
from onnx_inplace.dsl import annotations
from onnx_inplace.dsl.staging import rewrite

FEATURES = BuilderFeature.SCHEMA_AWARE | BuilderFeature.INFER_SHAPES
PACKAGE = os.path.dirname(os.path.abspath(__file__))
_current: contextvars.ContextVar[Recorder] = contextvars.ContextVar("recorder")


def user_line() -> Location:
    """The innermost line that is not ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(os.path.abspath(frame.f_code.co_filename)) == PACKAGE:
        frame = frame.f_back
    return Location(frame.f_code.co_filename, frame.f_lineno)


def fail(message: str, location: Location | None = None) -> typing.NoReturn:
    raise ContractError([Finding("E100", message, location or user_line())])


def recorder() -> Recorder:
    return _current.get(None) or fail("tensors can only be used while a @model or @function is recorded.")


def _binary(name: str, swap: bool = False):
    def method(self, other):
        return recorder().emit(name, (other, self) if swap else (self, other))

    return method


class Tensor:
    """A value of the graph. It has no content: Python cannot decide on it."""

    __slots__ = ("value",)
    __array_ufunc__ = None  # numpy leaves operators to us
    __hash__ = object.__hash__

    def __init__(self, value: ir.Value):
        self.value = value

    def __bool__(self):
        fail(f"`{self.value.name}` is a tensor: Python cannot decide on it here (a helper, a comprehension, a chained "
             "comparison, or a block with return, break or continue).")

    def __index__(self):
        fail(f"`{self.value.name}` is a tensor, not a Python integer.")

    __int__ = __float__ = __index__

    def __iter__(self):
        fail(f"`{self.value.name}` is a tensor: its length is not known.")

    def __getitem__(self, key):
        fail("indexing is not part of this prototype.")

    def __invert__(self):
        return recorder().emit("Not", (self,))

    def __neg__(self):
        return recorder().emit("Neg", (self,))


for _name, _op in {"add": "Add", "sub": "Sub", "mul": "Mul", "truediv": "Div", "matmul": "MatMul", "mod": "Mod", "pow": "Pow",
                   "and": "And", "or": "Or"}.items():
    setattr(Tensor, f"__{_name}__", _binary(_op))
    setattr(Tensor, f"__r{_name}__", _binary(_op, swap=True))
for _name, _op in {"lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual", "eq": "Equal"}.items():
    setattr(Tensor, f"__{_name}__", _binary(_op))


class Operators:
    """``op.X(...)`` records operator X of an opset."""

    def __init__(self, opset: Opset):
        self._opset = opset

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        op = Op(self._opset, name)
        if op.op_schema is None:
            fail(f"there is no operator {name} in {self._opset.domain or 'ai.onnx'} {self._opset.version}.")

        def record(*args, **kwargs):
            args = list(args)
            params = [p.name for p in op.op_signature.params if p.is_param()]
            for p in params[len(args):]:
                if p in kwargs:
                    args.append(kwargs.pop(p))
            return recorder().emit(op, args, {k: v for k, v in kwargs.items() if v is not None})

        return record


class _Undefined:
    """Value of a variable that is not bound (in one branch)."""

    def __repr__(self):
        return "<not defined in every branch>"


UNDEFINED = _Undefined()


def look(thunk):
    try:
        return thunk()
    except NameError:
        return UNDEFINED


class Recorder:
    """The graph under construction; also the ``__dsl__`` of rewritten functions."""

    def __init__(self, opset: Opset):
        self.opset = opset
        self.names: dict[str, int] = {}
        self.tapes: list[TapeBuilder] = []
        self.owner: dict[ir.Value, TapeBuilder] = {}
        self.anonymous: set[ir.Value] = set()
        self.functions: dict = {}
        self.outputs: tuple | None = None

    # values

    def fresh(self, stem: str) -> str:
        name, n = stem, self.names.get(stem, 0)
        while name in self.names:
            n += 1
            name = f"{stem}_{n}"
        self.names[stem] = max(n, self.names.get(stem, 0))
        self.names.setdefault(name, 0)
        return name

    def use(self, value: ir.Value) -> ir.Value:
        owner = self.owner.get(value)
        if owner is None:
            fail(f"`{value.name}` belongs to another model.")
        if not any(owner is t for t in self.tapes):
            fail(f"`{value.name}` was made inside of a block that has ended; assign a variable there.")
        return value

    def emit(self, op, args, attributes=None, outputs: int = 1, names=None):
        op = Op(self.opset, op) if isinstance(op, str) else op
        tape, location = self.tapes[-1], user_line()
        plain = []
        for x in args:
            if x is UNDEFINED:
                fail("a variable is used that only one branch has assigned.", location)
            plain.append(self.use(x.value) if isinstance(x, Tensor) else x.item() if isinstance(x, np.generic) else x)
        before = len(tape._nodes)  # `tape.nodes` copies the list at every call
        names = names or ["tmp"] * outputs
        unique = [self.fresh(n) for n in names]
        try:
            out = tape.op(op.name, *plain, _domain=op.opset.domain, _version=op.opset.version, _outputs=unique, **(attributes or {}))
        except (ValueError, TypeError, RuntimeError) as error:
            fail(f"{op.name}: {error}", location)
        for node in tape._nodes[before:]:
            node.meta[LOCATION] = location
            for v in node.outputs:
                v.name = v.name or self.fresh(node.op_type.lower())
                self.owner[v] = tape
        values = [out] if isinstance(out, ir.Value) else list(out)
        self.anonymous.update(v for v, n in zip(values, names) if n == "tmp")
        return Tensor(values[0]) if len(values) == 1 else tuple(map(Tensor, values))

    def tensor(self, x) -> ir.Value:
        if isinstance(x, Tensor):
            return self.use(x.value)
        if x is UNDEFINED:
            fail("a variable is used that only one branch has assigned.")
        if not isinstance(x, (bool, int, float, np.ndarray, np.generic)):
            fail(f"{x!r} cannot become a tensor.")
        return self.emit("Constant", [], {"value": ir.tensor(x)}).value

    # called by rewritten functions

    def named(self, x, name):
        if isinstance(name, tuple):
            if isinstance(x, tuple) and len(x) == len(name):
                for a, b in zip(x, name):
                    self.named(a, b)
        elif isinstance(x, Tensor) and x.value in self.anonymous:
            self.anonymous.discard(x.value)
            x.value.name = self.fresh(name)
        return x

    def dropped(self, x):
        if isinstance(x, Tensor):
            fail("the result of this operator is dropped; assign it.")
        return x

    def python(self, test):
        if isinstance(test, Tensor):
            fail("a block that depends on a tensor cannot return, break or continue; assign a variable.")
        return test

    def result(self, value, names, line):
        self.outputs = (names, line)
        return value

    def not_(self, x):
        return recorder().emit("Not", (x,)) if isinstance(x, Tensor) else not x

    def and_(self, *thunks):
        return self.logic("And", False, thunks)

    def or_(self, *thunks):
        return self.logic("Or", True, thunks)

    def logic(self, op, stop, thunks):
        result = thunks[0]()
        for thunk in thunks[1:]:
            if not isinstance(result, Tensor):
                if bool(result) is stop:
                    return result
                result = thunk()
            else:
                other = thunk()
                result = self.emit(op, (result, other)) if isinstance(other, Tensor) else result if bool(other) is not stop else other
        return result

    def range_(self, *bounds):
        if not any(isinstance(b, Tensor) for b in bounds):
            return range(*bounds)
        if len(bounds) != 1:
            fail("use range(count) and add the start inside of the loop.")
        return _Count(bounds[0])

    def if_(self, test, then, other, names, thunks):
        values = [look(t) for t in thunks]
        if not isinstance(test, Tensor):
            return tuple(look(t) for t in (then if test else other)(*values))
        location = user_line()
        bodies = [self.body(f, values) for f in (then, other)]
        # a variable that leaves one branch only is no variable after it
        kept = [k for k in range(len(names)) if all(r[k] is not UNDEFINED for _, r in bodies)
                and any(r[k] is not values[k] for _, r in bodies)]
        result = list(values)
        for k in range(len(names)):
            if any(r[k] is UNDEFINED for _, r in bodies):
                result[k] = UNDEFINED
        if kept:
            graphs = [self.close(tape, [], [r[k] for k in kept], label, location) for (tape, r), label in zip(bodies, ("then", "else"))]
            out = self.emit("If", [test], {"then_branch": graphs[0], "else_branch": graphs[1]}, names=[names[k] for k in kept])
            for k, t, a, b in zip(kept, [out] if isinstance(out, Tensor) else out, graphs[0].outputs, graphs[1].outputs):
                t.value.type = t.value.type or a.type or b.type
                result[k] = t
        return tuple(result)

    def for_(self, items, body, names, thunks):
        values = [look(t) for t in thunks]
        if not isinstance(items, _Count):
            if isinstance(items, Tensor):
                items = iter(items)  # fails with the reason
            for item in items:
                values = [look(t) for t in body(item, *values)]
            return tuple(values)
        return self.loop(items.count, None, lambda i, *v: body(i, *v), names, values)

    def while_(self, test, body, names, thunks):
        values = [look(t) for t in thunks]
        first = test(*values)
        if not isinstance(first, Tensor):
            while first:
                values = [look(t) for t in body(*values)]
                first = test(*values)
            return tuple(values)
        return self.loop(None, first, lambda i, *v: body(*v), names, values, test)

    def loop(self, count, condition, body, names, values, test=None):
        location = user_line()
        carried = [k for k, v in enumerate(values) if v is not UNDEFINED]
        initial = [self.tensor(values[k]) for k in carried]
        step = ir.val(self.fresh("i"), ir.DataType.INT64, [])
        going = ir.val(self.fresh("going"), ir.DataType.BOOL, [])
        formals = [ir.Value(name=self.fresh(names[k]), type=v.type, shape=v.shape) for k, v in zip(carried, initial)]
        inside = list(values)
        for k, formal in zip(carried, formals):
            inside[k] = Tensor(formal)

        def run(*_):
            self.owner.update((v, self.tapes[-1]) for v in (step, going, *formals))
            results = [look(t) for t in body(Tensor(step), *inside)]
            again = self.emit("Identity", [Tensor(going)], names=["going"]) if test is None else test(*results)
            return [lambda: again, *(lambda r=results[k]: r for k in carried)]

        tape, results = self.body(run, [])
        graph = self.close(tape, [step, going, *formals], results, "body", location)
        out = self.emit("Loop", [count, condition, *map(Tensor, initial)], {"body": graph}, names=[names[k] for k in carried])
        result = [UNDEFINED] * len(names)
        for k, t, formal in zip(carried, [out] if isinstance(out, Tensor) else out, formals):
            t.value.type = t.value.type or formal.type
            result[k] = t
        return tuple(result)

    def body(self, f, values):
        """Record a block; its tape stays open for ``close``."""
        tape = TapeBuilder(features=FEATURES)
        self.tapes.append(tape)
        results = [look(t) for t in f(*values)]
        self.tapes.pop()
        return tape, results

    def close(self, tape, inputs, results, label, location) -> ir.Graph:
        self.tapes.append(tape)
        outputs: list[ir.Value] = []
        for x in results:
            v = self.tensor(x)
            if self.owner.get(v) is not tape or any(v is o for o in outputs):
                v = self.emit("Identity", [Tensor(v)], names=[v.name]).value
            outputs.append(v)
        self.tapes.pop()
        return ir.Graph(inputs, outputs, nodes=tape.nodes, name=f"{label}_line_{location.line}")

    # calls and results

    def call(self, callee, args, kwargs):
        function = callee.declaration.function
        inputs = [v.name for v in function.inputs]
        bound = dict(zip(inputs, args)) | kwargs
        if set(bound) != set(inputs) or len(args) > len(inputs):
            fail(f"{callee.name} takes {', '.join(inputs)}.")
        if self.functions.setdefault(function.identifier(), callee) is not callee:
            fail(f"another function is called {callee.name} as well.")
        out = self.emit(Op(Opset(function.domain, 1), callee.name), [Tensor(self.tensor(bound[i])) for i in inputs],
                        outputs=len(function.outputs))
        for t, declared in zip([out] if isinstance(out, Tensor) else out, function.outputs):
            t.value.type = t.value.type or declared.type
        return out


@dataclasses.dataclass
class _Count:
    count: Tensor


def translate(f, domain: str, opset: Opset, namespace: dict) -> Declaration:
    """Record ``f`` once."""
    r = Recorder(opset)
    location = Location(inspect.getsourcefile(f), f.__code__.co_firstlineno)
    hints = inspect.get_annotations(f, eval_str=True, locals=namespace)
    inputs, mutable, arguments = [], [], {}
    for name in inspect.signature(f).parameters:
        hint = hints[name]
        sequence = typing.get_origin(hint) is tuple
        values = []
        for k, h in enumerate(typing.get_args(hint) if sequence else (hint,)):
            declared = h.to_ir_type_and_shape()
            value = ir.Value(name=r.fresh(f"{name}.{k}" if sequence else name), type=declared.type, shape=declared.shape)
            values.append(value)
            if annotations.access_of(h) is Access.READ_WRITE:
                mutable.append(value)
        inputs += values
        arguments[name] = tuple(map(Tensor, values)) if sequence else Tensor(values[0])
    r.tapes.append(TapeBuilder(features=FEATURES))
    r.owner.update((v, r.tapes[0]) for v in inputs)
    token = _current.set(r)
    try:
        result = rewrite(f, r)(**arguments)
        outputs, returns = _results(r, result, hints.get("return"), inputs, location)
    finally:
        _current.reset(token)
    graph = ir.Graph(inputs, outputs, nodes=r.tapes.pop().nodes, name=f.__name__, opset_imports={"": opset.version})
    for n in ir.traversal.RecursiveGraphIterator(graph):
        graph.opset_imports.setdefault(n.domain, n.version or 1)
    function = ir.Function(domain, f.__name__, graph=graph, attributes=[])
    functions: dict = {}
    for callee in r.functions.values():
        for f in (*callee.declaration.functions, callee.declaration):
            functions.setdefault(f.function.identifier(), f)
    access = tuple(Access.READ_WRITE if any(v is m for m in mutable) else Access.READ_ONLY for v in inputs)
    returned = tuple(None if v is None else v.name for v in returns)
    return Declaration(function, access, returned, tuple(functions.values()), location)


def _results(r: Recorder, result, hint, inputs, location):
    """Flatten, name and type what was returned."""
    names, line = r.outputs or fail("nothing is returned.", location)
    location = Location(location.file, line)
    by_name = {v.name: v for v in inputs}
    hints = typing.get_args(hint) if typing.get_origin(hint) is tuple else (hint,)
    result = [result] if len(names) == 1 else list(result)
    if len(hints) != len(result):
        fail(f"{len(result)} results, {len(hints)} declared.", location)
    outputs, returns, used = [], [], set()
    for name, value, h in zip(names, result, hints):
        sequence = isinstance(value, (list, tuple))
        declared = annotations.alias_of(h)
        for k, x in enumerate(value if sequence else [value]):
            wanted = f"output_{len(outputs)}" if name is None or name in used else f"{name}.{k}" if sequence else name
            root = None
            if declared is not None:
                root = by_name.get(f"{declared}.{k}" if sequence else declared)
                if root is None:
                    fail(f'Alias["{declared}"] names no parameter.', location)
            v = r.tensor(x)
            if any(v is o for o in (*inputs, *outputs)):
                v = r.emit("Identity", [Tensor(v)], names=[wanted]).value
                v.producer().meta[LOCATION] = location
            _take(r, f"updated_{wanted}" if wanted in by_name else wanted, v)
            if declared is None and getattr(h, "dtype", None) is not None:
                ts = h.to_ir_type_and_shape()
                v.type, v.shape = ts.type, ts.shape
            outputs.append(v)
            returns.append(root)
        used.add(name)
    return outputs, returns


def _take(r: Recorder, name: str, value: ir.Value) -> None:
    """Give a result its name; who had it before gets another."""
    def values(nodes):
        for node in nodes:
            yield from node.outputs
            for a in node.attributes.values():
                if a.type == ir.AttributeType.GRAPH:
                    yield from a.as_graph().inputs
                    yield from values(a.as_graph())

    if value.name == name:
        return
    for other in values(r.tapes[-1]._nodes):
        if other.name == name:
            other.name = r.fresh(name)
    r.names.setdefault(name, 0)
    value.name = name
