"""Several operations that are done as one: products and what follows them, in fused steps.

What a graph writes in several nodes is one operation already (``rewriting``).

* ``MatMulNBits(x) + ReduceSum(Reshape(x)) @ remainder``: 4-bit weights whose blocks have a minimum
  of their own. One product with exact minima.
* ``Silu(gate) * up`` and ``Gelu(gate) * up``: the gate of a feed-forward.
* what follows a product element by element: a bias, an activation, a gate, a residual. The product
  does it before its result leaves the registers: ``fused.DOMAIN::Product``.

A pattern is joined only where nothing else uses what stands between its operations, and where none
of them reads storage of the caller that is written before the last one.

``Product(x, residual)`` has the attributes ``matrices``: its products as operations of the model,
one, or a gate and what it gates; ``biases``: values, one for each matrix, or None; ``activation``:
"" or the name of an operator; ``gate``: whether the activation of the first half of the result is
multiplied by the second half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from types import MappingProxyType

from onnx_inplace.compiler import fused
from onnx_inplace.compiler.fused import FusedValue, Operation

_ACTIVATIONS = {"Silu", "Gelu", "GeluTanh", "Relu", "Tanh", "Sigmoid"}
_GATES = {"Silu", "Gelu", "GeluTanh"}
_GROUP = 16  # outputs of which gate and what it gates take turns


def join(
    operations: Sequence[Operation], values: Sequence[FusedValue], leaving: Collection[int]
) -> list[Operation]:
    """The operations, those of a pattern as one, which stands where the last of them stood."""
    found = list(operations)
    for pattern in (
        _corrected,
        _named,
        _gated,
        _product,
        _biased,
        _gated_halves,
        _gated_pair,
        _activated,
        _residual,
    ):
        found = _apply(pattern, found, values, leaving)
    return found


class _Uses:
    """Who makes and who reads a value."""

    def __init__(
        self,
        operations: Sequence[Operation],
        values: Sequence[FusedValue],
        leaving: Collection[int],
    ):
        self.values = values
        self.maker = {v: o for o in operations for v in o.outputs if v is not None}
        self.count: dict[int, int] = dict.fromkeys(leaving, 1)
        for o in operations:
            for v in o.inputs:
                if v is not None:
                    self.count[v] = self.count.get(v, 0) + 1

    def made_by(self, value: int | None, op_type: str, domain: str = "") -> Operation | None:
        """The operation that makes a value which is used once, if it has this type."""
        if value is None or self.count.get(value) != 1:
            return None
        maker = self.maker.get(value)
        return maker if maker is not None and _is(maker, op_type, domain) else None

    def product(self, value: int | None) -> Operation | None:
        """The product that makes a value which is used once, if nothing follows it yet."""
        maker = self.made_by(value, "Product", fused.DOMAIN)
        if maker is None or maker.inputs[1] is not None or maker.attributes["activation"]:
            return None
        return maker

    def shape(self, value: int | None) -> object:
        """Sizes of a value."""
        return None if value is None else self.values[value].shape

    def columns(self, value: int | None) -> object:
        """The last size of a value."""
        shape = None if value is None else self.values[value].shape
        return shape[-1] if shape else None


def _is(o: Operation, op_type: str, domain: str = "") -> bool:
    return (o.domain, o.op_type) == (domain, op_type)


_Match = tuple[Operation, tuple[Operation, ...]]
"""What stands for a pattern, and its operations but the last."""


def _apply(
    pattern: Callable[[Operation, _Uses], _Match | None],
    operations: Sequence[Operation],
    values: Sequence[FusedValue],
    leaving: Collection[int],
) -> list[Operation]:
    uses = _Uses(operations, values, leaving)
    gone: set[int] = set()
    made: dict[int, Operation] = {}
    for k, o in enumerate(operations):
        match = pattern(o, uses)
        if match is None or any(id(part) in gone or id(part) in made for part in match[1]):
            continue
        if _reads_late(match[1], operations[:k], values):
            continue
        made[id(o)] = match[0]
        gone |= {id(part) for part in match[1]}
    return [made.get(id(o), o) for o in operations if id(o) not in gone]


def _reads_late(
    parts: Sequence[Operation], before: Sequence[Operation], values: Sequence[FusedValue]
) -> bool:
    """Whether ``parts``, if they stood behind ``before``, would read what was overwritten since."""
    written: set[str | None] = set()
    left = {id(part) for part in parts}
    for o in reversed(before):
        if id(o) in left:
            left.discard(id(o))
            if any(v is not None and values[v].root in written for v in o.inputs):
                return True
        if not left:
            break  # what stands before all of them matters to none
        if o.writes:
            written.update(o.roots.values())
    return False


def _made(
    o: Operation, op_type: str, inputs: tuple[int | None, ...], **attributes: object
) -> Operation:
    return dataclasses.replace(
        o,
        domain=fused.DOMAIN,
        op_type=op_type,
        version=1,
        inputs=inputs,
        attributes=MappingProxyType(attributes),
    )


def _after(o: Operation, product: Operation, **changes: object) -> Operation:
    """A product that also does what ``o`` does."""
    attributes = MappingProxyType({**product.attributes, **changes})
    return dataclasses.replace(product, outputs=o.outputs, attributes=attributes)


def _corrected(add: Operation, uses: _Uses) -> _Match | None:
    if not _is(add, "Add"):
        return None
    for quantized_at, correction_at in (add.inputs, add.inputs[::-1]):
        product = uses.made_by(quantized_at, "MatMulNBits", "com.microsoft")
        correction = uses.made_by(correction_at, "MatMul")
        if product is None or correction is None or len(product.inputs) > 4:
            continue
        sums = uses.made_by(correction.inputs[0], "ReduceSum")
        blocks = None if sums is None else uses.made_by(sums.inputs[0], "Reshape")
        if sums is None or blocks is None or blocks.inputs[0] != product.inputs[0]:
            continue
        size = product.attributes["block_size"]
        if not _sums_blocks(sums, blocks, uses, product.attributes["K"] // size, size):
            continue
        remainder = correction.inputs[1]
        if remainder is None or uses.values[remainder].constant is None:
            continue
        inputs = (*product.inputs, *[None] * (4 - len(product.inputs)), remainder)
        made = _made(add, "CorrectedProduct", inputs, **product.attributes)
        return made, (product, correction, sums, blocks)
    return None


def _sums_blocks(sums: Operation, blocks: Operation, uses: _Uses, count: int, size: int) -> bool:
    """Whether the last axis is summed, block by block."""
    source = uses.values[blocks.inputs[0] or 0].shape
    shape = uses.values[blocks.outputs[0] or 0].shape
    reduced = uses.values[sums.outputs[0] or 0].shape
    if source is None or shape is None or reduced is None:
        return False
    if shape != (*source[:-1], count, size) or reduced != shape[:-1]:
        return False
    axes = sums.inputs[1] if len(sums.inputs) > 1 else None
    content = None if axes is None else uses.values[axes].content
    return content in ((len(shape) - 1,), (-1,)) and not sums.attributes.get("keepdims", 1)


def _named(o: Operation, uses: _Uses) -> _Match | None:
    """Activations that have several names."""
    if _is(o, "Swish") and o.attributes.get("alpha", 1.0) == 1.0:
        return _made(o, "Silu", o.inputs[:1]), ()
    if _is(o, "QuickGelu", "com.microsoft") and o.attributes.get("alpha", 1.702) == 1.0:
        return _made(o, "Silu", o.inputs[:1]), ()
    if _is(o, "Gelu") or _is(o, "Gelu", "com.microsoft"):
        tanh = o.attributes.get("approximate", "none") in ("tanh", b"tanh")
        return _made(o, "GeluTanh" if tanh else "Gelu", o.inputs[:1]), ()
    if _is(o, "FastGelu", "com.microsoft") and o.inputs[1:] in ((), (None,)):
        return _made(o, "GeluTanh", o.inputs[:1]), ()
    if o.domain == "" and o.op_type in ("Relu", "Tanh", "Sigmoid"):
        return _made(o, o.op_type, o.inputs), ()
    return None


def _gated(mul: Operation, uses: _Uses) -> _Match | None:
    """``activation(gate) * up`` of one shape."""
    if not _is(mul, "Mul"):
        return None
    for activated, up in (mul.inputs, mul.inputs[::-1]):
        for name in _GATES:
            activation = uses.made_by(activated, name, fused.DOMAIN)
            if activation is None or up is None or up == activated:
                continue
            gate = activation.inputs[0]
            if uses.shape(gate) is not None and uses.shape(gate) == uses.shape(up):
                return _made(mul, "Gated", (gate, up), activation=name), (activation,)
    return None


def _product(o: Operation, uses: _Uses) -> _Match | None:
    """Products as one kind, so that what follows is recognised once."""
    of_bits = _is(o, "MatMulNBits", "com.microsoft") or _is(o, "CorrectedProduct", fused.DOMAIN)
    if of_bits:
        bias = o.inputs[5] if len(o.inputs) > 5 else None
    elif _is(o, "Gemm"):
        bias = o.inputs[2] if len(o.inputs) > 2 else None
    elif _is(o, "MatMul"):
        bias = None
    else:
        return None
    inputs = (o.inputs[0], None)
    made = _made(o, "Product", inputs, matrices=(o,), biases=(bias,), activation="", gate=False)
    return made, ()


def _biased(add: Operation, uses: _Uses) -> _Match | None:
    if not _is(add, "Add"):
        return None
    for source, bias in (add.inputs, add.inputs[::-1]):
        product = uses.product(source)
        if product is None or bias is None or product.attributes["biases"] != (None,):
            continue
        value = uses.values[bias]
        columns = uses.columns(source)
        if value.constant is None or value.shape is None or uses.shape(source) is None:
            continue
        if value.shape == (*[1] * (len(value.shape) - 1), columns) and len(value.shape) <= len(
            uses.values[source or 0].shape or ()
        ):
            return _after(add, product, biases=(bias,)), (product,)
    return None


def _gated_halves(o: Operation, uses: _Uses) -> _Match | None:
    """One product makes gate and what it gates."""
    if not _is(o, "Gated", fused.DOMAIN):
        return None
    gate, up = o.inputs
    split = uses.made_by(gate, "Split")
    if split is None or uses.made_by(up, "Split") is not split or split.outputs != (gate, up):
        return None
    product, source = uses.product(split.inputs[0]), uses.shape(split.inputs[0])
    columns = uses.columns(gate)
    rank = len(source) if isinstance(source, tuple) else 0
    if product is None or split.attributes.get("axis", 0) not in (-1, rank - 1):
        return None
    if columns != uses.columns(up) or not isinstance(columns, int) or columns % _GROUP:
        return None
    return _after(o, product, activation=o.attributes["activation"], gate=True), (product, split)


def _gated_pair(o: Operation, uses: _Uses) -> _Match | None:
    """Two products of one kind make gate and what it gates."""
    if not _is(o, "Gated", fused.DOMAIN):
        return None
    first, second = (uses.product(k) for k in o.inputs)
    columns = uses.columns(o.inputs[0])
    if first is None or second is None or first is second or first.inputs != second.inputs:
        return None
    if not isinstance(columns, int) or columns % _GROUP or not _alike(first, second):
        return None
    a, b = first.attributes, second.attributes
    made = _after(
        o,
        first,
        matrices=a["matrices"] + b["matrices"],
        biases=a["biases"] + b["biases"],
        activation=o.attributes["activation"],
        gate=True,
    )
    return made, (first, second)


def _alike(a: Operation, b: Operation) -> bool:
    """Whether the matrices of two products can lie in one."""
    (first,), (second,) = a.attributes["matrices"], b.attributes["matrices"]
    facts = [
        [o.attributes.get(k) for k in ("bits", "K", "block_size", "accuracy_level", "transB")]
        for o in (first, second)
    ]
    return (first.domain, first.op_type, facts[0]) == (second.domain, second.op_type, facts[1])


def _activated(o: Operation, uses: _Uses) -> _Match | None:
    if o.domain != fused.DOMAIN or o.op_type not in _ACTIVATIONS:
        return None
    product = uses.product(o.inputs[0])
    return None if product is None else (_after(o, product, activation=o.op_type), (product,))


def _residual(add: Operation, uses: _Uses) -> _Match | None:
    if not _is(add, "Add"):
        return None
    for source, residual in (add.inputs, add.inputs[::-1]):
        product = uses.made_by(source, "Product", fused.DOMAIN)
        if product is None or product.inputs[1] is not None or source == residual:
            continue
        if residual is None or uses.shape(residual) != uses.shape(source):
            continue
        joined = _after(add, product)
        return dataclasses.replace(joined, inputs=(product.inputs[0], residual)), (product,)
    return None
