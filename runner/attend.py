"""One call of attention: from arrays in slots to a kernel on addresses. Chooses kernel and threads.

Both attention operators end here. What depends on shapes only is worked out once for each tuple of
shapes; a call then looks it up and hands addresses over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import ml_dtypes
import numba
import numpy as np

from onnx_inplace.compiler import errors, steps
from onnx_inplace.numba_kernels import (
    attention,
    decode,
    floats,
    invoke,
    layout,
    prefill,
    specialise,
    vector,
)
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner.actions import Array, Settings

KINDS: dict[np.dtype[Any], int] = {
    np.dtype(np.float32): floats.FLOAT32,
    np.dtype(np.float16): floats.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): floats.BFLOAT16,
}
"""Element types that kernels read and write."""

PARALLEL = 1 << 20
"""Products of elements from which a second thread pays: 1,800 tokens of 9 heads of 64."""

SHORTEST_SPLIT = 256  # tokens

T = TypeVar("T")

_MOST_GEOMETRIES = 1024

_layer_lock = threading.Lock()
_layer_is_safe = False


@contextlib.contextmanager
def _parallel_region(threads: int) -> Iterator[None]:
    """Threads of numba, at most ``threads`` of them; one region at a time where the layer needs it.

    The layer "workqueue" aborts the process when two threads enter it.
    """
    global _layer_is_safe
    before = numba.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    try:
        if _layer_is_safe:
            yield
            return
        with _layer_lock:
            yield
            _layer_is_safe = numba.threading_layer() in ("omp", "tbb")
    finally:
        numba.set_num_threads(before)


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Arrangement of heads in memory: strides in bytes of one argument."""

    batch: int
    head: int
    token: int

    @staticmethod
    def of(array: Array, heads: int, size: int, first: int = 0) -> Heads:
        """Strides of (batch, heads, tokens, size), or of (batch, tokens, heads * size) packed."""
        if array.ndim == 4:
            return Heads(array.strides[0], array.strides[1], array.strides[2])
        return Heads(array.strides[0], size * array.itemsize, array.strides[1])


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Attributes and sizes of a call; see ``numba_kernels.layout.Layout``."""

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    capacity: int
    head_size: int
    value_size: int
    query: Heads
    key: Heads
    value: Heads
    output: Heads
    kinds: tuple[int, int, int, int]
    left: int
    right: int
    at_end: bool
    mask: tuple[int, int, int, int, int]
    scale: float
    softcap: float


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What fast kernels are made for; None where it is not known before a run."""

    kind: int | None  # of keys and values
    size: int | None  # of a head, in keys and values
    group: int | None

    def fits(self, problem: Problem) -> bool:
        """Whether a call is of this shape."""
        p = problem
        return (p.kinds[1], p.head_size, p.heads // p.kv_heads) == (
            self.kind,
            self.size,
            self.group,
        ) and (
            p.kinds[2],
            p.value_size,
        ) == (self.kind, self.size)


class Kernels:
    """The kernels of a step, compiled when the model is loaded: none is compiled during a run."""

    def __init__(self, settings: Settings, shape: Shape) -> None:
        self.threads, self.shape = settings.threads, shape
        self.serial = invoke.invoke.ready()
        self.parallel = invoke.invoke_parallel.ready() if settings.threads > 1 else None
        self.portable: int = attention.attend.ready().address
        self.decode: Any = None
        self.prefill: Any = None
        kind, size, group = shape.kind, shape.size, shape.group
        if (
            settings.portable
            or kind is None
            or size is None
            or group is None
            or not vector.available()
        ):
            return
        if size % vector.LANES == 0:
            self.prefill = specialise.specialise(prefill, kind, size)
            self.prefill_address: int = self.prefill.attend.ready().address
        if size % vector.LANES == 0 and group <= vector.LANES:
            self.decode = specialise.specialise(decode, kind, size, group)
            self.decode_addresses = (
                self.decode.partials.ready().address,
                self.decode.merge.ready().address,
            )


