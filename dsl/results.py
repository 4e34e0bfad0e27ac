"""What a function returns: flat, named after the author's variables, typed as declared."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnx_inplace.compiler.diagnosis import VARIABLE
from onnx_inplace.compiler.errors import Location
from onnx_inplace.compiler.paged_types import PagedType
from onnx_inplace.dsl import literals, notation, parameters, recorder, structures
from onnx_inplace.dsl.tensor import Operand

Dim = int | ir.SymbolicDim


@dataclasses.dataclass(frozen=True)
class Results:
    """The outputs of a graph.

    Attributes:
        values: the outputs.
        returns: for each the name of the parameter that it must alias, or None.
        template: what the function returned, with the number of an output for every tensor.
    """

    values: list[ir.Value]
    returns: list[str | None]
    template: Any


@dataclasses.dataclass
class _Collector:
    r: recorder.Recorder
    parameters: Mapping[str, parameters.Parameter]
    inputs: Mapping[str, ir.Value]
    location: Location
    values: list[ir.Value] = dataclasses.field(default_factory=list)
    returns: list[str | None] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._held = set(self.inputs.values())  # values that are no new output
        self._taken = {v.name for v in self._held}

    def add(self, variable: str | None, path: str, x: Any, hint: Any, root: str | None) -> int:
        """One output."""
        r, location = self.r, self.location
        declared = None if root is None else self.inputs.get(root)
        dtype = declared.dtype if declared is not None else None
        typed = None
        if declared is None and notation.is_tensor(hint):
            typed = notation.type_and_shape(hint)
            dtype = hint.dtype
        value = self.value(x, dtype)
        name = self.name(variable, path, root)
        if not r.is_unknown(value):
            own = r.owner(value) is r.blocks[0] and not value.is_initializer()
            if not own or value in self._held:
                [again] = r.emit("", "Identity", [value], outputs=[name], location=location)
                again.meta[VARIABLE] = value.meta.get(VARIABLE)  # what the author calls it
                value = again
            r.names.take(value, name)
            if typed is not None:
                self.declare(value, *typed)
            elif declared is not None:
                value.type = value.type or declared.type
        self.values.append(value)
        self.returns.append(root)
        self._held.add(value)
        self._taken.add(value.name)
        return len(self.values) - 1

    def value(self, x: Any, dtype: ir.DataType | None) -> ir.Value:
        if isinstance(x, Operand):
            return self.r.use(x.value)
        try:
            return self.r.constant(literals.literal(x, dtype))
        except (literals.Lost, TypeError) as error:
            code = "E102" if isinstance(error, literals.Lost) else "E100"
            self.r.fault(f"result: {error}.", code)
            return self.r.unknown()

    def name(self, variable: str | None, path: str, root: str | None) -> str:
        """The name of the next output; what is taken already falls back to its number."""
        wanted = None
        if variable is not None and variable not in self.parameters:
            wanted = f"{variable}.{path}" if path else variable
        elif root is not None:
            wanted = f"updated_{root}"
        elif path and not path[0].isdigit():  # a mapping, NamedTuple or dataclass written out
            wanted = path
        for name in (wanted, f"updated_{root}" if root else None):
            holder = self.r.names.holder(name) if name is not None else None
            is_weight = holder is not None and holder.is_initializer()
            if name is not None and name not in self._taken and not is_weight:
                return name
        return f"output_{len(self.values)}"

    def declare(self, value: ir.Value, type_: ir.TypeProtocol, shape: ir.Shape | None) -> None:
        """Check a declared type against what was inferred, and merge the dimensions."""
        if value.type is not None and value.type != type_:
            pages = any(isinstance(t, PagedType) for t in (value.type, type_))
            found, wanted = (str(t) if pages else t.dtype.name for t in (value.type, type_))
            code = "E115" if pages else "E102"
            self.r.fault(f"`{value.name}` is declared {wanted}, and is {found}.", code)
            return
        value.type = type_
        if shape is None or value.shape is None:
            value.shape = shape if value.shape is None else value.shape
            return
        if shape.rank() != value.shape.rank() or any(
            isinstance(a, int) and isinstance(b, int) and a != b
            for a, b in zip(shape, value.shape, strict=True)
        ):
            message = f"`{value.name}` is declared with shape {shape}, and has {value.shape}."
            self.r.fault(message, "E102")
            return
        value.shape = ir.Shape([_merged(a, b) for a, b in zip(shape, value.shape, strict=True)])


def _merged(declared: Dim, inferred: Dim) -> Dim:
    """A number if there is one, else the name that the inputs give, else the declared one."""
    if isinstance(declared, int):
        return declared
    known = isinstance(inferred, int) or inferred.value is not None
    return inferred if known else declared


def collect(
    r: recorder.Recorder,
    result: Any,
    hint: Any,
    declared: Mapping[str, parameters.Parameter],
    inputs: Mapping[str, ir.Value],
    namespace: Mapping[str, Any],
) -> Results:
    """Take apart what was returned."""
    if r.returned is None or result is None:
        r.fault(
            "Nothing is returned: a model or function returns its results.", location=r.location
        )
        return Results([], [], None)
    names, is_tuple, location = r.returned
    collector = _Collector(r, declared, inputs, location)
    with r.at(location):
        template = _all(collector, result, hint, namespace, names, is_tuple)
    return Results(collector.values, collector.returns, template)


def _all(
    c: _Collector,
    result: Any,
    hint: Any,
    namespace: Mapping[str, Any],
    names: Sequence[str | None],
    is_tuple: bool,
) -> Any:
    if not _is_written_out(hint):
        if is_tuple:
            return _one(c, None, result, hint, namespace, names)
        return _one(c, names[0], result, hint, namespace)
    hints = notation.members(hint, namespace) or []
    members = structures.children(result)
    if members is None or len(members) != len(hints):
        count = 1 if members is None else len(members)
        c.r.fault(f"{count} results are returned, {len(hints)} are declared.")
        return None
    template = [
        _one(c, names[k], x, h, namespace)
        if is_tuple
        else _one(c, names[0], x, h, namespace, path=str(k))
        for k, ((_, x), (_, h)) in enumerate(zip(members, hints, strict=True))
    ]
    return structures.rebuild(result, template)


def _is_written_out(hint: Any) -> bool:
    """``tuple[A, B]``, or a list or mapping of annotations: several results."""
    is_class = isinstance(hint, type) and typing.get_origin(hint) is None
    return not is_class and notation.members(hint, {}) is not None


def _one(
    c: _Collector,
    variable: str | None,
    x: Any,
    hint: Any,
    namespace: Mapping[str, Any],
    names: Sequence[str | None] = (),
    path: str = "",
) -> Any:
    """One result as it is declared: a tensor, or a structure of them.

    ``names``: what the members are called, where a tuple is written out.
    """
    target = notation.alias_of(hint)
    roots: list[str | None] = []
    if target is not None:
        parameter = parameters.find(c.parameters, target)
        mutable = [] if parameter is None else [p for p in parameter.leaves() if p.access.value]
        if not mutable:
            c.r.fault(
                f'Alias["{target}"] names no mutable parameter of '
                f"{c.r.name}({', '.join(c.parameters)}).",
                "E117",
            )
            hint, target = None, None
        else:
            roots = [p.name for p in mutable]
    members = None if target is not None else notation.members(hint, namespace)
    if members is not None:
        inside = structures.children(x)
        if inside is None or len(inside) != len(members):
            c.r.fault(f"a structure of {len(members)} is declared, and {x!r} returned.")
            return None
        return structures.rebuild(
            x,
            [
                _one(c, variable, e, h, namespace, path=f"{path}.{n}" if path else n)
                for (n, e), (_, h) in zip(inside, members, strict=True)
            ],
        )
    leaves = structures.leaves(x, Operand)
    if target is not None and len(leaves) != len(roots):
        c.r.fault(
            f'{len(leaves)} tensors are returned as Alias["{target}"], which are {len(roots)}.'
        )
        return None
    count = iter(range(len(leaves)))

    def add(leaf: Any, at: str) -> int:
        k = next(count)
        full = ".".join(p for p in (path, at) if p)
        own = variable
        if names and at.isdigit():
            own, full = names[int(at)], ""
        return c.add(own, full, leaf, hint, roots[k] if roots else None)

    return structures.transform(add, x, Operand)
