"""What page formats cost: SmolLM2-135M over caches that a policy keeps, against a float32 cache.

For each policy: mean KL divergence of the next token's distribution, its 99th percentile,
perplexity, how often the most likely token is the same one, and bits per element of the cache, all
included, at 2,048 and at 32,768 tokens. Texts: the first 2,048 tokens of the GPL-3 and of CPython's
argparse.py. A page is written when its tokens come, and converted from what it holds when it is
old enough. ``--by kernels`` does everything as decoding does it, ``PagedAttention`` included, but a
page of tokens a step; ``--by tokens`` one token a step, ``--by fast`` with accuracy_level=4, which
prompts do not know. With ``--by pages`` attention is numpy's in float32; ``--by specification``
takes pages of the tests' numpy specification as well.

    python benchmarks/accuracy.py                       all bounds
    python benchmarks/accuracy.py --policy INT8 --text gpl

llama.cpp's q4_0, q5_1 and q8_0 take part where llama-cpp-python is installed.
"""

import argparse
import dataclasses
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tutorials" / "smollm2"), str(ROOT / "tests")]

import paged_layers  # noqa: E402
import tokenizer  # noqa: E402
import weights  # noqa: E402
from config import SMOLLM2_135M  # noqa: E402
from policies import PAGE_SIZE, POLICIES, Policy  # noqa: E402
from teacher import Array, Attend, Teacher, exact  # noqa: E402

PEER = importlib.util.find_spec("llama_cpp") is not None
if PEER:
    import llama

TOKENS, LONG = 2048, 32768
WAYS: dict[str, Callable[[Policy], Attend]] = {
    "kernels": paged_layers.by_kernels,
    "tokens": functools.partial(paged_layers.by_tokens, accuracy_level=0),
    "fast": functools.partial(paged_layers.by_tokens, accuracy_level=4),
    "pages": functools.partial(paged_layers.by_numpy, specification=False),
    "specification": functools.partial(paged_layers.by_numpy, specification=True),
}
TEXTS = {
    "gpl": Path("/usr/share/common-licenses/GPL-3"),
    "code": Path(argparse.__file__),
}


# -- measures


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Of the distributions of all next tokens of a text."""

    divergence: float
    percentile_99: float
    perplexity: float
    same_choice: float

    def __str__(self) -> str:
        """Columns of the table."""
        return (
            f"{self.divergence:10.5f}{self.percentile_99:9.4f}{self.perplexity:9.3f}"
            f"{self.same_choice:8.4f}"
        )


HEADER = f"{'KL':>10}{'KL 99 %':>9}{'ppl':>9}{'same':>8}"


def measure(reference: Iterable[Array], found: Iterable[Array], tokens: list[int]) -> Measured:
    """Compare two rows of log probabilities, [rows, vocabulary] at a time."""
    divergence, same, likelihood = [], [], []
    following, position = np.array(tokens[1:]), 0
    for expected, given in zip(reference, found, strict=True):
        divergence.append((np.exp(expected) * (expected - given)).sum(-1, dtype=np.float64))
        same.append(expected.argmax(-1) == given.argmax(-1))
        known = following[position : position + len(given)]
        likelihood.append(given[np.arange(len(known)), known].astype(np.float64))
        position += len(given)
    all_divergence = np.concatenate(divergence)
    return Measured(
        float(all_divergence.mean()),
        float(np.quantile(all_divergence, 0.99)),
        float(np.exp(-np.concatenate(likelihood).mean())),
        float(np.concatenate(same).mean()),
    )


def compare(
    text: str, tokens: list[int], policies: Iterable[Policy], attends: Callable[[Policy], Attend]
) -> list[tuple[str, float, float]]:
    """Print a line for each policy; (claim, divergence, bound) of those that have a bound."""
    teacher = Teacher(SMOLLM2_135M, weights.gguf_path())
    reference = teacher.hidden(tokens, exact(PAGE_SIZE))
    print(f"\n{text}{'':<{34 - len(text)}}{HEADER}{'bits 2k':>9}{'bits 32k':>9}")
    itself = measure(*(teacher.log_probabilities(reference) for _ in range(2)), tokens)
    print(f"{'float32 cache':<34}{itself}{32:>9.2f}{32:>9.2f}", flush=True)
    claims = []
    for policy in policies:
        start = time.perf_counter()
        hidden = teacher.hidden(tokens, attends(policy))
        both = (teacher.log_probabilities(h) for h in (reference, hidden))
        found = measure(*both, tokens)
        took = time.perf_counter() - start
        print(
            f"{policy.name:<34}{found}{policy.bits(TOKENS):>9.2f}{policy.bits(LONG):>9.2f}"
            f"   ({took:.0f} s)",
            flush=True,
        )
        if policy.bound is not None:
            claims.append((f"{text}: {policy.name}", found.divergence, policy.bound))
    return claims


def compare_peer(text: str, tokens: list[int]) -> None:
    """llama.cpp's caches against its own float32 cache."""
    path = weights.gguf_path()
    reference = llama.logits(path, tokens, "float32")
    for name in ("float32", "q8_0", "q5_1", "q4_0"):
        logits = reference if name == "float32" else llama.logits(path, tokens, name)
        found = measure(*(llama.log_probabilities(x) for x in (reference, logits)), tokens)
        size = f"{llama.bits(name):>9.2f}" * 2
        print(f"{'llama.cpp ' + name:<34}{found}{size}", flush=True)


def read_text(text: str) -> list[int]:
    """The first tokens of a text.

    Raises:
        SystemExit: it is not on this machine.
    """
    path = TEXTS[text]
    if not path.exists():
        raise SystemExit(f"{path} is missing: on Debian it is in base-files")
    tokens: list[int] = tokenizer.read(weights.gguf_path()).encode(path.read_text("utf-8")).ids
    print(f"{text}: the first {TOKENS:,} of {len(tokens):,} tokens of {path}")
    return tokens[:TOKENS]


def main() -> None:
    """Print the tables, and whether each bound holds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", choices=TEXTS, action="append", help="default: both")
    parser.add_argument("--policy", help="only policies whose name begins so")
    parser.add_argument("--by", choices=WAYS, default="kernels", help="default: kernels")
    parser.add_argument("--no-peer", action="store_true", help="without llama.cpp")
    arguments = parser.parse_args()
    chosen = [p for p in POLICIES if p.name.startswith(arguments.policy or "")]
    print(
        f"Python {sys.version.split()[0]}; K after rotary positions; pages of {PAGE_SIZE} tokens "
        "where no other size is named"
    )
    claims = []
    for text in arguments.text or TEXTS:
        tokens = read_text(text)
        claims += compare(text, tokens, chosen, WAYS[arguments.by])
        if PEER and not arguments.no_peer:
            compare_peer(text, tokens)
    if not PEER:
        print("\nllama.cpp is skipped: llama-cpp-python is not installed")
    print("\nBytes at 32,768 tokens, all included, against an all-FLOAT16 cache:")
    for policy in chosen:
        print(f"  {policy.name:<34}{16 / policy.bits(LONG):6.2f} times the tokens")
    print()
    for claim, divergence, bound in claims:
        holds = "holds" if divergence <= bound else "FAILS"
        print(f"  {holds}  {claim}: {divergence:.5f} (at most {bound})")
    raise SystemExit(any(divergence > bound for _, divergence, bound in claims))


if __name__ == "__main__":
    main()
