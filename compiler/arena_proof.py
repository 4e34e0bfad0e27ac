"""What the verifier asks of the layout of buffers: none shares bytes with one that is alive."""

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


def violations(
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
                    names = [f"`{values[s].name}` (slot {s})" for s in (other, slot)]
                    yield f"{names[0]} and {names[1]} share bytes"
            alive.append((frame.reads.get(slot, first), begin, end, slot))
