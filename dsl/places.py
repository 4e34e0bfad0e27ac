"""Where the author's program stands: the innermost line that is neither ours nor onnxscript's."""

from __future__ import annotations

import functools
import os
import sys
import types

import onnxscript

from onnx_inplace.compiler.errors import Location

_FOLDERS = tuple(
    os.path.dirname(os.path.abspath(f)) + os.sep for f in (__file__, onnxscript.__file__)
)


@functools.lru_cache(maxsize=4096)
def _is_machinery(filename: str) -> bool:
    return os.path.abspath(filename).startswith(_FOLDERS)


def user_frame() -> types.FrameType:
    """The innermost frame of the author's code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_line() -> Location:
    """The line that the author's code is executing."""
    frame = user_frame()
    return Location(frame.f_code.co_filename, frame.f_lineno)


def source_place(location: Location) -> str:
    """How a place is stored in a file: no folder, so that the bytes do not depend on one."""
    return f"{os.path.basename(location.file)}:{location.line}"
