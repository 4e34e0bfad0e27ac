"""What a model takes: descriptions of inputs, and values of the caller made into arrays of them.

Nothing that a caller hands over loses information here: a number is converted only where the
declared type can hold it, an array must have the declared type. Where the bytes lie, and whether
they are lent, is decided in ``storage``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_inplace.compiler import errors, extents
from onnx_inplace.runner.storage import Array

Dims = dict[str, int]  # what a named dimension is in one run
_INT64 = np.dtype(np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    """An input or an output as the model declares it.

    Attributes:
        name: as in the graph; parameters of a group are called ``group.0`` or ``group.field``.
        dtype: of the elements; bfloat16 and other types that numpy lacks come from ml_dtypes.
        shape: a number, the name of a dimension, or None for a dimension without a name; None: any
            rank.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...] | None

    @classmethod
    def of(cls, value: ir.Value) -> Port:
        """Describe a value of a graph."""
        if value.dtype in (None, ir.DataType.UNDEFINED):
            raise errors.BindingError(
                f"`{value.name}`: the model does not say what its elements are.", value.name
            )
        shape = None
        if value.shape is not None:
            shape = tuple(d if isinstance(d, int) else d.value or None for d in value.shape)
        return cls(str(value.name), np.dtype(value.dtype.numpy()), shape)

    @property
    def rank(self) -> int:
        """Number of axes; -1 when it is not declared."""
        return -1 if self.shape is None else len(self.shape)

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of its dimensions, each once, in order."""
        return tuple(dict.fromkeys(d for d in self.shape or () if isinstance(d, str)))

    def __str__(self) -> str:
        """As ``name: type[dimensions]``."""
        shape = (
            ""
            if self.shape is None
            else ", ".join("?" if d is None else str(d) for d in self.shape)
        )
        return f"{self.name}: {self.dtype}[{'...' if self.shape is None else shape}]"

    def unify(self, given: tuple[int, ...], dims: Dims) -> None:
        """Match a shape with the declaration; ``dims`` learns the names that it did not know.

        Raises:
            errors.StorageMismatch: another rank, another size, or a name that stands for two sizes.
        """
        if self.shape is None:
            return
        if len(given) != len(self.shape):
            raise errors.StorageMismatch(
                f"`{self.name}`: shape {given} has {len(given)} axes, declared {self}.",
                self.name,
                self.shape,
                given,
            )
        for axis, (declared, size) in enumerate(zip(self.shape, given, strict=True)):
            if declared is None:
                dims[extents.unnamed(self.name, axis)] = size
                continue
            expected = declared if isinstance(declared, int) else dims.setdefault(declared, size)
            if expected != size:
                known = (
                    "" if isinstance(declared, int) else f", and {declared} is {expected} already"
                )
                raise errors.StorageMismatch(
                    f"`{self.name}`: axis {axis} of {given} has size {size}; declared "
                    f"{self}{known}.",
                    self.name,
                    self.shape,
                    given,
                )


def array(port: Port, value: object) -> Array:
    """Make a value of the caller an array of the declared type.

    An array must have the type. Python and numpy scalars, 0-d arrays and lists are converted within
    their kind: integers to any integer or float type that holds them exactly, floats to the nearest
    float, booleans to bool. An integer input declared as a scalar takes one element as (), (1,) or
    (1, 1); one declared (B,) takes (B,) or (B, 1). The result may share memory with ``value``.

    Raises:
        errors.StorageMismatch: another kind or type, or a number that would be changed.
    """
    if isinstance(value, np.ndarray) and value.dtype is port.dtype and value.ndim == port.rank:
        return value
    if type(value) is int and port.dtype is _INT64:
        try:
            return np.array(value, _INT64)
        except OverflowError:
            raise _refused(port, value) from None
    if isinstance(value, np.ndarray) and value.ndim:
        if value.dtype != port.dtype:
            return _strings(port, value)
        return _drop_unit_axes(port, value)
    return _drop_unit_axes(port, _convert(port, value))


def _convert(port: Port, value: object) -> Array:
    """Scalars and nested lists."""
    try:
        given: Array = np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        raise _refused(port, value) from None
    if given.dtype == port.dtype:
        return given
    if given.dtype.kind == "f" and _is_float(port.dtype):
        with np.errstate(over="ignore"):
            result = given.astype(port.dtype)
        if np.array_equal(np.isfinite(result), np.isfinite(given)):
            return result
    elif given.dtype.kind in "iu" and (port.dtype.kind in "iu" or _is_float(port.dtype)):
        with np.errstate(over="ignore", invalid="ignore"):
            result = given.astype(port.dtype)
        # Compared as Python numbers: int64 and uint64 have no common type that holds both.
        if result.astype(object).ravel().tolist() == given.ravel().tolist():
            return result
    elif given.dtype.kind in "US" and port.dtype.kind == "O":
        return given.astype(object)
    elif not given.size and given.dtype.kind != "O":
        return given.astype(port.dtype)  # an empty list has no kind
    raise _refused(port, value)


def _strings(port: Port, value: Array) -> Array:
    if port.dtype.kind == "O" and value.dtype.kind in "US":
        return value.astype(object)
    raise errors.StorageMismatch(
        f"`{port.name}`: elements are {value.dtype!r}, declared {port}.",
        port.name,
        port.dtype,
        value.dtype,
    )


def _drop_unit_axes(port: Port, value: Array) -> Array:
    if port.shape is None or len(port.shape) > 1 or port.dtype.kind not in "iu":
        return value
    extra = value.shape[len(port.shape) :]
    if extra and len(value.shape) <= 2 and all(n == 1 for n in extra):
        return value.reshape(value.shape[: len(port.shape)])
    return value


def _is_float(dtype: np.dtype[Any]) -> bool:
    # ml_dtypes' floats have kind "V" or "f", depending on the type
    return dtype.kind == "f" or (dtype.kind == "V" and "float" in dtype.name)


def _refused(port: Port, value: object) -> errors.StorageMismatch:
    given = value if not isinstance(value, np.ndarray | np.generic) else value.dtype
    return errors.StorageMismatch(
        f"`{port.name}`: {value!r} ({type(value).__name__}) is not of {port.dtype}; nothing is "
        f"rounded. Declared {port}.",
        port.name,
        port.dtype,
        given,
    )


def flatten(
    names: Iterable[str],
    given: Mapping[str, object],
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> dict[str, Any]:
    """Arguments by the names of the graph: ``caches=[a, b]`` is ``caches.0`` and ``caches.1``.

    A sequence, mapping, named tuple or dataclass is a group when the graph has parameters
    ``name.…`` and none that is called ``name`` itself. What is not given is its default.

    Raises:
        errors.BindingError: a name is missing, unknown, or given twice.
    """
    expected = dict.fromkeys(names)  # looked up for each of many layers
    found: dict[str, Any] = {}
    for name, value in given.items():
        for path, leaf in _leaves(name, value, expected):
            if path in found:
                raise errors.BindingError(f"`{path}` is given twice.", path)
            found[path] = leaf
    found = {**defaults, **found}
    missing = [n for n in expected if n not in found]
    unknown = [n for n in found if n not in expected]
    if not missing and not unknown:
        return found
    parts = [
        f"{word} {', '.join(f'`{n}`' for n in list_)}"
        for word, list_ in (("missing:", missing), ("unknown:", unknown))
        if list_
    ]
    declared = ", ".join(expected) or "none"
    raise errors.BindingError(
        f"arguments do not fit: {'; '.join(parts)}. Declared: {declared}.", (missing + unknown)[0]
    )


def _leaves(name: str, value: object, expected: Collection[str]) -> Iterable[tuple[str, object]]:
    parts = None
    if name not in expected and any(n.startswith(f"{name}.") for n in expected):
        parts = _parts(value)
    if parts is None:
        yield name, value
        return
    for key, part in parts.items():
        yield from _leaves(f"{name}.{key}", part, expected)


def _parts(value: object) -> Mapping[Any, object] | None:
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return None
