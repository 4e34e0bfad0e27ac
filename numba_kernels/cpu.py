"""Which kernels the CPU can run, and which of them are wanted.

A path is what kernels may name by themselves: nothing, instructions of AVX2, or of AVX-512. What
LLVM makes of plain code is another matter: it uses all that the CPU has. So the variable
``ONNX_INPLACE_KERNELS=avx2`` does more than choose: it takes AVX-512 away from LLVM as well, for
this process and everything that numba compiles in it, as if the CPU had none.
"""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Mapping

import llvmlite.binding
from numba.core import config

VARIABLE = "ONNX_INPLACE_KERNELS"
AUTO = "auto"


class Path(enum.IntEnum):
    """Kernels, from those that run everywhere to those that ask for most."""

    PORTABLE = 0
    """Plain code, of which LLVM makes vectors."""
    AVX2 = 1
    """With FMA and F16C; with AVX-VNNI where the CPU has it."""
    AVX512 = 2
    """With VNNI; with BF16 where the CPU has it."""


NAMES = {path.name.lower(): path for path in Path}

_NEEDS = {
    Path.PORTABLE: (),
    # without F16C and FMA, LLVM calls functions that may not exist
    Path.AVX2: ("avx2", "fma", "f16c"),
    Path.AVX512: (
        *("avx2", "fma", "f16c"),
        *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"),
    ),
}


def has(feature: str) -> bool:
    """Whether the CPU that numba compiles for has a feature, by LLVM's name.

    An instruction that it does not have makes LLVM end the process.
    """
    if config.CPU_FEATURES is not None or config.CPU_NAME not in (None, "host"):
        return f"+{feature}" in (config.CPU_FEATURES or "").split(",")
    return bool(_host().get(feature, False))


@functools.cache
def _host() -> Mapping[str, bool]:
    """Features of this machine. Asked once: llvmlite does not survive an interrupt in between."""
    return dict(llvmlite.binding.get_host_cpu_features())


def missing(path: Path) -> list[str]:
    """Features that a path needs and the CPU does not have."""
    return [feature for feature in _NEEDS[path] if not has(feature)]


def runnable() -> list[Path]:
    """The paths of this CPU, the best one last."""
    return [path for path in Path if not missing(path)]


def choose(wanted: str = AUTO) -> Path:
    """The path of that name; "auto": what the environment says, else the best one.

    A process compiles for one CPU, so it has the best path of that CPU, and the portable one.

    Raises:
        ValueError: there is no such path, this CPU cannot run it, or this process does not compile
            for it.
    """
    name, source = wanted, f"kernels={wanted!r}"
    if name == AUTO:
        name = os.environ.get(VARIABLE) or AUTO
        source = f"{VARIABLE}={name}"
    paths = runnable()
    if name == AUTO:
        return paths[-1]
    known = ", ".join([AUTO, *(path.name.lower() for path in paths)])
    path = NAMES.get(name)
    if path is None:
        raise ValueError(f"{source}: there are no such kernels. Here are {known}.")
    if lacking := missing(path):
        raise ValueError(
            f"{source} needs {', '.join(lacking)}: the CPU has it not, or numba may not use it. "
            f"Here are {known}."
        )
    if path not in (Path.PORTABLE, paths[-1]):
        raise ValueError(
            f"{source}: this process compiles for {paths[-1].name.lower()}; start it with "
            f"{VARIABLE}={name}, and without NUMBA_CPU_FEATURES, for other kernels."
        )
    return path


def _without_avx512() -> str:
    """The features of this CPU as LLVM takes them, those of 512 bits switched off."""
    host = _host()
    wide = ("avx512", "avx10", "evex512", "amx")
    return ",".join(
        f"{'+' if known and not name.startswith(wide) else '-'}{name}"
        for name, known in sorted(host.items())
    )


# Before anything is compiled: numba asks once.
if os.environ.get(VARIABLE) == Path.AVX2.name.lower() and config.CPU_FEATURES is None:
    config.CPU_FEATURES = _without_avx512()
