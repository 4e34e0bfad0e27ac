"""The garbage collector, while much is made that stays.

A model becomes some hundred thousand objects, and nearly all of them outlive the call that makes
them. The collector would look at all of them again and again, and find nothing: an eighth of the
time in which SmolLM2 is loaded.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Do not look for garbage within the block, or the function that this decorates.

    Safe in several threads: one that ends first lets the collector go on for the others as well.
    Where the caller has switched it off, it stays off.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
