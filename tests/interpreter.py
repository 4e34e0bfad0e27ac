"""A second opinion: what a model means, in numpy, written without a line of the product.

One walk over the protobuf serves two meanings:

* `functional`: the meaning of ONNX. Every operator makes a new value; nothing that exists ever
  changes.
* `in_place`: what a machine does that follows program order and overwrites storage at every write.
  It knows no versions, so a stale read simply sees the new bytes: when that differs from the
  functional meaning, the program must have been refused.

Only the operators that ``strategies`` makes are known. Storage is told apart by memory, not by
names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import AttributeProto, numpy_helper

DOMAIN = "onnx_inplace"

Array = np.ndarray
Values = dict[str, Array]


class OutOfRange(Exception):
    """A write that does not fit: the functional meaning is not defined."""


class Undefined(OutOfRange):
    """The same in a value that nobody lent: a runtime that has no use for it may leave it out."""


class Forbidden(Exception):
    """A write into storage that nobody lent for writing."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A parsed model and its functions by identifier."""

    graph: onnx.GraphProto
    functions: Mapping[tuple[str, str, str], onnx.FunctionProto]

    @classmethod
    def parse(cls, serialized: bytes) -> Model:
        """Read a file; whatever an annotation says is ignored."""
        proto = onnx.ModelProto.FromString(serialized)
        return cls(proto.graph, {(f.domain, f.name, f.overload): f for f in proto.functions})


def functional(model: Model, inputs: Mapping[str, Array]) -> list[Array]:
    """Results of the functional meaning. Changes no array that it is given.

    Raises:
        OutOfRange: a position or an index is not in range.
    """
    return _Machine(model, {}).run(inputs)


def in_place(
    model: Model, inputs: Mapping[str, Array], storage: Mapping[str, Array]
) -> list[Array]:
    """Run in program order; writes change ``storage``, and results may be views of it.

    Raises:
        OutOfRange: a position or an index is not in range of a value in ``storage``.
        Undefined: likewise, of another value.
        Forbidden: something else than ``storage`` would be written.
    """
    return _Machine(model, {id(a): a for a in storage.values()}).run({**inputs, **storage})


def overlap(a: Array, b: Array) -> bool:
    """Whether two arrays have a byte in common."""
    return bool(np.may_share_memory(a, b)) and a.size > 0 and b.size > 0


