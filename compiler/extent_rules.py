"""What operators do to sizes, where shape inference gives up.

onnx's inference does not solve the -1 of a Reshape, and everything behind it becomes unknown. The
rules here follow such sizes through the operators that stand between an input and a cache; they may
give up too, and must not guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import onnx_ir as ir

from onnx_inplace.compiler import control, sizes
from onnx_inplace.compiler.sizes import Partial, Size


class Known(Protocol):
    """What a rule may ask."""

    def partial(self, value: ir.Value) -> Partial | None:
        """Sizes of a value, as far as they are known."""

    def integers(self, value: ir.Value | None) -> Partial | None:
        """Elements of a vector of integers, as far as they are known."""

    def integer(self, value: ir.Value | None) -> Size | None:
        """The one integer that a value holds."""

    def affine(self, value: ir.Value) -> tuple[ir.Value, Size] | None:
        """A value as an integer graph input plus one number."""


Rule = Callable[[ir.Node, Known], Sequence["Partial | None"]]


def results(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    """Shapes of a node's outputs; fewer than outputs, or None, where no rule tells."""
    rule = _RULES.get((node.domain, node.op_type))
    if rule is None:
        return ()
    try:
        return rule(node, known)
    except (ArithmeticError, LookupError, ValueError):
        return ()  # axes that an input of this rank has not: no valid node, the library refuses it


def _input(node: ir.Node, known: Known, port: int = 0) -> Partial | None:
    value = node.inputs[port] if port < len(node.inputs) else None
    return None if value is None else known.partial(value)


