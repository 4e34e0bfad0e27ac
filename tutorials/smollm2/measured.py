"""A conversation that watches its own steps: clock, memory, and whether the caches stay."""

import time
from collections.abc import Sequence
from pathlib import Path

from generate import Conversation

from onnx_inplace import Session
from onnx_inplace.runner.outputs import Outputs

PROCESS = Path("/proc/self")


def restart_peak() -> None:
    """Forget earlier peaks of memory, where Linux lets us: loading takes more than running."""
    if (PROCESS / "clear_refs").exists():
        (PROCESS / "clear_refs").write_text("5")


def peak_memory() -> int | None:
    """The most resident memory, in bytes, that the process has had since `restart_peak`."""
    if not (PROCESS / "clear_refs").exists():
        return None
    lines = (PROCESS / "status").read_text().splitlines()
    kibibytes = next(line for line in lines if line.startswith("VmHWM")).split()[1]
    return int(kibibytes) * 1024


class Measured(Conversation):
    """A conversation and what its steps took. The first step is the prompt."""

    def __init__(self, session: Session, max_length: int) -> None:
        """Allocate caches for ``max_length`` tokens."""
        super().__init__(session, max_length)
        self.seconds: list[float] = []  # of each step
        self.peaks: list[int | None] = []  # of memory, after each step
        self.copied = 0  # [bytes] of caches that came back in other memory than the one lent
        restart_peak()

    def run(self, tokens: Sequence[int]) -> Outputs:
        """Append tokens."""
        start = time.perf_counter()
        outputs = super().run(tokens)
        self.seconds.append(time.perf_counter() - start)
        self.peaks.append(peak_memory())
        returned = zip(list(outputs)[1:], self.caches, strict=True)
        self.copied += sum(new.nbytes for new, lent in returned if new is not lent)
        return outputs

    def report(self) -> str:
        """What the steps took, in three lines."""
        prompt, *decoding = self.seconds
        size = sum(cache.nbytes for cache in self.caches)
        speed = len(decoding) / sum(decoding) if decoding else 0.0
        lines = [
            f"{len(decoding)} tokens, {speed:.1f} tokens/s"
            f" (prompt: {self.length - len(decoding)} tokens in {prompt:.2f} s)",
            f"caches: {size:,} bytes; bytes allocated for caches during decoding: {self.copied}",
        ]
        peaks = [peak for peak in self.peaks[1:] if peak is not None]
        if peaks:
            growth = (peaks[-1] - peaks[0]) / 2**20
            lines.append(f"memory of the process: +{growth:.1f} MiB since the first decoding step")
        return "\n".join(lines)
