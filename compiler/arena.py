"""Where in one piece of memory values stand that are not all alive at the same time.

The runner lays its buffers out with this function and the plan says with it what they need, so the
two cannot differ. It knows sizes and lives only.
"""

from __future__ import annotations

from collections.abc import Sequence

ALIGNMENT = 64  # [bytes] a cache line, and the widest vector register

Life = tuple[int, int]
"""First and last step of a value, both included: a step reads one value while it makes another."""


def place(wanted: Sequence[tuple[int, Life]]) -> tuple[tuple[int, ...], int]:
    """Offset of each value, given its bytes and its life; and the bytes of the whole.

    The largest value is placed first, each at the lowest offset where nothing stands that is alive
    with it.
    """
    offsets = [0] * len(wanted)
    beside: dict[int, list[tuple[int, int, int]]] = {}  # by step: begin, end, number
    total = 0
    for index in sorted(range(len(wanted)), key=lambda k: (-wanted[k][0], wanted[k][1], k)):
        size, (first, last) = wanted[index]
        room, begin = -(-size // ALIGNMENT) * ALIGNMENT, 0
        if not room:
            continue
        steps = range(first, last + 1)
        for low, high, _ in sorted({span for step in steps for span in beside.get(step, ())}):
            if low - begin >= room:
                break
            begin = max(begin, high)
        offsets[index] = begin
        for step in steps:
            beside.setdefault(step, []).append((begin, begin + room, index))
        total = max(total, begin + room)
    return tuple(offsets), total
