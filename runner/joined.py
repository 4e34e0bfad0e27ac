"""The main block of a plan as one session of onnxruntime, which calls our steps back.

What the library hands over are addresses; for the steps they become arrays in the slots of the run,
for the time of the call. Storage of the caller stays in the slots all the time.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence

import numpy as np

from onnx_inplace.compiler import errors, joining
from onnx_inplace.compiler.joining import DOMAIN, Joined
from onnx_inplace.compiler.steps import ExecutionPlan, SubSession
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import library, pools
from onnx_inplace.runner.actions import Action, Slots
from onnx_inplace.runner.frames import Frame
from onnx_inplace.runner.joined_call import INT64, Border, Prepared, Tensors
from onnx_inplace.runner.joined_run import Live, Run
from onnx_inplace.runner.native import operators, session

_log = logging.getLogger("onnx_inplace")

FEWEST = 8
"""Sub-sessions from which on one session is made of them: the C interface takes time to load."""


def of(plan: ExecutionPlan, loader: library.Library) -> JoinedRunner | None:
    """The main block of a plan as one session; None where it is better as several, or has to be."""
    count = sum(isinstance(step, SubSession) for step in plan.block.steps)
    if count < FEWEST or pools.shared() or session.environment() is None:
        return None
    found = joining.join(plan)
    return None if found is None else JoinedRunner(found, plan, loader)


class JoinedRunner:
    """The session, loaded when it is first needed. Shared by bindings and threads.

    Attributes:
        joined: what it executes.
        step: the model of that.
    """

    def __init__(self, joined: Joined, plan: ExecutionPlan, loader: library.Library) -> None:
        """Look at its border; nothing is loaded."""
        self.joined, self.step, self._plan, self._loader = joined, joined.session, plan, loader
        self._session: session.Session | None = None
        self._lock = threading.Lock()
        self._live: Live
        self._keys = itertools.count()
        self._inputs = [Border(plan, port) for port in self.step.inputs]
        self._outputs = [Border(plan, port) for port in self.step.outputs]
        loader.expect(self.step)

    def load(self) -> None:
        """Load the model, if that has not been done.

        Raises:
            errors.UnsupportedOperator: onnxruntime cannot run a node.
            errors.WeightsError: a file of its weights has changed since.
        """
        with self._lock:
            if self._session is not None:
                return
            shared = session.environment()
            assert shared is not None, "who has no C interface does not join"
            tensors = Tensors(shared.functions)
            live = self._live = Live(tensors)
            described = [
                live.operator(number, call, self._plan)
                for number, call in enumerate(self.joined.calls)
            ]
            self._session = self._loader.load_joined(
                self.step,
                shared,
                lambda: operators.Domain(shared.functions, tensors.table, DOMAIN, described),
            )

    def loads(self) -> bool:
        """Load it; False where onnxruntime does not take it as a whole.

        Raises:
            errors.WeightsError: as :meth:`load`.
        """
        try:
            self.load()
        except errors.UnsupportedOperator as error:
            _log.info("sub-sessions are not joined to one: %s", error)
            return False
        return True

    def action(self, frame: Frame, actions: Sequence[Action]) -> Action:
        """The main block in one frame; ``actions`` are those of the calls."""
        self.load()
        assert self._session is not None
        calls = [
            Prepared(self._live.tensors, call, self._plan, action, frame)
            for call, action in zip(self.joined.calls, actions, strict=True)
        ]
        run = Run(next(self._keys), self._live, calls)
        binding = self._session.bind()
        binding.bind_input(self.joined.token, INT64, (1,), address(run.token))
        binding.bind_output(self.joined.last, INT64, (1,), address(run.last))
        moving = []
        for port in self._inputs:
            held = frame.template[port.slot]
            if held is None:
                moving.append(port)
            else:
                binding.bind_input(port.name, port.code, held.shape, address(held))
        known = [(p, frame.shapes[p.slot]) for p in self._outputs if p.slot in frame.shapes]
        unknown = [port for port in self._outputs if port.slot not in frame.shapes]
        execute = binding.runner()

        def act(slots: Slots) -> None:
            for port in moving:
                array = slots[port.slot]
                binding.bind_input(port.name, port.code, array.shape, address(array))
            results = []
            for port, shape in known:
                results.append(array := np.empty(shape, port.dtype))
                binding.bind_output(port.name, port.code, shape, address(array))
            for port in unknown:
                binding.bind_unknown(port.name)
            run.execute(slots, execute)
            for (port, _), array in zip(known, results, strict=True):
                slots[port.slot] = array  # a call that made it has cleared its slots
            if unknown:
                made = binding.made(1 + len(known), [port.dtype for port in unknown])
                for port, array in zip(unknown, made, strict=True):
                    slots[port.slot] = array
                    if port.fixed:
                        frame.note(port.slot, array.shape)

        return act
