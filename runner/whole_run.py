"""A run that is a layer and looks like the one before: from arguments to outputs in one call.

Around the compiled call of a layer there is Python that looks at arguments, claims pages, judges
them, and hands results over. Behind a call that has read a long context none of it is in the CPU's
caches any more, and each function costs as much as ten thousand bytes of the context. Here all of
this is in the compiled call, for runs that differ from the last one in numbers only. A run that is
anything else is left, untouched, to ``binding``, which also says why something is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onnx_inplace.numba_kernels import objects, whole_run
from onnx_inplace.numba_kernels.append_attend import NEWS, REFUSED
from onnx_inplace.numba_kernels.memory import FIELD, address
from onnx_inplace.numba_kernels.objects import ITEMS
from onnx_inplace.numba_kernels.whole_run import Words
from onnx_inplace.runner import journal, storage, workspace
from onnx_inplace.runner.checks import Check
from onnx_inplace.runner.execute import Run
from onnx_inplace.runner.intake import Intake
from onnx_inplace.runner.layers import LayerAction
from onnx_inplace.runner.outputs import Outputs
from onnx_inplace.runner.page_checks import Grown
from onnx_inplace.runner.pages import PagedCache
from onnx_inplace.runner.results import Results


@dataclasses.dataclass(slots=True)
class Progress:
    """What the runs of a binding have done.

    Attributes:
        generation: number of runs that may have changed the storage.
        failed: the error of a run that failed half-way, and what it had written; None: none has.
    """

    generation: int = 0
    failed: tuple[BaseException, tuple[journal.Written, ...]] | None = None


class WholeRun:
    """Runs with inputs of one tuple of shapes, on one binding's storage."""

    def __init__(
        self,
        run: Run,
        action: LayerAction,
        taking: Intake,
        settled: list[Any],
        index: int,
        outputs_type: Callable[[list[Any]], Outputs],
    ) -> None:
        """All that ``find`` asks for is so. Results are ``settled``, but for one at ``index``."""
        call, template = action.prepared, run.frame.template
        assert call is not None
        self._call, self._type = call, outputs_type
        self._settled, self._index = settled, index
        feeds = [i.slot for i in run.frame.plan.inputs if not i.mutable]
        self._taking = taking
        pairs = zip(feeds, taking.copies, strict=True)
        copied = {slot: copy for slot, copy in pairs if copy is not None}
        places = [-1 if slot in copied else slot for slot in feeds]
        self._places = np.array(places, np.int64)
        # Addresses of objects: of the template and of copies they stay, for they are kept here.
        self._kept = dict(enumerate(template)) | copied
        self._slots = np.array([id(value) for value in self._kept.values()], np.int64)
        words = self._words = np.zeros(Words.END, np.int64)
        words[Words.COUNT], words[Words.EXPECTED] = len(places), taking.expected
        words[Words.KIND], words[Words.PLACES] = objects.ARRAY, address(self._places)
        words[Words.SLOTS], words[Words.OUTPUT] = address(self._slots), action.output
        words[Words.CALL], words[Words.TABLE] = action.called, call.at
        for name, cache in run.frame.roots.items():
            if isinstance(cache, PagedCache):
                cache.store.name = name  # what errors call it
                words[Words.CLAIM] = address(cache.claim(name))
        self._at = address(words)
        self._run = whole_run.run.ready()

    def __call__(self, progress: Progress, values: Mapping[str, object]) -> Outputs | None:
        """Make a run; None: it is nothing for this, and nothing has happened."""
        call, lent = self._call, storage.leases.all
        given = self._taking.pick(values)
        if given is None:
            return None
        output = np.empty(call.shape, call.dtype)
        space, helpers = workspace.of_thread(call.space), call.helpers
        team = 0 if helpers is None else helpers.at
        arguments = id(output), id(lent.words) + FIELD, self._at, id(space) + FIELD, team
        progress.generation += 1
        try:
            done = self._run(id(given) + ITEMS, *arguments)
        except BaseException as error:  # an interrupt, which may come behind the writes
            progress.failed = error, self._written()
            raise
        if done == REFUSED:
            progress.generation -= 1
            return None
        if helpers is not None and done & NEWS:
            helpers.look_after()
        call.count(done)
        results = self._settled.copy()
        results[self._index] = output
        return self._type(results)

    def _written(self) -> tuple[journal.Written, ...]:
        """What a run has written, if it has: at the positions that it has copied."""
        slots = [*self._kept.values(), []]
        self._call.note(slots, REFUSED)
        return journal.read(slots)


def find(
    run: Run, taking: Intake | None, checks: Sequence[Check], results: Results
) -> WholeRun | None:
    """What makes runs like the one that was made; None: there is nothing.

    Args:
        run: of a frame.
        taking: of its inputs; None: they are nothing to be taken at once.
        checks: that ``taking`` does not make. The layer's call judges pages by itself.
        results: of the frame.
    """
    action = run.layer
    if taking is None or action is None or action.prepared is None or not action.finishes:
        return None
    roots = run.frame.roots
    pages = [root for root in roots.values() if isinstance(root, PagedCache)]
    if len(pages) > 1 or not all(isinstance(check, Grown) for check in checks):
        return None
    written = {new: run.frame.template[old] for new, old in action.written}
    settled, places = results.settled.copy(), []
    for index, (_, slot, root), own in results.made:
        if root is not None and written.get(slot) is roots[root]:
            settled[index] = roots[root]
        elif slot == action.output and own:
            places.append(index)
        else:
            return None
    if len(places) != 1:
        return None
    return WholeRun(run, action, taking, settled, places[0], results.type)
