"""Folders of a cache that versions and processes share: claimed by who uses them, deleted by age.

A claim is a shared lock on a file in the folder, held until the process ends. Who wants to delete a
folder needs the lock alone, and moves the folder away while having it: nobody sees a folder with
half of its files, and nobody loses one that is in use. Where there are no such locks (Windows, some
network file systems), nothing is deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

KEPT = 4
"""So many folders that were used last stay, however long ago that was."""

UNUSED = 24 * 3600.0
"""[s] Others go when nobody has used them for so long."""

_CLAIM = "claimed"
_DELETED = ".deleted"
_NAME = re.compile(r"[0-9a-f]{16}")

_held: list[int] = []  # open files: closed, and so given back, by the end of the process


def claim(path: Path) -> None:
    """Make a folder, and keep it until this process ends.

    Raises:
        OSError: nothing can be written there.
    """
    while True:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = _open(path)
        with contextlib.suppress(OSError):
            _lock(file, alone=False)
        if _is_at(file, path / _CLAIM):
            os.utime(path / _CLAIM)
            _held.append(file)
            return
        os.close(file)  # the folder was deleted while we waited for the lock


def sweep(root: Path, now: float | None = None) -> list[Path]:
    """Delete folders of ``root`` that nobody uses any more; those that were deleted.

    A folder has a name of 16 hexadecimal digits; other content stays, and what cannot be deleted.
    """
    for rest in root.glob(f"*{_DELETED}"):  # somebody was stopped in the middle
        shutil.rmtree(rest, ignore_errors=True)
    last = (time.time() if now is None else now) - UNUSED
    folders = [path for path in root.iterdir() if _NAME.fullmatch(path.name)]
    used = sorted(((_used(path), path) for path in folders), reverse=True)
    return [path for time_, path in used[KEPT:] if time_ < last and _delete(path)]


def _used(path: Path) -> float:
    """When it was claimed last; of versions that claimed nothing: when a file came into it."""
    for place in (path / _CLAIM, path):
        with contextlib.suppress(OSError):
            return place.stat().st_mtime
    return 0.0


def _delete(path: Path) -> bool:
    away = path.with_name(f"{path.name}.{os.getpid()}{_DELETED}")
    try:
        file = _open(path)
        try:
            _lock(file, alone=True)
            if not _is_at(file, path / _CLAIM):
                return False
            path.rename(away)
        finally:
            os.close(file)
    except OSError:
        return False
    shutil.rmtree(away, ignore_errors=True)
    return True


def _open(path: Path) -> int:
    return os.open(path / _CLAIM, os.O_RDWR | os.O_CREAT, 0o600)


def _lock(file: int, *, alone: bool) -> None:
    """Shared: wait for it. Alone: only if nobody else has it.

    Raises:
        OSError: somebody has it, or there are no locks.
    """
    if fcntl is None:
        raise OSError("no locks")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False
