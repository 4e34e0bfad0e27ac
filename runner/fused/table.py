"""Collects the instructions of a fused step for one tuple of shapes, and puts them into memory."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from onnx_inplace.compiler import errors, sizes
from onnx_inplace.compiler.errors import Location
from onnx_inplace.compiler.fused import Fused, FusedValue
from onnx_inplace.numba_kernels.fused import interpreter, moves
from onnx_inplace.numba_kernels.memory import OnDemand, address
from onnx_inplace.runner.actions import Array, DType, Slots
from onnx_inplace.runner.attend import KINDS
from onnx_inplace.runner.fused.buffers import Buffers, aligned
from onnx_inplace.runner.fused.instruction import Instruction, flags, meet, range_
from onnx_inplace.runner.fused.page_access import Pages, Source
from onnx_inplace.runner.fused.weights import Weights
from onnx_inplace.runner.pages import PagedCache


class NotFused(Exception):
    """A fused step cannot serve these shapes: the ordinary steps do. ``str`` says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """What must hold of the integers of an input before a run: low <= number < end.

    ``fail(numbers)`` raises the error of the operation that reads them, ``refuse`` with its line.
    """

    value: int
    low: int
    end: int
    fail: Callable[[Array], None]
    location: Location | None = None

    def refuse(self, numbers: Array) -> None:
        """Raise the error; it says the place."""
        try:
            self.fail(numbers)
        except errors.PlacedError as error:
            error.at(self.location)
            raise


@dataclasses.dataclass(frozen=True, slots=True)
class Codes:
    """A value as integers, in memory that each thread fills and reads alone.

    Attributes:
        memory: of all threads; each has ``each`` bytes.
        place: where the first thread's codes begin.
    """

    memory: Array
    place: int
    each: int


