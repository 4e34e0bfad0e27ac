"""What a process has allocated, by whom: a counter in C under malloc, for fresh processes.

``environment`` compiles the counter and says what a process must be started with; in that process
``restart`` and ``read`` work.
"""

import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
AVAILABLE = sys.platform == "linux" and COMPILER is not None


@dataclasses.dataclass(frozen=True)
class Allocated:
    """Bytes; ``aligned`` are those of onnxruntime: tensors, workspace, packed weights."""

    all: int
    all_peak: int
    aligned: int
    aligned_peak: int


def environment(folder: Path) -> Mapping[str, str]:
    """For a process whose allocations are counted; the library is made in ``folder``."""
    library = folder / "liballocations.so"
    if not library.exists():
        partial = folder / f"liballocations.{os.getpid()}.so"
        command = [str(COMPILER), "-O2", "-shared", "-fPIC", "-o", str(partial), str(SOURCE)]
        subprocess.run(command, check=True)
        partial.replace(library)
    return os.environ | {"LD_PRELOAD": str(library)}


def restart() -> None:
    """Forget earlier peaks."""
    ctypes.CDLL(None).allocations_restart()


def read() -> Allocated:
    """What is allocated now, and the most since ``restart``."""
    numbers = (ctypes.c_int64 * 4)()
    ctypes.CDLL(None).allocations_read(numbers)
    return Allocated(*numbers)
