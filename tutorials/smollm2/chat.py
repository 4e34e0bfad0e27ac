"""Chat with SmolLM2-135M in the terminal.

python tutorials/smollm2/chat.py
python tutorials/smollm2/chat.py --once "What is the capital of France?"
python tutorials/smollm2/chat.py --cache paged
"""

import argparse

import tokenizer
import weights
from config import SMOLLM2_135M
from decoder import Precision
from generate import ELEMENTS, PAGED, Conversation, compiled
from measured import Measured
from paged import PagedConversation
from tokenizers import Tokenizer

from onnx_inplace import Session, errors


def main() -> None:
    """Ask, answer, and report."""
    options = arguments()
    precision = Precision.FAST if options.fast else Precision.EXACT
    caches = "in pages" if options.cache == PAGED else f"of {options.cache}"
    print(f"SmolLM2-135M, {precision.name.lower()}, caches {caches}")
    text = tokenizer.read(weights.gguf_path())
    kind = PagedConversation if options.cache == PAGED else Conversation
    session = Session(compiled(precision, options.cache))
    conversation = Measured(kind(session, options.max_length))
    try:
        if options.once:
            print(f"> {options.once}")
            answer(conversation, text, tokenizer.first_turn(options.once), options.limit)
            print(f"\n{conversation.report()}")
        else:
            chat(conversation, text, options.limit)
    except (errors.CapacityError, errors.PoolTooSmall):
        print(f"\nThe caches are full: {options.max_length:,} tokens (--max-length).")
    except (EOFError, KeyboardInterrupt):
        print()


def chat(conversation: Measured, text: Tokenizer, limit: int) -> None:
    """One question after the other, all in the same caches."""
    turn = tokenizer.first_turn
    while True:
        answer(conversation, text, turn(input("> ")), limit)
        turn = tokenizer.next_turn


def answer(conversation: Measured, text: Tokenizer, prompt: str, limit: int) -> None:
    """Print an answer while it comes into being."""
    end = text.token_to_id(tokenizer.END)
    tokens = conversation.generate(text.encode(prompt).ids, limit, end)
    for piece in tokenizer.stream(text, tokens):
        print(piece, end="", flush=True)
    print()


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Chat with SmolLM2-135M in the terminal.")
    parser.add_argument(
        "--once", metavar="QUESTION", help="answer one question and say what it took"
    )
    parser.add_argument(
        "--fast",
        action="store_true",
        help="round the inputs of matrices to 8 bits: faster, less exact",
    )
    parser.add_argument(
        "--cache",
        choices=[*ELEMENTS, PAGED],
        default="float32",
        help="element type of the caches, or pages that are stored in fewer bits as they age",
    )
    parser.add_argument("--max-length", type=int, default=2048, help="tokens that the caches hold")
    parser.add_argument("--limit", type=int, default=256, help="tokens of an answer, at most")
    options = parser.parse_args()
    if options.max_length > SMOLLM2_135M.context:
        parser.error(f"the model was made for at most {SMOLLM2_135M.context:,} tokens")
    return options


if __name__ == "__main__":
    main()
