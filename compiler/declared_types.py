"""Types and shapes that a model declares for its inputs and outputs, read, mended and compared.

Exporters write shapes that say nothing: sizes of zero, no shape at all, names made up for one axis.
What says nothing is dropped, and what a library infers from the operators takes its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import onnx

Dim = int | str | None


def dims(info: Any) -> list[Dim] | None:
    """Sizes, names, and None for what has neither; None as a whole: the rank is not known."""
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return [
        d.dim_param or (d.dim_value if d.HasField("dim_value") else None) for d in tensor.shape.dim
    ]


def write(info: Any, shape: list[Dim]) -> None:
    """Replace the shape."""
    tensor = info.type.tensor_type
    tensor.ClearField("shape")
    tensor.shape.SetInParent()
    for dim in shape:
        added = tensor.shape.dim.add()
        if isinstance(dim, int):
            added.dim_value = dim
        elif dim is not None:
            added.dim_param = dim


def element_type(info: Any) -> int:
    """Of a tensor; 0: not known, or no tensor."""
    return int(info.type.tensor_type.elem_type)


def fits(a: Any, b: Any) -> bool:
    """Whether nothing that both declare says that they differ."""
    if not element_type(a) or element_type(a) != element_type(b):
        return False
    one, two = dims(a), dims(b)
    if one is None or two is None:
        return True
    return len(one) == len(two) and not any(
        isinstance(x, int) and isinstance(y, int) and x != y for x, y in zip(one, two, strict=True)
    )


def equal(a: Any, b: Any) -> bool:
    """Whether both declare the same, and all of it."""
    shape = dims(a)
    if shape is None or None in shape or element_type(a) != element_type(b):
        return False
    return shape == dims(b)


def size(info: Any) -> str:
    """Bytes of a value, as a number or a product with names."""
    kind = element_type(info)
    item = onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize if kind else 1
    shape = dims(info)
    if shape is None:
        return "an unknown number of"
    names = [str(d) if d is not None else "?" for d in shape if not isinstance(d, int)]
    for dim in shape:
        item *= dim if isinstance(dim, int) else 1
    return " * ".join([str(item), *names])


def inferred(proto: Any) -> dict[str, Any]:
    """What follows from inputs and operators, whatever else the model declares; by name."""
    bare = onnx.ModelProto.FromString(proto.SerializeToString())
    bare.graph.ClearField("value_info")
    for info in _infos(bare.graph):
        info.type.tensor_type.ClearField("shape")
    inputs = {v.name for v in bare.graph.input}  # an initializer of one is only its default
    constants = [t for t in bare.graph.initializer if t.name not in inputs]
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(constants)
    try:
        bare = onnx.shape_inference.infer_shapes(bare, data_prop=True)
    except onnx.shape_inference.InferenceError:
        return {}  # the model contradicts itself: nothing follows
    return {v.name: v for v in (*bare.graph.output, *bare.graph.value_info)}


def mend(proto: Any, found: Mapping[str, Any]) -> None:
    """Drop what says nothing, and write what is ``inferred`` from the operators instead."""
    for info in _infos(proto.graph):
        shape = dims(info)
        if shape is not None and 0 in shape:
            info.type.tensor_type.ClearField("shape")
    for info in (*proto.graph.output, *proto.graph.value_info):
        better, declared = found.get(info.name), dims(info)
        known = None if better is None else dims(better)
        if not known or (declared is not None and None not in declared):
            continue
        if declared is None or len(declared) == len(known):
            info.type.tensor_type.elem_type = element_type(better)
            write(info, [None if _made_up(d) else d for d in known])


def _made_up(dim: Dim) -> bool:
    """Names that onnx's inference gives to sizes that nobody has named, and sizes of zero."""
    return dim == 0 or (isinstance(dim, str) and dim.startswith("unk__"))


def _infos(graph: Any) -> Iterator[Any]:
    """Declarations of values that nodes make; inputs are left to ``unify``."""
    yield from graph.output
    yield from graph.value_info
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _infos(attribute.g)


def unify(root: Any, output: Any, capacity: str | None) -> None:
    """Give an output and its root one shape: sizes win over names, names over nothing.

    Args:
        root: declaration of the input.
        output: declaration of the output.
        capacity: name for an axis that both name differently; None: the root's name stays.
    """
    one, two = dims(root), dims(output)
    if one is None and two is None:
        return
    given = one if one is not None else two
    other = two if two is not None else given
    assert given is not None and other is not None
    if len(given) != len(other):
        return  # the analysis says what is wrong
    shape: list[Dim] = []
    for axis, (x, y) in enumerate(zip(given, other, strict=True)):
        x, y = x or None, y or None  # a size of zero says nothing
        if isinstance(x, int) and isinstance(y, int) and x != y:
            return
        if isinstance(x, int) or isinstance(y, int):
            shape.append(x if isinstance(x, int) else y)
        elif x is not None and y is not None and x != y and capacity is not None:
            shape.append(capacity)
        else:
            shape.append(x or y or f"{root.name}_dim_{axis}")
    write(root, shape)
    output.type.CopyFrom(root.type)
