"""Which nodes a fused step can execute: a rule for each operator.

A rule looks at one node and gives a reason why not, or None. What it accepts, the runner has a
template for (``runner.fused.templates``; a test holds the two lists together), and that template
needs nothing which is known only in a run: shapes and integer parameters follow from the dimensions
of the inputs.
"""

from __future__ import annotations

import threading

import onnx_ir as ir

from onnx_inplace.compiler import fusable_caches, fusable_rules
from onnx_inplace.compiler.fusable_context import Context, Rule, unknown_shape, wanted
from onnx_inplace.compiler.sizes import Size

PRODUCTS = {("com.microsoft", "MatMulNBits"), ("", "MatMul"), ("", "Gemm")}

_lock = threading.Lock()
_rules: dict[tuple[str, str], Rule] = {**fusable_rules.RULES, **fusable_caches.RULES}


def register(domain: str, op_type: str, rule: Rule) -> None:
    """Let fused steps execute an operator; ``runner.fused.templates.register`` does this, too.

    Raises:
        ValueError: the operator has another rule already.
    """
    with _lock:
        if _rules.setdefault((domain, op_type), rule) is not rule:
            raise ValueError(f"{domain}::{op_type} has another rule already")


def operators() -> frozenset[tuple[str, str]]:
    """Operators that have a rule."""
    with _lock:
        return frozenset(_rules)


def reason(node: ir.Node, context: Context) -> str | None:
    """Why a fused step cannot execute a node; None: it can."""
    if decided(node, context):
        return None
    rule = _rules.get((node.domain, node.op_type))
    if rule is None:
        return "no template"
    if node.op_type != "Split" and not (wanted(node.outputs[0]) or context.root(node.outputs[0])):
        return "its first result is not wanted"
    return unknown_shape(node, context) or rule(node, context)


def decided(node: ir.Node, context: Context) -> bool:
    """Whether weights and the dimensions of the inputs say what a node makes: nothing is to do."""
    return bool(node.outputs) and all(
        context.constant(v) or context.content(v) is not None for v in node.outputs
    )


def is_product(node: ir.Node, context: Context) -> bool:
    """Whether a node multiplies by a weight: what a decoder spends its time on."""
    return (node.domain, node.op_type) in PRODUCTS and any(context.constant(v) for v in node.inputs)


def rows(node: ir.Node, context: Context) -> tuple[Size, ...]:
    """Sizes of the rows of a product: all axes of its first input but the last."""
    return (context.shape(node.inputs[0]) or ())[:-1]
