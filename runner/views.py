"""Views: the storage of a root in another shape. Nothing is copied, nothing is checked twice."""

from __future__ import annotations

import math

from onnx_inplace.compiler import errors
from onnx_inplace.compiler.steps import View
from onnx_inplace.runner.actions import Action, Array, Slots


def action(step: View) -> Action:
    """The action of a view."""
    source, output, parameter = step.source, step.output, step.parameter
    if step.op_type == "Identity":

        def identity(slots: Slots) -> None:
            slots[output] = slots[source]

        return identity

    def act(slots: Slots) -> None:
        array: Array = slots[source]
        given = None if parameter is None else slots[parameter].reshape(-1).tolist()
        shape = _shape(step, array.shape, given)
        if math.prod(shape) != array.size:
            raise errors.StorageMismatch(
                f"{step.op_type} of `{step.root}`: {list(array.shape)} cannot become {list(shape)}",
                step.root,
                array.shape,
                shape,
            )
        slots[output] = array.reshape(shape)

    return act


def _shape(step: View, before: tuple[int, ...], given: list[int] | None) -> tuple[int, ...]:
    attributes = step.attributes
    if step.op_type == "Reshape":
        return _reshape(before, given or [], bool(attributes.get("allowzero", 0)))
    if step.op_type == "Flatten":
        axis = attributes.get("axis", 1)
        axis = axis + len(before) if axis < 0 else axis
        return math.prod(before[:axis]), math.prod(before[axis:])
    axes = attributes.get("axes") if given is None else given
    if step.op_type == "Unsqueeze":
        rank = len(before) + len(axes or ())
        places = {a % rank for a in axes or ()}
        rest = iter(before)
        return tuple(1 if k in places else next(rest) for k in range(rank))
    if axes is None:
        return tuple(d for d in before if d != 1)
    places = {a % len(before) for a in axes}
    return tuple(d for k, d in enumerate(before) if k not in places or d != 1)


def _reshape(before: tuple[int, ...], wanted: list[int], zeros: bool) -> tuple[int, ...]:
    shape = [
        before[k] if d == 0 and not zeros and k < len(before) else d for k, d in enumerate(wanted)
    ]
    if -1 in shape:
        known = math.prod(d for d in shape if d != -1)
        shape[shape.index(-1)] = math.prod(before) // known if known else 0
    return tuple(shape)
