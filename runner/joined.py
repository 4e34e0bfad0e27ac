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
from onnx_inplace.runner.border import Border
from onnx_inplace.runner.frames import Frame
from onnx_inplace.runner.joined_call import INT64, Prepared, Tensors
from onnx_inplace.runner.joined_run import Live, Run
from onnx_inplace.runner.native import operators, session

_log = logging.getLogger("onnx_inplace")

FEWEST = 8
"""Sub-sessions from which on one session is made of them: the C interface takes time to load."""


def load(plan: ExecutionPlan, loader: library.Library) -> JoinedRunner | None:
    """The main block of a plan as one session.

    Returns:
        None where it is better as several, or has to be: onnxruntime may not take it as a whole.

    Raises:
        errors.WeightsError: a file of its weights has changed since it was expected.
    """
    count = sum(isinstance(step, SubSession) for step in plan.block.steps)
    if count < FEWEST or pools.shared():
        return None
    shared, found = session.environment(), joining.join(plan)
    if shared is None or found is None:
        return None
    try:
        return JoinedRunner(found, plan, loader, shared)
    except errors.UnsupportedOperator as error:
        _log.info("sub-sessions are not joined to one: %s", error)
        return None


class WhenAsked:
    """The main block as one session, made when it is first asked for.

    Of a decoder whose tokens are fused that is with the first prompt.
    """

    def __init__(self, plan: ExecutionPlan, loader: library.Library) -> None:
        """What :func:`load` takes."""
        self._plan, self._loader = plan, loader
        self._lock = threading.Lock()
        self._made: list[JoinedRunner | None] = []  # one, once it has been asked for

    def get(self) -> JoinedRunner | None:
        """See :func:`load`."""
        with self._lock:
            if not self._made:
                self._made.append(load(self._plan, self._loader))
            return self._made[0]


class JoinedRunner:
    """The session. Shared by bindings and threads.

    Attributes:
        calls: what it calls back.
    """

    def __init__(
        self,
        joined: Joined,
        plan: ExecutionPlan,
        loader: library.Library,
        shared: session.Environment,
    ) -> None:
        """Load it.

        Raises:
            errors.UnsupportedOperator: onnxruntime cannot run a node.
            errors.WeightsError: as :func:`load`.
        """
        self.calls, self._joined, self._plan = joined.calls, joined, plan
        self._keys = itertools.count()
        self._inputs = [Border.of(plan, port) for port in joined.session.inputs]
        self._outputs = [Border.of(plan, port) for port in joined.session.outputs]
        tensors = Tensors(shared.functions)
        live = self._live = Live(tensors)
        described = [live.operator(k, call, plan) for k, call in enumerate(joined.calls)]
        self._session = loader.load_joined(
            joined.session,
            shared,
            lambda: operators.Domain(shared.functions, tensors.table, DOMAIN, described),
        )

    def action(self, frame: Frame, actions: Sequence[Action]) -> Action:
        """The main block in one frame; ``actions`` are those of the calls."""
        calls = [
            Prepared(self._live.tensors, call, self._plan, action, frame)
            for call, action in zip(self.calls, actions, strict=True)
        ]
        run = Run(next(self._keys), self._live, calls)
        binding = self._session.bind()
        binding.bind_input(self._joined.token, INT64, (1,), address(run.token))
        binding.bind_output(self._joined.last, INT64, (1,), address(run.last))
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
                    if port.value.fixed:
                        frame.note(port.slot, array.shape)

        return act
