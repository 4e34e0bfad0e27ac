"""Functions of the author, and calls of them: one FunctionProto per set of Python arguments.

A parameter that is not annotated as tensors is an attribute: its Python value specialises the
function. The variants of ``f`` are called ``f_axis_1`` and so on, and different functions of one
name in one domain ``f``, ``f_2``: names, not overloads, since onnx.reference runs one body for
all overloads of a name.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import onnxscript

from onnx_inplace.compiler import paged_types, program
from onnx_inplace.compiler.contract import Access
from onnx_inplace.compiler.errors import Location
from onnx_inplace.dsl import literals, parameters, places, recorder, structures, tensor
from onnx_inplace.dsl.results import Results
from onnx_inplace.dsl.signatures import Operator, attribute
from onnx_inplace.dsl.tensor import Operand, Tensor


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One variant of a function, recorded and checked."""

    declaration: program.Declaration
    parameters: Mapping[str, parameters.Parameter]
    results: Results


class Function:
    """A function that models and other functions call: ``@function``."""

    def __init__(
        self,
        f: Callable[..., Any],
        signature: inspect.Signature,
        attributes: tuple[str, ...],
        record: Callable[[Mapping[str, Any], str, int | None], Recorded],
    ) -> None:
        """Record at once, if no Python value is missing.

        ``record`` gets Python values, the name of the FunctionProto, and the opset of the caller,
        or None if there is none so far.
        """
        self.__name__, self.__doc__, self.__wrapped__ = f.__name__, f.__doc__, f
        self._signature, self._attributes, self._record = signature, attributes, record
        # with the values, so that no other object gets the id of one
        self._variants: dict[object, tuple[Recorded, Mapping[str, Any]]] = {}
        defaults = {n: signature.parameters[n].default for n in attributes}
        if inspect.Parameter.empty not in defaults.values():
            self.variant(defaults, None)

    def __repr__(self) -> str:
        return f"<@function {self.__name__}{self._signature}>"

    def variant(self, values: Mapping[str, Any], opset: int | None) -> Recorded:
        """The function for these Python values, of the opset of its caller.

        What was recorded without a caller serves every caller of the opset that it came to.
        """
        of_values = tuple(_key(v) for v in values.values())
        alone = self._variants.get((None, of_values))
        if alone is not None and alone[0].declaration.function.opset_imports[""] == opset:
            return alone[0]
        key = opset, of_values
        found = self._variants.get(key)
        if found is None:
            parts = [f"{n}_{_word(v)}" for n, v in values.items() if _has_short_name(v)]
            name = "_".join([self.__name__, *parts])
            found = self._variants[key] = self._record(values, name, opset), values
        return found[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record a call."""
        r = recorder.current()
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            r.stop(f"{self.__name__}{self._signature}: {error}.")
        bound.apply_defaults()
        values = {n: literals.plain(bound.arguments[n]) for n in self._attributes}
        for n, v in values.items():
            if structures.contains(Operand, v):
                r.stop(f"{self.__name__}: `{n}` is a Python value, and a tensor is given.")
        variant = self.variant(values, r.fixed_opset)
        return _call(r, self.__name__, variant, bound.arguments)


def _key(x: Any) -> object:
    """What tells Python values apart: content where it is immutable, else the object itself."""
    if isinstance(x, list | tuple):
        return type(x), tuple(map(_key, x))
    if isinstance(x, bool | int | float | str | bytes | type | enum.Enum | None):
        return type(x), repr(x) if isinstance(x, float) else x  # repr: 0.0 is not -0.0, nan is nan
    return type(x), id(x)


def _word(x: Any) -> str:
    """``x`` as a part of a name: ``m1`` for -1, ``0_5`` for 0.5."""
    return re.sub(r"\W+", "_", str(x).replace("-", "m")).strip("_")


def _has_short_name(x: Any) -> bool:
    """Whether ``x`` reads well in the name of a function."""
    if isinstance(x, list | tuple):
        return len(x) < 4 and all(map(_has_short_name, x))
    return isinstance(x, bool | int | float) or (isinstance(x, str) and len(x) < 16)


def _call(r: recorder.Recorder, name: str, callee: Recorded, arguments: Mapping[str, Any]) -> Any:
    function = callee.declaration.function
    inputs: list[ir.Value] = []
    dims: dict[str, int | ir.SymbolicDim] = {}
    for parameter in callee.parameters.values():
        leaves = list(parameter.leaves())
        given = structures.leaves(arguments[parameter.name], Operand)
        if isinstance(parameter, parameters.Leaf):
            given = [("", arguments[parameter.name])]
        if len(given) != len(leaves):
            r.stop(
                f"{name}: `{parameter.name}` takes {len(leaves)} tensors, and {len(given)} are "
                "given."
            )
        inputs += [
            _argument(r, name, leaf, x, dims) for leaf, (_, x) in zip(leaves, given, strict=True)
        ]
    r.use_opset(function.opset_imports[""], f"`{name}`")
    identifier = _linked(r, callee.declaration)
    results = r.emit(*identifier, inputs, outputs=len(function.outputs), infer=False)
    by_name = dict(zip((v.name for v in function.inputs), inputs, strict=True))
    for value, declared, root in zip(
        results, function.outputs, callee.declaration.returns, strict=True
    ):
        if r.is_unknown(value):
            continue
        value.type, value.shape = declared.type, _substituted(declared.shape, dims)
        if root is not None:
            value.shape = by_name[root].shape
    return structures.transform(lambda k, _: Tensor(results[k]), callee.results.template, int)


def _argument(
    r: recorder.Recorder,
    name: str,
    leaf: parameters.Leaf,
    x: Any,
    dims: dict[str, int | ir.SymbolicDim],
) -> ir.Value:
    """One argument as the parameter wants it."""
    type_, shape = leaf.typed()
    if not isinstance(x, Operand):
        if leaf.is_paged:
            r.fault(f"{name}: `{leaf.name}` is a paged cache, not {x!r}.", part=leaf.name)
            return r.unknown()
        try:
            value = r.constant(literals.literal(x, type_.dtype))
        except (literals.Lost, TypeError) as error:
            code = "E102" if isinstance(error, literals.Lost) else "E100"
            r.fault(f"{name}: `{leaf.name}`: {error}.", code, part=leaf.name)
            return r.unknown()
    else:
        value = tensor.plain(x)
    if r.is_unknown(value):
        return value
    if r.is_weak(value) and value.dtype != type_.dtype:
        return r.emit("", "Cast", [value], [ir.AttrInt64("to", int(type_.dtype))])[0]
    called = recorder.called(value)
    pages = paged_types.is_paged(value) or isinstance(type_, paged_types.PagedType)
    if pages and value.type is not None and value.type != type_:
        given = value.type if paged_types.is_paged(value) else "no paged cache"
        r.fault(
            f"{name}: `{leaf.name}` is {type_ if leaf.is_paged else 'a tensor'}, and {called} is "
            f"{given}.",
            "E115",
            part=leaf.name,
        )
        return r.unknown()
    if value.dtype is not None and value.dtype != type_.dtype:
        r.fault(
            f"{name}: `{leaf.name}` is {type_.dtype.name}, and {called} is {value.dtype.name}.",
            "E102",
            part=leaf.name,
        )
        return r.unknown()
    if shape is not None and value.shape is not None and not _fits(shape, value.shape, dims):
        r.fault(
            f"{name}: `{leaf.name}` is {shape}, and {called} is {value.shape}.",
            "E102",
            part=leaf.name,
        )
        return r.unknown()
    return value


def _fits(wanted: ir.Shape, given: ir.Shape, dims: dict[str, int | ir.SymbolicDim]) -> bool:
    """Whether a shape can be passed; notes what the names of the callee stand for."""
    if wanted.rank() != given.rank():
        return False
    for a, b in zip(wanted, given, strict=True):
        if isinstance(a, int):
            if isinstance(b, int) and a != b:
                return False
        elif a.value is not None:
            known = dims.setdefault(a.value, b)
            if isinstance(known, int) and isinstance(b, int) and known != b:
                return False
            if isinstance(b, int):
                dims[a.value] = b
    return True


def _substituted(
    shape: ir.Shape | None, dims: Mapping[str, int | ir.SymbolicDim]
) -> ir.Shape | None:
    """A shape of the callee in the names of the caller."""
    if shape is None:
        return None
    return ir.Shape([d if isinstance(d, int) else dims.get(d.value or "") for d in shape])


# -- one name per function


def _linked(r: recorder.Recorder, callee: program.Declaration) -> tuple[str, str]:
    """Domain and name under which the recorded graph calls ``callee``."""
    for nested in callee.functions:
        key = nested.function.identifier()
        if not _is_same(r.functions.setdefault(key, nested), nested):
            other = r.functions[key]
            r.stop(
                f"{callee.function.name} calls the `{nested.function.name}` of "
                f"{_place(nested.location)}, and the one of {_place(other.location)} is in use "
                "here as well: rename one, or give it another domain."
            )
    function = callee.function
    stem, n = function.name, 1
    while True:
        key = (function.domain, function.name, function.overload)
        if n > 1:
            key = (function.domain, f"{stem}_{n}", function.overload)
        known = r.functions.get(key)
        if known is None:
            r.functions[key] = callee if n == 1 else _renamed(callee, key[1])
            return key[0], key[1]
        if _is_same(known, callee) or (n > 1 and known.function.graph is function.graph):
            return key[0], key[1]
        n += 1


def _renamed(declaration: program.Declaration, name: str) -> program.Declaration:
    f = declaration.function
    renamed = ir.Function(
        f.domain, name, f.overload, graph=f.graph, attributes=list(f.attributes.values())
    )
    return dataclasses.replace(declaration, function=renamed)


def _is_same(a: program.Declaration, b: program.Declaration) -> bool:
    """Whether two functions are one, or made twice from one source (by a factory)."""
    if a is b or a.function.graph is b.function.graph:
        return True
    if (a.access, a.returns) != (b.access, b.returns):
        return False
    first, second = (ir.to_proto(x.function) for x in (a, b))
    second.name = first.name
    return bool(
        first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)
    )


def _place(location: Location) -> str:
    return places.source_place(location)


# -- functions of onnxscript


class Evaluator:
    """Lets onnxscript's operators and @script functions record, instead of computing."""

    def eval_op(self, op: Any, args: Any, kwargs: Any) -> Any:
        """An operator of onnxscript's opsets."""
        own = Operator(op.opset.domain, op.name, op.opset.version)
        return tensor.call(own, args, kwargs)

    def eval_function(self, function: onnxscript.OnnxFunction, args: Any, kwargs: Any) -> Any:
        """A @script function."""
        return call_script(function, args, kwargs)


def call_script(function: onnxscript.OnnxFunction, args: Any, kwargs: Any) -> Any:
    """Record a call of a @script function."""
    r = recorder.current()
    body: ir.Function = function.function_ir
    names = [str(v.name) for v in body.inputs]
    given = dict(zip([*names, *body.attributes], args, strict=False)) | dict(kwargs)
    missing = [n for n in names if n not in given]
    strange = [n for n in given if n not in names and n not in body.attributes]
    if missing or strange:
        r.stop(
            f"{function.name} takes {', '.join([*names, *body.attributes])}, not "
            f"{', '.join(given)}."
        )
    inputs = []
    for n in names:
        x = given[n]
        if x is None or isinstance(x, Operand):
            inputs.append(tensor.plain(x))
            continue
        try:
            inputs.append(r.constant(literals.literal(x, None)))
        except (literals.Lost, TypeError) as error:
            r.fault(f"{function.name}: {error}.")
            inputs.append(r.unknown())
    attributes = []
    for n, a in body.attributes.items():
        if n in given:
            try:
                attributes.append(attribute(n, given[n], a.type))
            except TypeError as error:
                r.fault(f"{function.name}: {error}.")
    location = places.user_line()
    for f in (*body_functions(function), body):
        if "" in f.opset_imports:
            r.use_opset(f.opset_imports[""], f"`{f.name}`")
        declaration = program.Declaration(
            f, (Access.READ_ONLY,) * len(f.inputs), (None,) * len(f.outputs), (), location
        )
        known = r.functions.setdefault(f.identifier(), declaration)
        if not _is_same(known, declaration):
            r.stop(f"two functions are called {f.domain}::{f.name}.")
    results = r.emit(
        body.domain, body.name, inputs, attributes, outputs=len(body.outputs), infer=False
    )
    for value, declared in zip(results, body.outputs, strict=True):
        value.type = value.type or declared.type
    return tensor.wrap(results)


def body_functions(function: onnxscript.OnnxFunction) -> list[ir.Function]:
    """All functions that a @script function calls, callees first."""
    called = function.function_ir.get_called_functions()
    return [f.function_ir for f in called.values() if f is not function]
