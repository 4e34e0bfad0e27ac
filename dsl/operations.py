"""Recording one operator: its Python arguments become inputs and attributes, or a fault at the author's line."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnx_inplace.dsl import literals, recorder
from onnx_inplace.dsl.signatures import Formal, Operator, Signature, attribute, signature

Types = Sequence[tuple[ir.TypeProtocol | None, ir.Shape | None]]


def standard(name: str, *inputs: Any, **attributes: Any) -> ir.Value:
    """Record a standard operator of one output, for operators and indices of Python."""
    return apply(Operator("", name, None), inputs, attributes)[0]


def apply(
    operator: Operator,
    inputs: Sequence[Any],
    attributes: Mapping[str, Any],
    outputs: int | None = None,
    types: Types = (),
) -> list[ir.Value]:
    """Record ``operator`` on values, numbers, lists of numbers, arrays or None.

    ``outputs`` and ``types`` say what a schema cannot say, or that there is none.
    """
    r = recorder.current()
    if operator.domain == "" and operator.version is not None:
        r.use_opset(operator.version)
    version = operator.version or r.opset
    known = signature(operator.domain, operator.name, version)
    attributes = {k: v for k, v in attributes.items() if v is not None}
    if known is not None:
        inputs, attributes = _named_inputs(r, operator, known, inputs, attributes)
        if outputs is None:
            outputs = _count(r, operator, known, inputs, attributes)
        elif outputs > len(known.outputs) and not any(f.variadic for f in known.outputs):
            r.fault(f"{operator.name} has at most {len(known.outputs)} outputs, not {outputs}.")
            return [r.unknown() for _ in range(outputs)]
    outputs = outputs or 1
    attrs: list[ir.Attr] = []
    for name, value in attributes.items():
        try:
            attrs.append(attribute(name, value, None if known is None else known.attributes[name]))
        except (TypeError, ValueError, OverflowError, KeyError) as error:
            r.fault(f"{operator.name}: {error}.")
            return [r.unknown() for _ in range(outputs)]
    values, weak = _adapt(r, operator, known, list(inputs))
    if values is None:
        return [r.unknown() for _ in range(outputs)]
    results = r.emit(
        operator.domain, operator.name, values, attrs, version=version, outputs=outputs
    )
    for value, (type_, shape) in zip(results, types, strict=False):
        value.type, value.shape = type_, shape
    if known is not None:
        for k, value in enumerate(results):
            if known.outputs[min(k, len(known.outputs) - 1)].type in weak:
                r.make_weak(value)
    return results


def _named_inputs(
    r: recorder.Recorder,
    operator: Operator,
    known: Signature,
    inputs: Sequence[Any],
    attributes: Mapping[str, Any],
) -> tuple[list[Any], dict[str, Any]]:
    """Inputs given by keyword take their place; what is no attribute is a fault."""
    values, rest = list(inputs), dict(attributes)
    last = known.inputs[-1] if known.inputs else None
    if last is not None and last.variadic and len(values) == len(known.inputs) == 1:
        values = list(values[0]) if isinstance(values[0], list | tuple) else values
    for port, formal in enumerate(known.inputs):
        if formal.name in rest and formal.name not in known.attributes:
            values.extend([None] * (port + 1 - len(values)))
            if values[port] is not None:
                r.fault(f"{operator.name}: `{formal.name}` is given twice.")
            values[port] = rest.pop(formal.name)
    for name in [n for n in rest if n not in known.attributes]:
        del rest[name]
        choice = [*known.attributes, *(f.name for f in known.inputs)]
        near = difflib.get_close_matches(name, choice, 1)
        hint = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(choice) or 'none'}."
        r.fault(f"{operator.name} has no attribute `{name}`: {hint}")
    missing = [n for n in known.required if n not in rest]
    if missing:
        r.fault(f"{operator.name} needs the attribute `{missing[0]}`.")
    if last is None or not last.variadic:
        if len(values) > len(known.inputs):
            names = ", ".join(f.name for f in known.inputs) or "no inputs"
            r.fault(f"{operator.name} takes {names}: {len(values)} are given.")
    for port, formal in enumerate(known.inputs):
        if formal.required and (port >= len(values) or values[port] is None):
            r.fault(f"{operator.name} needs `{formal.name}`.")
            values.extend([None] * (port + 1 - len(values)))
            values[port] = r.unknown()
    return values, rest


def _count(
    r: recorder.Recorder,
    operator: Operator,
    known: Signature,
    inputs: Sequence[Any],
    attributes: Mapping[str, Any],
) -> int:
    count = known.default_outputs()
    if count is None and operator.name == "Split":
        if "num_outputs" in attributes:
            return int(attributes["num_outputs"])
        if len(inputs) > 1 and isinstance(inputs[1], list | tuple):
            return len(inputs[1])
    if count is None:
        r.fault(f"say how many outputs {operator.name} has: _outputs=n.")
        return 1
    return count


def _adapt(
    r: recorder.Recorder, operator: Operator, known: Signature | None, inputs: list[Any]
) -> tuple[list[ir.Value | None] | None, dict[str, None]]:
    """Inputs as values, and the type variables that only Python numbers bind.

    The inputs are None after a fault.
    """
    bound: dict[str, ir.Value] = {}
    weak: dict[str, list[Any]] = {}
    formals = [_formal(known, port) for port in range(len(inputs))]
    failed = False
    for formal, x in zip(formals, inputs, strict=True):
        if formal is None or x is None:
            continue
        if not isinstance(x, ir.Value) or r.is_weak(x):
            weak.setdefault(formal.type, []).append(x)
            continue
        dtype = _dtype(x)
        other = bound.setdefault(formal.type, x)
        if dtype is None:
            continue
        if _dtype(other) is None:
            bound[formal.type] = x
        elif _dtype(other) != dtype:
            r.fault(_differ(operator, other, x), "E102")
            failed = True
        if known is not None and not _allowed(known, formal.type, dtype):
            r.fault(
                f"{operator.name} is not defined for {dtype.name}, which {recorder.called(x)} is.",
                "E102",
            )
            failed = True
    only_weak = {t: None for t, xs in weak.items() if t not in bound and any(map(_is_value, xs))}
    common = {t: _promoted(weak[t]) for t in only_weak}
    values: list[ir.Value | None] = []
    for formal, x in zip(formals, inputs, strict=True):
        wanted = None
        if formal is not None:
            wanted = _fixed(formal.type) or common.get(formal.type)
            if formal.type in bound:
                wanted = _dtype(bound[formal.type])
        try:
            like = bound.get(formal.type) if formal is not None and wanted is None else None
            values.append(_value(r, x, wanted, like))
        except (literals.Lost, TypeError) as error:
            code = "E102" if isinstance(error, literals.Lost) else "E100"
            r.fault(f"{operator.name}: {error}.", code)
            failed = True
    return (None if failed else values), only_weak


def _formal(known: Signature | None, port: int) -> Formal | None:
    formal = None if known is None else known.formal(port)
    return None if formal is not None and formal.variadic and not formal.uniform else formal


def _is_value(x: Any) -> bool:
    return isinstance(x, ir.Value)


def _dtype(value: ir.Value) -> ir.DataType | None:
    return value.dtype


def _fixed(type_: str) -> ir.DataType | None:
    """The element type of ``tensor(int64)``; None for a type variable."""
    return _FIXED.get(type_)


_FIXED = {
    f"tensor({name})": dtype
    for name, dtype in {
        "int64": ir.DataType.INT64,
        "int32": ir.DataType.INT32,
        "float": ir.DataType.FLOAT,
        "bool": ir.DataType.BOOL,
        "uint8": ir.DataType.UINT8,
    }.items()
}
_ONNX_NAMES = {
    ir.DataType.FLOAT: "float",
    ir.DataType.DOUBLE: "double",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
}


def _allowed(known: Signature, type_: str, dtype: ir.DataType) -> bool:
    name = f"tensor({_ONNX_NAMES.get(dtype, dtype.name.lower())})"
    allowed = known.allowed.get(type_)
    return (
        name in allowed if allowed is not None else not type_.startswith("tensor(") or type_ == name
    )


def _differ(operator: Operator, a: ir.Value, b: ir.Value) -> str:
    first, second = (f"{recorder.called(v)} is {d.name}" for v in (a, b) if (d := v.dtype))
    return f"{operator.name}: {first}, {second}; convert one of them with op.Cast(x, to=...)."


def _promoted(xs: list[Any]) -> ir.DataType:
    """The type of carried Python numbers and literals that meet no tensor."""
    kinds = [x.dtype if isinstance(x, ir.Value) else literals.default_type(x) for x in xs]
    for dtype in (ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL):
        if dtype in kinds:
            return dtype
    return next((k for k in kinds if k is not None), ir.DataType.FLOAT)


def _value(
    r: recorder.Recorder, x: Any, dtype: ir.DataType | None, like: ir.Value | None
) -> ir.Value | None:
    if x is None:
        return None
    if isinstance(x, ir.Value):
        if r.is_weak(x) and dtype is not None and x.dtype != dtype:
            return r.emit("", "Cast", [x], [ir.AttrInt64("to", int(dtype))])[0]
        return x
    if isinstance(x, list | tuple) and any(isinstance(e, ir.Value) for e in x):
        return pack(x)
    value = r.constant(literals.literal(x, dtype))
    if like is not None and not literals.is_array(x) and not r.is_unknown(like):
        return r.emit("", "CastLike", [value, like])[0]  # its type is found at run time
    return value


def pack(elements: Sequence[Any]) -> ir.Value:
    """Scalars, some of them tensors, as one INT64 tensor of rank 1: ``op.Reshape(x, [batch, -1])``."""
    return standard("Concat", *(as_vector(e) for e in elements), axis=0)


def as_vector(x: Any) -> ir.Value:
    """A whole number or a tensor of one element as INT64 of shape [1]."""
    r = recorder.current()
    if not isinstance(x, ir.Value):
        return r.constant(literals.literal([x], ir.DataType.INT64))
    if x.dtype is not None and x.dtype != ir.DataType.INT64:
        if not literals.is_integer_type(x.dtype):
            r.fault(
                f"{recorder.called(x)} is {x.dtype.name}, and whole numbers are wanted here.",
                "E102",
            )
            return r.unknown()
        x = standard("Cast", x, to=ir.DataType.INT64)
    if x.shape is not None and x.shape.rank() == 1:
        return x
    if x.shape is not None and x.shape.rank() == 0:
        return standard("Unsqueeze", x, [0])
    return standard("Reshape", x, [1])
