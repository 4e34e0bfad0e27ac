"""Where compiled code is kept between processes, so that no stale code is ever found.

numba stores code beside a source file and trusts it while that one file has its old time and size.
A kernel is made of several files: after a change of another one, numba would run old code on new
layouts. Our code is kept in a folder whose name is a digest of all that goes into it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import tempfile
import threading
from collections.abc import Iterator

import llvmlite
import numba

from onnx_inplace.numba_kernels import folders

_SOURCES = pathlib.Path(__file__).parent
_lock = threading.Lock()


@functools.cache
def folder() -> pathlib.Path | None:
    """The folder of this version; None where nothing can be written.

    It is in ``ONNX_INPLACE_CACHE``, else in ``NUMBA_CACHE_DIR``, else in the user's caches. Folders
    of other versions beside it are deleted when nobody has used them for long.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    base = os.environ.get("ONNX_INPLACE_CACHE") or numba.config.CACHE_DIR or caches
    path = pathlib.Path(base).expanduser() / "onnx-inplace" / _digest()
    try:
        folders.claim(path)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError:
        return None
    with contextlib.suppress(OSError):
        folders.sweep(path.parent)
    return path


def _digest() -> str:
    versions = f"{numba.__version__} {llvmlite.__version__} {numba.config.BOUNDSCHECK}"
    state = hashlib.sha256(versions.encode())
    for file in sorted(_SOURCES.rglob("*.py")):
        state.update(file.read_bytes())
    return state.hexdigest()[:16]


@contextlib.contextmanager
def kept() -> Iterator[bool]:
    """Functions that are decorated inside keep their code in :func:`folder`; False: nowhere."""
    place = folder()
    if place is None:
        yield False
        return
    with _lock:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(place)
        try:
            yield True
        finally:
            numba.config.CACHE_DIR = before
