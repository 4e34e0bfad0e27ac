"""From a compiled decoder to tokens: load it once, lend it caches, ask for the next token."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import weights
from config import SMOLLM2_135M
from decoder import Precision, decoder
from numpy.typing import NDArray
from paged_decoder import paged_decoder

from onnx_inplace import Session, compiler, dsl
from onnx_inplace.dsl import FLOAT, FLOAT16
from onnx_inplace.runner.outputs import Outputs

ELEMENTS = {"float32": FLOAT, "float16": FLOAT16}
PAGED = "paged"
SOURCES = Path(__file__).parent
FOLDER = SOURCES.parents[1] / "build" / "smollm2"
MAKERS = [SOURCES, *map(Path, (*compiler.__path__, *dsl.__path__))]  # folders


def compiled(precision: Precision, element: str, folder: Path = FOLDER) -> Path:
    """The decoder as a file, compiled when it is missing or older than what it is made by.

    Its caches have elements of type ``element``; or pages, where that is ``PAGED``.
    """
    path = folder / f"{precision.name.lower()}-{element}.onnx"
    changed = max(file.stat().st_mtime for maker in MAKERS for file in maker.glob("*.py"))
    if not path.exists() or path.stat().st_mtime < changed:
        folder.mkdir(parents=True, exist_ok=True)
        content = weights.read(SMOLLM2_135M, weights.gguf_path())
        if element == PAGED:
            program = paged_decoder(SMOLLM2_135M, content, precision)
        else:
            program = decoder(SMOLLM2_135M, content, precision, ELEMENTS[element])
        program.save(path)
    return path


def continuation(
    run: Callable[[Sequence[int]], Outputs], prompt: Sequence[int], limit: int, end: int | None
) -> Iterator[int]:
    """The most likely tokens after ``prompt``: ``limit`` of them, or up to ``end``."""
    logits = run(prompt)["logits"]
    for _ in range(limit):
        token = int(logits.argmax())
        if token == end:
            return
        yield token
        logits = run([token])["logits"]


class Conversation:
    """Caches of one conversation, lent to a session for as long as it lasts.

    The session writes the keys and values of new tokens into ``keys`` and ``values``: memory that
    is allocated here, once, and never copied.
    """

    def __init__(self, session: Session, max_length: int) -> None:
        """Allocate caches for ``max_length`` tokens."""
        layers = range(SMOLLM2_135M.layers)
        self.keys = [session.allocate(f"keys.{k}", max_length=max_length) for k in layers]
        self.values = [session.allocate(f"values.{k}", max_length=max_length) for k in layers]
        self.binding = session.bind(keys=self.keys, values=self.values)
        self.length = 0  # [tokens] that the caches hold

    @property
    def caches(self) -> list[NDArray[Any]]:
        """All caches, keys first: the order in which the model returns them."""
        return [*self.keys, *self.values]

    def run(self, tokens: Sequence[int]) -> Outputs:
        """Append tokens to the caches. What comes back starts with the logits of the next token."""
        outputs = self.binding.run(tokens=np.array([tokens]), position=self.length)
        self.length += len(tokens)
        return outputs

    def generate(self, prompt: Sequence[int], limit: int, end: int | None = None) -> Iterator[int]:
        """See ``continuation``."""
        return continuation(self.run, prompt, limit, end)
