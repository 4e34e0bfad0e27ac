"""Python numbers, lists and arrays beside tensors: the element type that they take.

A Python number has no element type: it takes the one of the tensors beside it, if its value
survives. 0.1 does in FLOAT16 (it is rounded, as it is in FLOAT), 1e6 and 1e-10 do not, and 1.5
does not in INT64. Arrays have an element type, and are never converted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

DEFAULT = {bool: ir.DataType.BOOL, int: ir.DataType.INT64, float: ir.DataType.FLOAT}
_FLOATS = frozenset(
    {
        ir.DataType.FLOAT,
        ir.DataType.FLOAT16,
        ir.DataType.BFLOAT16,
        ir.DataType.DOUBLE,
        ir.DataType.FLOAT8E4M3FN,
        ir.DataType.FLOAT8E4M3FNUZ,
        ir.DataType.FLOAT8E5M2,
        ir.DataType.FLOAT8E5M2FNUZ,
    }
)


_ARRAYS = (np.ndarray, ir.Tensor, onnx.TensorProto)
_NO_ARRAYS = (int, float, str, list, tuple, dict, range, ir.Value, type(None))  # asked often


class Lost(ValueError):
    """A value does not survive in an element type."""


def is_number(x: object) -> bool:
    """Whether ``x`` is a Python number, or numpy's."""
    return isinstance(x, bool | int | float | np.generic)


def is_array(x: object) -> bool:
    """Whether ``x`` has content and an element type."""
    if isinstance(x, _ARRAYS):
        return True
    return not isinstance(x, _NO_ARRAYS) and isinstance(x, ir.TensorProtocol)


def plain(x: Any) -> Any:
    """A numpy scalar as a Python number; all else as it is."""
    return (
        x.item()
        if isinstance(x, np.generic) and not _is_extended(x)
        else (float(x) if isinstance(x, np.generic) else x)
    )


def _is_extended(x: np.generic) -> bool:
    return bool(x.dtype.type.__module__ == ml_dtypes.__name__)


def default_type(x: Any) -> ir.DataType:
    """The element type of a number, or of nested lists of numbers, that stands alone."""
    if is_array(x):
        return as_tensor(x).dtype
    kinds = [type(plain(n)) for n in _numbers(x)]
    for kind in (float, int, bool):
        if kind in kinds:
            return DEFAULT[kind]
    return ir.DataType.INT64  # an empty list: axes, shapes


def is_integer_type(dtype: ir.DataType) -> bool:
    """Whether elements are whole numbers (BOOL is not counted)."""
    return bool(dtype.is_integer())


def is_float_type(dtype: ir.DataType) -> bool:
    """Whether elements are floating point numbers."""
    return dtype in _FLOATS


def as_tensor(array: Any) -> ir.TensorProtocol:
    """An array as a tensor of the same element type. Nothing is copied that is usable as it is.

    Raises:
        TypeError: the array holds what ONNX does not know.
    """
    if isinstance(array, onnx.TensorProto):
        return ir.serde.deserialize_tensor(array)
    if isinstance(array, np.ndarray):
        if array.dtype == object:
            raise TypeError("an array of Python objects is no tensor")
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        return ir.Tensor(array)
    if isinstance(array, ir.TensorProtocol):
        return array
    if hasattr(array, "__array__") and not isinstance(array, np.generic):
        return as_tensor(np.asarray(array))
    raise TypeError(f"{type(array).__name__} is no array")


def literal(x: Any, dtype: ir.DataType | None) -> ir.TensorProtocol:
    """Numbers (also in nested lists) or an array as a tensor of ``dtype``; None: of its own type.

    Raises:
        Lost: a value does not survive.
        TypeError: ``x`` holds no numbers.
    """
    if is_array(x):
        tensor = as_tensor(x)
        if dtype is not None and tensor.dtype != dtype:
            raise Lost(
                f"an array of {tensor.dtype.name} beside tensors of {dtype.name}: convert it, "
                f"for example with .astype"
            )
        return tensor
    dtype = dtype or default_type(x)
    numbers = [_survives(plain(n), dtype) for n in _numbers(x)]
    shape = _shape(x)
    if math.prod(shape) != len(numbers):
        raise TypeError(f"{x!r}: the lists have different lengths")
    array = np.array(numbers, dtype=_numpy(dtype)).reshape(shape)
    return ir.Tensor(array, dtype=dtype)


def _numpy(dtype: ir.DataType) -> npt.DTypeLike:
    return dtype.numpy()


def _numbers(x: Any) -> Iterable[Any]:
    if isinstance(x, list | tuple | range):
        for element in x:
            yield from _numbers(element)
    elif is_number(x):
        yield x
    elif isinstance(x, np.ndarray):
        yield from x.ravel().tolist()
    else:
        raise TypeError(f"{x!r} cannot become a tensor")


def _shape(x: Any) -> tuple[int, ...]:
    if isinstance(x, np.ndarray):
        return tuple(x.shape)
    if isinstance(x, list | tuple | range):
        return (len(x), *(_shape(x[0]) if len(x) else ()))
    return ()


def _survives(x: Any, dtype: ir.DataType) -> Any:
    """``x`` as ``dtype`` holds it."""
    if isinstance(x, bool) or dtype == ir.DataType.BOOL:
        if isinstance(x, bool) and dtype == ir.DataType.BOOL:
            return x
        raise Lost(f"{x!r} beside a tensor of {dtype.name}: convert one of them")
    if is_integer_type(dtype):
        if x != x or x in (math.inf, -math.inf) or x != int(x):
            raise Lost(f"{x!r} is no whole number, and the tensor beside it is {dtype.name}")
        low, high = _range(dtype)
        if not low <= x <= high:
            raise Lost(f"{x!r} is not between {low} and {high}, as {dtype.name} is")
        return int(x)
    if not is_float_type(dtype):
        raise Lost(f"{x!r} cannot become {dtype.name}")
    try:
        with np.errstate(over="ignore"):
            held = float(np.array(x, dtype=np.float64).astype(_numpy(dtype)))
    except OverflowError:
        held = math.inf
    if isinstance(x, int):
        kept = math.isfinite(held) and int(held) == x
    else:
        kept = (
            held == x
            or (x != x and held != held)
            or (math.isfinite(x) and math.isfinite(held) and held != 0.0)
        )
    if not kept:
        raise Lost(f"{x!r} would be {held} as {dtype.name}, as the tensor beside it is")
    return held


def _range(dtype: ir.DataType) -> tuple[int, int]:
    bits = dtype.bitwidth
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if dtype.is_signed() else (0, 2**bits - 1)
