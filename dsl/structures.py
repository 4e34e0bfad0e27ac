"""Structures of tensors (tuples, mappings, dataclasses): taken apart, put together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from onnx_inplace.dsl import literals


def is_number_or_array(x: object) -> bool:
    """Whether ``x`` can become a constant."""
    return literals.is_number(x) or literals.is_array(x)


def children(x: Any) -> list[tuple[str, Any]] | None:
    """The members of a structure with their names; None: ``x`` is a leaf."""
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return list(zip(x._fields, x, strict=True))
    if isinstance(x, list | tuple):
        return [(str(k), e) for k, e in enumerate(x)]
    if isinstance(x, Mapping):
        return [(str(k), e) for k, e in x.items()]
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return [(f.name, getattr(x, f.name)) for f in dataclasses.fields(x) if f.init]
    return None


def rebuild(x: Any, members: Sequence[Any]) -> Any:
    """A structure like ``x`` with other members."""
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*members)
    if isinstance(x, list | tuple):
        return type(x)(members)
    if isinstance(x, Mapping):
        return dict(zip(x, members, strict=True))
    names = [f.name for f in dataclasses.fields(x) if f.init]
    return dataclasses.replace(x, **dict(zip(names, members, strict=True)))


def update(x: Any, new: Any) -> Any:
    """Give ``x`` the members of ``new``, so that all who hold ``x`` see them; else ``new``."""
    if isinstance(x, list):
        x[:] = new
    elif isinstance(x, MutableMapping):
        x.update(new)
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        try:
            for name, member in children(new) or []:
                setattr(x, name, member)
        except dataclasses.FrozenInstanceError:
            return new
    else:
        return new
    return x


def copied(x: Any, kind: type) -> Any:
    """The structure again, with the same leaves: what a block does to it stays in the block."""
    return transform(lambda leaf, _: leaf, x, kind)


def contains(kind: type, x: Any) -> bool:
    """Whether ``x`` is a ``kind``, or holds one."""
    if isinstance(x, kind):
        return True
    members = children(x)
    return members is not None and any(contains(kind, e) for _, e in members)


def transform(f: Callable[[Any, str], Any], x: Any, kind: type, path: str = "") -> Any:
    """``x`` with ``f(leaf, path)`` for every leaf; what holds no ``kind`` is one leaf."""
    members = children(x)
    if isinstance(x, kind) or members is None or not contains(kind, x):
        return f(x, path)
    return rebuild(x, [transform(f, e, kind, f"{path}.{n}" if path else n) for n, e in members])


def leaves(x: Any, kind: type, path: str = "") -> list[tuple[str, Any]]:
    """Every leaf with its path."""
    found: list[tuple[str, Any]] = []

    def note(leaf: Any, at: str) -> Any:
        found.append((at, leaf))
        return leaf

    transform(note, x, kind, path)
    return found
