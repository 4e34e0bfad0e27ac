"""From annotations to the inputs of a graph, and to what the author's code gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir

from onnx_inplace.compiler.contract import Access
from onnx_inplace.dsl import notation


class Unusable(ValueError):
    """An annotation describes no tensor."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One tensor parameter, or one paged cache.

    Attributes:
        name: ``cache``, or ``caches.0`` and ``cache.k`` inside of a structure.
        hint: its tensor type.
        access: what the function may do with it.
    """

    name: str
    hint: Any
    access: Access

    def leaves(self) -> Iterator[Leaf]:
        """Itself."""
        yield self

    @property
    def is_paged(self) -> bool:
        """Whether it is a paged cache."""
        return isinstance(self.hint, notation.Pages)

    def typed(self) -> tuple[ir.TypeProtocol, ir.Shape | None]:
        """Element type and shape."""
        return notation.type_and_shape(self.hint)


@dataclasses.dataclass(frozen=True)
class Group:
    """A structure of tensor parameters."""

    name: str
    hint: Any
    members: tuple[tuple[str, Leaf | Group], ...]

    def leaves(self) -> Iterator[Leaf]:
        """All tensors, in order."""
        for _, member in self.members:
            yield from member.leaves()


Parameter = Leaf | Group


def describe(
    name: str, hint: Any, namespace: Mapping[str, Any], access: Access = Access.READ_ONLY
) -> Parameter:
    """The parameter that ``hint`` describes.

    Raises:
        Unusable: it describes no tensor.
    """
    hint, declared = notation.unwrapped(hint)
    if declared is Access.READ_WRITE:
        access = declared
    if notation.is_tensor(hint):
        return Leaf(name, hint, access)
    members = notation.members(hint, namespace)
    if members is None:
        raise Unusable(
            f'`{name}` needs a tensor type, as FLOAT[2, "n"], or a tuple, mapping, NamedTuple '
            "or dataclass of them"
        )
    described = [(n, describe(f"{name}.{n}", h, namespace, access)) for n, h in members]
    return Group(name, hint, tuple(described))


def is_tensors(hint: Any, namespace: Mapping[str, Any]) -> bool:
    """Whether ``hint`` describes tensors, and not a Python value."""
    hint, _ = notation.unwrapped(hint)
    if notation.is_tensor(hint):
        return True
    if hint in (tuple, list, dict):
        return False
    members = notation.members(hint, namespace)
    return members is not None and all(is_tensors(h, namespace) for _, h in members)


def build(parameter: Parameter, made: Mapping[str, Any]) -> Any:
    """What the author's code gets: the structure, with a tensor in every place."""
    if isinstance(parameter, Leaf):
        return made[parameter.name]
    return notation.make(parameter.hint, [build(m, made) for _, m in parameter.members])


def find(parameters: Mapping[str, Parameter], path: str) -> Parameter | None:
    """The parameter, or the part of one, that ``caches`` or ``caches.0`` names."""
    first, *rest = path.split(".")
    found = parameters.get(first)
    for step in rest:
        if not isinstance(found, Group):
            return None
        found = dict(found.members).get(step)
    return found
