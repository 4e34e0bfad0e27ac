"""What the author's code sees of a value: it records, and Python cannot decide on it."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import onnx_ir as ir

from onnx_inplace.dsl import arithmetic, indexing, operations, recorder, structures
from onnx_inplace.dsl.signatures import Operator


class Operand(abc.ABC):
    """What can stand where a tensor is wanted: a tensor, a weight, what a loop stacked."""

    __slots__ = ()
    __array_ufunc__ = None  # numpy leaves operators to us
    __hash__ = object.__hash__

    @property
    @abc.abstractmethod
    def value(self) -> ir.Value:
        """The value in the graph that is being recorded."""

    # -- what Python would decide

    def __bool__(self) -> bool:
        """Note a fault: a tensor has no content while the graph is built."""
        recorder.current().fault(
            f"Python decides on the tensor {recorder.called(self.value)} here. Only if, for, "
            "while, and, or, not and comparisons in the text of a @model or @function can.",
            repair="Decide there, pass the decision in as a Python value, or use op.Where.",
        )
        return False

    def __index__(self) -> int:
        """Fault: the number is not known."""
        recorder.current().stop(
            f"{recorder.called(self.value)} is a tensor, and a Python number is wanted here; "
            "its value is known only when the model runs."
        )

    __int__ = __index__

    def __float__(self) -> float:
        """Fault: the number is not known."""
        return self.__index__()

    def __len__(self) -> int:
        """Fault: a length may not be known."""
        recorder.current().stop(
            f"{recorder.called(self.value)} is a tensor: use `.shape[0]` where the length is "
            "declared, op.Shape else."
        )

    def __iter__(self) -> Iterator[Any]:
        """Fault: how often is not known."""
        recorder.current().stop(
            f"{recorder.called(self.value)} is one tensor: loop over `range(n)`, or over "
            "`scan(...)`. If its operator has several results, `_outputs=3` says how many."
        )

    def __contains__(self, x: object) -> bool:
        """Fault: the content is not known."""
        recorder.current().stop(
            f"{recorder.called(self.value)} is a tensor: Python cannot search it."
        )

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        """Fault: numpy cannot compute on it."""
        recorder.current().stop(
            f"{recorder.called(self.value)} is a tensor: use op.* instead of numpy."
        )

    def __array_function__(self, f: Any, *args: object) -> NoReturn:
        """Fault: numpy cannot compute on it."""
        recorder.current().stop(f"numpy.{f.__name__} of a tensor: use op.* instead.")

    def __setitem__(self, key: object, value: object) -> None:
        """Fault: tensors are values."""
        recorder.current().fault(
            f"{recorder.called(self.value)} is a tensor, and tensors are values: items cannot "
            "be assigned.",
            repair="Write into a cache with kv.CacheUpdate, or make a new tensor with "
            "op.ScatterND or op.Where.",
        )

    # -- what is known

    @property
    def dtype(self) -> ir.DataType | None:
        """The element type, if it is known."""
        return self.value.dtype

    @property
    def shape(self) -> tuple[int | str | None, ...] | None:
        """Dimensions: numbers, names, or None; None for all: the rank is not known."""
        shape = self.value.shape
        return None if shape is None else tuple(d if isinstance(d, int) else d.value for d in shape)

    @property
    def rank(self) -> int | None:
        """The number of dimensions, if it is known."""
        shape = self.value.shape
        return None if shape is None else shape.rank()

    def __repr__(self) -> str:
        dtype = "?" if self.dtype is None else self.dtype.name
        shape = "" if self.shape is None else list(self.shape)
        return f"Tensor({recorder.called(self.value)}: {dtype}{shape})"

    # -- what records

    def __getitem__(self, key: Any) -> Tensor:
        key = tuple(map(_plain_key, key)) if isinstance(key, tuple) else _plain_key(key)
        return Tensor(indexing.index(self.value, key))

    def __pos__(self) -> Operand:
        return self

    def __neg__(self) -> Tensor:
        return Tensor(operations.standard("Neg", self.value))

    def __abs__(self) -> Tensor:
        return Tensor(operations.standard("Abs", self.value))

    def __invert__(self) -> Tensor:
        return Tensor(arithmetic.invert(self.value))

    def __add__(self, other: Any) -> Tensor:
        return _binary("add", self, other)

    def __radd__(self, other: Any) -> Tensor:
        return _binary("add", other, self)

    def __sub__(self, other: Any) -> Tensor:
        return _binary("sub", self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return _binary("sub", other, self)

    def __mul__(self, other: Any) -> Tensor:
        return _binary("mul", self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return _binary("mul", other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return _binary("truediv", self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return _binary("truediv", other, self)

    def __floordiv__(self, other: Any) -> Tensor:
        return _binary("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return _binary("floordiv", other, self)

    def __mod__(self, other: Any) -> Tensor:
        return _binary("mod", self, other)

    def __rmod__(self, other: Any) -> Tensor:
        return _binary("mod", other, self)

    def __pow__(self, other: Any) -> Tensor:
        return _binary("pow", self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return _binary("pow", other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return _binary("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return _binary("matmul", other, self)

    def __and__(self, other: Any) -> Tensor:
        return _binary("and", self, other)

    def __rand__(self, other: Any) -> Tensor:
        return _binary("and", other, self)

    def __or__(self, other: Any) -> Tensor:
        return _binary("or", self, other)

    def __ror__(self, other: Any) -> Tensor:
        return _binary("or", other, self)

    def __xor__(self, other: Any) -> Tensor:
        return _binary("xor", self, other)

    def __rxor__(self, other: Any) -> Tensor:
        return _binary("xor", other, self)

    def __lt__(self, other: Any) -> Tensor:
        return _binary("lt", self, other)

    def __le__(self, other: Any) -> Tensor:
        return _binary("le", self, other)

    def __gt__(self, other: Any) -> Tensor:
        return _binary("gt", self, other)

    def __ge__(self, other: Any) -> Tensor:
        return _binary("ge", self, other)

    def __eq__(self, other: Any) -> Tensor:  # type: ignore[override]
        return _binary("eq", self, other)

    def __ne__(self, other: Any) -> Tensor:  # type: ignore[override]
        return _binary("ne", self, other)


class Tensor(Operand):
    """A value of the graph."""

    __slots__ = ("_value",)

    def __init__(self, value: ir.Value) -> None:
        self._value = value

    @property
    def value(self) -> ir.Value:
        """The value in the graph that is being recorded."""
        return self._value


def _binary(name: str, a: Any, b: Any) -> Tensor:
    if not all(map(_can_be_operand, (a, b))):
        return NotImplemented  # type: ignore[no-any-return]
    return Tensor(arithmetic.binary(name, plain(a), plain(b)))


def _can_be_operand(x: Any) -> bool:
    return isinstance(x, Operand) or structures.is_number_or_array(x) or isinstance(x, list | tuple)


def _plain_key(key: Any) -> Any:
    if isinstance(key, slice):
        return slice(plain(key.start), plain(key.stop), plain(key.step))
    return plain(key)


def plain(x: Any) -> Any:
    """Operands as values, also inside of lists; all else as it is."""
    if isinstance(x, Operand):
        return x.value
    if isinstance(x, list | tuple) and any(isinstance(e, Operand) for e in x):
        return [plain(e) for e in x]
    return x


def wrap(values: Sequence[ir.Value]) -> Any:
    """One tensor, or a tuple of them."""
    return Tensor(values[0]) if len(values) == 1 else tuple(map(Tensor, values))


def call(
    operator: Operator,
    inputs: Sequence[Any],
    attributes: Mapping[str, Any],
    outputs: int | None = None,
    types: operations.Types = (),
) -> Any:
    """Record ``operator`` on what the author's code has in hand."""
    plain_attributes = {k: plain(v) for k, v in attributes.items()}
    results = operations.apply(
        operator, [plain(x) for x in inputs], plain_attributes, outputs, types
    )
    return wrap(results)
