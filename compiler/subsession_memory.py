"""What the library holds inside of a sub-session, node by node.

The library (onnxruntime) is deterministic: it writes some results over inputs that nobody else
reads, keeps a dead value for the next one of the same shape, and frees the rest as soon as it is
dead. This module repeats these decisions on sizes, in the order of ``subsession_graph``; what
kernels take beside their results is in ``library_kernels``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir

from onnx_inplace.compiler import control, library_kernels, subsession_graph
from onnx_inplace.compiler.extents import Extents
from onnx_inplace.compiler.memory import Allocations
from onnx_inplace.compiler.sizes import Size
from onnx_inplace.compiler.subsession_graph import Operation, SizeOf, Tensor


class Simulation:
    """The sub-sessions of one model.

    Counted is what is allocated inside: without what enters and leaves, and without weights.

    Attributes:
        estimates: operators whose kernels may take memory that is not counted.
    """

    def __init__(self, known: Extents, size_of: SizeOf):
        """``size_of``: bytes of a value."""
        self.estimates: dict[str, None] = {}
        self._known, self._size_of = known, size_of

    def workspace(
        self, nodes: Sequence[ir.Node], kept: Collection[ir.Value]
    ) -> tuple[Allocations, ...]:
        """What is allocated at each node of a sub-session that makes ``kept``, each once."""
        operations = subsession_graph.executed(nodes, kept, self._known, self._size_of)
        buffers = _Buffers(operations)
        found: dict[Allocations, None] = {(): None}
        for index, operation in enumerate(operations):
            alive = [*buffers.alive(index), *self._beside(operation)]
            for inside in self._bodies(operation):
                together = (size for size in (*alive, *inside) if size != 0)
                found[tuple(sorted(together, key=str))] = None
        return tuple(found)

    def _beside(self, operation: Operation) -> tuple[Size, ...]:
        node = operation.node
        if operation.op_type != node.op_type:  # fused, or a cast: they take none
            return ()
        workspace = library_kernels.workspace(node, self._known)
        if workspace is None or node.op_type in library_kernels.ESTIMATED:
            self.estimates[node.op_type] = None
        return workspace or ()

    def _bodies(self, operation: Operation) -> tuple[Allocations, ...]:
        """Of what a node executes inside; how often does not matter."""
        bodies = control.bodies(operation.node)
        return tuple(a for body in bodies for a in self.workspace(list(body), ())) or ((),)


class _Buffers:
    """Which value stands in whose memory, and from when to when that is allocated."""

    def __init__(self, operations: Sequence[Operation]):
        self._life: dict[Tensor, tuple[int, int]] = {}
        self._holder: dict[Tensor, Tensor] = {}
        self._uses: dict[Tensor, int] = {}
        self._free: list[Tensor] = []
        for operation in operations:
            for tensor in operation.inputs:
                self._uses[tensor] = self._uses.get(tensor, 0) + 1
        for index, operation in enumerate(operations):
            for tensor in operation.outputs:
                self._place(tensor, operation, index)
            for tensor in (*operation.inputs, *operation.outputs):
                self._extend(self._of(tensor), index)
            for tensor in operation.inputs:
                holder = self._of(tensor)
                self._uses[holder] -= 1
                self._release(holder)
            for tensor in operation.outputs:
                if not self._uses.get(tensor, 0):
                    self._release(self._of(tensor))

    def alive(self, index: int) -> Iterator[Size]:
        """Sizes of what is allocated while an operation runs."""
        return (t.size for t, (first, last) in self._life.items() if first <= index <= last)

    def _of(self, tensor: Tensor) -> Tensor:
        return self._holder.get(tensor, tensor)

    def _place(self, tensor: Tensor, operation: Operation, index: int) -> None:
        if tensor.bound:
            return
        holder = self._taken_over(tensor, operation)
        if holder is None:
            self._life[tensor] = index, index
            return
        self._holder[tensor] = holder
        self._uses[holder] = self._uses.get(holder, 0) + self._uses.get(tensor, 0)

    def _taken_over(self, tensor: Tensor, operation: Operation) -> Tensor | None:
        """Whose memory a result is written to; None: it gets its own."""
        if operation.inputs and operation.outputs[0] is tensor:
            source = operation.inputs[0]
            holder = self._of(source)
            if operation.op_type in library_kernels.SHARES:
                return holder
            alone = holder in self._life and self._uses[holder] == 1
            if operation.op_type in library_kernels.OVERWRITES and alone and _alike(source, tensor):
                return holder
        for dead in self._free:
            if _alike(dead, tensor):
                self._free.remove(dead)
                return dead
        return None

    def _extend(self, holder: Tensor, index: int) -> None:
        if holder in self._life:
            self._life[holder] = self._life[holder][0], index

    def _release(self, holder: Tensor) -> None:
        if holder in self._life and not self._uses.get(holder, 0):
            self._free.insert(0, holder)


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape is not None and one.shape == other.shape
