"""Where the accidents of a random program come from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from hypothesis import strategies as st


class Choices(Protocol):
    """Where the program's accidents come from."""

    def below(self, count: int) -> int:
        """A number from 0 to ``count - 1``; small numbers are the plain choices."""


class Seeded:
    """Choices of a pseudo-random generator: fast, and repeated by the seed alone."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, count: int) -> int:
        return self._random.randrange(count)


class Drawn:
    """Choices that hypothesis makes, and shrinks."""

    def __init__(self, draw: Callable[[st.SearchStrategy[int]], int]) -> None:
        self._draw = draw

    def below(self, count: int) -> int:
        return self._draw(st.integers(0, count - 1))
