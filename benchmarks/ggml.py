"""Peers in ggml: flash attention and quantization of the libraries inside of llama-cpp-python.

The package is used for its libraries only: no model, no ``import llama_cpp``.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import importlib.util
import sys
from collections.abc import Callable
from ctypes import POINTER, Structure, c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import numpy as np
from problem import Array, Problem

_ROOM = 1 << 20  # bytes beside the data: headers of tensors and the graph
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
_PREFIX = "" if sys.platform == "win32" else "lib"


class Type(enum.IntEnum):
    """Element types by their numbers in ``ggml.h``."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q8_0 = 8

    def row_bytes(self, size: int) -> int:
        """Bytes of ``size`` elements: blocks of 32 with a float16 scale where it is quantized."""
        block = {Type.F32: 128, Type.F16: 64, Type.Q4_0: 18, Type.Q8_0: 34}[self]
        return size // 32 * block


class _Settings(Structure):
    """``ggml_init_params``."""

    _fields_ = [("bytes", c_size_t), ("buffer", c_void_p), ("no_alloc", c_bool)]


class _Plan(Structure):
    """``ggml_cplan``: its first members, and room for those that other versions add."""

    _fields_ = [
        ("work_size", c_size_t),
        ("work_data", c_void_p),
        ("threads", c_int),
        ("others", c_void_p * 8),
    ]


class _Traits(Structure):
    """The first member of ``ggml_type_traits_cpu``."""

    _fields_ = [("from_float", ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64))]


class _Library:
    """Functions with their signatures."""

    def __init__(self, folder: Path) -> None:
        names = [f"{_PREFIX}ggml-base{_SUFFIX}", f"{_PREFIX}ggml-cpu{_SUFFIX}"]
        base, cpu = (ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL) for name in names)

        def declare(
            library: ctypes.CDLL, name: str, result: type | None, *arguments: type
        ) -> Callable[..., object]:
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            return function

        self.init = declare(base, "ggml_init", c_void_p, _Settings)
        self.free = declare(base, "ggml_free", None, c_void_p)
        tensor = c_void_p, c_int, c_int64, c_int64, c_int64, c_int64
        self.tensor = declare(base, "ggml_new_tensor_4d", c_void_p, *tensor)
        self.data = declare(base, "ggml_get_data", c_void_p, c_void_p)
        attend = *[c_void_p] * 5, *[c_float] * 3
        self.attend = declare(base, "ggml_flash_attn_ext", c_void_p, *attend)
        self.graph = declare(base, "ggml_new_graph", c_void_p, c_void_p)
        self.expand = declare(base, "ggml_build_forward_expand", None, c_void_p, c_void_p)
        self.plan = declare(cpu, "ggml_graph_plan", _Plan, c_void_p, c_int, c_void_p)
        self.compute = declare(cpu, "ggml_graph_compute", c_int, c_void_p, POINTER(_Plan))
        self.traits = declare(cpu, "ggml_get_type_traits_cpu", POINTER(_Traits), c_int)
        declare(cpu, "ggml_cpu_init", None)()


@functools.cache
def library() -> _Library | None:
    """The libraries of llama-cpp-python; None if it is not installed."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        return None
    return _Library(Path(found.origin).parent / "lib")


def quantizer(kind: Type, source: Array) -> Callable[[], Array]:
    """A call that quantizes float32 numbers as decoding does (``from_float``), and its bytes."""
    functions = library()
    assert functions is not None
    convert = functions.traits(kind).contents.from_float
    data = np.ascontiguousarray(source, np.float32)
    target = np.ones(kind.row_bytes(data.size), np.uint8)

    def quantize() -> Array:
        convert(data.ctypes.data, target.ctypes.data, data.size)
        return target

    return quantize


class FlashAttention:
    """``ggml_flash_attn_ext`` of one new token over a cache of one type."""

    def __init__(self, problem: Problem, kind: Type) -> None:
        """Quantize the cache into memory of ggml and build the graph of this node."""
        functions = library()
        assert functions is not None and problem.new == 1
        self._functions, self._problem = functions, problem
        size, tokens, kv_heads = problem.size, problem.tokens, problem.kv_heads
        cache_bytes = 2 * kind.row_bytes(problem.keys.size)
        settings = _Settings(cache_bytes + 8 * problem.query.nbytes + _ROOM, None, False)
        self._context = functions.init(settings)
        make = functools.partial(functions.tensor, self._context)
        query = make(Type.F32, size, 1, problem.heads, 1)
        self._fill(query, problem.query)
        halves = []
        for x in problem.kv:
            half = make(kind, size, tokens, kv_heads, 1)
            self._fill(half, x if kind is Type.F32 else quantizer(kind, x)())
            halves.append(half)
        scale = c_float(size**-0.5)
        self._output = functions.attend(self._context, query, *halves, None, scale, 0, 0)
        self._graph = functions.graph(self._context)
        functions.expand(self._graph, self._output)

    def _fill(self, tensor: object, array: Array) -> None:
        data = np.ascontiguousarray(array)
        ctypes.memmove(self._functions.data(tensor), data.ctypes.data, data.nbytes)

    def run(self, threads: int) -> Callable[[], Array]:
        """A call on so many threads; it gives (heads, 1, head_size) float32."""
        functions = self._functions
        plan = functions.plan(self._graph, threads, None)
        assert isinstance(plan, _Plan)
        work = np.ones(plan.work_size + 64, np.uint8)
        plan.work_data = work.ctypes.data
        shape = self._problem.heads, 1, self._problem.size
        place = ctypes.cast(functions.data(self._output), POINTER(c_float))
        output = np.ctypeslib.as_array(place, shape)

        def compute(keep: object = (self, work)) -> Array:
            status = functions.compute(self._graph, ctypes.byref(plan))
            assert status == 0, f"ggml_graph_compute: {status}"
            return output

        return compute

    def __del__(self) -> None:
        self._functions.free(self._context)
