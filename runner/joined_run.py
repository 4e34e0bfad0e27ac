"""A run of the library that calls steps of ours back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from onnx_inplace.compiler import errors
from onnx_inplace.compiler.joining import Call
from onnx_inplace.compiler.steps import ExecutionPlan
from onnx_inplace.numba_kernels import called
from onnx_inplace.numba_kernels.append_attend import REFUSED, WRITTEN
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.numba_kernels.pages_append_attend import CLIPPED
from onnx_inplace.runner import team, workspace
from onnx_inplace.runner.actions import Slots
from onnx_inplace.runner.border import Border
from onnx_inplace.runner.joined_call import INT64, Prepared, Tensors
from onnx_inplace.runner.joined_compiled import Compiled
from onnx_inplace.runner.native import operators

_NONE = np.empty(0, np.uint8)


class Live:
    """Runs that are in progress, by their keys.

    Operators refer to this and to nothing of the session, which they must not keep alive.
    """

    def __init__(self, tensors: Tensors) -> None:
        """None yet."""
        self.tensors = tensors
        self.runs: dict[int, Run] = {}

    def operator(self, number: int, call: Call, plan: ExecutionPlan) -> operators.Operator:
        """What the library calls back for the call of this number."""
        inputs = [Border.of(plan, port).code for port in (*call.inputs, *call.unread)]
        outputs = [Border.of(plan, port).code for port in call.outputs]
        count, runs, at = 1 + len(call.inputs), self.runs, self.tensors.at
        collect, read = self.tensors.collect, ctypes.c_int64.from_address

        def compute(context: int) -> int:
            places = np.empty(count, np.int64)
            if collect(at, context, count, address(places)):
                return called.FAILED
            token, *addresses = places.tolist()
            words = read(token).value
            return runs[read(words).value].call(number, words, context, addresses)

        return operators.Operator(
            call.op_type, number, [INT64, *inputs], [INT64, *outputs], compute
        )


class Run:
    """The calls of one frame, and the run of it that is in progress: one at a time.

    Attributes:
        token: what the library passes to the first call: the address of ``called.Run``.
        last: where it puts what the last call gives.
    """

    def __init__(self, key: int, live: Live, calls: Sequence[Prepared]) -> None:
        """``key`` tells it from all others."""
        self._key, self._live, self._calls = key, live, calls
        self._words = np.zeros(called.Run.LAYERS + len(calls), np.int64)
        self._words[called.Run.KEY] = key
        self.token, self.last = np.array([address(self._words)]), np.zeros(1, np.int64)
        self._compiled: list[Compiled | None] = [None] * len(calls)
        self._results = np.zeros(len(calls), np.int64)  # of compiled calls
        self._most = 0  # bytes of their workspace
        self._space, self._space_at = _NONE, np.zeros(1, np.int64)
        self._slots: Slots | None = None
        self._error: BaseException | None = None
        self._threads = team.Borrowed(live.tensors.loop)

    def execute(self, slots: Slots, run: Callable[[], None]) -> None:
        """Let the library run.

        Raises:
            BaseException: what a step of ours has raised.
            KeyboardInterrupt: in a step of ours, or on the way to it.
            errors.OperatorError: what the library says.
        """
        runs = self._live.runs
        self._begin(slots)
        try:
            runs[self._key] = self
            with self._threads:
                run()
            self._note(slots, len(self._calls), CLIPPED)  # whatever else is of no use any more
        except BaseException as error:
            self._note(slots, len(self._calls))
            if not isinstance(error, RuntimeError):
                raise
            if self._error is not None:
                raise self._error from None
            if self._words[called.Run.LOST]:
                raise KeyboardInterrupt from None
            raise errors.OperatorError(str(error)) from None
        finally:
            runs.pop(self._key, None)
            self._slots = self._error = None
            self._space = _NONE  # it is the thread's, which may want more of it

    def _begin(self, slots: Slots) -> None:
        self._slots, self._error, words = slots, None, self._words
        words[called.Run.LOST], words[called.Run.SLOTS] = 0, id(slots)
        self._results.fill(REFUSED)
        self._space = workspace.of_thread(self._most)
        self._space_at[0] = address(self._space)
        words[called.Run.LAYERS :] = [
            c.at if c is not None and c.current else 0 for c in self._compiled
        ]

    def _note(self, slots: Slots, end: int, least: int = WRITTEN) -> None:
        """Let the journal have what compiled calls before ``end`` have written, in order."""
        for number in np.flatnonzero(self._results[:end] >= least).tolist():
            compiled = self._compiled[number]
            assert compiled is not None
            compiled.note(slots, int(self._results[number]))
            self._results[number] = REFUSED

    def _compile(self, number: int) -> None:
        """Let runs from the next one on do without Python here, if they can."""
        found = self._calls[number].compile(self._results[number:], self._space_at)
        self._compiled[number] = found
        if found is not None:
            self._most = max(self._most, found.space)

    def call(self, number: int, token: int, context: int, addresses: list[int]) -> int:
        """A call of the library, on the thread of the run: ``called.SUCCEEDED`` or ``FAILED``."""
        try:
            slots, call = self._slots, self._calls[number]
            assert slots is not None
            self._threads.context = context
            result = int(self._results[number])
            self._note(slots, number + 1)
            if result == REFUSED:
                call(slots, token, context, addresses)
                self._compile(number)
            else:
                call.end(slots, result)
        except BaseException as error:
            self._error = error
            return called.FAILED
        return called.SUCCEEDED
