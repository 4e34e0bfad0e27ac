"""What stands between a product and attention, shared by kv heads instead of done by one thread.

Templates write it in the steps of the model: turn all heads, convert them, copy some into the
caches, attend, convert again. Here these instructions become others with the same results, to the
bit: queries are turned to where attention reads them, keys and values go straight into the caches.
Each thread then does all of a kv head, so that none has to wait for another one from the product
before attention to the conversion behind it.

Only for one new token of one sequence. What is written elsewhere, or read by somebody else as well,
stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx_inplace.numba_kernels.floats import BFLOAT16, FLOAT16, FLOAT32, SIZES
from onnx_inplace.numba_kernels.fused import moves
from onnx_inplace.numba_kernels.fused import rotary as turning
from onnx_inplace.numba_kernels.fused.moves import Move, Tokens, Widen
from onnx_inplace.numba_kernels.fused.rotary import Rotary
from onnx_inplace.runner.fused.instruction import Instruction, Range, meet

KERNELS = turning.rotary, moves.widening
"""What instructions by kv heads call."""


def share(instructions: Sequence[Instruction], kept: Sequence[Range]) -> list[Instruction]:
    """The same instructions, those around attention by kv heads.

    Args:
        instructions: in order.
        kept: bytes that are looked at after a run.
    """
    code = _Code(instructions, kept)
    for attention in [i for i in instructions if i.units and hasattr(i.block, "query")]:
        block: Any = attention.block
        for cache in (block.key, block.value):
            _write_by_heads(code, attention, cache)
        _turn_queries(code, attention)
        _widen_by_heads(code, attention)
    code.drop_orphans()
    return code.instructions


class _Code:
    """Instructions that are being rewritten."""

    def __init__(self, instructions: Sequence[Instruction], kept: Sequence[Range]):
        self.instructions = list(instructions)
        self._kept = tuple(kept)
        self._orphans: list[Instruction] = []

    def at(self, instruction: Instruction) -> int:
        """Its place."""
        return next(k for k, i in enumerate(self.instructions) if i is instruction)

    def maker(self, reader: Instruction, range_: Range) -> Instruction | None:
        """The one instruction that wrote all that ``reader`` finds in a range; None: several."""
        for i in reversed(self.instructions[: self.at(reader)]):
            if meet(i.writes, (range_,)):
                whole = any(w[0] <= range_[0] and range_[1] <= w[1] for w in i.writes)
                return i if whole else None
        return None

    def readers(self, maker: Instruction, range_: Range) -> list[Instruction] | None:
        """Who reads a range as ``maker`` left it; None where that cannot be told."""
        found = []
        for i in self.instructions[self.at(maker) + 1 :]:
            if meet(i.reads, (range_,)):
                found.append(i)
            if any(w[0] <= range_[0] and range_[1] <= w[1] for w in i.writes):
                return found
        return None if meet(self._kept, (range_,)) else found

    def still(self, maker: Instruction, reader: Instruction, ranges: Sequence[Range]) -> bool:
        """Whether nobody writes to the ranges behind ``maker`` and before ``reader``."""
        between = self.instructions[self.at(maker) + 1 : self.at(reader)]
        return not any(meet(i.writes, ranges) for i in between)

    def unread(self, maker: Instruction, reader: Instruction, range_: Range) -> bool:
        """Whether nobody reads a range behind ``maker`` and before ``reader``."""
        between = self.instructions[self.at(maker) + 1 : self.at(reader)]
        return not any(meet(i.reads, (range_,)) for i in between)

    def replace(self, old: Instruction, new: Instruction) -> None:
        """Another instruction in its place."""
        self.instructions[self.at(old)] = new

    def remove(self, instruction: Instruction) -> None:
        """Nobody needs it any more."""
        del self.instructions[self.at(instruction)]

    def orphan(self, instruction: Instruction) -> None:
        """Perhaps nobody reads what it writes any more."""
        self._orphans.append(instruction)

    def drop_orphans(self) -> None:
        """Leave out the orphans that indeed nobody reads, and those that only they have read."""
        dropped = True
        while dropped:
            left = [o for o in self._orphans if any(i is o for i in self.instructions)]
            unread = [o for o in left if self.readers(o, o.writes[0]) == []]
            dropped = bool(unread)
            if unread:
                self.remove(unread[0])


def _write_by_heads(code: _Code, attention: Instruction, cache: int) -> None:
    """Tokens of one cache: from where they were computed, each head by the thread that reads it."""
    update = code.maker(attention, (cache, cache + 1))
    if update is None or not isinstance(update.block, Tokens):
        return
    t = update.block
    one_token = t.rows == attention.units and t.length == 1 and t.values_row == t.token
    if t.cache != cache or not one_token:
        return
    values = t.values, t.values + t.rows * t.token
    move = code.maker(update, values)
    m = _conversion(move, from_float=True)
    if move is None or m is None:
        return
    numbers = t.token // SIZES[m.target_kind]
    begin = m.source + (t.values - m.target) // SIZES[m.target_kind] * SIZES[FLOAT32]
    source = begin, begin + t.rows * numbers * SIZES[FLOAT32]
    if numbers > turning.LARGEST_HEAD or not code.still(move, update, [source]):
        return
    output = {
        "output": cache,
        "kind": m.target_kind,
        "output_head": t.capacity * t.token,
        "output_token": t.token,
        "position": t.position,
        "capacity": t.capacity if t.circular else 0,
        "units": t.rows,
    }
    position = tuple(r for r in update.reads if not meet([r], [values]))
    turned = _turned(code, move, update, source, t.rows, numbers)
    if turned is None:
        size = numbers * SIZES[FLOAT32]
        fields = dict.fromkeys(Rotary._fields, 0) | output
        fields |= {"input": begin, "batch": 1, "heads": t.rows, "tokens": 1, "size": numbers}
        fields |= {"layout": turning.PLAIN, "input_head": size, "input_token": size}
        new, reads = Rotary(**fields), (source, *position)
    else:
        new, reads = turned[0]._replace(**output), (*turned[1], *position)
    code.replace(update, _by_heads(new, reads, update.writes))
    code.orphan(move)


def _turned(
    code: _Code, move: Instruction, user: Instruction, source: Range, heads: int, size: int
) -> tuple[Rotary, tuple[Range, ...]] | None:
    """The rotation of just the heads in ``source``, and what it reads; None: there is none."""
    maker = code.maker(move, source)
    if maker is None or not isinstance(maker.block, Rotary):
        return None
    r, row = maker.block, size * SIZES[FLOAT32]
    if (r.batch, r.tokens, r.size, r.kind, r.output_head) != (1, 1, size, FLOAT32, row):
        return None
    first = (source[0] - r.output) // row
    begin = r.input + first * r.input_head
    input_ = begin, begin + (heads - 1) * r.input_head + row
    angles = [(a, a + r.half * SIZES[FLOAT32]) for a in (r.cos, r.sin)]
    if source[0] != r.output + first * row or r.input_head < row:
        return None
    if not code.still(maker, user, [input_, *angles]) or meet([input_], maker.writes):
        return None
    code.orphan(maker)
    return r._replace(input=begin, heads=heads), (input_, *angles)


def _turn_queries(code: _Code, attention: Instruction) -> None:
    """Queries are turned to where attention reads them."""
    block: Any = attention.block
    assert attention.units is not None
    query = next(r for r in attention.reads if r[0] == block.query)
    move = code.maker(attention, query)
    m = _conversion(move, from_float=True)
    if move is None or m is None:
        return
    if m.target != query[0] or not _alone(attention, code.readers(move, move.writes[0])):
        return
    maker = code.maker(move, (m.source, m.source + 1))
    if maker is None or not isinstance(maker.block, Rotary) or maker.block.output != m.source:
        return
    if not _alone(move, code.readers(maker, maker.writes[0])):
        return
    if not code.unread(maker, move, query) or not code.still(maker, move, [query]):
        return
    size = SIZES[m.target_kind] * maker.block.size
    heads, rest = divmod(query[1] - query[0], size)
    source = m.source, m.source + heads * maker.block.size * SIZES[FLOAT32]
    turned = _turned(code, move, maker, source, heads, maker.block.size)
    if turned is None or rest or heads % attention.units:
        return
    new = turned[0]._replace(
        output=query[0],
        kind=m.target_kind,
        output_head=size,
        output_token=size,
        units=attention.units,
    )
    code.replace(maker, _by_heads(new, turned[1], (query,)))
    code.remove(move)


def _widen_by_heads(code: _Code, attention: Instruction) -> None:
    """The result of attention is converted by the threads that made it."""
    block: Any = attention.block
    (result,) = attention.writes
    readers = code.readers(attention, result) or []
    for move in readers:
        m = _conversion(move, from_float=False)
        if m is None or move.reads != (result,):
            continue
        if m.source != block.output or m.d5 % attention.units:
            continue
        new = Widen(m.source, m.target, m.d5, m.source_kind, attention.units)
        code.replace(
            move,
            Instruction(
                moves.widening.ready().address,
                new,
                False,
                move.reads,
                move.writes,
                units=attention.units,
            ),
        )


def _alone(one: Instruction, found: Sequence[Instruction] | None) -> bool:
    return found is not None and len(found) == 1 and found[0] is one


def _conversion(instruction: Instruction | None, *, from_float: bool) -> Move | None:
    """The block, if it converts numbers side by side, from or to float32."""
    if instruction is None or not isinstance(instruction.block, Move):
        return None
    m = instruction.block
    if (m.d0, m.d1, m.d2, m.d3, m.d4) != (1, 1, 1, 1, 1):
        return None
    wide, narrow = (m.source_kind, m.s5), (m.target_kind, m.t5)
    if not from_float:
        wide, narrow = narrow, wide
    halves = [(FLOAT16, 2), (BFLOAT16, 2)]
    return m if wide == (FLOAT32, 4) and narrow in halves else None


def _by_heads(block: Rotary, reads: Sequence[Range], writes: Sequence[Range]) -> Instruction:
    return Instruction(
        turning.rotary.ready().address,
        block,
        False,
        tuple(reads),
        tuple(writes),
        units=block.units,
    )
