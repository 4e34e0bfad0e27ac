"""Chat with SmolLM2-135M in the terminal.

python tutorials/smollm2/chat.py
python tutorials/smollm2/chat.py --once "What is the capital of France?"
"""

import argparse

import tokenizer
import weights
from config import SMOLLM2_135M
from decoder import Precision
from generate import ELEMENTS, Conversation, compiled
from measured import Measured
from tokenizers import Tokenizer

from onnx_inplace import Session, errors


def main() -> None:
    """Ask, answer, and report."""
    options = arguments()
    precision = Precision.FAST if options.fast else Precision.EXACT
    print(f"SmolLM2-135M, {precision.name.lower()}, caches of {options.cache}")
    text = tokenizer.read(weights.gguf_path())
    conversation = Measured(Session(compiled(precision, options.cache)), options.max_length)
    try:
        if options.once:
            print(f"> {options.once}")
            answer(conversation, text, tokenizer.first_turn(options.once), options.limit)
            print(f"\n{conversation.report()}")
        else:
            chat(conversation, text, options.limit)
    except errors.CapacityError as error:
        print(f"\nThe caches are full: {error.capacity:,} tokens (--max-length).")
    except (EOFError, KeyboardInterrupt):
        print()


def chat(conversation: Conversation, text: Tokenizer, limit: int) -> None:
    """One question after the other, all in the same caches."""
    turn = tokenizer.first_turn
    while True:
        answer(conversation, text, turn(input("> ")), limit)
        turn = tokenizer.next_turn


def answer(conversation: Conversation, text: Tokenizer, prompt: str, limit: int) -> None:
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
        "--cache", choices=ELEMENTS, default="float32", help="element type of the caches"
    )
    parser.add_argument("--max-length", type=int, default=2048, help="tokens that the caches hold")
    parser.add_argument("--limit", type=int, default=256, help="tokens of an answer, at most")
    options = parser.parse_args()
    if options.max_length > SMOLLM2_135M.context:
        parser.error(f"the model was made for at most {SMOLLM2_135M.context:,} tokens")
    return options


if __name__ == "__main__":
    main()
