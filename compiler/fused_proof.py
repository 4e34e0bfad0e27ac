"""What the verifier asks of a fused step: the same as of the steps that it stands for.

Operations are followed one by one. An operation whose result is storage of a root gets a name of
the live content of that root, and no operation reads a name that another one has written over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from onnx_inplace.compiler.fused import Fused, Operation

_VIEWS = {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}


@dataclasses.dataclass
class Followed:
    """What holds behind the operations of a fused step.

    Attributes:
        root: of every value that is storage of one.
        live: values that name the newest content, by root.
        written: roots that an operation has written.
        violations: what must not be.
    """

    root: dict[int, str]
    live: dict[str, set[int]]
    written: set[str]
    violations: list[str]


def follow(step: Fused, entering: Mapping[int, str]) -> Followed:
    """Follow a step; ``entering``: roots of its inputs, by value, each of the live version."""
    live: dict[str, set[int]] = {}
    for value, root in entering.items():
        live.setdefault(root, set()).add(value)
    found = Followed(dict(entering), live, set(), [])
    known = {link.value for link in step.inputs}
    known |= {
        k
        for k, value in enumerate(step.values)
        if value.constant is not None or value.content is not None
    }
    for operation in step.operations:
        found.violations += _wrong(step, operation, found, known)
        _advance(operation, found)
        known.update(value for value in operation.outputs if value is not None)
    return found


def _wrong(step: Fused, operation: Operation, found: Followed, known: set[int]) -> Iterator[str]:
    roots = []
    for value in operation.inputs:
        if value is None:
            continue
        name = f"`{step.values[value].name}` in a fused step"
        if value not in known:
            yield f"{name} is read before it is made"
        root = found.root.get(value)
        roots.append(root)
        if root is not None and value not in found.live[root]:
            yield f"{name} names an old version of `{root}`"
        if root != step.values[value].root:
            yield f"{name} is storage of {root}, and said to be of {step.values[value].root}"
    for root in operation.roots.values():
        if root not in roots:
            yield f"{operation.op_type} in a fused step makes storage of `{root}` out of none"
        if operation.op_type not in _VIEWS and roots.count(root) > 1:
            yield f"{operation.op_type} in a fused step writes what another input reads"


def _advance(operation: Operation, found: Followed) -> None:
    for index, root in operation.roots.items():
        value = operation.outputs[index]
        if operation.op_type not in _VIEWS:
            found.live[root] = set()
            found.written.add(root)
        if value is not None:
            found.root[value] = root
            found.live.setdefault(root, set()).add(value)
