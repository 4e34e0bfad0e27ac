"""Takes part in ``decode.py``: the very file that onnxruntime-genai runs, run by this project.

Its caches are inputs that the file says to be changed in place, its padding mask is longer with
every token, and queries and keys are turned by GroupQueryAttention, as in the peer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnx_inplace import Session

NAME = "in place, onnxruntime-genai's file"


class SameFile:
    """This project on a file of ``genai.write``."""

    def __init__(self, path: Path, threads: int, fuse: str, max_length: int) -> None:
        """Load it and fill its caches."""
        self.name = f"{NAME}, fuse={fuse}"
        session = Session(path, threads=threads, fuse=fuse)
        random = np.random.default_rng(0)
        self._caches = {}
        for port in session.mutable_inputs:
            cache = session.allocate(port.name, batch=1, max_length=max_length)
            cache[:] = random.standard_normal(cache.shape, np.float32) * 0.1
            self._caches[port.name] = cache
        self._binding = session.bind(**self._caches)
        self._mask = np.ones((1, max_length), np.int64)
        self._position, self._next = 0, 504

    def read(self, tokens: list[int]) -> None:
        """Append a prompt."""
        self._position += len(tokens)
        mask = self._mask[:, : self._position]
        logits = self._binding.run(tokens=np.array([tokens]), mask=mask)[0]
        self._next = int(logits.argmax())

    def go_to(self, position: int) -> None:
        """Make ``position`` the place of the next token."""
        self._position = position

    def token(self) -> None:
        """Decode one token and choose the next."""
        self.read([self._next])
