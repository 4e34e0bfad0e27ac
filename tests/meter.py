"""The most resident memory that this process has had since `restart`, as Linux counts it."""

from pathlib import Path

_PROCESS = Path("/proc/self")
AVAILABLE = (_PROCESS / "clear_refs").exists()


def restart() -> None:
    """Forget earlier peaks: loading a model takes more than running it."""
    (_PROCESS / "clear_refs").write_text("5")


def peak() -> int:
    """The peak in bytes."""
    lines = (_PROCESS / "status").read_text().splitlines()
    kibibytes = next(line for line in lines if line.startswith("VmHWM")).split()[1]
    return int(kibibytes) * 1024