class Call:
    """A prepared call for one tuple of shapes. Immutable: threads share it."""

    def __init__(self, problem: Problem, kernels: Kernels) -> None:
        p = self.problem = problem
        facts = layout.Layout(
            p.batch, p.kv_heads, p.heads // p.kv_heads, p.tokens, p.head_size, p.value_size,
            *p.kinds, p.left, p.right, int(p.at_end), layout.bits(p.scale), layout.bits(p.softcap),
            *dataclasses.astuple(p.query), *dataclasses.astuple(p.key),
            *dataclasses.astuple(p.value), *dataclasses.astuple(p.output), *p.mask,
        )  # fmt: skip
        self._layout = np.array(facts, np.int64)
        self._layout_address = address(self._layout)
        self._kernels = kernels
        self._workspace = attention.workspace_size(p.head_size, p.value_size)
        self._row_products = p.batch * p.heads * p.tokens * p.head_size
        self._all = np.full(p.batch, p.capacity, np.int64)
        plain = not p.softcap and not p.mask[3] and kernels.shape.fits(p)
        self._decode = kernels.decode if p.tokens == 1 and plain else None
        self._prefill = kernels.prefill if plain else None

    def __call__(
        self,
        query: int,
        key: int,
        value: int,
        output: int,
        lengths: Array | None,
        root: str,
        mask: int = 0,
        sinks: int = 0,
    ) -> None:
        """Read ``lengths`` tokens of each row (all without), write to address ``output``."""
        p, kernels = self.problem, self._kernels
        if lengths is None:
            lengths = self._all
        longest = check_lengths(root, lengths, p.batch, p.capacity)
        places = (
            self._layout_address, query, key, value, output, address(lengths), mask, sinks
        )  # fmt: skip
        small = kernels.parallel is None or self._row_products * longest < PARALLEL
        workers = 1 if small else kernels.threads
        if self._decode is not None:
            self._run_decode(places, workers, longest)
        elif self._prefill is not None:
            workspace = np.empty(-(-self._prefill.workspace_size(workers) // 8), np.int64)
            workspace[0] = 0
            self._run(kernels.prefill_address, places, address(workspace), workers)
        else:
            workspace = np.empty(self._workspace * workers, np.uint8)
            self._run(kernels.portable, places, address(workspace), workers)

    def _run_decode(self, places: tuple[int, ...], workers: int, longest: int) -> None:
        rows = self.problem.batch * self.problem.kv_heads
        splits = 1
        if workers > 1:  # some more items than threads, so that a late thread does not matter
            splits = max(1, min(longest // SHORTEST_SPLIT, -(-4 * workers // rows)))
        size = self._decode.workspace_size(rows * splits, workers)
        workspace = np.empty(-(-size // 8), np.int64)
        workspace[0], workspace[1] = 0, splits
        partials, merge = self._kernels.decode_addresses
        self._run(partials, places, address(workspace), workers)
        self._kernels.serial(merge, *places, address(workspace), workers)

    def _run(self, kernel: int, places: tuple[int, ...], space: int, workers: int) -> None:
        kernels = self._kernels
        if workers == 1 or kernels.parallel is None:
            kernels.serial(kernel, *places, space, 1)
            return
        with _parallel_region(workers):
            kernels.parallel(kernel, *places, space, workers)


class Calls(Generic[T]):
    """Prepared calls by shape."""

    def __init__(self) -> None:
        self._calls: dict[Any, T] = {}

    def get(self, key: Any) -> T | None:
        """The call of some shapes, if it is prepared."""
        return self._calls.get(key)

    def put(self, key: Any, call: T) -> T:
        """Keep a call. A server sees many lengths of prompts: forget them, do not grow for ever."""
        if len(self._calls) >= _MOST_GEOMETRIES:
            self._calls.clear()
        self._calls[key] = call
        return call


def check_lengths(root: str, lengths: Array, batch: int, capacity: int) -> int:
    """The longest of the valid lengths.

    Raises:
        StorageMismatch: there is not one length for each row.
        CapacityError: a length is negative or exceeds the capacity: the kernel would read outside.
    """
    if lengths.shape != (batch,):
        raise errors.StorageMismatch(f"{root}: lengths {list(lengths.shape)} for {batch} rows")
    longest = 0
    for row, length in enumerate(lengths.tolist()):
        if not 0 <= length <= capacity:
            raise errors.CapacityError(root, 0, length, capacity, row)
        longest = max(longest, length)
    return longest


def mask_values(mask: Array) -> Array:
    """What kernels take as a mask: bool, or float32 to add."""
    if mask.dtype == np.bool_:
        return np.ascontiguousarray(mask)
    return np.ascontiguousarray(mask, dtype=np.float32)


def mask_layout(
    mask: Array | None, rows: tuple[int, int, int], capacity: int
) -> tuple[int, int, int, int, int]:
    """(batch, head and token stride, bytes of an element, keys): 0 strides repeat."""
    if mask is None:
        return 0, 0, 0, 0, 0
    shape = (1,) * (4 - mask.ndim) + mask.shape
    if any(m not in (1, r) for m, r in zip(shape, rows, strict=False)) or shape[3] > capacity:
        raise errors.StorageMismatch(f"Attention: a mask {list(mask.shape)} for rows {list(rows)}")
    strides = (0,) * (4 - mask.ndim) + mask.strides
    batch, head, token = (0 if m == 1 else s for m, s in zip(shape[:3], strides, strict=False))
    return batch, head, token, mask.itemsize, shape[3]


def kind_of(value: steps.Value | None) -> int | None:
    """The kind of the elements of a value, where it is known."""
    return None if value is None or value.dtype is None else KINDS.get(value.dtype.numpy())


def known_dim(value: steps.Value | None, axis: int) -> int | None:
    """A dimension of a value, where it is known."""
    if value is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    dim = value.shape[axis]
    return dim if isinstance(dim, int) else None
