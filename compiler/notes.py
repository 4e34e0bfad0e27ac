"""What a plan tells its reader beside the steps, each with the author's line where it is known."""

from __future__ import annotations

import dataclasses

from onnx_inplace.compiler.errors import Location


@dataclasses.dataclass(frozen=True, slots=True)
class Copied:
    """A value that a step copies out of a root, or that ``Copy`` makes of any other value."""

    value: str
    root: str | None
    reason: str
    location: Location | None

    def __str__(self) -> str:
        return f"`{self.value}` is a copy of `{self.root or 'a value'}`: {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True)
class Fallback:
    """A node that reads a whole root, capacity included, because the library executes it."""

    node: str
    root: str
    location: Location | None

    def __str__(self) -> str:
        return f"{self.node} reads the whole capacity of `{self.root}`"


@dataclasses.dataclass(frozen=True, slots=True)
class Condition:
    """What must hold of the inputs of a run: it is proved to, or a run checks it first."""

    text: str
    root: str
    location: Location | None

    def __str__(self) -> str:
        return self.text
