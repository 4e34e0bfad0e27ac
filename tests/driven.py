"""Runs of a model without the checks before them: what its steps themselves do and say."""

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from onnx_inplace import Session, errors
from onnx_inplace.numba_kernels import whole_run
from onnx_inplace.numba_kernels.append_attend import NEWS, REFUSED
from onnx_inplace.runner import journal


class Driven:
    """One binding, whose steps are joined where they can be, or run one by one."""

    def __init__(self, session: Session, storage: dict[str, Any], single: bool) -> None:
        self._session, self._binding = session, session.bind(**storage)
        self._execution = self._binding._execution
        if single:
            self._execution.observe(lambda step, action: action)

    def __call__(self, feeds: dict[str, np.ndarray], like: dict[str, np.ndarray]) -> Any:
        """The frame of inputs ``like`` these, with other inputs.

        Returns:
            The bytes of the first output, or what was raised; and the journal.
        """
        ports = self._session.feeds
        run = self._execution.run(tuple(like[port.name].shape for _, port in ports))
        slots = [*run.slots(), []]
        for slot, port in ports:
            slots[slot] = feeds[port.name]
        error = None
        try:
            run(slots)
        except errors.InplaceError as raised:
            error = raised
        written = [dataclasses.astuple(w)[:4] for w in journal.read(slots)]
        if error is not None:
            return type(error), vars(error), str(error), written
        return slots[self._session.results[0][1]].tobytes(), written

    def close(self) -> None:
        """Give the storage back."""
        self._binding.close()


def recording(real: Any, found: list[int], without: int | None = None) -> Any:
    """Like a kernel that is compiled on demand; what it returns is kept, but for one answer.

    And without ``NEWS``, which depend on what else the machine does.
    """

    class Recording:
        def ready(self) -> Any:
            def call(*arguments: int) -> int:
                answer: int = real.ready()(*arguments)
                if answer != without:
                    found.append(answer & ~NEWS)
                return answer

            return call

    return Recording()


def answers(monkeypatch: pytest.MonkeyPatch, calls: ModuleType) -> list[int]:
    """What the compiled call of a kind of layers says from now on, alone or in a whole run."""
    found: list[int] = []
    monkeypatch.setattr(calls, "append_and_attend", recording(calls.append_and_attend, found))
    # what is refused there is asked for once more, by itself
    monkeypatch.setattr(whole_run, "run", recording(whole_run.run, found, REFUSED))
    return found
