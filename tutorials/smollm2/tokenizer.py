"""Text to tokens and back, with the vocabulary of the GGUF file."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
END = "<|im_end|>"
_CONTROL = 3  # the token type of marks like <|im_end|>


def read(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file: byte-level pair encoding, each digit a token of its own."""
    fields = gguf.GGUFReader(path).fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    merges: list[str] = fields["tokenizer.ggml.merges"].contents()
    kinds: list[int] = fields["tokenizer.ggml.token_type"].contents()

    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marks = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return tokenizer


def first_turn(question: str) -> str:
    """What the model reads before it answers the first question."""
    return f"<|im_start|>system\n{SYSTEM}{END}\n{_turn(question)}"


def next_turn(question: str) -> str:
    """What the model reads between its last answer, up to its last word, and the next one."""
    return f"{END}\n{_turn(question)}"


def _turn(question: str) -> str:
    return f"<|im_start|>user\n{question}{END}\n<|im_start|>assistant\n"


def stream(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Text as it becomes known. A character may take several tokens, so the last ones can wait."""
    pending: list[int] = []
    for token in tokens:
        pending.append(token)
        text = tokenizer.decode(pending)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            pending.clear()
            yield text
    if pending:
        yield tokenizer.decode(pending)
