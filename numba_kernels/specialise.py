"""Copies of a kernel's module with other constants, as files, so that numba keeps their code.

numba finds compiled code again by the file and the line of a function, not by the values of
globals, and never for functions that close over intrinsics. A copy of the module for each tuple of
constants makes both work: 5 s of compilation become 0.1 s in the next process.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
import tempfile
import threading
import types

from onnx_inplace.numba_kernels import cache

_MARK = re.compile(r"^(?P<names>[A-Z, ]+) = .*  # specialised$", re.MULTILINE)
_lock = threading.RLock()  # a copy may specialise what it is made of
_modules: dict[tuple[str, tuple[int, ...]], types.ModuleType] = {}


def specialise(template: types.ModuleType, *constants: int) -> types.ModuleType:
    """The module ``template`` with ``constants`` in its line that ends in ``# specialised``.

    Safe in several threads and processes. Where no file can be written, the copy lives in memory
    and is compiled by every process.
    """
    key = template.__name__, constants
    with _lock:
        if key not in _modules:
            _modules[key] = _load(template, constants)
        return _modules[key]


def _load(template: types.ModuleType, constants: tuple[int, ...]) -> types.ModuleType:
    assert template.__file__ is not None
    source = pathlib.Path(template.__file__)
    text, count = _MARK.subn(
        lambda match: f"{match['names']} = {', '.join(map(str, constants))},", source.read_text()
    )
    if count != 1:
        raise ValueError(f"{source.name} has {count} lines to specialise")
    name = "_".join([source.stem, *map(str, constants)])
    module = types.ModuleType(f"{__name__}.{name}")
    path = _write(name, text)
    module.__file__ = str(path) if path is not None else f"<{name}>"
    sys.modules[module.__name__] = module  # numba looks functions up by their module
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    return module


def _write(name: str, text: str) -> pathlib.Path | None:
    place = cache.folder()
    if place is None:
        return None
    path = place / f"{name}.py"
    try:
        if path.exists():
            return path if path.read_text() == text else None
        with tempfile.NamedTemporaryFile("w", dir=place, suffix=".tmp", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)  # whole or not at all, whoever else writes it now
    except OSError:
        return None
    return path
