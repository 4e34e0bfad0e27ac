"""What a loaded session holds of the weights, and in which forms.

A clean place for every form: one line for each in what ``weights`` returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import onnx_ir as ir

from onnx_inplace.compiler import flat, library_kernels
from onnx_inplace.compiler.steps import Block, Branch, Repeat, ScanStep, Step, SubSession, Value

GIVEN = "as the model gives them"
PACKED = "packed by onnxruntime"
COMPUTED = "computed when loaded"


def weights(
    block: Block,
    values: Sequence[Value],
    of_slot: Sequence[ir.Value],
    nodes: Mapping[int, Sequence[ir.Node]],
) -> Mapping[str, int]:
    """Bytes by form. See ``footprint.build`` for the arguments.

    What a file holds is mapped: pages of it that nothing reads any more cost nothing.
    """
    given: dict[int, int] = {}
    packed = computed = 0
    for value in of_slot:
        _add(given, value)
    for step in _steps(block):
        members = nodes.get(id(step), ())
        for value in dict.fromkeys(v for node in members for v in flat.captures(node)):
            _add(given, value)
        if isinstance(step, SubSession):
            packed += sum(library_kernels.packed(n) for n in members) if step.packs else 0
            computed += _computed(members)
    forms = {GIVEN: sum(given.values()), PACKED: packed, COMPUTED: computed}
    return MappingProxyType({form: size for form, size in forms.items() if size})


def _add(given: dict[int, int], value: ir.Value) -> None:
    tensor = value.const_value
    if value.is_initializer() and tensor is not None and tensor.dtype != ir.DataType.STRING:
        given[id(tensor)] = tensor.nbytes


def _computed(nodes: Sequence[ir.Node]) -> int:
    """What follows from weights alone is computed once, and kept where another node reads it."""
    constant: set[ir.Value] = set()
    read: set[ir.Value] = set()
    for node in nodes:
        taken = flat.captures(node)
        if taken and all(v.is_initializer() or v in constant for v in taken):
            constant.update(node.outputs)
        else:
            read.update(taken)
    return sum(_bytes(value) for value in constant & read)


def _bytes(value: ir.Value) -> int:
    if value.shape is None or value.dtype is None or not value.shape.is_static():
        return 0
    elements = 1
    for size in value.shape.numpy():
        elements *= size
    return elements * value.dtype.bitwidth // 8


def _steps(block: Block) -> Iterator[Step]:
    for step in block.steps:
        yield step
        match step:
            case Branch():
                yield from _steps(step.then)
                yield from _steps(step.otherwise)
            case Repeat() | ScanStep():
                yield from _steps(step.body)
