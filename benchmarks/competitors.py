"""Who takes part in ``decode.py``: this project's decoder over each kind of cache, and its peers.

All have a 4-bit body and an 8-bit head from one GGUF file. Ours decodes over caches of random
numbers, which cost what real ones cost; peers have to read a prompt first.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import generate
import memory_speed
import numpy as np
import step_models
import weights
from config import SMOLLM2_135M
from decoder import Precision
from paged_decoder import PAGE_SIZE
from same_file import SameFile

from onnx_inplace import Session

FOLDER = generate.FOLDER / "peers"
KINDS = "float32", "float16", "INT8"
PEERS = {"onnxruntime-genai": "onnxruntime_genai", "llama.cpp": "llama_cpp"}
"""Families and modules; a competitor is called by its family, or by it, a comma and its way."""

Fuse = Literal["auto", "off"]


class Competitor(Protocol):
    """What takes part."""

    name: str

    def read(self, tokens: list[int]) -> None:
        """Append a prompt."""

    def go_to(self, position: int) -> None:
        """Make ``position`` the place of the next token."""

    def token(self) -> None:
        """Decode one token and choose the next."""


def label(kind: str, fuse: Fuse) -> str:
    """The name of ours."""
    return f"in place, {kind}, fuse={fuse}"


class InPlace:
    """This project's decoder over float32 or float16 arrays, or over pages of INT8."""

    def __init__(self, kind: str, threads: int, fuse: Fuse, max_length: int) -> None:
        """Load it and fill its caches."""
        self.name = label(kind, fuse)
        dense = kind in generate.ELEMENTS
        path = generate.compiled(Precision.FAST, kind if dense else generate.PAGED)
        session = Session(path, threads=threads, fuse=fuse)
        self.feeds: dict[str, Any] = {}
        if dense:
            conversation = generate.Conversation(session, max_length)
            self.caches, self.binding = conversation.caches, conversation.binding
            random = np.random.default_rng(0)
            for cache in self.caches:
                cache[:] = random.standard_normal(cache.shape, np.float32) * 0.1
        else:
            self.caches = paged_caches(kind, max_length)
            self.binding = session.bind(caches=self.caches)
            self.feeds["block_table"] = np.arange(max_length // PAGE_SIZE)
        self.position = 0
        self.next = 504

    def read(self, tokens: list[int]) -> None:
        """Append a prompt."""
        place = np.array(self.position)
        outputs = self.binding.run(tokens=np.array([tokens]), position=place, **self.feeds)
        self.position += len(tokens)
        self.next = int(outputs["logits"].argmax())

    def go_to(self, position: int) -> None:
        """Make ``position`` the place of the next token."""
        self.position = position

    def token(self) -> None:
        """Decode one token and choose the next."""
        self.read([self.next])


def paged_caches(kind: str, max_length: int) -> list[Any]:
    """A cache a layer, full of pages of one format that hold random numbers."""
    others = [name for name in ("FLOAT32", "FLOAT16", "INT8", "INT4", "INT2") if name != kind]
    heads, size = SMOLLM2_135M.kv_heads, SMOLLM2_135M.head_size
    _, session = step_models.page_writer(heads, PAGE_SIZE, size, [kind, *others])
    random, caches = np.random.default_rng(0), []
    table = np.arange(max_length // PAGE_SIZE)
    for _ in range(SMOLLM2_135M.layers):
        values = random.standard_normal((2, heads, max_length, size), np.float32) * 0.1
        caches.append(session.allocate("cache"))
        with session.bind(cache=caches[-1]) as step:
            step.run(blocks=table, values=values, position=np.array(0))
    return caches


class Reading:
    """Reads as many bytes as the weights have, again and again: what the machine can give.

    Weights of this size may stay in the last cache from token to token, and so may these bytes.
    """

    name = "reading memory"

    def __init__(self, threads: int) -> None:
        """Write the memory that is read."""
        self.token, self.nbytes = memory_speed.reading(weight_bytes(), threads)

    def read(self, tokens: list[int]) -> None:
        """Nothing: it takes no part in prompts."""

    def go_to(self, position: int) -> None:
        """Nothing: it has no position."""


def peers(name: str, threads: int, max_length: int, fuse: Sequence[Fuse] = ()) -> list[Competitor]:
    """A peer in each of its ways; none where it is not installed.

    ``fuse``: ways in which this project runs the file of onnxruntime-genai.
    """
    if importlib.util.find_spec(PEERS[name]) is None:
        return []
    path = weights.gguf_path()
    if name == "llama.cpp":
        llama = importlib.import_module("llama_decode").Llama
        return [llama(path, threads, max_length, FOLDER, flash=way) for way in (True, False)]
    genai = importlib.import_module("genai")
    folder = FOLDER / f"genai-{threads}-{max_length}"
    file = genai.write(folder, SMOLLM2_135M, path, threads, max_length)
    same = [SameFile(file, threads, way, max_length) for way in fuse]
    return [*same, genai.GenAI(folder, max_length)]


def weight_bytes() -> int:
    """Bytes of the GGUF file that one token reads: all matrices, the embedding as the head."""
    gguf = importlib.import_module("gguf")
    tensors = gguf.GGUFReader(weights.gguf_path()).tensors
    return sum(int(tensor.n_bytes) for tensor in tensors)