def integer(node: ir.Node, name: str, default: int | None = None) -> int | None:
    """An attribute."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _parameter(node: ir.Node, known: Known, name: str = "axes") -> list[int] | None:
    """The second input or an attribute, if it is a constant."""
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        found = known.integers(node.inputs[1])
        if found is None or not all(isinstance(n, int) for n in found):
            return None
        return [n for n in found if isinstance(n, int)]
    return list(node.attributes[name].as_ints()) if name in node.attributes else None


def _same(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    return (_input(node, known),)


def _broadcast(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    shapes = [known.partial(v) for v in node.inputs if v is not None]
    found = [shape for shape in shapes if shape is not None]
    if len(found) != len(shapes):
        return ()
    rank = max(map(len, found))
    padded = [(1,) * (rank - len(shape)) + shape for shape in found]
    return (tuple(_common(column) for column in zip(*padded, strict=True)),)


def _common(column: tuple[Size | None, ...]) -> Size | None:
    """The size that sizes broadcast to. A size other than 1 is the result, whatever the rest is."""
    wide = {size for size in column if size != 1}
    fixed = [size for size in wide if isinstance(size, int)]
    if fixed:
        return fixed[0]
    if len(wide) == 1:
        return wide.pop()
    return None if wide else 1


def _reshape(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    before = _input(node, known)
    target = known.integers(node.inputs[1]) if len(node.inputs) > 1 else None
    if target is None or integer(node, "allowzero"):
        return ()
    after: list[Size | None] = []
    for k, size in enumerate(target):
        if size != 0:
            after.append(size)
        else:
            after.append(before[k] if before is not None and k < len(before) else None)
    if -1 in after:
        at = after.index(-1)
        total = sizes.whole(before)
        others = sizes.whole((*after[:at], *after[at + 1 :]))
        after[at] = None
        if total is not None and others is not None:
            after[at] = sizes.operation("//", sizes.product(total), sizes.product(others))
    return (tuple(after),)


def _squeeze(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    before, axes = _input(node, known), _parameter(node, known)
    if before is None or axes is None:
        return ()  # without axes: every axis of size 1, whichever these are
    gone = {a % len(before) for a in axes}
    return (tuple(s for k, s in enumerate(before) if k not in gone),)


def _unsqueeze(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    before, axes = _input(node, known), _parameter(node, known)
    if before is None or axes is None:
        return ()
    rank = len(before) + len(axes)
    new, old = {a % rank for a in axes}, iter(before)
    return (tuple(1 if k in new else next(old) for k in range(rank)),)


def _flatten(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    before, axis = _input(node, known), integer(node, "axis", 1)
    if before is None or axis is None:
        return ()
    axis = axis if axis >= 0 else axis + len(before)
    halves = [sizes.whole(before[:axis]), sizes.whole(before[axis:])]
    return (tuple(None if half is None else sizes.product(half) for half in halves),)


def _transpose(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    before = _input(node, known)
    if before is None:
        return ()
    if "perm" not in node.attributes:
        return (before[::-1],)
    return (tuple(before[k] for k in node.attributes["perm"].as_ints()),)


def _matmul(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    left, right = _input(node, known), _input(node, known, 1)
    if left is None or right is None or min(len(left), len(right)) < 2:
        return ()
    rank = max(len(left), len(right))
    padded = [(1,) * (rank - len(s)) + s[:-2] for s in (left, right)]
    batch = tuple(_common(column) for column in zip(*padded, strict=True))
    return ((*batch, left[-2], right[-1]),)


def _matmul_nbits(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    before, width = _input(node, known), integer(node, "N")
    return () if before is None else ((*before[:-1], width),)


def _split(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    before, axis = _input(node, known), integer(node, "axis", 0)
    if before is None or axis is None:
        return ()
    given = _parameter(node, known, "split")
    axis %= len(before)
    size, count = before[axis], len(node.outputs)
    even = size // count if isinstance(size, int) and size % count == 0 else None
    by_size = len(node.inputs) > 1 and node.inputs[1] is not None
    parts: Sequence[int | None] = given or [None if by_size else even] * count
    return [(*before[:axis], part, *before[axis + 1 :]) for part in parts]


def _concat(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    shapes = [known.partial(v) for v in node.inputs if v is not None]
    found, axis = [s for s in shapes if s is not None], integer(node, "axis")
    if axis is None or len(found) != len(shapes):
        return ()
    axis %= len(found[0])
    total: Size | None = 0
    for shape in found:
        size = shape[axis]
        total = None if total is None or size is None else sizes.operation("+", total, size)
    rest = [next((s for s in column if s is not None), None) for column in zip(*found, strict=True)]
    return ((*rest[:axis], total, *rest[axis + 1 :]),)


def _gather(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    data, indices, axis = _input(node, known), _input(node, known, 1), integer(node, "axis", 0)
    if data is None or indices is None or axis is None:
        return ()
    axis %= len(data)
    return ((*data[:axis], *indices, *data[axis + 1 :]),)


def _reduce(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    before, axes = _input(node, known), _parameter(node, known)
    if before is None or axes is None:
        return ()
    gone = {a % len(before) for a in axes}
    if integer(node, "keepdims", 1):
        return (tuple(1 if k in gone else s for k, s in enumerate(before)),)
    return (tuple(s for k, s in enumerate(before) if k not in gone),)


def _attention(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    query, value = _input(node, known), _input(node, known, 2)
    if query is None or value is None or len(query) != 4 or len(value) != 4:
        return ()
    return ((*query[:3], value[3]),)


def _page_gather(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    page, ids = _input(node, known), _input(node, known, 1)
    if page is None or ids is None or len(page) != 4:
        return ()
    halves, heads, size, width = page
    if not ids:
        return (page,)
    blocks = ids[-1]
    tokens = None if blocks is None or size is None else sizes.operation("*", blocks, size)
    return ((halves, *ids[:-1], heads, tokens, width),)


def _convolution(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    """How often the kernel fits into each axis."""
    before, kernel = _input(node, known), _input(node, known, 1)
    if before is None or kernel is None or "auto_pad" in node.attributes:
        return ()
    axes = len(before) - 2

    def numbers(name: str, count: int, default: int) -> Sequence[int]:
        found = node.attributes.get(name)
        return [default] * count if found is None else found.as_ints()

    pads = numbers("pads", 2 * axes, 0)
    after: list[Size | None] = [before[0], kernel[0]]
    for k, stride, dilation in zip(
        range(axes), numbers("strides", axes, 1), numbers("dilations", axes, 1), strict=True
    ):
        size, width = before[k + 2], kernel[k + 2]
        if size is None or not isinstance(width, int):
            after.append(None)
            continue
        room = sizes.operation("+", size, pads[k] + pads[k + axes] - dilation * (width - 1) - 1)
        after.append(sizes.operation("+", sizes.operation("//", room, stride), 1))
    return (tuple(after),)


def _scan(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    """What is stacked: one element a round, as many rounds as the sequences have elements."""
    ports = control.ports(node)
    lengths = []
    for k, (whole, _) in enumerate(ports.scanned):
        shape, axis = known.partial(whole), _scan_axis(node, "input", k)
        lengths.append(None if shape is None else shape[axis])
    length = next((size for size in lengths if size is not None), None)
    found: list[Partial | None] = [None] * len(ports.carried)
    for k, (element, _) in enumerate(ports.stacked):
        shape = known.partial(element)
        if shape is None:
            found.append(None)
            continue
        axis = _scan_axis(node, "output", k) % (len(shape) + 1)
        found.append((*shape[:axis], length, *shape[axis:]))
    return found


def _scan_axis(node: ir.Node, what: str, k: int) -> int:
    axes = node.attributes.get(f"scan_{what}_axes")
    return 0 if axes is None else axes.as_ints()[k]


def _range(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    """From a number to one that is so much larger, in steps of one."""
    start, end, step = node.inputs
    if start is None or end is None or known.integer(step) != 1:
        return ()
    first, last = known.integer(start), known.integer(end)
    if first is None or last is None:
        one, other = known.affine(start), known.affine(end)
        if one is None or other is None or one[0] is not other[0]:
            return ()
        first, last = one[1], other[1]
    length = sizes.operation("-", last, first)
    return ((length,),) if sizes.covers(length, 0) else ()


def _slice(node: ir.Node, known: Known) -> Sequence[Partial | None]:
    """Axes that are not sliced keep their size."""
    before, starts = _input(node, known), _input(node, known, 1)
    if before is None or starts is None or not isinstance(starts[0], int):
        return ()
    axes: Sequence[Size | None] | None = range(starts[0])
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        axes = known.integers(node.inputs[3])
    if axes is None or not all(isinstance(axis, int) for axis in axes):
        return ()
    sliced = {axis % len(before) for axis in axes if isinstance(axis, int)}
    return (tuple(None if k in sliced else size for k, size in enumerate(before)),)


_SAME = (
    *("Identity", "Cast", "CastLike", "Abs", "Neg", "Relu", "Sigmoid", "Tanh", "Exp", "Log"),
    *("Sqrt", "Erf", "Gelu", "Sin", "Cos", "Floor", "Ceil", "Round", "Clip", "Not", "Sign"),
    *("Reciprocal", "Softplus", "Elu", "LeakyRelu", "HardSigmoid", "HardSwish", "Swish", "Mish"),
    *("Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "RotaryEmbedding"),
    *("CumSum", "Trilu", "Dropout", "IsNaN", "IsInf"),
)
_BROADCAST = (
    *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "Sum", "Mean", "And", "Or", "Xor"),
    *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Where", "PRelu"),
    *("BitwiseAnd", "BitwiseOr", "BitwiseXor"),
)
_REDUCE = (
    *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare"),
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"),
)
_MICROSOFT_SAME = (
    *("RotaryEmbedding", "Gelu", "FastGelu", "QuickGelu", "BiasGelu", "SkipLayerNormalization"),
    *("SkipSimplifiedLayerNormalization",),
)

_RULES: dict[tuple[str, str], Rule] = {
    **{("", name): _same for name in _SAME},
    **{("", name): _broadcast for name in _BROADCAST},
    **{("", name): _reduce for name in _REDUCE},
    **{("com.microsoft", name): _same for name in _MICROSOFT_SAME},
    ("", "SimplifiedLayerNormalization"): _same,
    ("onnx_inplace", "Copy"): _same,
    ("onnx_inplace", "PagedAttention"): _same,
    ("onnx_inplace", "PageGather"): _page_gather,
    ("", "Reshape"): _reshape,
    ("", "Squeeze"): _squeeze,
    ("", "Unsqueeze"): _unsqueeze,
    ("", "Flatten"): _flatten,
    ("", "Transpose"): _transpose,
    ("", "MatMul"): _matmul,
    ("com.microsoft", "MatMulNBits"): _matmul_nbits,
    ("", "Split"): _split,
    ("", "Slice"): _slice,
    ("", "Concat"): _concat,
    ("", "Gather"): _gather,
    ("", "Attention"): _attention,
    ("", "Range"): _range,
    ("", "Scan"): _scan,
    ("", "Conv"): _convolution,
}
