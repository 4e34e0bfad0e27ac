"""What a loaded session holds of the weights, and in which forms.

A clean place for every form: one line for each in what ``Resident`` says. What fused steps repack
depends on numbers, so it is found when somebody asks, once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import onnx_ir as ir

from onnx_inplace.compiler import errors, flat, library_kernels, matrices
from onnx_inplace.compiler.fused import Fusion
from onnx_inplace.compiler.steps import Block, Branch, Repeat, ScanStep, Step, SubSession, Value

GIVEN = "as the model gives them"
PACKED = "packed by onnxruntime"
COMPUTED = "computed when loaded"
REPACKED = "repacked for fused steps"

AUTO, OFF, DECODE_ONLY = "auto", "off", "decode-only"
"""What a session may be loaded with: ordinary steps and fused ones, or one of the two."""


class Resident:
    """Bytes of weights by form.

    What a file holds is mapped: pages of it that nothing reads any more cost nothing. Of a session
    with ordinary steps and fused ones everything is counted; before its first ordinary run it holds
    what one with fused steps alone does.
    """

    def __init__(
        self,
        block: Block,
        values: Sequence[Value],
        of_slot: Sequence[ir.Value],
        nodes: Mapping[int, Sequence[ir.Node]],
        fusion: Fusion,
    ):
        """See ``footprint.build`` for the arguments; ``fusion``: of the plan."""
        self._fusion = fusion
        self._ordinary = _Found()
        for value in of_slot:
            self._ordinary.add(value.const_value if value.is_initializer() else None)
        self._ordinary.steps(block, nodes)
        self._fused = _Found()
        if fusion.block is not None:
            self._fused.steps(fusion.block, nodes)
        for region in fusion.regions:
            for k in {k for o in region.operations for k in o.inputs if k is not None}:
                self._fused.add(region.values[k].constant)

    def forms(self, fuse: str) -> Mapping[str, int]:
        """Of a session that is loaded with ``fuse``.

        Raises:
            BindingError: there is no such choice.
        """
        if fuse not in (AUTO, OFF, DECODE_ONLY):
            raise errors.BindingError(
                f'fuse is {fuse!r}, not one of "{AUTO}", "{OFF}", "{DECODE_ONLY}".', "fuse"
            )
        loaded = {
            AUTO: (self._ordinary, self._fused),
            OFF: (self._ordinary,),
            DECODE_ONLY: (self._fused,),
        }[fuse]
        given = {key: size for found in loaded for key, size in found.given.items()}
        forms = {
            GIVEN: sum(given.values()),
            PACKED: sum(found.packed for found in loaded),
            COMPUTED: sum(found.computed for found in loaded),
            REPACKED: 0 if fuse == OFF else self._repacked,
        }
        return MappingProxyType({form: size for form, size in forms.items() if size})

    @functools.cached_property
    def _repacked(self) -> int:
        return matrices.nbytes(self._fusion)


class _Found:
    """What some steps read: bytes of tensors, each once, and of what is made of them."""

    def __init__(self) -> None:
        self.given: dict[int, int] = {}
        self.packed = self.computed = 0

    def add(self, tensor: ir.TensorProtocol | None) -> None:
        if tensor is not None and tensor.dtype != ir.DataType.STRING:
            self.given[id(tensor)] = tensor.nbytes

    def steps(self, block: Block, nodes: Mapping[int, Sequence[ir.Node]]) -> None:
        for step in _steps(block):
            members = nodes.get(id(step), ())
            for value in dict.fromkeys(v for node in members for v in flat.captures(node)):
                self.add(value.const_value if value.is_initializer() else None)
            if isinstance(step, SubSession):
                packs = step.packs
                self.packed += sum(library_kernels.packed(n) for n in members) if packs else 0
                self.computed += _computed(members)


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
