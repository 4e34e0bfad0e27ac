"""A peer of ``decode.py``: llama.cpp on the very file with a float16 cache.

It takes part with flash attention and without: for heads of 64 elements its flash attention has no
vector code on CPUs with AVX512-FP16, elsewhere it is the faster one.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np

PIECE = 512  # [tokens] of a prompt that are read at once
FLOAT16 = llama_cpp.GGML_TYPE_F16


class Llama:
    """A loaded model with a cache for ``max_length`` tokens.

    A long prompt takes llama.cpp a minute; what it left in the cache is kept in ``folder``, so that
    later processes begin behind it.
    """

    def __init__(
        self, path: Path, threads: int, max_length: int, folder: Path, *, flash: bool
    ) -> None:
        """Load the model and allocate the cache."""
        self.name = "llama.cpp, flash attention" if flash else "llama.cpp"
        self._llama = llama_cpp.Llama(
            str(path),
            n_ctx=max_length,
            n_batch=PIECE,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=flash,
            type_k=FLOAT16,
            type_v=FLOAT16,
            verbose=False,
        )
        self._context = self._llama.ctx
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = self._llama.n_vocab()
        self._states = folder / ("llama-flash" if flash else "llama")
        self._length = 0
        self._next = 504

    def read(self, tokens: list[int]) -> None:
        """Append a prompt."""
        for start in range(0, len(tokens), PIECE):
            piece = tokens[start : start + PIECE]
            array = (llama_cpp.llama_token * len(piece))(*piece)
            batch = llama_cpp.llama_batch_get_one(array, len(piece))
            status = llama_cpp.llama_decode(self._context, batch)
            assert status == 0, f"llama_decode: {status}"
            self._length += len(piece)

    def go_to(self, position: int) -> None:
        """Make ``position`` the place of the next token: back, or on through arbitrary tokens."""
        if position <= self._length:
            llama_cpp.llama_memory_seq_rm(self._memory, 0, position, -1)
            self._length = position
            return
        path = self._states / f"{position}.state"
        if not self._load(path):
            self.read(list(range(1000, 1000 + position - self._length)))
            self._save(path)

    def token(self) -> None:
        """Decode one token and choose the next."""
        self.read([self._next])
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        self._next = int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())

    def _load(self, path: Path) -> bool:
        if not path.exists():
            return False
        llama_cpp.llama_memory_seq_rm(self._memory, 0, -1, -1)
        count, tokens = ctypes.c_size_t(), (llama_cpp.llama_token * 1)()
        read = llama_cpp.llama_state_seq_load_file(
            self._context, str(path).encode(), 0, tokens, 1, ctypes.byref(count)
        )
        self._length = int(llama_cpp.llama_memory_seq_pos_max(self._memory, 0)) + 1
        return bool(read)

    def _save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        tokens = (llama_cpp.llama_token * 1)()
        llama_cpp.llama_state_seq_save_file(self._context, str(path).encode(), 0, tokens, 0)
