"""Rules of onnxscript's rewriter: what fused steps recognise that a graph writes in several nodes.

Each rule says which nodes, on which condition (constants and shapes), and the one node that means
the same. All of it is decided by structure. Operands of Add and Mul may stand in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import pattern

from onnx_inplace.compiler import fused

_Op = Any  # what patterns and replacements are written with
_Condition = Callable[..., bool]


def _number(value: ir.Value | None) -> float | None:
    """The one number of a weight."""
    tensor = None if value is None else value.const_value
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


def _is(value: ir.Value, number: float) -> bool:
    found = _number(value)
    return found is not None and abs(found - number) <= 1e-3 * abs(number)


def _integers(value: ir.Value | None) -> tuple[int, ...] | None:
    """The integers of a parameter."""
    tensor = None if value is None else value.const_value
    return None if tensor is None else tuple(int(n) for n in tensor.numpy().reshape(-1))


def _columns(value: ir.Value) -> int | None:
    """The last size, where it is known."""
    last = value.shape[-1] if value.shape is not None and len(value.shape) else None
    return last if isinstance(last, int) else None


def _is_float32(*values: ir.Value) -> bool:
    return all(v.dtype == ir.DataType.FLOAT for v in values)


def _last(axes: tuple[int, ...] | None, x: ir.Value) -> bool:
    """Whether it is the last axis."""
    return x.shape is not None and axes in ((-1,), (len(x.shape) - 1,))


# -- GELU


def _gelu_divided(op: _Op, x: Any, root: Any, one: Any, half: Any) -> Any:
    return op.Mul(op.Mul(x, op.Add(op.Erf(op.Div(x, root)), one)), half)


def _gelu_divided_half(op: _Op, x: Any, root: Any, one: Any, half: Any) -> Any:
    return op.Mul(op.Mul(x, half), op.Add(op.Erf(op.Div(x, root)), one))


def _gelu_times(op: _Op, x: Any, root: Any, one: Any, half: Any) -> Any:
    return op.Mul(op.Mul(x, op.Add(op.Erf(op.Mul(x, root)), one)), half)


def _gelu_times_half(op: _Op, x: Any, root: Any, one: Any, half: Any) -> Any:
    return op.Mul(op.Mul(x, half), op.Add(op.Erf(op.Mul(x, root)), one))


def _is_gelu(root_is: float) -> _Condition:
    def condition(
        context: Any, x: ir.Value, root: ir.Value, one: ir.Value, half: ir.Value, **_: Any
    ) -> bool:
        constants = _is(root, root_is) and _is(one, 1.0) and _is(half, 0.5)
        return constants and x.dtype is not None

    return condition


def _gelu(op: _Op, x: Any, **_: Any) -> Any:
    return op.Gelu(x)


def _gelu_by_tanh(op: _Op, x: Any, three: Any, small: Any, factor: Any, one: Any, half: Any) -> Any:
    inner = op.Mul(op.Add(x, op.Mul(op.Pow(x, three), small)), factor)
    return op.Mul(op.Mul(x, half), op.Add(op.Tanh(inner), one))


def _gelu_by_tanh_outside(
    op: _Op, x: Any, three: Any, small: Any, factor: Any, one: Any, half: Any
) -> Any:
    inner = op.Mul(op.Add(x, op.Mul(op.Pow(x, three), small)), factor)
    return op.Mul(op.Mul(x, op.Add(op.Tanh(inner), one)), half)


def _is_gelu_by_tanh(
    context: Any,
    x: ir.Value,
    three: ir.Value,
    small: ir.Value,
    factor: ir.Value,
    one: ir.Value,
    half: ir.Value,
    **_: Any,
) -> bool:
    wanted = ((three, 3.0), (small, 0.044715), (factor, 0.7978845608), (one, 1.0), (half, 0.5))
    return x.dtype is not None and all(_is(value, number) for value, number in wanted)


def _tanh_gelu(op: _Op, x: Any, **_: Any) -> Any:
    return op.Gelu(x, approximate="tanh")


# -- SiLU


def _silu(op: _Op, x: Any) -> Any:
    return op.Mul(x, op.Sigmoid(x))


def _silu_steep(op: _Op, x: Any, alpha: Any) -> Any:
    return op.Mul(x, op.Sigmoid(op.Mul(x, alpha)))


def _is_silu(context: Any, x: ir.Value, alpha: ir.Value | None = None, **_: Any) -> bool:
    return x.dtype is not None and (alpha is None or _number(alpha) is not None)


def _swish(op: _Op, x: Any, alpha: ir.Value | None = None) -> Any:
    return op.Swish(x, alpha=1.0 if alpha is None else _number(alpha))


# -- norms


def _rms_divided(op: _Op, x: Any, two: Any, axes: Any, epsilon: Any, scale: Any) -> Any:
    mean = op.ReduceMean(op.Pow(x, two), axes, _outputs=["mean"])
    return op.Mul(op.Div(x, op.Sqrt(op.Add(mean, epsilon))), scale)


def _rms_reciprocal(op: _Op, x: Any, two: Any, axes: Any, epsilon: Any, scale: Any) -> Any:
    mean = op.ReduceMean(op.Pow(x, two), axes, _outputs=["mean"])
    return op.Mul(op.Mul(x, op.Reciprocal(op.Sqrt(op.Add(mean, epsilon)))), scale)


def _rms_one_over(op: _Op, x: Any, two: Any, axes: Any, epsilon: Any, scale: Any, one: Any) -> Any:
    mean = op.ReduceMean(op.Pow(x, two), axes, _outputs=["mean"])
    return op.Mul(op.Mul(x, op.Div(one, op.Sqrt(op.Add(mean, epsilon)))), scale)


def _layer_norm(
    op: _Op, x: Any, axes: Any, two: Any, again: Any, epsilon: Any, scale: Any, bias: Any
) -> Any:
    centered = op.Sub(x, op.ReduceMean(x, axes, _outputs=["center"]))
    mean = op.ReduceMean(op.Pow(centered, two), again, _outputs=["mean"])
    return op.Add(op.Mul(op.Div(centered, op.Sqrt(op.Add(mean, epsilon))), scale), bias)


def _is_mean(mean: ir.Value, axes: ir.Value, x: ir.Value) -> bool:
    node = mean.producer()
    keeps = node is not None and node.attributes.get_int("keepdims", 1) == 1
    return keeps and _last(_integers(axes), x)


def _is_row(value: ir.Value, x: ir.Value) -> bool:
    """A number for each column."""
    columns = _columns(x)
    if columns is None or value.shape is None:
        return False
    return list(value.shape) == [1] * (len(value.shape) - 1) + [columns]


def _is_rms(
    context: Any,
    x: ir.Value,
    two: ir.Value,
    axes: ir.Value,
    mean: ir.Value,
    epsilon: ir.Value,
    scale: ir.Value,
    one: ir.Value | None = None,
    **_: Any,
) -> bool:
    return (
        _is(two, 2.0)
        and (one is None or _is(one, 1.0))
        and _number(epsilon) is not None
        and _is_mean(mean, axes, x)
        and _is_row(scale, x)
        and _is_float32(x, scale)
    )


def _rms(op: _Op, x: Any, scale: Any, epsilon: ir.Value, **_: Any) -> Any:
    return op.RMSNormalization(x, scale, epsilon=_number(epsilon))


def _is_layer_norm(
    context: Any,
    x: ir.Value,
    axes: ir.Value,
    center: ir.Value,
    again: ir.Value,
    bias: ir.Value,
    **more: Any,
) -> bool:
    same = _is_mean(center, axes, x) and _is_row(bias, x) and _is_float32(bias)
    return same and _is_rms(context, x=x, axes=again, **more)


def _normalized(op: _Op, x: Any, scale: Any, bias: Any, epsilon: ir.Value, **_: Any) -> Any:
    return op.LayerNormalization(x, scale, bias, epsilon=_number(epsilon))


# -- rotary embedding


def _rotary(
    op: _Op, x: Any, cos: Any, sin: Any, start: Any, middle: Any, begin: Any, end: Any,
    axes: Any, others: Any,
) -> Any:  # fmt: skip
    first = op.Slice(x, start, middle, axes, _allow_other_inputs=True)
    second = op.Slice(x, begin, end, others, _allow_other_inputs=True)
    turned = op.Concat(op.Neg(second), first, _outputs=["turned"])
    return op.Add(op.Mul(x, cos), op.Mul(turned, sin))


def _is_rotary(
    context: Any,
    x: ir.Value,
    turned: ir.Value,
    start: ir.Value,
    middle: ir.Value,
    begin: ir.Value,
    end: ir.Value,
    axes: ir.Value,
    others: ir.Value,
    cos: ir.Value,
    sin: ir.Value,
    **_: Any,
) -> bool:
    size, node = _columns(x), turned.producer()
    if size is None or size % 2 or node is None or x.shape is None or len(x.shape) != 4:
        return False
    steps = [n for part in node.predecessors() for n in _steps(part)]
    ends = _integers(end)
    return (
        _integers(start) == (0,)
        and _integers(middle) == _integers(begin) == (size // 2,)
        and ends is not None
        and ends[0] >= size
        and _last(_integers(axes), x)
        and _last(_integers(others), x)
        and all(step == 1 for step in steps)
        and node.attributes.get_int("axis", 0) in (-1, 3)
        and _columns(cos) == _columns(sin) == size
        and _is_float32(x, cos, sin)
    )


def _steps(node: ir.Node) -> tuple[int, ...]:
    """Steps of a Slice, or of the one before a Neg."""
    if node.op_type == "Neg":
        maker = None if node.inputs[0] is None else node.inputs[0].producer()
        return () if maker is None else _steps(maker)
    steps = node.inputs[4] if len(node.inputs) > 4 else None
    return (1,) if steps is None else (_integers(steps) or (0,))


def _turned(op: _Op, x: Any, cos: Any, sin: Any, **_: Any) -> Any:
    return op.Turn(x, cos, sin, _domain=fused.DOMAIN)


_ROUNDS: tuple[dict[str, list[pattern.RewriteRule]], ...] = (
    {"ReduceMean": [pattern.RewriteRule(_layer_norm, _normalized, _is_layer_norm)]},
    {
        "Erf": [
            pattern.RewriteRule(_gelu_divided, _gelu, _is_gelu(2**0.5)),
            pattern.RewriteRule(_gelu_divided_half, _gelu, _is_gelu(2**0.5)),
            pattern.RewriteRule(_gelu_times, _gelu, _is_gelu(0.5**0.5)),
            pattern.RewriteRule(_gelu_times_half, _gelu, _is_gelu(0.5**0.5)),
        ],
        "Tanh": [
            pattern.RewriteRule(_gelu_by_tanh, _tanh_gelu, _is_gelu_by_tanh),
            pattern.RewriteRule(_gelu_by_tanh_outside, _tanh_gelu, _is_gelu_by_tanh),
        ],
        "Sigmoid": [
            pattern.RewriteRule(_silu, _swish, _is_silu),
            pattern.RewriteRule(_silu_steep, _swish, _is_silu),
        ],
        "ReduceMean": [
            pattern.RewriteRule(_rms_divided, _rms, _is_rms),
            pattern.RewriteRule(_rms_reciprocal, _rms, _is_rms),
            pattern.RewriteRule(_rms_one_over, _rms, _is_rms),
        ],
        "Neg": [pattern.RewriteRule(_rotary, _turned, _is_rotary)],
    },
)
"""One after the other: the norm of centered numbers contains the one of any numbers."""


def rounds(families: Collection[str]) -> Iterator[pattern.RewriteRuleSet]:
    """Rules of ``families`` (of ``rewriting.FAMILIES``), to be applied one set after another."""
    for by_family in _ROUNDS:
        rules = [r for family, found in by_family.items() if family in families for r in found]
        if rules:
            yield pattern.RewriteRuleSet(rules, commute=True)
