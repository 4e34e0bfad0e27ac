"""Recording one operator: Python arguments become inputs and attributes, or a fault."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnx_inplace.compiler import paged_rules
from onnx_inplace.dsl import literals, recorder
from onnx_inplace.dsl.signatures import Formal, Operator, Signature, attribute, signature

Types = Sequence[tuple[ir.TypeProtocol | None, ir.Shape | None]]


def standard(name: str, *inputs: Any, **attributes: Any) -> ir.Value:
    """Record a standard operator of one output, for operators and indices of Python."""
    return apply(Operator("", name, None), inputs, attributes)[0]


_HELP = "Look up what {0} takes, in the operators of ONNX."


class Wrong(Exception):
    """Arguments that an operator cannot take."""

    def __init__(self, message: str, code: str = "E100", repair: str | None = None) -> None:
        super().__init__(message)
        self.code, self.repair = code, repair


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
        r.use_opset(operator.version, f"op.{operator.name}")
    version = operator.version or r.opset
    known = signature(operator.domain, operator.name, version)
    count = outputs or (known and known.default_outputs()) or 1
    try:
        if known is None:
            arguments = list(inputs), dict(attributes)
        else:
            arguments = _arguments(known, inputs, attributes)
            count = _count(known, outputs, *arguments)
        given = [x for x in arguments[0] if isinstance(x, ir.Value)]
        misuse = paged_rules.misuse(operator.domain, operator.name, given)
        if misuse is not None:
            raise Wrong(misuse, "E102", paged_rules.SEE)
        values, weak = _adapted(r, known, arguments[0])
        attrs = [
            attribute(n, v, None if known is None else known.attributes[n])
            for n, v in arguments[1].items()
            if v is not None
        ]
    except (Wrong, literals.Lost) as error:
        if isinstance(error, literals.Lost):
            error = Wrong(str(error), "E102", "Write a number that survives, or convert.")
        r.fault(f"{operator.name}: {error}.", error.code, repair=error.repair)
        return [r.unknown() for _ in range(count)]
    except (TypeError, ValueError, OverflowError) as error:
        r.fault(f"{operator.name}: {error}.", repair=_HELP.format(operator.name))
        return [r.unknown() for _ in range(count)]
    results = r.emit(operator.domain, operator.name, values, attrs, version=version, outputs=count)
    for value, (type_, shape) in zip(results, types, strict=False):
        value.type, value.shape = type_, shape
    if known is not None:
        for k, value in enumerate(results):
            if known.outputs[min(k, len(known.outputs) - 1)].type in weak:
                r.make_weak(value)
    return results


def _arguments(
    known: Signature, inputs: Sequence[Any], attributes: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Inputs given by keyword take their place; what the schema does not know is refused."""
    values, rest = list(inputs), {n: v for n, v in attributes.items() if v is not None}
    last = known.inputs[-1] if known.inputs else None
    variadic = last is not None and last.variadic
    if variadic and len(known.inputs) == len(values) == 1 and isinstance(values[0], list | tuple):
        values = list(values[0])  # op.Concat([a, b], axis=0)
    for port, formal in enumerate(known.inputs):
        if formal.name in rest and formal.name not in known.attributes:
            values.extend([None] * (port + 1 - len(values)))
            if values[port] is not None:
                raise Wrong(f"`{formal.name}` is given twice")
            values[port] = rest.pop(formal.name)
    names = [f.name for f in known.inputs]
    for name in rest:
        if name not in known.attributes:
            choice = [*known.attributes, *names]
            near = difflib.get_close_matches(name, choice, 1)
            hint = f"it has `{near[0]}`" if near else f"there is {', '.join(choice)}"
            raise Wrong(f"no attribute is called `{name}`: {hint}")
    for name in known.required:
        if name not in rest:
            raise Wrong(f"the attribute `{name}` is missing")
    while values and values[-1] is None:
        values.pop()
    if not variadic and len(values) > len(names):
        raise Wrong(f"it takes {', '.join(names) or 'no inputs'}, and {len(values)} are given")
    for port, formal in enumerate(known.inputs):
        if formal.required and (port >= len(values) or values[port] is None):
            raise Wrong(f"the input `{formal.name}` is missing")
    return values, rest