class _Machine:
    def __init__(self, model: Model, writable: Mapping[int, Array]) -> None:
        self.model, self.in_place = model, bool(writable)
        self.writable: list[Array] = list(writable.values())

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        graph = self.model.graph
        values = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
        values.update(inputs)
        self.block(graph.node, values)
        return [values[o.name] for o in graph.output]

    def block(self, nodes: Iterable[onnx.NodeProto], values: Values) -> None:
        for node in nodes:
            for name, value in zip(node.output, self.node(node, values), strict=False):
                if name:
                    values[name] = value

    def body(
        self, graph: onnx.GraphProto, outer: Values, arguments: Sequence[Array]
    ) -> list[Array]:
        values = dict(outer)
        values.update((i.name, numpy_helper.to_array(i)) for i in graph.initializer)
        values.update((i.name, a) for i, a in zip(graph.input, arguments, strict=True))
        self.block(graph.node, values)
        return [values[o.name] for o in graph.output]

    def node(self, node: onnx.NodeProto, values: Values) -> list[Array]:
        inputs = [values[name] if name else None for name in node.input]
        attributes = {a.name: _attribute(a) for a in node.attribute}
        key = (node.domain, node.op_type)
        if key == ("", "If"):
            branch = attributes["then_branch" if inputs[0] else "else_branch"]
            return self.body(branch, values, ())
        if key == ("", "Loop"):
            return self.loop(attributes["body"], values, *inputs)
        if key == ("", "Scan"):
            return self.scan(attributes, values, inputs)
        if key in WRITES:
            return [self.write(WRITES[key], inputs, attributes)]
        function = self.model.functions.get((*key, node.overload))
        if function is not None and node.domain != DOMAIN:
            return self.call(function, inputs)
        if key in VIEWS:
            view = VIEWS[key](*inputs, **attributes)
            return [view if self.in_place else view.copy()]
        result = OPERATORS[key](*inputs, **attributes)
        return [np.array(r) for r in (result if isinstance(result, tuple) else (result,))]

    def write(self, rule: Callable[..., None], inputs: list, attributes: dict) -> Array:
        target = inputs[0]
        lent = any(overlap(target, w) for w in self.writable)
        if not lent:
            if self.in_place and rule in OWN_WRITES:
                raise Forbidden
            target = target.copy()
        try:
            rule(target, *inputs[1:], **attributes)
        except OutOfRange:
            if self.in_place and not lent:
                raise Undefined from None
            raise
        return target

    def call(self, function: onnx.FunctionProto, inputs: list[Array]) -> list[Array]:
        """A function may write what it declares: all else was lent to others."""
        values = dict(zip(function.input, inputs, strict=True))
        outer, self.writable = self.writable, list(self.writable)
        if self.in_place:
            lent = [values[name] for name in mutable_parameters(function)]
            if not all(any(overlap(a, w) for w in outer) for a in lent):
                raise Forbidden
            self.writable = lent
        self.block(function.node, values)
        self.writable = outer
        return [values[name] for name in function.output]

    def loop(self, body, values: Values, count, condition, *state) -> list[Array]:
        going = True if condition is None else bool(condition)
        carried, stacks, i = list(state), [[] for _ in body.output[1 + len(state) :]], 0
        while going and (count is None or i < int(count)):
            arguments = [np.asarray(i, np.int64), np.asarray(going), *carried]
            again, *results = self.body(body, values, arguments)
            going, carried = bool(again), results[: len(state)]
            for stack, value in zip(stacks, results[len(state) :], strict=True):
                stack.append(value.copy())
            i += 1
        return [
            *carried,
            *(_stack(s, o) for s, o in zip(stacks, body.output[1 + len(state) :], strict=True)),
        ]

    def scan(self, attributes: dict, values: Values, inputs: list[Array]) -> list[Array]:
        body, k = attributes["body"], len(inputs) - attributes["num_scan_inputs"]
        carried, sequences = list(inputs[:k]), inputs[k:]
        stacks: list[list[Array]] = [[] for _ in body.output[k:]]
        for step in range(len(sequences[0])):
            results = self.body(body, values, [*carried, *(s[step] for s in sequences)])
            carried = results[:k]
            for stack, value in zip(stacks, results[k:], strict=True):
                stack.append(value.copy())
        return [*carried, *(_stack(s, o) for s, o in zip(stacks, body.output[k:], strict=True))]


def mutable_parameters(function: onnx.FunctionProto) -> list[str]:
    """Names of the parameters that a function may write, as ``strategies`` notes them."""
    entry = next((p.value for p in function.metadata_props if p.key == "mutable"), "")
    return entry.split(",") if entry else []


def _attribute(attribute: AttributeProto):
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.type == AttributeProto.TENSOR:
        return numpy_helper.to_array(value)
    return value.decode() if isinstance(value, bytes) else value


def _stack(values: list[Array], output: onnx.ValueInfoProto) -> Array:
    if values:
        return np.stack(values)
    tensor = output.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    return np.zeros((0, *(d.dim_value for d in tensor.shape.dim)), dtype)


def _rows(position: Array, cache: Array, batch_axis: int | None) -> list[tuple[tuple, int]]:
    """(index of a row, position in it): one for a scalar, else one for each row."""
    if position.ndim == 0:
        return [((), int(position))]
    axis = batch_axis % cache.ndim
    return [((slice(None),) * axis + (slice(b, b + 1),), int(p)) for b, p in enumerate(position)]


def _update(cache, values, position, axis=-2, batch_axis=0, mode="linear") -> None:
    """CacheUpdate, TensorScatter. Checks every row before it writes one."""
    axis %= cache.ndim
    length, capacity = values.shape[axis], cache.shape[axis]
    rows = _rows(position, cache, batch_axis)
    if mode == "circular":
        if length > capacity or any(p < 0 for _, p in rows):
            raise OutOfRange
    elif not all(0 <= p <= capacity - length for _, p in rows):
        raise OutOfRange
    values = values.copy()
    for index, p in rows:
        row, new = np.moveaxis(cache[index], axis, 0), np.moveaxis(values[index], axis, 0)
        for k in range(length):
            row[(p + k) % capacity] = new[k]


