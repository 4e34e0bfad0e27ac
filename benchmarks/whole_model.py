"""How far a decoder of fused steps is from float32 numpy: SmolLM2-135M, one token a run.

Teacher forced over the first 512 tokens of the GPL-3 and of CPython's argparse.py: mean KL
divergence of the next token's distribution, its 99th percentile, perplexity, and how often the most
likely token is the same one. Products in float32 ("exact") or with inputs in 8 bits ("fast"), which
is what ``decode.py`` times; caches in float16, or pages of INT8.

    python benchmarks/whole_model.py                    all; fails where a mean is above 0.006
    python benchmarks/whole_model.py --fuse off         the same by onnxruntime's steps
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tutorials" / "smollm2")]

import accuracy  # noqa: E402
import generate  # noqa: E402
import paged  # noqa: E402
import teacher  # noqa: E402
import weights  # noqa: E402
from config import SMOLLM2_135M  # noqa: E402
from decoder import Precision  # noqa: E402
from policies import PAGE_SIZE  # noqa: E402

from onnx_inplace import Session  # noqa: E402

TOKENS = 512
BOUND = 0.006
CACHES = {"float16": "float16", "INT8": generate.PAGED}
PIECE = 64  # tokens whose distributions are held at once

Conversation = generate.Conversation | paged.PagedConversation


def expected(tokens: list[int]) -> list[teacher.Array]:
    """Log probabilities of the reference, [``PIECE``, vocabulary] at a time."""
    whole = -(-len(tokens) // PAGE_SIZE) * PAGE_SIZE  # what follows changes nothing before it
    reference = teacher.Teacher(SMOLLM2_135M, weights.gguf_path())
    hidden = reference.hidden(tokens + [0] * (whole - len(tokens)), teacher.exact(PAGE_SIZE))
    return list(reference.log_probabilities(hidden[: len(tokens)], PIECE))


def converse(session: Session, cache: str, length: int) -> Conversation:
    """A conversation of up to ``length`` tokens."""
    if cache == "INT8":
        return paged.PagedConversation(session, length, tiers=None, first_format="INT8")
    return generate.Conversation(session, length)


def decoded(conversation: Conversation, tokens: list[int]) -> Iterator[teacher.Array]:
    """What ``expected`` gives, of a conversation that is given one token after the other."""
    for begin in range(0, len(tokens), PIECE):
        rows = [conversation.run([t])["logits"][0].copy() for t in tokens[begin : begin + PIECE]]
        yield teacher.log_softmax(np.stack(rows))


def main() -> None:
    """Print the table, and whether each bound holds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", choices=accuracy.TEXTS, action="append", help="default: both")
    parser.add_argument("--fuse", choices=["auto", "off"], default="auto")
    options = parser.parse_args()
    failed = False
    for text in options.text or accuracy.TEXTS:
        tokens = accuracy.read_text(text)[:TOKENS]
        print(f"\n{f'{text}, the first {TOKENS}, fuse={options.fuse}':<34}{accuracy.HEADER}")
        reference = expected(tokens)
        for precision in Precision:
            for cache in CACHES:
                start = time.perf_counter()
                path = generate.compiled(precision, CACHES[cache])
                conversation = converse(Session(path, fuse=options.fuse), cache, TOKENS)
                found = accuracy.measure(reference, decoded(conversation, tokens), tokens)
                holds = found.divergence <= BOUND
                failed |= not holds
                name = f"{precision.name.lower()}, {cache} caches"
                took = time.perf_counter() - start
                said = "holds" if holds else f"FAILS: at most {BOUND}"
                print(f"{name:<34}{found}   {said} ({took:.0f} s)", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
