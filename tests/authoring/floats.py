"""Random programs on float32: products with weights among all that other programs do.

All numbers are integers below 2**24, so that float32 is exact in whatever order it is summed, and
every oracle agrees to the last bit. What grows is cut down at once, mostly by operators that fused
steps have, and not named again before it is.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from authoring.author import Author
from authoring.block import CAPACITY, TOKEN, WIDTH, Block, Name
from authoring.values import MODULUS

LIMIT = 100


class FloatAuthor(Author):
    """Writes one program on float32."""

    def __init__(self, choices) -> None:
        super().__init__(choices, ir.DataType.FLOAT)

    def token(self, block: Block, new: bool = False) -> Name:
        return self.product(block) if self.chance(2) else super().token(block, new)

    def product(self, block: Block) -> Name:
        """A token times a weight, perhaps with something behind it."""
        known = [n for n in block.tensors if n.shape == TOKEN and n.cache is None]
        source = self.pick(known[::-1]) if known and self.chance(2) else self.part(block)
        matrix = self.below(3**4)
        digits = [matrix // 3**k % 3 - 1 for k in range(4)]
        weight = block.numbers(np.array(digits).reshape(WIDTH, WIDTH))
        name = block.node("MatMul", [source.value, weight.value], TOKEN, hint="mm")
        name = self.small(block, name)
        if known and self.chance(2):
            inputs = [name.value, self.pick(known).value]
            name = self.small(block, block.node(self.pick(["Add", "Sub", "Mul"]), inputs, TOKEN))
        activation = self.pick([None, "Relu", "Neg", "Abs"])
        return name if activation is None else block.node(activation, [name.value], TOKEN)

    def part(self, block: Block) -> Name:
        """Tokens of a cache where they lie."""
        source = self.cache_name(block, self.pick(list(block.current)))
        at = self.below(CAPACITY)
        bounds = [block.constant(np.array([n])).value for n in (at, at + 1, 1)]
        return block.node("Slice", [source.value, *bounds], TOKEN, hint="sl")

    def small(self, block: Block, name: Name) -> Name:
        block.names.remove(name)
        if self.chance(3):
            modulus = block.numbers(np.array(MODULUS), small=False)
            return block.node("Mod", [name.value, modulus.value], name.shape, hint="z", fmod=1)
        limit = block.numbers(np.array(LIMIT), small=False)
        size = self.passing(block, "Abs", name)
        above = self.passing(block, "Sub", size, limit)
        above = self.passing(block, "Relu", above)
        return block.node("Sub", [size.value, above.value], name.shape, hint="z")

    def passing(self, block: Block, op: str, *inputs: Name) -> Name:
        """A value that nobody else reads."""
        name = block.node(op, [n.value for n in inputs], inputs[0].shape)
        block.names.remove(name)
        return name

    def bounded(self, block: Block, name: Name) -> Name:
        return self.small(block, name)

    def as_integer(self, block: Block, name: Name) -> Name:
        to = ir.DataType.INT64
        return block.node("Cast", [name.value], name.shape, kind="sum", dtype=to, to=to.value)

    def as_element(self, block: Block, name: Name) -> Name:
        to = block.element
        return block.node("Cast", [name.value], name.shape, kind="sum", dtype=to, to=to.value)
