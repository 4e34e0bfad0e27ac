"""Bytes in words."""

from __future__ import annotations

from onnx_inplace.compiler.memory import Bytes

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def short(size: float) -> str:
    """Three digits and a unit."""
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    if unit == "bytes":
        return "1 byte" if size == 1 else f"{size:,.0f} bytes"
    digits = 0 if size >= 100 else 1 if size >= 10 else 2
    return f"{size:,.{digits}f} {unit}"


def formula(size: Bytes) -> str:
    """A number with its digits in groups, or a formula with signs that people write."""
    if isinstance(size, int) or size.is_Integer:
        return f"{int(size):,}"
    return str(size).replace("**", "^").replace("*", " · ").replace("Max(", "max(")


def brief(size: Bytes) -> str:
    """A number of bytes as ``short`` says it, else the formula."""
    known = isinstance(size, int) or size.is_Integer
    return short(int(size)) if known else formula(size)
