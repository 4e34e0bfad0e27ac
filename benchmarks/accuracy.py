"""What page formats cost: SmolLM2-135M over caches that a policy keeps, against a float32 cache.

For each policy: mean KL divergence of the next token's distribution, its 99th percentile,
perplexity, how often the most likely token is the same one, and bits per element of the cache, all
included, at 2,048 and at 32,768 tokens. Texts: the first 2,048 tokens of the GPL-3 and of CPython's
argparse.py. Numbers come out of the runner's own pages (``--encoder specification``: out of
the numpy specification of the tests): a page is written when its tokens come, and converted from
what it holds when it is old enough. Attention itself is float32 here.

    python benchmarks/accuracy.py                       all bounds, about 20 seconds a line
    python benchmarks/accuracy.py --policy INT8 --text gpl

llama.cpp's q4_0, q5_1 and q8_0 take part where llama-cpp-python is installed.
"""

import argparse
import dataclasses
import functools
import importlib.util
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tutorials" / "smollm2"), str(ROOT / "tests")]

import page_specification  # noqa: E402
import tokenizer  # noqa: E402
import weights  # noqa: E402
from config import SMOLLM2_135M  # noqa: E402
from teacher import Array, Cache, Teacher, Visible, exact  # noqa: E402

from onnx_inplace import Session, formats  # noqa: E402
from onnx_inplace.compiler.formats import PageFormat  # noqa: E402
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, Paged, kv, model  # noqa: E402

PEER = importlib.util.find_spec("llama_cpp") is not None
if PEER:
    import llama

