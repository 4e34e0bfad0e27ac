"""An allocator for sessions of onnxruntime: small tensors in slots, all others in its arena.

The arena keeps what is free in order of size, under a lock, which takes 5 % of a decoder's token: a
thousand tensors, each of which is used for some microseconds. onnxruntime's own remedy, a block for
all tensors of a run, stands beside the arena, and costs 150 KB for each length of a prompt that was
ever seen.

Where there is no memory, the arena throws an exception through compiled code of ours. Windows has
no way through that, and keeps the arena alone.
"""

from __future__ import annotations

import ctypes

from onnx_inplace.numba_kernels import slots
from onnx_inplace.numba_kernels.slots import Words
from onnx_inplace.runner import pools
from onnx_inplace.runner.native.functions import Functions

_VERSION = 18  # of the structure: the first that knows of what is kept for long
_DEVICE, _DEFAULT = 0, 0  # kind of an allocator, kind of memory
_P = ctypes.c_void_p
_OF_ENVIRONMENT = b"session.use_env_allocators", b"1"


class _Allocator(ctypes.Structure):
    """OrtAllocator, in the order that onnxruntime documents."""

    _fields_ = (
        ("version", ctypes.c_uint32),
        ("give", _P),
        ("take_back", _P),
        ("information", _P),
        ("keep", _P),
    )


class Allocator:
    """What sessions of an environment take tensors from. It lives as long as the process.

    Attributes:
        pool: its slots.
    """

    def __init__(self, functions: Functions, environment: int, arena: int) -> None:
        """Register it.

        Args:
            functions: of the library.
            environment: address of onnxruntime's object.
            arena: address of an OrtAllocator.
        """
        self.pool = slots.Pool()
        words, rest = self.pool.words, _Allocator.from_address(arena)
        words[Words.REST] = arena
        words[Words.GIVE], words[Words.TAKE_BACK] = rest.give, rest.take_back
        words[Words.KEEP] = rest.keep if rest.version >= _VERSION and rest.keep else rest.give
        words[Words.INFORMATION] = functions.make("CreateCpuMemoryInfo", _DEVICE, _DEFAULT)
        own = _Allocator.from_address(self.pool.at)
        own.version = _VERSION
        own.give, own.take_back = slots.give.ready().address, slots.take_back.ready().address
        own.information, own.keep = slots.describe.ready().address, slots.keep.ready().address
        functions.call("RegisterAllocator", environment, self.pool.at)
        # Sessions and threads of the library end with the process, behind the interpreter.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


def share(functions: Functions, environment: int, memory: int) -> Allocator:
    """Put slots in front of the arena that an environment has registered for this memory."""
    options = functions.make("CreateSessionOptions")
    functions.call("AddSessionConfigEntry", options, *_OF_ENVIRONMENT)
    functions.call("SetIntraOpNumThreads", options, 1)
    model = pools.smallest()
    session = functions.make("CreateSessionFromArray", environment, model, len(model), options)
    arena = functions.make("CreateAllocator", session, memory)  # is all that refers to it
    functions.release("Session", session)
    functions.release("SessionOptions", options)
    return Allocator(functions, environment, arena)