def _assign(state, value) -> None:
    state[...] = value.copy()


def _reorder(cache, indices, batch_axis=0) -> None:
    if not all(0 <= i < cache.shape[batch_axis] for i in indices):
        raise OutOfRange
    cache[...] = np.take(cache, indices, batch_axis)


def _tensor_scatter(cache, update, position=None, axis=-2, mode="linear") -> None:
    position = np.zeros(cache.shape[0], np.int64) if position is None else position
    _update(cache, update, position, axis, 0, mode)


def _scatter_elements(data, indices, updates, axis=0, reduction="none") -> None:
    assert reduction == "none"
    if not all(-data.shape[axis] <= i < data.shape[axis] for i in indices.flat):
        raise OutOfRange
    np.put_along_axis(data, indices, updates.copy(), axis)


def _scatter_nd(data, indices, updates, reduction="none") -> None:
    assert reduction == "none"
    updates = updates.copy()
    for at in np.ndindex(indices.shape[:-1]):
        if not all(-n <= i < n for i, n in zip(indices[at], data.shape, strict=False)):
            raise OutOfRange
        data[tuple(indices[at])] = updates[at]


WRITES: dict[tuple[str, str], Callable[..., None]] = {
    (DOMAIN, "CacheUpdate"): _update,
    (DOMAIN, "Assign"): _assign,
    (DOMAIN, "CacheReorder"): _reorder,
    ("", "TensorScatter"): _tensor_scatter,
    ("", "ScatterElements"): _scatter_elements,
    ("", "ScatterND"): _scatter_nd,
}
OWN_WRITES = (_update, _assign, _reorder)  # standard operators may make a new value instead


def _squeeze(x, axes):
    return np.squeeze(x, tuple(int(a) for a in axes))


def _unsqueeze(x, axes):
    return np.expand_dims(x, tuple(int(a) for a in axes))


def _flatten(x, axis=1):
    return x.reshape(int(np.prod(x.shape[:axis])), -1)


VIEWS: dict[tuple[str, str], Callable[..., Array]] = {
    ("", "Identity"): lambda x: x[...],
    ("", "Reshape"): lambda x, shape: x.reshape(tuple(int(d) for d in shape)),
    ("", "Squeeze"): _squeeze,
    ("", "Unsqueeze"): _unsqueeze,
    ("", "Flatten"): _flatten,
}


def _constant(value=None, value_int=None, value_ints=None):
    if value is not None:
        return value
    return np.asarray(value_int if value_ints is None else value_ints, np.int64)


def _reduce_sum(x, axes=None, keepdims=1):
    axes = None if axes is None else tuple(int(a) for a in axes)
    return np.sum(x, axes, keepdims=bool(keepdims), dtype=x.dtype)


def _slice(x, starts, ends, axes):
    parts = [slice(None)] * x.ndim
    for start, end, axis in zip(starts, ends, axes, strict=True):
        parts[axis] = slice(int(start), int(end))
    return x[tuple(parts)]


OPERATORS: dict[tuple[str, str], Callable[..., Array]] = {
    (DOMAIN, "Copy"): lambda x: x,
    ("", "Constant"): _constant,
    ("", "Add"): np.add,
    ("", "Sub"): np.subtract,
    ("", "Mul"): np.multiply,
    ("", "Mod"): lambda x, y, fmod=0: np.fmod(x, y) if fmod else np.mod(x, y),
    ("", "Greater"): np.greater,
    ("", "Less"): np.less,
    ("", "Not"): np.logical_not,
    ("", "Gather"): lambda x, i, axis=0: np.take(x, i, axis),
    ("", "ReduceSum"): _reduce_sum,
    ("", "Concat"): lambda *x, axis: np.concatenate(x, axis),
    ("", "Transpose"): lambda x, perm: np.transpose(x, perm),
    ("", "MatMul"): np.matmul,
    ("", "Relu"): lambda x: np.maximum(x, 0),
    ("", "Neg"): np.negative,
    ("", "Abs"): np.abs,
    ("", "Cast"): lambda x, to: x.astype(onnx.helper.tensor_dtype_to_np_dtype(to)),
    ("", "Slice"): _slice,
}
