"""Weights of fused steps, as kernels take them: made once for a session, shared by its runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import onnx_ir as ir

from onnx_inplace.runner.actions import Array


class Sized(Protocol):
    """What knows its bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""


T = TypeVar("T", bound=Sized)


class Weights:
    """Arrays by what they were made from and how. Safe in several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._made: dict[tuple[str, tuple[int, ...]], tuple[tuple[object, ...], Any]] = {}

    def plain(self, tensor: ir.TensorProtocol) -> Array:
        """The tensor as the file has it, where possible without a copy."""
        return self.made("plain", [tensor], tensor.numpy)

    def made(
        self, form: str, tensors: Sequence[ir.TensorProtocol | None], make: Callable[[], T]
    ) -> T:
        """What ``make`` gives, called once for each form and tensors."""
        key = form, tuple(id(t) for t in tensors)
        with self._lock:
            found = self._made.get(key)
            if found is None:  # the tensors are kept, so that no other gets their id
                found = self._made[key] = tuple(tensors), make()
            result: T = found[1]
            return result

    @property
    def nbytes(self) -> int:
        """Bytes of what is no plain tensor: copies that a session keeps beside the file's."""
        with self._lock:
            return sum(a.nbytes for (form, _), (_, a) in self._made.items() if form != "plain")
