"""What an operator takes and gives, from its schema: inputs, attributes, number of outputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_inplace.compiler.formats import PageFormat
from onnx_inplace.dsl import literals, notation

_Option = onnx.defs.OpSchema.FormalParameterOption


@dataclasses.dataclass(frozen=True, slots=True)
class Formal:
    """One input or output.

    Attributes:
        name: as the schema has it.
        type: a type variable (``T``) or a type (``tensor(int64)``).
        required: it cannot be left out.
        variadic: it stands for all ports from here on.
        uniform: all ports of a variadic one have the same type.
    """

    name: str
    type: str
    required: bool
    variadic: bool
    uniform: bool


@dataclasses.dataclass(frozen=True)
class Signature:
    """The schema of an operator, as far as recording asks for it."""

    inputs: tuple[Formal, ...]
    outputs: tuple[Formal, ...]
    attributes: Mapping[str, ir.AttributeType]
    required: tuple[str, ...]
    allowed: Mapping[str, tuple[str, ...]]

    def formal(self, port: int) -> Formal | None:
        """The formal of input ``port``."""
        if port < len(self.inputs):
            return self.inputs[port]
        last = self.inputs[-1] if self.inputs else None
        return last if last is not None and last.variadic else None

    def default_outputs(self) -> int | None:
        """How many outputs a call gives when nothing is said; None: it must be said."""
        if any(f.variadic for f in self.outputs):
            return None
        return sum(f.required for f in self.outputs) or len(self.outputs)


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """An operator by name; ``version`` None: of the opset that the model has."""

    domain: str
    name: str
    version: int | None


@functools.lru_cache(maxsize=4096)
def signature(domain: str, name: str, version: int) -> Signature | None:
    """The signature of an operator; None: onnx has no schema of it."""
    try:
        schema = onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:
        return None
    return Signature(
        tuple(map(_formal, schema.inputs)),
        tuple(map(_formal, schema.outputs)),
        {k: _attribute_type(a) for k, a in sorted(schema.attributes.items())},
        tuple(sorted(k for k, a in schema.attributes.items() if a.required)),
        {c.type_param_str: tuple(c.allowed_type_strs) for c in schema.type_constraints},
    )


def _attribute_type(known: Any) -> ir.AttributeType:
    return ir.AttributeType[known.type.name]


def _formal(parameter: onnx.defs.OpSchema.FormalParameter) -> Formal:
    return Formal(
        parameter.name,
        parameter.type_str,
        parameter.option == _Option.Single,
        parameter.option == _Option.Variadic,
        parameter.is_homogeneous,
    )


def attribute(name: str, value: Any, type_: ir.AttributeType | None) -> ir.Attr:
    """A Python value as an attribute of the type that the schema asks for (None: of its own).

    Raises:
        TypeError: the value is of another kind.
    """
    if isinstance(value, notation.Pages):
        raise TypeError(f"attribute `{name}` is given a paged cache's type")
    if isinstance(value, PageFormat):
        value = value.name  # quantized_type=formats.INT8
    if notation.is_tensor(value):
        value = int(value.dtype)  # op.Cast(x, to=FLOAT16)
    elif isinstance(value, ir.DataType):
        value = int(value)
    elif isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        value = int(ir.DataType.from_numpy(np.dtype(value)))
    if isinstance(value, ir.Value):
        raise TypeError(f"attribute `{name}` is a Python value, and a tensor is given")
    value = literals.plain(value)
    kinds = ir.AttributeType
    match type_:
        case kinds.INT if isinstance(value, int):
            return ir.AttrInt64(name, int(value))
        case kinds.FLOAT if isinstance(value, int | float):
            return ir.AttrFloat32(name, float(value))
        case kinds.STRING if isinstance(value, str):
            return ir.AttrString(name, value)
        case kinds.INTS if (numbers := _sequence(value, int)) is not None:
            return ir.AttrInt64s(name, numbers)
        case kinds.FLOATS if (numbers := _sequence(value, int | float)) is not None:
            return ir.AttrFloat32s(name, [float(n) for n in numbers])
        case kinds.STRINGS if (strings := _sequence(value, str)) is not None:
            return ir.AttrStrings(name, strings)
        case kinds.TENSOR:
            return ir.AttrTensor(name, literals.literal(value, None))
        case None:
            return ir.convenience.convert_attribute(name, value)
    raise TypeError(f"attribute `{name}` is {type_.name}, not {value!r}")


def _sequence(value: Any, kind: Any) -> list[Any] | None:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple | range):
        return None
    elements = [literals.plain(x) for x in value]
    return elements if all(isinstance(x, kind) for x in elements) else None
