"""What the runner itself takes of a token of SmolLM2-135M; ``decode.py --overhead`` prints it."""

from __future__ import annotations

import cProfile
import pstats
import time
from pathlib import Path

from competitors import Fuse, InPlace
from config import SMOLLM2_135M


def line(kind: str, fuse: Fuse, position: int) -> str:
    """What was measured, in words."""
    whole, python = overhead(kind, position, fuse)
    return (
        f"{kind}, fuse={fuse}, position {position:,}: {whole:.2f} ms a token on one thread, "
        f"{python:.2f} outside of onnxruntime and kernels ({python / whole:.1%})"
    )


def overhead(kind: str, position: int, fuse: Fuse, tokens: int = 20) -> tuple[float, float]:
    """CPU ms a token, and those outside of onnxruntime and kernels, on one thread.

    A profiler says what native code takes; what a token takes is measured without one, because it
    slows down Python. The best of several turns counts, as others may use the caches of the CPU.
    """
    ours = InPlace(kind, 1, fuse, SMOLLM2_135M.context)

    def decode() -> None:
        ours.go_to(position)
        for _ in range(tokens):
            ours.token()

    wholes, natives = [], []
    for _ in range(6):
        start = time.thread_time()
        decode()
        wholes.append(time.thread_time() - start)
        profile = cProfile.Profile(time.thread_time)
        profile.runcall(decode)
        natives.append(native_seconds(profile))
    whole, native = min(wholes), min(natives)
    return 1e3 * whole / tokens, 1e3 * (whole - native) / tokens


def native_seconds(profile: cProfile.Profile) -> float:
    """The time inside of onnxruntime and of compiled kernels."""
    return sum(
        own
        for (file, _, name), (_, _, own, _, _) in pstats.Stats(profile).stats.items()
        if is_native(Path(file), name)
    )


def is_native(file: Path, name: str) -> bool:
    """Whether what a profiler calls so is compiled, or does nothing itself but call such a thing.

    onnxruntime's C interface has no name there: its time is that of the function that calls it.
    """
    if "onnxruntime" in name or "numba_kernels" in name:
        return True
    if file.parts[-2:] == ("native", "session.py"):
        return True
    return "numba_kernels" in file.parts and file.stem != "memory"
