"""The nodes of a sub-session as the library executes them: rewritten, and in its order.

The library (onnxruntime) computes constants when it loads, makes one node of some pairs, puts casts
around what it cannot compute in float16, and orders nodes by a search from the results backwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import onnx_ir as ir

from onnx_inplace.compiler import flat, library_kernels, sizes
from onnx_inplace.compiler.extents import Extents
from onnx_inplace.compiler.sizes import Size

SizeOf = Callable[[ir.Value], Size]


@dataclasses.dataclass(eq=False, slots=True)
class Tensor:
    """A value of the library.

    Attributes:
        size: in bytes.
        shape: sizes, and the bits of an element; None where the library cannot know them.
        bound: it stands outside: what enters, what leaves, or a weight.
        constant: a weight, or computed from weights alone.
        half: its elements are float16.
    """

    size: Size
    shape: tuple[Size, ...] | None
    bound: bool
    constant: bool = False
    half: bool = False

    def widened(self) -> Tensor:
        """The same in float32."""
        shape = None if self.shape is None else (*self.shape[:-1], 32)
        return Tensor(sizes.operation("*", 2, self.size), shape, False)


@dataclasses.dataclass(eq=False, slots=True)
class Operation:
    """A node of the library.

    Attributes:
        node: where it comes from: the last node of what was fused.
        op_type: of what it became.
        inputs: tensors that it reads, also those that its bodies take from outside.
        outputs: tensors that it makes.
        index: its number in the library's graph.
    """

    node: ir.Node
    op_type: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    index: int


def executed(
    nodes: Sequence[ir.Node], kept: Collection[ir.Value], known: Extents, size_of: SizeOf
) -> list[Operation]:
    """What the library executes for a sub-session that makes ``kept``, in its order."""
    return _ordered(_widened(_fused(_read(nodes, kept, known, size_of))))


def _read(
    nodes: Sequence[ir.Node], kept: Collection[ir.Value], known: Extents, size_of: SizeOf
) -> list[Operation]:
    made = {v for node in nodes for v in node.outputs}
    tensors = {
        value: Tensor(0, None, True, value.is_initializer(), _is_half(value))
        for node in nodes
        for value in flat.captures(node)
        if value not in made
    }
    operations: list[Operation] = []
    for node in nodes:
        inputs = [tensors[v] for v in flat.captures(node)]
        constant = all(t.constant for t in inputs) if inputs else node.op_type == "Constant"
        outputs = [v for v in node.outputs if v.name]
        for value in outputs:
            bound = value in kept or constant
            size = 0 if bound else size_of(value)
            shape = _shape(value, known)
            tensors[value] = Tensor(size, shape, bound, constant, _is_half(value))
        if not constant:
            made_here = [tensors[v] for v in outputs]
            operations.append(Operation(node, _type(node), inputs, made_here, len(operations)))
    return operations


def _type(node: ir.Node) -> str:
    """A Cast to the type that the value has is none."""
    source = node.inputs[0] if node.inputs else None
    keeps = node.op_type == "Cast" and source is not None and source.dtype == node.outputs[0].dtype
    return "Identity" if keeps else node.op_type


def _shape(value: ir.Value, known: Extents) -> tuple[Size, ...] | None:
    shape = known.shape(value)
    if shape is None or value.dtype is None or value.dtype == ir.DataType.STRING:
        return None
    return (*shape, value.dtype.bitwidth)


def _is_half(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.FLOAT16


def _readers(operations: Sequence[Operation]) -> dict[Tensor, list[Operation]]:
    readers: dict[Tensor, list[Operation]] = {}
    for operation in operations:
        for tensor in dict.fromkeys(operation.inputs):
            readers.setdefault(tensor, []).append(operation)
    return readers


def _fused(operations: list[Operation]) -> list[Operation]:
    """Pairs that the library makes one node of: what passed between them is never stored."""
    readers = _readers(operations)
    gone: set[Operation] = set()
    for operation in operations:
        follower = _only_reader(operation, readers)
        if follower is None or not _is_pair(operation, follower):
            continue
        others = [t for t in follower.inputs if t is not operation.outputs[0]]
        follower.inputs = list(dict.fromkeys([*operation.inputs, *others]))
        follower.op_type = _becomes(operation, follower)
        follower.index = len(operations) + len(gone)
        gone.add(operation)
        for tensor in operation.inputs:
            without = [r for r in readers[tensor] if r is not operation and r is not follower]
            readers[tensor] = [*without, follower]
    return [operation for operation in operations if operation not in gone]


def _becomes(operation: Operation, follower: Operation) -> str:
    if operation.op_type == "Sigmoid":
        return "QuickGelu"
    bias = operation.op_type == "MatMul" and follower.op_type == "Add"
    flat_bias = bias and _rank(follower.outputs[0]) == 2
    return "Gemm" if flat_bias or operation.op_type == "Gemm" else "MatMul"


def _rank(tensor: Tensor) -> int:
    return -1 if tensor.shape is None else len(tensor.shape) - 1


def _only_reader(operation: Operation, readers: dict[Tensor, list[Operation]]) -> Operation | None:
    if len(operation.outputs) != 1 or operation.outputs[0].bound:
        return None
    found = readers.get(operation.outputs[0], [])
    return found[0] if len(found) == 1 else None


def _is_pair(operation: Operation, follower: Operation) -> bool:
    others = [t for t in follower.inputs if t is not operation.outputs[0]]
    match operation.op_type, follower.op_type:
        case "Sigmoid", "Mul":  # x * sigmoid(x)
            return others == operation.inputs
        case "MatMul", "Add":  # a bias: of matrices any value of the result's shape
            if len(others) != 1:
                return False
            same = _rank(follower.outputs[0]) == 2 and others[0].shape == follower.outputs[0].shape
            return same or (others[0].constant and operation.inputs[-1].constant)
        case "Gemm", "Relu" | "Sigmoid" | "Tanh":
            return True
        case "MatMul", "Mul" | "Div":  # a scale
            return len(others) == 1 and others[0].constant and _has_scalar(follower.node)
        case "Transpose", "MatMul":
            return _swaps_the_last(operation.node)
    return False


def _has_scalar(node: ir.Node) -> bool:
    constants = (v.const_value for v in node.inputs if v is not None)
    return any(tensor is not None and tensor.size == 1 for tensor in constants)


def _swaps_the_last(node: ir.Node) -> bool:
    source = node.inputs[0]
    if "perm" not in node.attributes:
        return source is not None and source.shape is not None and len(source.shape) == 2
    perm = list(node.attributes["perm"].as_ints())
    return perm == [*range(len(perm) - 2), len(perm) - 1, len(perm) - 2]


def _widened(operations: list[Operation]) -> list[Operation]:
    """Casts around what no kernel computes in float16; where two would meet, there is none.

    That holds for casts of the author too: what is cast to float16 and only read by operators that
    compute in float32 stays as it is.
    """
    wide = {
        operation
        for operation in operations
        if operation.op_type not in library_kernels.HALF
        and any(tensor.half for tensor in (*operation.inputs, *operation.outputs))
    }
    readers = _readers(operations)
    result: list[Operation] = []
    casts: dict[Tensor, Tensor] = {}  # the same in float32

    def cast(node: ir.Node, source: Tensor, target: Tensor) -> None:
        result.append(Operation(node, "Cast", [source], [target], len(operations) + len(result)))

    def stays_wide(tensor: Tensor) -> bool:
        found = readers.get(tensor, [])
        return not tensor.bound and all(r in wide or r.op_type == "Cast" for r in found)

    for operation in operations:
        if operation.op_type == "Cast":
            source, target = operation.inputs[0], operation.outputs[0]
            if target.half and not source.half and wide and stays_wide(target):
                casts[target] = target.widened()
                operation.op_type, operation.outputs = "Identity", [casts[target]]
            elif source in casts and operation.node.outputs[0].dtype == ir.DataType.FLOAT:
                operation.op_type, operation.inputs = "Identity", [casts[source]]
        if operation not in wide:
            result.append(operation)
            continue
        for k, tensor in enumerate(operation.inputs):
            if not tensor.half or tensor.constant:
                continue
            if tensor not in casts:
                casts[tensor] = tensor.widened()
                cast(operation.node, tensor, casts[tensor])
            operation.inputs[k] = casts[tensor]
        narrow = [tensor for tensor in operation.outputs if tensor.half]
        result.append(operation)
        for tensor in narrow:
            casts[tensor] = tensor.widened()
            operation.outputs[operation.outputs.index(tensor)] = casts[tensor]
            if not stays_wide(tensor):
                cast(operation.node, casts[tensor], tensor)
    return result


def _ordered(operations: list[Operation]) -> list[Operation]:
    """From the results backwards; of several inputs the one with the highest number first."""
    maker = {tensor: operation for operation in operations for tensor in operation.outputs}
    read = {tensor for operation in operations for tensor in operation.inputs}
    leaves = [o for o in operations if not any(tensor in read for tensor in o.outputs)]
    order: list[Operation] = []
    seen: set[Operation] = set()
    stack = [(operation, False) for operation in sorted(leaves, key=_number)]
    while stack:
        operation, done = stack.pop()
        if done:
            order.append(operation)
        elif operation not in seen:
            seen.add(operation)
            stack.append((operation, True))
            before = {maker[t] for t in operation.inputs if t in maker} - seen
            stack += [(o, False) for o in sorted(before, key=_number)]
    return order


def _number(operation: Operation) -> int:
    return operation.index
