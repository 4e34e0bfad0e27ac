"""A decoder of another shape than SmolLM2: LayerNorm, GELU, biases, learned positions.

16 layers, hidden 1,024, 16 heads of 64 numbers over 4, 4-bit weights that are random. Nothing in
the package knows of this model; a token is one fused call behind its positions, as SmolLM2's is.
Both decode in turns, so that both see the same machine. What is compared is the bytes that a token
has to read, repacked weights and the valid part of the caches, over its time.

    python benchmarks/second_model.py
    python benchmarks/second_model.py --threads 1 --position 1000 --tokens 40
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tutorials" / "smollm2"))

import competitors  # noqa: E402
import decode  # noqa: E402
import numpy as np  # noqa: E402
import second_decoder  # noqa: E402

from onnx_inplace import Session, compiler  # noqa: E402
from onnx_inplace.compiler import matrices  # noqa: E402

MAX_LENGTH = 8192


class Second:
    """The decoder of random weights, over float16 caches of random numbers."""

    def __init__(self, threads: int) -> None:
        """Load it and fill its caches."""
        self.name = "second model"
        sizes = second_decoder.Sizes()
        self.session = Session(second_decoder.decoder(sizes), threads=threads, fuse="auto")
        caches = {
            port.name: self.session.allocate(port.name, max_length=MAX_LENGTH)
            for port in self.session.mutable_inputs
        }
        random = np.random.default_rng(0)
        for cache in caches.values():
            cache[:] = 0.1 * random.standard_normal(cache.shape, np.float32)
        self.token_bytes = sum(c[:, :, :1].nbytes for c in caches.values())
        self.binding = self.session.bind(**caches)
        self.position, self.next = 0, 504

    def read(self, tokens: list[int]) -> None:
        """Append a prompt."""
        logits = self.binding.run(tokens=np.array([tokens]), position=self.position)["logits"]
        self.position += len(tokens)
        self.next = int(logits.argmax())

    def go_to(self, position: int) -> None:
        """Make ``position`` the place of the next token."""
        self.position = position

    def token(self) -> None:
        """Decode one token and choose the next."""
        self.read([self.next])


@dataclasses.dataclass(frozen=True)
class Reads:
    """Bytes that a token reads."""

    weights: int
    each: int  # of one token in all caches

    def rate(self, position: int, milliseconds: float) -> float:
        """GB/s."""
        return (self.weights + self.each * position) / milliseconds / 1e6


def main() -> None:
    """Print ms a token and GB/s of both."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--position", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=30, help="of a turn")
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()

    first, second = (
        competitors.InPlace("float16", given.threads, "auto", MAX_LENGTH),
        Second(given.threads),
    )
    caches = first.caches
    path = competitors.generate.compiled(competitors.Precision.FAST, "float16")
    reads = {
        first.name: Reads(
            matrices.nbytes(compiler.plan(path).fused), sum(c[:, :, :1].nbytes for c in caches)
        ),
        second.name: Reads(matrices.nbytes(second.session.plan.fused), second.token_bytes),
    }
    times = decode.decode([first, second], given.position, given.rounds, given.tokens)
    for name, took in times.items():
        rate = reads[name].rate(given.position, took)
        weights = reads[name].weights / 2**20
        print(f"{name}: {took:.2f} ms a token, {weights:.0f} MiB of weights, {rate:.1f} GB/s")


if __name__ == "__main__":
    main()