def _count(
    known: Signature, wanted: int | None, inputs: Sequence[Any], attributes: Mapping[str, Any]
) -> int:
    """The number of outputs."""
    variadic = any(f.variadic for f in known.outputs)
    if wanted is not None:
        if wanted > len(known.outputs) and not variadic:
            raise Wrong(f"it has {len(known.outputs)} outputs at most, not {wanted}")
        return wanted
    count = known.default_outputs()
    if count is not None:
        return count
    if "num_outputs" in attributes:  # Split
        return int(attributes["num_outputs"])
    if len(inputs) > 1 and isinstance(inputs[1], list | tuple):
        return len(inputs[1])
    raise Wrong("say how many outputs it has: _outputs=n")


def _adapted(
    r: recorder.Recorder, known: Signature | None, inputs: list[Any]
) -> tuple[list[ir.Value | None], dict[str, None]]:
    """Inputs as values, and the type variables that only carried Python numbers bind."""
    formals = [_formal(known, port) for port in range(len(inputs))]
    bound: dict[str, ir.Value] = {}
    weak: dict[str, list[Any]] = {}
    for formal, x in zip(formals, inputs, strict=True):
        if formal is None or x is None:
            continue
        if not isinstance(x, ir.Value) or r.is_weak(x):
            weak.setdefault(formal.type, []).append(x)
        else:
            _bind(known, bound, formal, x)
    carried = {t: xs for t, xs in weak.items() if t not in bound and any(map(_is_value, xs))}
    values = []
    for formal, x in zip(formals, inputs, strict=True):
        dtype, like = None, None
        if formal is not None:
            if formal.name in _VECTORS and literals.is_number(x):
                x = [x]  # op.Squeeze(x, 0)
            like = bound.get(formal.type)
            dtype = _FIXED.get(formal.type) if like is None else like.dtype
            if formal.type in carried:
                dtype = _promoted(carried[formal.type])
        values.append(_value(r, x, dtype, like if dtype is None else None))
    return values, dict.fromkeys(carried)


def _bind(known: Signature | None, bound: dict[str, ir.Value], formal: Formal, x: ir.Value) -> None:
    """Note the type that a tensor gives to the type variable of its formal."""
    other = bound.setdefault(formal.type, x)
    dtype, expected = _dtype(x), _dtype(other)
    if dtype is None:
        return
    if expected is None:
        bound[formal.type] = x
    elif expected != dtype:
        names = recorder.called(other), recorder.called(x)
        raise Wrong(
            f"{names[0]} is {expected.name}, {names[1]} is {dtype.name}",
            "E102",
            "Convert one of them: op.Cast(x, to=...).",
        )
    if known is not None and not _allowed(known, formal.type, dtype):
        name = recorder.called(x)
        raise Wrong(
            f"{name} is {dtype.name}, for which it is not defined",
            "E102",
            "Cast it, or declare another element type.",
        )


def _dtype(value: ir.Value) -> ir.DataType | None:
    """The element type of a tensor; None: it is not known, or the value is a sequence."""
    return value.dtype if isinstance(value.type, ir.TensorType) else None


def _formal(known: Signature | None, port: int) -> Formal | None:
    formal = None if known is None else known.formal(port)
    return None if formal is not None and formal.variadic and not formal.uniform else formal


def _is_value(x: Any) -> bool:
    return isinstance(x, ir.Value)


# Inputs that ONNX wants as vectors, of one number too.
_VECTORS = frozenset({"axes", "shape", "split", "repeats", "pads", "starts", "ends", "steps", "K"})
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
    """Scalars, some of them tensors, as one vector: ``op.Reshape(x, [batch, -1])``."""
    return standard("Concat", *(as_vector(e) for e in elements), axis=0)


def as_vector(number: Any) -> ir.Value:
    """A whole number or a tensor of one element as INT64 of shape [1]."""
    r = recorder.current()
    if not isinstance(number, ir.Value):
        return r.constant(literals.literal([number], ir.DataType.INT64))
    x: ir.Value = number
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
