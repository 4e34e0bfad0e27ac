"""One call of attention: from arrays in slots to a kernel on addresses. Chooses kernel and threads.

Both attention operators end here. What depends on shapes only is worked out once for each tuple of
shapes; a call then looks it up and hands addresses over.
"""

from __future__ import annotations

import collections
import dataclasses
import time
import types
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnx_inplace.compiler import errors
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
from onnx_inplace.numba_kernels.memory import FIELD, OnDemand, address
from onnx_inplace.numba_kernels.sharing import Sharing
from onnx_inplace.runner import team, threads, work
from onnx_inplace.runner.actions import Array, Settings

KINDS: dict[np.dtype[Any], int] = {
    np.dtype(np.float32): floats.FLOAT32,
    np.dtype(np.float16): floats.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): floats.BFLOAT16,
}
"""Element types that kernels read and write."""

PARALLEL = 1 << 21
"""Products of elements from which a second thread pays, that sleeps before: 3,600 tokens of 9 heads
of 64, 500 of 32 heads of 128 (``benchmarks/crossover.py``)."""

SHARED = 1 << 19
"""Products from which work is shared out: here a thread pays that is awake."""

T = TypeVar("T")

_MOST_GEOMETRIES = 1024

_policies: dict[int, threads.Policy] = collections.defaultdict(threads.Policy)  # by kernel


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Arrangement of heads in memory: strides in bytes of one argument."""

    batch: int
    head: int
    token: int

    @staticmethod
    def of(array: Array, size: int) -> Heads:
        """Strides of (batch, heads, tokens, size), or of (batch, tokens, heads * size) packed."""
        if array.ndim == 4:
            return Heads(array.strides[0], array.strides[1], array.strides[2])
        return Heads(array.strides[0], size * array.itemsize, array.strides[1])


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Attributes and sizes of a call; see ``numba_kernels.layout.Layout``."""

    shape: tuple[int, ...]  # of the output
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

    @property
    def rows(self) -> tuple[int, int]:
        """Query rows of a kv head, and kv heads of all rows of the batch."""
        return self.tokens * (self.heads // self.kv_heads), self.batch * self.kv_heads


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What fast kernels are made for; None where it is not known before a run."""

    kind: int | None  # of keys and values
    size: int | None  # of a head, in keys and values
    group: int | None

    def fits(self, problem: Problem) -> bool:
        """Whether a call is of this shape."""
        p = problem
        group = p.heads // p.kv_heads
        given = p.kinds[1], p.kinds[2], p.head_size, p.value_size, group
        return given == (self.kind, self.kind, self.size, self.size, self.group)


class Kernels:
    """The kernels of a step, compiled when the model is loaded: none is compiled during a run."""

    def __init__(self, settings: Settings, shape: Shape) -> None:
        self.threads, self.shape = settings.threads, shape
        self.serial = invoke.invoke.ready()
        self.serial_arrays = invoke.invoke_arrays.ready()
        team.ready(settings.threads)
        self.portable: int = attention.attend.ready().address
        self.decode: types.ModuleType | None = None
        self.prefill: types.ModuleType | None = None
        kind, size, group = shape.kind, shape.size, shape.group
        if settings.portable:
            return
        if kind is None or size is None or group is None or size % vector.LANES:
            return
        self.prefill = specialise.specialise(prefill, kind, size)
        self.prefill.attend.ready()
        if group <= vector.LANES:
            self.decode = specialise.specialise(decode, kind, size, group)
            self.decode.attend.ready()
            self.decode.merge.ready()

    def other(self, problem: Problem, workers: int) -> tuple[OnDemand, int]:
        """The kernel of a call that decoding does not fit, and bytes of its workspace."""
        if self.prefill is not None and self.shape.fits(problem):
            count, heads = problem.rows
            return self.prefill.attend, self.prefill.workspace_size(count, heads, workers)
        size = attention.workspace_size(problem.head_size, problem.value_size)
        return attention.attend, size * workers


def facts(p: Problem) -> Array:
    """The Layout of a problem, in memory."""
    numbers: list[int] = [
        p.batch, p.kv_heads, p.heads // p.kv_heads, p.tokens, p.head_size, p.value_size,
        *p.kinds, p.left, p.right, int(p.at_end), layout.bits(p.scale), layout.bits(p.softcap),
        *dataclasses.astuple(p.query), *dataclasses.astuple(p.key),
        *dataclasses.astuple(p.value), *dataclasses.astuple(p.output), *p.mask,
    ]  # fmt: skip
    return np.array(layout.Layout(*numbers), np.int64)


class Plain(NamedTuple):
    """A call without mask and sinks, for who makes it without Python: see ``invoke.invoke``.

    Attributes:
        kernel: its address.
        layout: address of the Layout, which the call owns.
        space: bytes of workspace; its first two int64 are 0 and the number of splits.
        sharing: which sequences are split, and who works on them.
    """

    kernel: int
    layout: int
    space: int
    sharing: Sharing


class Call:
    """A prepared call for one tuple of shapes. Immutable: threads share it.

    Attributes:
        clock: decides on how many threads it runs.
    """

    def __init__(self, problem: Problem, kernels: Kernels) -> None:
        p = self.problem = problem
        self.shape = p.shape
        self._layout = facts(p)
        self._layout_address = address(self._layout)
        self._all = np.full(p.batch, p.capacity, np.int64)
        self._kernels, self._serial = kernels, kernels.serial
        self._serial_arrays = kernels.serial_arrays
        products = p.heads * p.tokens * p.head_size  # of a row and a key
        self._shared, long = (
            least // max(p.batch * products, 1) if kernels.threads > 1 else p.capacity
            for least in (min(SHARED, PARALLEL), PARALLEL)
        )
        fits = kernels.shape.fits(p)
        self._decode = kernels.decode if fits and p.tokens == 1 else None
        self._prefill = kernels.prefill if fits else None
        if self._decode is not None:
            self._kernel: int = self._decode.attend.ready().address
        elif self._prefill is not None:
            self._kernel = self._prefill.attend.ready().address
        else:
            self._kernel = kernels.portable
        merge: int = 0 if self._decode is None else self._decode.merge.ready().address
        split = 0 if self._decode is None else p.kv_heads
        sizes = self._shared, work.SHORTEST_SPLIT, split, work.reach(p, p.capacity)
        self._sharing = Sharing(*sizes, kernels.threads, merge)
        self.clock = work.Clock(_policies[self._kernel], products, p, p.at_end, long)
        self._workspace = self._words(1, 1)

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
        if lengths is None:
            lengths = self._all
        p = self.problem
        longest = longest_length(root, lengths, p.batch, p.capacity)
        places = self._layout_address, query, key, value, output, address(lengths), mask, sinks
        if longest <= self._shared:
            self._run(places, 1, 1)
            return
        # As many splits on one thread as on several: which it is, is decided by the clock and by
        # whose threads they are, and results must not depend on it.
        parts = work.splits(self._sharing, lengths, longest)
        if team.borrows() or longest <= self.clock.least:
            self._run(places, parts, self._kernels.threads if team.borrows() else 1)
            return
        parallel = self.clock.policy.parallel()
        start = time.perf_counter()
        self._run(places, parts, self._kernels.threads if parallel else 1)
        seconds = time.perf_counter() - start
        self.clock.took(seconds, self.clock.seen(lengths), parallel=parallel)

    def on_arrays(
        self,
        query: Array,
        key: Array,
        value: Array,
        output: Array,
        lengths: Array | None,
        root: str,
    ) -> None:
        """Like a call, for arrays without mask and sinks: every layer of a decoder comes here."""
        if lengths is None:
            lengths = self._all
        p = self.problem
        if longest_length(root, lengths, p.batch, p.capacity) > self._shared:
            at = address(query), address(key), address(value), address(output)
            self(*at, lengths, root)
            return
        workspace = np.empty(self._workspace, np.int64)
        self._serial_arrays(
            self._kernel,
            self._layout_address,
            id(query) + FIELD,
            id(key) + FIELD,
            id(value) + FIELD,
            id(output) + FIELD,
            id(lengths) + FIELD,
            id(workspace) + FIELD,
        )

    @property
    def plain(self) -> Plain:
        """What a call without mask and sinks is."""
        parts = work.most_splits(self._sharing, self.problem.capacity)
        space = 8 * max(self._workspace, self._words(self._kernels.threads, parts))
        return Plain(self._kernel, self._layout_address, space, self._sharing)

    def _words(self, workers: int, splits: int) -> int:
        """Workspace in int64."""
        p = self.problem
        if self._decode is not None:
            size: int = self._decode.workspace_size(p.batch * p.kv_heads * splits, workers)
        elif self._prefill is not None:
            size = self._prefill.workspace_size(*p.rows, workers)
        else:
            size = attention.workspace_size(p.head_size, p.value_size) * workers
        return 2 + size // 8

    def _run(self, places: tuple[int, ...], splits: int, workers: int) -> None:
        alone = workers == 1 and splits == 1
        words = self._workspace if alone else self._words(workers, splits)
        workspace = np.empty(words, np.int64)
        workspace[0], workspace[1] = 0, splits  # items that are done, splits
        if workers == 1:
            self._serial(self._kernel, *places, address(workspace), 1)
            return
        team.run(self._kernel, (*places, address(workspace)), workers, self._sharing.merge)


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


def longest_length(root: str, lengths: Array, batch: int, capacity: int) -> int:
    """The longest of the valid lengths.

    Raises:
        StorageMismatch: there is not one length for each row.
        CapacityError: a length is negative or exceeds the capacity: the kernel would read outside.
    """
    if lengths.shape != (batch,):
        raise errors.StorageMismatch(f"{root}: lengths {list(lengths.shape)} for {batch} rows")
    if batch == 1:
        only = int(lengths[0])
        if 0 <= only <= capacity:
            return only
    longest = 0
    for row, length in enumerate(lengths.tolist()):
        if not 0 <= length <= capacity:
            raise errors.CapacityError(root, 0, length, capacity, row)
        longest = max(longest, length)
    return longest


class Known(Protocol):
    """What a plan knows of a value: its element type and its shape."""

    @property
    def dtype(self) -> ir.DataType | None:
        """None where it is not known."""

    @property
    def shape(self) -> Sequence[object] | None:
        """Sizes; what is no number is known only in a run."""


def kind_of(value: Known | None) -> int | None:
    """The kind of the elements of a value, where it is known."""
    return None if value is None or value.dtype is None else KINDS.get(value.dtype.numpy())


def known_dim(value: Known | None, axis: int) -> int | None:
    """A dimension of a value, where it is known."""
    if value is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    dim = value.shape[axis]
    return dim if isinstance(dim, int) else None
