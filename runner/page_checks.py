"""Plays what a run will do against the page tables, before its first write.

What ``compiler.page_checks`` says about accesses to pages becomes numbers; ``page_pieces.Outlook``
judges them in the order in which they will happen. When all of them can happen, the memory of every
page that will be made is taken, so that the run does not fail for want of it half-way.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from onnx_inplace.compiler import errors, page_checks, page_log, sizes
from onnx_inplace.compiler.page_checks import Mode, PageAccess
from onnx_inplace.runner import page_growth
from onnx_inplace.runner.checks import load
from onnx_inplace.runner.page_growth import Growth
from onnx_inplace.runner.page_pieces import Outlook, pieces, reading
from onnx_inplace.runner.page_store import PageStore
from onnx_inplace.runner.storage import Array

Slots = list[Any]
Check = Callable[[Slots], None]


class Entry(NamedTuple):
    """One access of the log, in numbers.

    Attributes:
        access: what it does.
        length: tokens that are written, or that look back.
        ids: () a page; (blocks,); (rows, blocks).
        positions: (1,) or (rows,): first tokens; lengths, of READ.
    """

    access: PageAccess
    length: int
    ids: Array
    positions: Array


Entries = Callable[[Slots], Iterator[Entry]]


class Growing(NamedTuple):
    """Judges runs in which one sequence grows.

    Attributes:
        roots: the caches that it grows in.
        judge: whether a run, with the stores of these caches, is right.
    """

    roots: tuple[str, ...]
    judge: Callable[[Slots, Sequence[PageStore]], bool]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Grown:
    """The check of runs in which one sequence grows: nothing that they do to pages is late.

    They write all of these caches, so that no other run uses one of them.

    Attributes:
        grows: what such runs do.
        slots: of the caches.
        entries: the same, one by one.
    """

    grows: Growing
    slots: Sequence[int]
    entries: Entries

    def __call__(self, slots: Slots) -> None:
        """Refuse what cannot happen, see ``play``."""
        stores = [slots[slot].store for slot in self.slots]
        if not self.grows.judge(slots, stores):
            play(self.entries(slots), dict(zip(self.grows.roots, stores, strict=True)))
        for store in stores:
            store.judged = True


_NONE = np.zeros(1, np.int64)
_LOG = 1024  # numbers; a longer log is made again


class Checker:
    """What a session's runs do to page tables. Used by all of its bindings, in any thread."""

    def __init__(self, checks: page_checks.PageChecks | None, slot_of: Mapping[str, int]):
        """``slot_of`` says where a run holds the inputs of the graph."""
        self._checks, self._slot_of = checks, slot_of
        self._session = None
        self._log = _LOG
        if checks is not None:
            page_growth.ready()
        if checks is not None and checks.trace is not None:
            self._session = load(checks.trace.model)

    def prepare(self, dims: Mapping[str, int]) -> tuple[Check, ...]:
        """The check of a run with these dimensions; none for a model without pages."""
        if self._checks is None:
            return ()
        trace = self._checks.trace
        entries = self._listed(dims) if trace is None else self._traced(trace, dims)
        grows = self._growing(dims) if trace is None else None
        if grows is not None:
            return (Grown(grows, [self._slot_of[root] for root in grows.roots], entries),)
        slot_of = {a.root: self._slot_of[a.root] for a in self._checks.accesses}
        # A list is read off the very values that the steps will use.
        late = {a.root for a in self._checks.accesses if a.late is not None or trace is not None}

        def check(slots: Slots) -> None:
            caches = {root: slots[slot] for root, slot in slot_of.items()}
            stores = {root: cache.store for root, cache in caches.items()}
            play(entries(slots), stores)
            for root, cache in caches.items():
                # what only reads a cache may do so beside a run that has judged nothing
                cache.store.judged = cache.is_written and root not in late

        return (check,)

    def _listed(self, dims: Mapping[str, int]) -> Entries:
        """Entries that are read off inputs."""
        assert self._checks is not None
        table = []
        for access in _certain(self._checks.accesses):
            numbers = [
                sizes.evaluate(size or 0, dims)
                for size in (access.length, access.rows, access.blocks)
            ]
            shape = tuple(numbers[3 - access.rank :]) if access.rank else ()
            ids, positions = self._reader(access.ids, dims), self._reader(access.positions, dims)
            table.append((access, numbers[0], shape, ids, positions))

        def entries(slots: Slots) -> Iterator[Entry]:
            for access, length, shape, ids, positions in table:
                tables = ids(slots)
                if tables.shape != shape:
                    tables = tables.reshape(shape)
                yield Entry(access, length, tables, positions(slots))

        return entries

    def _reader(
        self, operand: page_checks.Operand | None, dims: Mapping[str, int]
    ) -> Callable[[Slots], Array]:
        """Finds the numbers of an operand."""
        if operand is None:
            return lambda slots: _NONE
        if operand.input is None:
            numbers = np.array(sizes.numbers(operand.numbers, dims), np.int64)
            return lambda slots: numbers
        slot, offset = self._slot_of[operand.input], sizes.evaluate(operand.offset, dims)
        if not offset:
            return operator.itemgetter(slot)

        def read(slots: Slots) -> Array:
            moved: Array = slots[slot] + offset
            return moved

        return read

    def _growing(self, dims: Mapping[str, int]) -> Growing | None:
        """Judges a run at once where all it does is to let one sequence grow; None: it is not so.

        The function says whether the run is right; else it has to be played.
        """
        assert self._checks is not None
        accesses = list(_certain(self._checks.accesses))
        found = page_growth.pattern(accesses)
        if found is None or len(accesses) < len(self._checks.accesses):
            return None
        roots, write, read = found
        tokens = sizes.evaluate(write.length or 0, dims)
        growth = Growth(len(roots), tokens, 0 if read is None else read.left)
        ids_of, position_of = self._reader(write.ids, dims), self._reader(write.positions, dims)
        length_of = None if read is None else self._reader(read.positions, dims)

        def judge(slots: Slots, stores: Sequence[PageStore]) -> bool:
            ids, position = ids_of(slots), position_of(slots)
            if position.size != 1 or not ids.flags.c_contiguous:
                return False
            if ids.ndim == 2 and len(ids) != 1:
                return False
            first = position.item()
            if length_of is not None:
                length = length_of(slots)
                if length.size != 1 or length.item() != first + tokens:
                    return False
            return growth.allowed(stores, ids if ids.ndim == 1 else ids.reshape(-1), first)

        return Growing(roots, judge)

    def _traced(self, trace: page_checks.Trace, dims: Mapping[str, int]) -> Entries:
        """Entries of a log that a model writes."""
        vectors = {
            name: np.asarray(sizes.numbers(vector, dims), np.int64) for name, vector in trace.sizes
        }
        inputs = [(name, self._slot_of[name]) for name in trace.inputs]
        assert self._session is not None
        names = [self._session.get_outputs()[0].name]
        run = self._session._sess.run  # as in ``checks``

        def entries(slots: Slots) -> Iterator[Entry]:
            feeds = {**vectors, **{name: slots[slot] for name, slot in inputs}}
            while True:
                feeds[trace.log] = np.zeros(self._log, np.int64)
                try:
                    log = run(names, feeds, None)[0]
                except Exception as error:
                    raise errors.OperatorError(f"page ids cannot be computed: {error}") from None
                if log[0] < len(log):
                    return self._read(log)
                self._log = 2 * int(log[0])

        return entries

    def _read(self, log: Array) -> Iterator[Entry]:
        """The entries of a log, see ``compiler.page_log``, up to what is not known of a cache."""
        assert self._checks is not None
        lost: set[str] = set()
        at, end = 1, 1 + int(log[0])
        while at < end:
            number, length, rows, blocks = log[at : at + page_log.HEADER].tolist()
            at += page_log.HEADER
            access = self._checks.accesses[number if number >= 0 else -1 - number]
            positions, ids = log[at : at + rows], log[at + rows : at + rows + rows * blocks]
            at += rows + rows * blocks
            if number < 0:
                lost.add(access.root)
            elif access.root not in lost:
                shape = ((), (blocks,), (rows, blocks))[access.rank]
                yield Entry(access, length, ids.reshape(shape), positions)


