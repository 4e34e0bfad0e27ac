"""A conversation in pages: memory grows with the text, and old pages are stored in fewer bits."""

from collections.abc import Iterator, Sequence

import numpy as np
from config import SMOLLM2_135M
from generate import continuation
from paged_decoder import PAGE_SIZE

from onnx_inplace import PagedCache, SequencePool, Session, policy
from onnx_inplace.runner.outputs import Outputs

TIERS = policy.ByAge(
    [policy.Tier("FLOAT16", tokens=128), policy.Tier("INT8", tokens=128), policy.Tier("INT4")],
    first=1,
)
"""The newest 128 tokens and the first page in 16 bits, 128 more in 8, the rest in 4."""


class PagedConversation:
    """One paged cache a layer, and the sequence of a conversation in them."""

    def __init__(
        self,
        session: Session,
        max_length: int,
        tiers: policy.Policy | None = TIERS,
        first_format: str = "FLOAT16",
    ) -> None:
        """Caches without pages, for up to ``max_length`` tokens.

        Pages begin as ``first_format`` and age by ``tiers``.
        """
        layers = range(SMOLLM2_135M.layers)
        self.caches: list[PagedCache] = [session.allocate(f"caches.{k}") for k in layers]
        self.blocks = -(-max_length // PAGE_SIZE)  # of the block table: one shape for all runs
        self.pool = SequencePool(self.caches, first_format, max_pages=self.blocks)
        self.sequence = self.pool.new()
        self.tiers = tiers
        self.binding = session.bind(caches=self.caches)

    @property
    def length(self) -> int:
        """Tokens that the caches hold."""
        return self.sequence.length

    def run(self, tokens: Sequence[int]) -> Outputs:
        """Append tokens. What comes back starts with the logits of the next token."""
        with self.sequence.writing(len(tokens), self.blocks) as place:
            outputs = self.binding.run(
                tokens=np.array([tokens]),
                block_table=place.block_table[0],
                position=place.position[0],
            )
        filled = self.length // PAGE_SIZE > (self.length - len(tokens)) // PAGE_SIZE
        if self.tiers is not None and filled:  # tiers are whole pages
            policy.apply(self.tiers, self.pool)
        return outputs

    def generate(self, prompt: Sequence[int], limit: int, end: int | None = None) -> Iterator[int]:
        """The most likely tokens after ``prompt``: ``limit`` of them, or up to ``end``."""
        return continuation(self.run, prompt, limit, end)

    def formats(self) -> dict[str, int]:
        """How many pages of all layers are stored in which format."""
        names = [cache.page(page).quantized_type for cache in self.caches for page in cache]
        return {name: names.count(name) for name in sorted(set(names))}
