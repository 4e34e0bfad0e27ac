"""What the verifier asks of lives and buffers: none ends, or shares bytes, while it is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from onnx_inplace.compiler.steps import Block, Storage, Value


@dataclasses.dataclass
class Frame:
    """A block that is being followed: where it stands, and the last reads of its own values."""

    block: Block
    index: int = -1
    fills: dict[int, int] = dataclasses.field(default_factory=dict)
    reads: dict[int, int] = dataclasses.field(default_factory=dict)


def short_lives(values: Sequence[Value], frame: Frame) -> Iterator[str]:
    """Values of a block that the plan says to be dead while they were seen to be needed."""
    stated = frame.block.lifetimes
    for slot, index in frame.fills.items():
        last = max(frame.reads.get(slot, index), index)
        if slot not in stated:
            yield f"{_name(values, slot)} has no lifetime"
        elif stated[slot][0] > index or stated[slot][1] < last:
            lives = f"lives from {index} to {last}, stated {stated[slot]}"
            yield f"{_name(values, slot)} {lives}"
    for slot in stated.keys() - frame.fills.keys():
        yield f"{_name(values, slot)} has a lifetime in a block that does not fill it"


def shared(
    values: Sequence[Value],
    frames: Sequence[Frame],
    layouts: Sequence[Mapping[int, tuple[int, int]]],
) -> Iterator[str]:
    """Of each block: buffers that are missing, and pairs that share bytes while both are alive."""
    for frame, layout in zip(frames, layouts, strict=True):
        buffers = {s for s in frame.fills if values[s].storage is Storage.BUFFER}
        if buffers != set(layout):
            yield f"the arena has {sorted(layout)}, buffers are {sorted(buffers)}"
        alive: list[tuple[int, int, int, int]] = []  # last step, begin, end, slot
        for first, slot in sorted((frame.fills[s], s) for s in buffers & set(layout)):
            begin, end = layout[slot]
            alive = [other for other in alive if other[0] >= first]
            for _, low, high, other in alive:
                if max(begin, low) < min(end, high):
                    yield f"{_name(values, other)} and {_name(values, slot)} share bytes"
            alive.append((frame.reads.get(slot, first), begin, end, slot))


def _name(values: Sequence[Value], slot: int) -> str:
    return f"`{values[slot].name}` (slot {slot})"
