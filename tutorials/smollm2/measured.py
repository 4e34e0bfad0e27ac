"""A conversation that is watched: the clock, and whether the caches stay."""

import time
from collections.abc import Iterator, Sequence

from generate import Conversation, continuation
from paged import PagedConversation

from onnx_inplace.runner.outputs import Outputs


class Measured:
    """A conversation and what its steps took. The first step is the prompt."""

    def __init__(self, conversation: Conversation | PagedConversation) -> None:
        """Nothing has run yet."""
        self.conversation = conversation
        self.seconds: list[float] = []  # of each step
        self.copied = 0  # [bytes] of caches that came back in other memory than the one lent

    def run(self, tokens: Sequence[int]) -> Outputs:
        """Append tokens."""
        start = time.perf_counter()
        outputs = self.conversation.run(tokens)
        self.seconds.append(time.perf_counter() - start)
        returned = zip(list(outputs)[1:], self.conversation.caches, strict=True)
        self.copied += sum(new.nbytes for new, lent in returned if new is not lent)
        return outputs

    def generate(self, prompt: Sequence[int], limit: int, end: int | None = None) -> Iterator[int]:
        """The most likely tokens after ``prompt``."""
        return continuation(self.run, prompt, limit, end)

    def report(self) -> str:
        """What the steps took."""
        prompt, *decoding = self.seconds
        size = sum(cache.nbytes for cache in self.conversation.caches)
        speed = len(decoding) / sum(decoding) if decoding else 0.0
        text = (
            f"{len(decoding)} tokens, {speed:.1f} tokens/s"
            f" (prompt: {self.conversation.length - len(decoding)} tokens in {prompt:.2f} s)\n"
            f"caches: {size:,} bytes; bytes "
        )
        if isinstance(self.conversation, Conversation):
            return text + f"allocated for caches during decoding: {self.copied}"
        formats = ", ".join(f"{n} {name}" for name, n in self.conversation.formats().items())
        return text + f"copied: {self.copied}; pages: {formats}"
