"""Where the accidents of a random program come from."""

from __future__ import annotations

import random


class Choices:
    """Choices of a pseudo-random generator: fast, and repeated by the seed alone."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, count: int) -> int:
        """A number from 0 to ``count - 1``; small numbers are the plain choices."""
        return self._random.randrange(count)