TOKENS, LONG = 2048, 32768
PAGE_SIZE = 128
TEXTS = {
    "gpl": Path("/usr/share/common-licenses/GPL-3"),
    "code": Path(argparse.__file__),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """Which format a page has, by its age in pages.

    Attributes:
        name: what it is called here.
        tiers: format of the newest pages, and of how many of them; one after the other.
        rest: format of all older pages.
        first: format that the first page keeps for good; None: it ages like the others.
        bound: largest mean KL divergence that it may have; None: it is shown only.

    Raises:
        ValueError: the newest page would have a format that is written best as a whole page.
    """

    name: str
    tiers: tuple[tuple[PageFormat, int], ...]
    rest: PageFormat
    first: PageFormat | None = None
    bound: float | None = None

    def __post_init__(self) -> None:
        if not self.chain[0].appendable:
            raise ValueError(f"{self.name}: the newest page fills token by token")

    @property
    def chain(self) -> list[PageFormat]:
        """The formats that a page goes through, in order."""
        return [*(page_format for page_format, _ in self.tiers), self.rest]

    def stage(self, age: int) -> int:
        """The place in the chain of a page that is ``age`` pages behind the newest one."""
        for stage, (_, pages) in enumerate(self.tiers):
            if age < pages:
                return stage
            age -= pages
        return len(self.tiers)

    def bits(self, tokens: int) -> float:
        """Bits per element of a cache of so many tokens, scales and padding included."""
        pages = tokens // PAGE_SIZE
        chosen = [self.chain[self.stage(pages - 1 - page)] for page in range(pages)]
        if self.first is not None:
            chosen[0] = self.first
        dims = 2, SMOLLM2_135M.kv_heads, PAGE_SIZE, SMOLLM2_135M.head_size
        return sum(page_format.bits_per_element(dims) for page_format in chosen) / pages


FLOAT16, INT8, INT4, INT2 = formats.FLOAT16, formats.INT8, formats.INT4, formats.INT2
POLICIES = (
    Policy("FLOAT16", (), FLOAT16),
    Policy("INT8", (), INT8, bound=0.001),
    Policy("INT4; newest, first FLOAT16", ((FLOAT16, 1),), INT4, FLOAT16, bound=0.004),
    Policy("INT4; newest, first INT8", ((INT8, 1),), INT4, INT8, bound=0.006),
    Policy("FLOAT16 x1, INT8 x2, INT4", ((FLOAT16, 1), (INT8, 2)), INT4, FLOAT16, bound=0.002),
    Policy("FLOAT16 x1, INT4 x3, INT2", ((FLOAT16, 1), (INT4, 3)), INT2, FLOAT16, bound=0.025),
    Policy("INT2; newest 4, first FLOAT16", ((FLOAT16, 4),), INT2, FLOAT16, bound=0.02),
    Policy("INT4T", (), formats.INT4T),
    Policy("INT4T; first FLOAT16", (), formats.INT4T, FLOAT16),
    Policy("FP8_E4M3", (), formats.FP8_E4M3),
)


# -- caches


def cache_of(policy: Policy, specification: bool) -> Cache:
    """What queries see of a layer whose pages are kept by a policy."""
    decode = by_specification if specification else by_pages

    def cache(keys: Array, values: Array) -> Visible:
        x = np.stack([keys, values])
        stages = decode(x, policy.chain)
        first = None if policy.first is None else decode(x[:, :, :PAGE_SIZE], [policy.first])[0]

        def visible(newest: int) -> tuple[Array, Array]:
            seen = np.empty_like(x[:, :, : (newest + 1) * PAGE_SIZE])
            for page in range(newest + 1):
                rows = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
                seen[:, :, rows] = stages[policy.stage(newest - page)][:, :, rows]
            if first is not None:
                seen[:, :, :PAGE_SIZE] = first
            return seen[0], seen[1]

        return visible

    return cache


def by_pages(x: Array, chain: list[PageFormat]) -> list[Array]:
    """What pages of the runner decode to in each format of a chain: [2, heads, tokens, head_size].

    The first format of a chain is appendable: a page that is written at once is what it would be
    token by token.
    """
    session = writer(tuple(chain))
    cache = session.allocate("cache")
    pages = x.shape[2] // PAGE_SIZE
    with session.bind(cache=cache) as step:
        step.run(table=np.arange(pages), values=x)
    stages = []
    for place, page_format in enumerate(chain):
        for page in range(pages if place else 0):
            cache.convert(page, page_format)
        stages.append(np.concatenate([cache.page(page).decode() for page in range(pages)], axis=2))
    return stages


@functools.cache
def writer(chain: tuple[PageFormat, ...]) -> Session:
    """Writes a layer's K and V into pages of the first format, which may become the other ones."""
    heads, head_size = SMOLLM2_135M.kv_heads, SMOLLM2_135M.head_size
    Pages = Paged[(FLOAT[2, heads, PAGE_SIZE, head_size], *chain)]

    @model
    def write(
        cache: Mutable[Pages], table: INT64["blocks"], values: FLOAT[2, heads, "tokens", head_size]
    ) -> Alias["cache"]:
        updated = kv.PagedCacheUpdate(cache, table, values, 0, quantized_type=chain[0].name)
        return updated

    return Session(write)


def by_specification(x: Array, chain: list[PageFormat]) -> list[Array]:
    """The same by the numpy specification: all pages as the heads of one page."""
    _, heads, tokens, head_size = x.shape
    pages = tokens // PAGE_SIZE
    by_page = x.reshape(2, heads * pages, PAGE_SIZE, head_size)
    dims = by_page.shape
    page = in_sequence(chain[0], x) if chain[0].key.channel_offset else None
    if page is None:
        page = page_specification.encode(chain[0], by_page, PAGE_SIZE)
    stages = []
    for before, page_format in zip([chain[0], *chain], chain, strict=False):
        if page_format is not before:
            page = page_specification.convert(before, page_format, page, dims, PAGE_SIZE)
        stages.append(page_specification.decode(page_format, page, dims).reshape(x.shape))
    return stages


def in_sequence(page_format: PageFormat, x: Array) -> NDArray[np.uint8]:
    """Pages of a format whose offsets come from the page before, as the heads of one page."""
    _, heads, tokens, head_size = x.shape
    dims = 2, heads, PAGE_SIZE, head_size
    pages = [page_specification.start_page(page_format, dims)]
    for start in range(0, tokens, PAGE_SIZE):
        new = x[:, :, start : start + PAGE_SIZE]
        pages[-1] = page_specification.write(page_format, pages[-1], dims, new, 0, 0)
        following = page_specification.start_page(
            page_format, dims, page_format, pages[-1], PAGE_SIZE
        )
        pages.append(following)
    by_head = [page.reshape(heads, 1, -1) for page in pages[:-1]]
    return np.concatenate(by_head, axis=1).reshape(-1)


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
    text: str, tokens: list[int], policies: Iterable[Policy], specification: bool
) -> list[tuple[str, float, float]]:
    """Print a line for each policy; (claim, divergence, bound) of those that have a bound."""
    teacher = Teacher(SMOLLM2_135M, weights.gguf_path())
    reference = teacher.hidden(tokens, exact(PAGE_SIZE), PAGE_SIZE)
    print(f"\n{text}{'':<{34 - len(text)}}{HEADER}{'bits 2k':>9}{'bits 32k':>9}")
    itself = measure(*(teacher.log_probabilities(reference) for _ in range(2)), tokens)
    print(f"{'float32 cache':<34}{itself}{32:>9.2f}{32:>9.2f}", flush=True)
    claims = []
    for policy in policies:
        start = time.perf_counter()
        hidden = teacher.hidden(tokens, cache_of(policy, specification), PAGE_SIZE)
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
    parser.add_argument("--encoder", choices=("pages", "specification"), default="pages")
    parser.add_argument("--no-peer", action="store_true", help="without llama.cpp")
    arguments = parser.parse_args()
    chosen = [p for p in POLICIES if p.name.startswith(arguments.policy or "")]
    print(f"Python {sys.version.split()[0]}, pages of {PAGE_SIZE} tokens, K after rotary positions")
    claims = []
    for text in arguments.text or TEXTS:
        tokens = read_text(text)
        claims += compare(text, tokens, chosen, arguments.encoder == "specification")
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
