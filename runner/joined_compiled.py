"""A layer's compiled call for the library: no Python, while tensors are where arrays over them are.

The arrays stand in the template of the frame, so every run finds them in its slots. They are over
memory of the library, and looked at by nobody but the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnx_inplace.numba_kernels import called
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import team
from onnx_inplace.runner.actions import Array, Slots
from onnx_inplace.runner.layers import LayerAction


class Compiled:
    """The call for tensors in certain places.

    Attributes:
        places: addresses of what goes in, then of what comes out.
        space: bytes of workspace that it takes.
        at: address of its ``called.Layer``.
    """

    def __init__(
        self,
        loop: int,
        action: LayerAction,
        places: Sequence[int],
        inputs: int,
        shapes: Array,
        result: int,
        space: int,
    ) -> None:
        """Describe it.

        Args:
            loop: address of the library's, see ``numba_kernels.sharing``.
            action: whose compiled call is prepared.
            places: of the tensors, without the token.
            inputs: how many of them go in.
            shapes: of those that come out, see ``foreign.provide``.
            result: where the call writes what it has done: address of an int64.
            space: where it finds the address of its workspace, likewise.
        """
        assert action.prepared is not None
        self.places = tuple(places)
        self._action, self._prepared = action, action.prepared
        self.space = action.prepared.space
        self._shapes, self._team = shapes, team.words(loop)
        words = self._words = np.zeros(called.Layer.PLACES + len(places), np.int64)
        words[called.Layer.CALL] = action.called
        words[called.Layer.TABLE] = action.prepared.at
        words[called.Layer.SPACE] = space
        words[called.Layer.RESULT] = result
        words[called.Layer.INPUTS] = 1 + inputs
        words[called.Layer.OUTPUTS] = 1 + len(places) - inputs
        words[called.Layer.SHAPES] = address(shapes)
        words[called.Layer.TEAM] = address(self._team)
        words[called.Layer.PLACES :] = places
        self.at = address(words)

    def serves(self, places: Sequence[int]) -> bool:
        """Whether it is for these places, and for what the action has prepared by now."""
        return self._action.prepared is self._prepared and self.places == tuple(places)

    @property
    def current(self) -> bool:
        """Whether it makes the call that its action has prepared."""
        return self._action.prepared is self._prepared

    def note(self, slots: Slots, result: int) -> None:
        """Note what has been written; ``result`` is what the call has said."""
        self._prepared.note(slots, result)
