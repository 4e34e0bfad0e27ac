"""Storage that a caller lends to a session, and the runs on it.

All checks that need no kernel stand here, in a fixed order, before the first write: arguments,
types, shapes, overlap, positions. Whatever a run changes belongs to the binding, never to the
session, so that two bindings run in two threads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from onnx_inplace.compiler import errors
from onnx_inplace.compiler.contract import Access
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import execute, inputs, intake, journal, layers, storage, whole_run
from onnx_inplace.runner.checks import Check
from onnx_inplace.runner.frames import Frame
from onnx_inplace.runner.outputs import Outputs
from onnx_inplace.runner.page import Use
from onnx_inplace.runner.page_port import PagedPort
from onnx_inplace.runner.pages import PagedCache
from onnx_inplace.runner.results import Results
from onnx_inplace.runner.storage import Array, Interval
from onnx_inplace.runner.whole_run import Progress, WholeRun

if TYPE_CHECKING:
    from onnx_inplace.runner.session import Session

Slots = list[Any]
_PREPARED_LIMIT = 256  # combinations of shapes whose checks a binding remembers


class Binding:
    """The exclusive right to some arrays, and a session that runs on them.

    Made by ``Session.bind``. The right begins there and ends with ``close``, with the ``with``
    block, or when the binding is collected. The arrays are kept alive by the binding. Between runs
    the caller may read and write them; during a run in another thread their content is in flux.

    Attributes:
        arrays: what was lent, by name of the mutable input: arrays and paged caches.
    """

    def __init__(self, session: Session, lent: Mapping[str, object]):
        """Check and lease what is lent. See ``Session.bind``."""
        given = inputs.flatten(session.ports_by_name, lent)
        self._dims: inputs.Dims = {}
        self._caches: dict[str, PagedCache] = {}
        arrays: dict[str, Array] = {}
        for port in session.mutable_inputs:
            if isinstance(port, PagedPort):
                self._caches[port.name] = port.check(given[port.name])
            else:
                arrays[port.name] = storage.check(port.name, given[port.name], port.dtype)
        self.arrays: dict[str, Any] = {**arrays, **self._caches}
        for port in session.mutable_inputs:
            port.unify(self.arrays[port.name].shape, self._dims)
        for name, array in arrays.items():
            storage.check_layout(name, array)
        self._session, self._progress = session, Progress()
        self._running, self._begun = threading.Lock(), 0
        self._execution = session.open(self.arrays)
        self._prepared: dict[tuple[tuple[int, ...], ...], tuple[Check, ...]] = {}
        # Of the last run: most runs have the shapes of the one before.
        self._shapes: tuple[tuple[int, ...], ...] | None = None
        self._checks: tuple[Check, ...] = ()
        self._intake: intake.Intake | None = None  # made when shapes come a second time
        self._repeats = False
        self._remaining: tuple[Check, ...] = ()  # checks that it does not make
        self._frame: execute.Run
        self._results: Results
        self._whole: WholeRun | None = None  # a run like the last one, in one call
        self._whole_from: tuple[object, object] = None, None  # what it was asked for
        self._taken = False  # the next run may have inputs that `_intake` takes
        # Who gives back is known before anything is taken: an interrupt may come between any two
        # calls.
        self._lease, self._closed = storage.leases.number(), False
        weakref.finalize(self, storage.leases.give_back, self._lease)
        tables = {name: cache.store.table for name, cache in self._caches.items()}
        storage.leases.take(arrays, tables, self._lease)

    def __enter__(self) -> Self:
        """The binding itself: the lease has begun already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the arrays back, whatever happened."""
        self.close()

    def __reduce__(self) -> NoReturn:
        """Not copied, not pickled: the right to storage is exclusive."""
        raise TypeError("a Binding cannot be copied or pickled: bind other arrays to the session.")

    @property
    def closed(self) -> bool:
        """Whether the arrays have been given back."""
        return self._closed

    @property
    def generation(self) -> int:
        """Number of runs that may have changed the arrays.

        What was read at one generation is old at the next.
        """
        return self._progress.generation

    def close(self) -> None:
        """Give the arrays back. May be called twice.

        Raises:
            errors.BindingInUse: a run is in progress in another thread.
        """
        if self._running.locked():
            raise errors.BindingInUse("the binding is running: it can be closed after that.")
        with self._running:
            self._closed = True
            storage.leases.give_back(self._lease)

    def observe(self, observe: execute.Observe) -> Frame:
        """Serves ``profile``: steps are observed from the next run on.

        Returns:
            The frame of the next run, if it has the shapes of the last one.
        """
        self._execution.observe(observe)
        assert self._shapes is not None, "nothing has run yet"
        self._frame, self._whole = self._execution.run(self._shapes), None
        return self._frame.frame

    def reset(self) -> None:
        """Accept the arrays as they are after a run that failed half-way."""
        self._progress.failed = None

    def run(self, /, **values: object) -> Outputs:
        """Execute the model once, in place.

        Args:
            **values: the ordinary inputs by name, groups as sequences or mappings. Arrays must have
                the declared type; numbers and lists are converted where nothing is rounded. An
                integer declared as a scalar may be given as (), (1,) or (1, 1), integers declared
                (B,) as (B,) or (B, 1).

        Returns:
            The outputs, by name and by position. Aliased outputs are the arrays that were lent.

        Raises:
            errors.BindingInUse: a run of this binding is in progress.
            errors.BindingError: closed; or an argument is missing or unknown.
            errors.StorageMismatch: type or shape of an argument.
            errors.SharedStorage: an argument overlaps storage that is lent to any binding.
            errors.CapacityError: a position or a length leaves a cache.
            errors.OperatorError: a standard operator cannot compute with these values.
            errors.DirtyState: an earlier run failed after it had written.
        """
        begun = self._begun
        # An interrupt may come behind any call, `acquire` included, but for `with`.
        if not self._running.locked():
            with self._running:
                if self._begun == begun:  # no other thread was faster
                    self._begun += 1
                    whole = self._whole if self._taken else None
                    progress = self._progress
                    if whole is not None and progress.failed is None and not self._closed:
                        outputs = whole(progress, values)
                        if outputs is not None:
                            return outputs
                    return self._run(values)
        raise errors.BindingInUse("the binding is running: a run can be started after that.")

    def _run(self, values: dict[str, object]) -> Outputs:
        if self._closed:
            raise errors.BindingError("the binding is closed: its arrays have been given back.")
        if self._progress.failed is not None:
            error, written = self._progress.failed
            raise _dirty(error, written) from error
        session, checks = self._session, self._remaining
        if len(values) != len(session.feeds) or not session.feed_names.issuperset(values):
            names = (port.name for port in session.inputs)
            values = inputs.flatten(names, values, session.defaults)
        given = None if self._intake is None else self._intake(values)
        self._taken = given is not None
        if given is None:
            given = self._given(values)
            shapes = tuple([array.shape for array in given])
            if shapes != self._shapes:
                self._prepare(shapes)
            elif not self._repeats:
                self._expect(given)
            checks = self._checks
        run = self._frame
        slots = run.slots()  # of this run alone, so that nothing of it is kept alive
        slots.append([])  # journal.JOURNAL
        for feed, array in zip(session.feeds, given, strict=True):
            slots[feed[0]] = array
        if session.paged:
            claims: list[tuple[PagedCache, Use]] = []
            try:
                self._claim(given, claims)
                self._execute(run, slots, checks)
            finally:
                for cache, use in claims:
                    cache.end(use)
        else:
            self._execute(run, slots, checks)
        if run.layer is not None:
            self._prepare_whole(run, run.layer)
        return self._results.collect(slots, given)

    def _execute(self, run: execute.Run, slots: Slots, checks: Iterable[Check]) -> None:
        for check in checks:
            check(slots)
        self._progress.generation += 1
        try:
            run(slots)
        except BaseException as error:
            written = journal.read(slots)
            if written:
                self._progress.failed = error, written
            raise

    def _claim(self, given: list[Any], claims: list[tuple[PagedCache, Use]]) -> None:
        """Paged caches belong to the run. Each claim is noted before it is made."""
        for name, cache in self._caches.items():
            use = Use(name)
            claims.append((cache, use))
            cache.begin(use, Access.READ_WRITE)
            cache.store.name = name  # what errors call it
        for index, name in self._session.paged_inputs:
            use, cache = Use(name), given[index]
            claims.append((cache, use))
            cache.begin(use, Access.READ_ONLY)

    def _given(self, values: dict[str, object]) -> list[Any]:
        """Ordinary inputs in order: of the declared type, C-contiguous, apart from all leases.

        Integers may be positions: they are copied.
        """
        session, lent = self._session, storage.leases.lent
        given: list[Any] = []
        for _, port in session.feeds:
            value = values[port.name]
            if isinstance(port, PagedPort):
                given.append(self._read_only(port, value))
                continue
            array = inputs.array(port, value)
            if not array.flags.c_contiguous:
                self._refuse_lent(port, storage.interval(array))
                array = np.ascontiguousarray(array)
            elif type(value) is not int:  # a number that was converted has its own memory
                start = address(array)
                if lent(start, start + array.nbytes):
                    self._refuse_lent(port, Interval(start, start + array.nbytes))
                if array.dtype.kind in "iu":
                    # What is checked must be what is used, whatever another thread does to it.
                    array = array.copy()
            given.append(array)
        return given

    def _read_only(self, port: PagedPort, value: object) -> PagedCache:
        """A paged cache that this run only reads; SharedStorage where a binding may write it."""
        cache = port.check(value)
        holder = storage.leases.pool_holder(cache.store.table)
        if holder is not None:
            raise errors.SharedStorage(
                f"`{port.name}` is lent for writing, as `{holder}`.", port.name, holder
            )
        return cache

    def _refuse_lent(self, port: inputs.Port, mine: Interval) -> None:
        holder = storage.leases.holder(mine)
        if holder is not None:
            raise errors.SharedStorage(
                f"`{port.name}` overlaps `{holder}`, which is lent for writing: pass a copy.",
                port.name,
                holder,
            )

    def _prepare(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        """Look up the checks and the frame of a run with inputs of these shapes, or make them."""
        checks = self._prepared.get(shapes)
        if checks is None:
            dims = dict(self._dims)
            for (_, port), shape in zip(self._session.feeds, shapes, strict=True):
                port.unify(shape, dims)
            checks = self._session.prechecks.prepare(dims) + self._session.page_checks.prepare(dims)
            if len(self._prepared) >= _PREPARED_LIMIT:
                self._prepared.clear()
            self._prepared[shapes] = checks
        run = self._execution.run(shapes)
        if self._shapes is None or run is not self._frame:
            self._frame, self._results = run, Results(self._session, self.arrays, run.frame)
        self._checks, self._shapes = checks, shapes
        self._intake, self._repeats = None, False
        self._whole, self._whole_from = None, (None, None)

    def _expect(self, given: list[Any]) -> None:
        """Inputs of these shapes may come again."""
        found = intake.of(self._session.feeds, given, self._checks)
        if found is not None:
            self._remaining = tuple(c for c in self._checks if c not in found.judges)
        self._intake, self._repeats, self._taken = found, True, True

    def _prepare_whole(self, run: execute.Run, layer: layers.LayerAction) -> None:
        """Runs like this one may be one call from now on; asked once for what that follows from."""
        call, taking = layer.prepared, self._intake
        if self._whole_from[0] is not call or self._whole_from[1] is not taking:
            self._whole_from = call, taking
            self._whole = whole_run.find(run, taking, self._remaining, self._results)


def _dirty(error: BaseException, written: tuple[journal.Written, ...]) -> errors.DirtyState:
    """What later runs are refused with."""
    return errors.DirtyState(
        f"an earlier run failed ({type(error).__name__}: {error}) after it had written: "
        f"{'; '.join(map(str, written[-3:]))}. Restore the arrays if you need to, then call "
        f"reset().",
        written,
    )
