"""A conversation that watches its own steps: the clock, and whether the caches stay."""

import time
from collections.abc import Sequence

from generate import Conversation

from onnx_inplace import Session
from onnx_inplace.runner.outputs import Outputs


class Measured(Conversation):
    """A conversation and what its steps took. The first step is the prompt."""

    def __init__(self, session: Session, max_length: int) -> None:
        """Allocate caches for ``max_length`` tokens."""
        super().__init__(session, max_length)
        self.seconds: list[float] = []  # of each step
        self.copied = 0  # [bytes] of caches that came back in other memory than the one lent

    def run(self, tokens: Sequence[int]) -> Outputs:
        """Append tokens."""
        start = time.perf_counter()
        outputs = super().run(tokens)
        self.seconds.append(time.perf_counter() - start)
        returned = zip(list(outputs)[1:], self.caches, strict=True)
        self.copied += sum(new.nbytes for new, lent in returned if new is not lent)
        return outputs

    def report(self) -> str:
        """What the steps took."""
        prompt, *decoding = self.seconds
        size = sum(cache.nbytes for cache in self.caches)
        speed = len(decoding) / sum(decoding) if decoding else 0.0
        return (
            f"{len(decoding)} tokens, {speed:.1f} tokens/s"
            f" (prompt: {self.length - len(decoding)} tokens in {prompt:.2f} s)\n"
            f"caches: {size:,} bytes; bytes allocated for caches during decoding: {self.copied}"
        )
