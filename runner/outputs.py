"""What a run returns: a mapping by name and a sequence by position, which unpacks.

An output that is declared as an alias is the array that the caller lent. Any other output owns its
memory: a later run, and a later change of an input, leave it as it is.
"""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, Mapping, Sequence
from typing import Any

import numpy as np

from onnx_inplace.runner.storage import Array

Result = tuple[str, int, str | None]
"""Name of an output, its slot, and the mutable input whose storage it is."""


class Outputs(tuple[Array, ...]):
    """Results of one run.

    As a sequence: ``outputs[0]``, ``first, second = outputs``, ``len``, iteration over the arrays.
    As a mapping: ``outputs["updated"]``, ``"updated" in outputs``, ``keys``, ``items``, ``get``.
    """

    __slots__ = ()
    _index: Mapping[str, int] = {}  # of the session's own subclass

    def __getitem__(self, key: Any) -> Any:
        """An array by name or by position."""
        return tuple.__getitem__(self, self._index[key] if isinstance(key, str) else key)

    def __contains__(self, name: object) -> bool:
        """Whether there is an output of this name."""
        return name in self._index

    def keys(self) -> KeysView[str]:
        """Names, in order."""
        return self._index.keys()

    def values(self) -> tuple[Array, ...]:
        """Arrays, in order."""
        return tuple(self)

    def items(self) -> ItemsView[str, Array]:
        """Pairs of name and array, in order; a name that a model gives twice, once."""
        return {name: self[index] for name, index in self._index.items()}.items()

    def get(self, name: str, default: Any = None) -> Any:
        """The array of a name, or ``default``."""
        return self[name] if name in self._index else default

    def __repr__(self) -> str:
        """Names, types and shapes; no contents."""
        arrays = ", ".join(
            f"{name}: {a.dtype}{list(a.shape)}" if isinstance(a, np.ndarray) else repr(a)
            for name, a in self.items()
        )
        return f"Outputs({arrays})"


def outputs_type(names: Sequence[str]) -> type[Outputs]:
    """The class of the results of one session: names are kept once, not with every result."""
    index = {name: k for k, name in enumerate(names)}
    return type("Outputs", (Outputs,), {"__slots__": (), "_index": index})