class Builder:
    """What a template writes to.

    Attributes:
        region: the fused step.
        dims: sizes by name of the dimension.
        weights: of the session.
        threads: of a run.
        instructions: until now.
        bounds: what is to check before a run.
        checks: likewise, whatever is no bound of one value.
        pages: what a run does to pages.
        scratch: arrays that must live as long as the table.
    """

    def __init__(
        self,
        region: Fused,
        dims: Mapping[str, int],
        roots: Mapping[str, Any],
        weights: Weights,
        threads: int,
        portable: bool,
    ):
        self.region, self.dims, self.weights = region, dims, weights
        self.threads, self.portable = threads, portable
        self._roots = roots
        written = [roots[name] for name in sorted(region.written)]
        self._written = [range_(root) for root in written if isinstance(root, np.ndarray)]
        self.instructions: list[Instruction] = []
        self.bounds: list[Bound] = []
        self.checks: dict[object, Callable[[Slots], None]] = {}
        self.scratch: list[Array] = []
        self.control = interpreter.control()
        self._codes: dict[tuple[int, int], Codes] = {}
        self._idle: dict[int, list[Array]] = {}  # memory of threads by size
        self.panels: dict[int, tuple[int, int]] = {}  # panels and their bytes, by address
        self._derived: dict[tuple[int, str], Array] = {}
        self._buffers = Buffers()
        self._arrays: dict[int, Array] = {}
        self._temporary: list[Array] = []
        self.leaving = {link.value for link in region.outputs}
        self.fresh: dict[int, Array] = {}  # leaving values that are made new by every run
        self.pages = Pages()
        self._slots = {link.value: link.slot for link in region.inputs}

    # -- values

    def value(self, index: int) -> FusedValue:
        """What the plan says of a value."""
        return self.region.values[index]

    def array(self, index: int | None) -> Array:
        """The bytes of a value; of a weight, as the file has it."""
        assert index is not None
        found = self._arrays.get(index)
        if found is None:
            found = self._arrays[index] = self._enter(index)
        return found

    def _enter(self, index: int) -> Array:
        value = self.value(index)
        if value.constant is not None:
            return self.weights.plain(value.constant)
        if value.root is not None:
            whole: Array = self._roots[value.root]
            return whole.reshape(self.shape(index))
        if value.content is not None:
            numbers = np.array(self.integers(index), np.int64)
            return self.lasting(numbers.reshape(self.shape(index)))
        raise NotFused(f"`{value.name}` is not made before it is used")

    def paged(self, index: int | None) -> PagedCache:
        """The caller's paged cache that a value is."""
        root = None if index is None else self.value(index).root
        assert root is not None
        cache: PagedCache = self._roots[root]
        return cache

    def source(self, index: int | None) -> Source:
        """Finds a value that every run brings, or that the dimensions decide."""
        assert index is not None
        slot = self._slots.get(index)
        if slot is None:
            fixed = self.array(index)
            return lambda slots: fixed
        return operator.itemgetter(slot)

    def shape(self, index: int) -> tuple[int, ...]:
        """The shape of a value with these dimensions."""
        shape = self.value(index).shape
        if shape is None:
            raise NotFused(f"the shape of `{self.value(index).name}` is known only in a run")
        found = self._numbers(index, shape)
        if 0 in found:  # kernels divide by numbers of columns
            raise NotFused(f"`{self.value(index).name}` is empty")
        return found

    def integers(self, index: int | None) -> tuple[int, ...] | None:
        """The integers of a parameter; None where the operator leaves it out."""
        if index is None:
            return None
        content = self.value(index).content
        if content is None:
            raise NotFused(f"`{self.value(index).name}` is known only in a run")
        return self._numbers(index, content)

    def _numbers(self, index: int, found: Sequence[sizes.Size]) -> tuple[int, ...]:
        try:
            return sizes.numbers(found, self.dims)
        except KeyError as error:
            raise NotFused(f"`{self.value(index).name}`: {error} is not known") from None

    def dtype(self, index: int) -> DType:
        """Element type of a value."""
        dtype = self.value(index).dtype
        if dtype is None:
            raise NotFused(f"the type of `{self.value(index).name}` is not known")
        return dtype.numpy()

    def enter(self, index: int) -> Array:
        """Memory for a value that every run brings."""
        array = self._buffers.take(self.shape(index), self.dtype(index))
        self._arrays[index] = array
        return array

    def result(self, index: int | None) -> Array:
        """Memory for a value that an operation makes."""
        assert index is not None
        shape, dtype = self.shape(index), self.dtype(index)
        if index in self.leaving:
            array = self.fresh[index] = np.empty(shape, dtype)
        else:
            array = self._buffers.take(shape, dtype)
        self._arrays[index] = array
        return array

    def view(self, index: int | None, array: Array) -> None:
        """A value that is other bytes in another shape.

        Of storage that the fused step writes it is a copy, unless it is declared as that storage:
        it keeps what it was, whatever is written behind it.
        """
        assert index is not None
        if array.shape != self.shape(index):
            raise NotFused(f"`{self.value(index).name}` is {array.shape}, not {self.shape(index)}")
        if self.value(index).root is None and meet([range_(array)], self._written):
            self.move(array, self.result(index))
            return
        self._buffers.keep(array)
        self._arrays[index] = array

    def temporary(self, shape: tuple[int, ...], dtype: DType | type = np.float32) -> Array:
        """Memory until the end of the operation."""
        array = self._buffers.take(shape, np.dtype(dtype))
        self._temporary.append(array)
        return array

    def derived(
        self,
        index: int,
        form: str,
        shape: tuple[int, ...],
        dtype: DType | type,
        fill: Callable[[Array], None],
    ) -> Array:
        """A value in another form, made once and kept as long as the value."""
        found = self._derived.get((index, form))
        if found is None:
            found = self._derived[index, form] = self._buffers.take(shape, np.dtype(dtype))
            fill(found)
        return found

    def codes(self, index: int, planes: int) -> Codes | None:
        """A value as integers, where they have been made."""
        return self._codes.get((index, planes))

    def private(self, index: int, planes: int, before: int, size: int) -> Codes:
        """Memory for a value as integers, behind ``before`` bytes for whatever comes first.

        No other thread sees it: it takes part in no conflict, and is used again at once when the
        value is dead.
        """
        before, size = -(-before // 64) * 64, -(-size // 64) * 64
        each = before + size
        idle = self._idle.setdefault(each, [])
        memory = idle.pop() if idle else self.lasting(aligned(each * self.threads))
        found = Codes(memory, address(memory) + before, each)
        self._codes[index, planes] = found
        return found

    def lasting(self, array: Array) -> Array:
        """Keep an array for as long as the table."""
        self.scratch.append(array)
        return array

    def end_operation(self, dead: Iterable[int]) -> None:
        """Give back what no later operation needs."""
        for array in self._temporary:
            self._buffers.drop(array)
        self._temporary.clear()
        for index in dead:
            array = self._arrays.get(index)  # type: ignore[assignment]
            if array is not None:
                self._buffers.drop(array)
            for key in [key for key in self._derived if key[0] == index]:
                self._buffers.drop(self._derived.pop(key))
            for own in [key for key in self._codes if key[0] == index]:
                codes = self._codes.pop(own)
                self._idle[codes.each].append(codes.memory)

    # -- instructions

    def emit(
        self,
        kernel: OnDemand,
        block: Sequence[int],
        reads: Sequence[Array],
        writes: Sequence[Array],
        *,
        first: bool = True,
        streamed: int = 0,
        growing: Sequence[tuple[Array, int]] = (),
        units: int = 0,
    ) -> None:
        """One more instruction. See :class:`Instruction`."""
        for numbers, _ in growing:
            self._buffers.keep(numbers)  # they are looked at between runs
        self.instructions.append(
            Instruction(
                kernel.ready().address,
                block,
                first,
                tuple(range_(a) for a in reads),
                tuple(range_(a) for a in writes),
                streamed,
                tuple(growing),
                units,
            )
        )

    def check(self, key: object, check: Callable[[Slots], None]) -> None:
        """Check the values of a run before it; what several operations ask by one key, once."""
        self.checks.setdefault(key, check)

    def move(self, source: Array, target: Array) -> None:
        """Copy elements, converted where the types differ."""
        kinds = (moves.BYTES, moves.BYTES)
        if source.dtype != target.dtype:
            kinds = KINDS[source.dtype], KINDS[target.dtype]
        try:
            block = moves.move_block(
                address(source),
                address(target),
                kinds,
                target.itemsize,
                target.shape,
                source.strides,
                target.strides,
            )
        except ValueError as error:
            raise NotFused(str(error)) from None
        self.emit(moves.move, block, [source], [target])

    def contiguous(self, array: Array, dtype: DType | type = np.float32) -> Array:
        """The same numbers side by side, of a type: itself, or a copy until the operation ends."""
        if array.dtype == dtype and array.flags.c_contiguous:
            return array
        copy = self.temporary(array.shape, dtype)
        self.move(array, copy)
        return copy

    def writing(self, index: int | None) -> tuple[Array, Callable[[], None]]:
        """Float32 memory for a result, and what to call when it is written."""
        result = self.result(index)
        if result.dtype == np.float32:
            return result, lambda: None
        numbers = self.temporary(result.shape)
        return numbers, lambda: self.move(numbers, result)

    def settle(self) -> None:
        """Results that others leave as parts of are made in one place, and copied by every run."""
        for link in self.region.outputs:
            if self.value(link.value).root is not None:
                continue
            array = self.array(link.value)
            for index, made in list(self.fresh.items()):
                if index != link.value and meet([range_(array)], [range_(made)]):
                    del self.fresh[index]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self._buffers.nbytes


@dataclasses.dataclass(frozen=True)
class Patch:
    """Words of argument blocks that hold an address inside of a result that each run makes new."""

    value: int
    words: tuple[tuple[int, int], ...]  # index of the word, offset in bytes


class Table:
    """Instructions in memory, ready to run."""

    def __init__(self, builder: Builder):
        instructions = builder.instructions
        self.words = np.array([w for i in instructions for w in i.block] or [0], np.int64)
        base, at, rows = address(self.words), 0, []
        for instruction, flag in zip(instructions, flags(instructions), strict=True):
            rows.append((instruction.kernel, base + 8 * at, flag))
            at += len(instruction.block)
        self.table = interpreter.table(rows)
        self.count = len(rows)
        self.barriers = sum(1 for _, _, flag in rows if flag & interpreter.BARRIER)
        self.patches = tuple(
            Patch(value, tuple(self._words_in(array))) for value, array in builder.fresh.items()
        )

    def _words_in(self, array: Array) -> Iterable[tuple[int, int]]:
        """An address lies far above all sizes, so a word in the range of an array is one."""
        low, high = range_(array)
        for k in np.nonzero((self.words >= low) & (self.words < max(high, low + 1)))[0].tolist():
            yield k, int(self.words[k]) - low