def _certain(accesses: Iterable[PageAccess]) -> Iterator[PageAccess]:
    """Accesses up to the first, of each cache, that is not known before the run."""
    lost: set[str] = set()
    for access in accesses:
        if access.late is not None:
            lost.add(access.root)
        elif access.root not in lost:
            yield access


_Memo = dict[object, tuple[Array, Any]]
"""Pieces and readings by what they follow from: layers of a model touch the same of their caches.

The array of page ids is kept, so that its id stays its own.
"""


def play(entries: Iterator[Entry], stores: Mapping[str, PageStore]) -> None:
    """Judge all entries, then reserve the memory of pages that will be made.

    Raises:
        errors.PageError, errors.CapacityError, errors.PageBudget: an entry cannot happen.
        MemoryError: pages that will be made find no room. In either case nothing has changed.
    """
    outlooks = {root: Outlook(store) for root, store in stores.items()}
    memo: _Memo = {}
    for entry in entries:
        root = entry.access.root
        try:
            _judge(entry, stores[root], outlooks[root], memo)
        except errors.PlacedError as error:
            error.at(entry.access.location)
            raise
    reserved: list[PageStore] = []
    try:
        for root, outlook in outlooks.items():
            if outlook.created:
                stores[root].reserve(outlook.created)
                reserved.append(stores[root])
    except BaseException:
        for store in reserved:
            store.release()
        raise


def _judge(entry: Entry, store: PageStore, outlook: Outlook, memo: _Memo) -> None:
    access = entry.access
    match access.mode:
        case Mode.WRITE:
            outlook.update(_touched(entry, store, memo), created_format(store, access))
        case Mode.READ:
            outlook.read(_touched(entry, store, memo))
        case Mode.CONVERT:
            assert access.quantized_type is not None
            format = store.format(access.quantized_type)
            outlook.convert(entry.ids.reshape(-1).tolist(), format)
        case Mode.GATHER:
            outlook.gather(entry.ids.reshape(-1).tolist())


def created_format(store: PageStore, access: PageAccess) -> int | None:
    """Index of the format of pages that an update makes; None: it makes none."""
    return None if access.quantized_type is None else store.format(access.quantized_type)


def _touched(entry: Entry, store: PageStore, memo: _Memo) -> Any:
    """Pieces of an update, or what attention reads."""
    access, length, ids, positions = entry
    key = access.mode, id(ids), positions.tobytes(), length, store.page_size, access.left
    found = memo.get(key)
    if found is None:
        if access.mode is Mode.READ:
            touched: Any = reading(store, ids, positions, length, access.left)
        else:
            touched = pieces(store.name, ids, positions, length, store.page_size)
        found = memo[key] = ids, touched
    return found[1]
