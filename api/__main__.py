"""``python -m onnx_inplace``, and the command ``onnx-inplace``."""

from __future__ import annotations

import os
import sys

from onnx_inplace.cli.commands import app


def main() -> None:
    """Run the command line; a reader that closes the pipe early is no error."""
    try:
        app(prog_name="onnx-inplace")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
