"""Processes whose heap is checked to the end."""

import os
import subprocess
import sys


def printed(program: str, *arguments: str) -> str:
    """What a program prints that may import what tests import; it ends well and says no error."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ
        | {"PYTHONPATH": os.path.dirname(__file__), "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
